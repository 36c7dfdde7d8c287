"""What is said of a prewarm: to people in sentences, to machines in records.

Pure, apart from `tell_failures`, which prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardcache.cli.output import Console, counted
from shardcache.errors import ShardCacheError
from shardcache.prewarm.plan import PrewarmPlan
from shardcache.prewarm.report import Outcome, PrewarmReport, ShardResult, Stopped
from shardcache.units import format_bytes, format_duration, format_rate

__all__ = [
    "check_text",
    "plan_record",
    "plan_text",
    "shard_record",
    "summary_record",
    "summary_text",
    "tell_failures",
]

#: Shards named that failed like another one; ``-v`` and the other formats tell all.
_NAMED = 5
_WHY = {
    Stopped.REQUESTED: "the run was interrupted",
    Stopped.DEADLINE: "the deadline is over",
    Stopped.FAILURES: "too many failed",
    Stopped.REFUSED: "nothing there could be read",
    Stopped.FULL: "there is no room",
}


def plan_text(plan: PrewarmPlan) -> str:
    """``Need 2,048 shards, 1.0 TB: 1,310 cached, 738 to fetch (369.0 GB); free 611.0 GB  ok``."""
    total = plan.cached_bytes + plan.fetch_bytes
    unknown = plan.unknown
    size = f", {'at least ' if unknown else ''}{format_bytes(total)}" if total else ""
    text = f"Need {counted(len(plan.shards), 'shard')}{size}: {len(plan.cached):,} cached"
    fetch = len(plan.to_fetch)
    if not fetch:
        return f"{text}, nothing to fetch"
    if unknown == fetch:
        need = "sizes unknown"
    else:
        need = format_bytes(plan.fetch_bytes)
        need += f" and {unknown:,} of unknown size" if unknown else ""
    if plan.outdated:
        need += f", {len(plan.outdated):,} replaced at the origin"
    text += f", {fetch:,} to fetch ({need}); free {format_bytes(plan.free)}"
    if plan.left_out:
        return f"{text}  {len(plan.left_out):,} do not fit and are left out"
    if plan.missing:
        return f"{text}  does not fit: {format_bytes(plan.missing)} too many"
    if plan.evict:
        text += f", {format_bytes(plan.evict)} of older shards make room"
    return f"{text}  ok"


def plan_record(plan: PrewarmPlan) -> dict[str, Any]:
    """The plan as raw values."""
    return {
        "shards": len(plan.shards),
        "cached": len(plan.cached),
        "cached_bytes": plan.cached_bytes,
        "to_fetch": len(plan.to_fetch),
        "to_fetch_bytes": plan.fetch_bytes,
        "unknown_sizes": plan.unknown,
        "free_bytes": plan.free,
        "evict_bytes": plan.evict,
        "missing_bytes": plan.missing,
        "left_out": len(plan.left_out),
        "outdated": len(plan.outdated),
    }


def shard_record(result: ShardResult) -> dict[str, Any]:
    """One shard's end as raw values."""
    error = result.error
    return {
        "url": result.url,
        "outcome": result.outcome.value,
        "size": result.size,
        "seconds": round(result.seconds, 6),
        "received_bytes": result.received,
        "retries": result.retries,
        "error": None if error is None else _reason(error),
        "error_type": None if error is None else type(error).__name__,
    }


def summary_record(report: PrewarmReport) -> dict[str, Any]:
    """The totals as raw values: shards by outcome, bytes, seconds."""
    return {
        **{outcome.value: report.count(outcome) for outcome in Outcome},
        "refreshed": report.refreshed,
        "retried": report.retried,
        "bytes": report.bytes,
        "received_bytes": report.received,
        "seconds": round(report.seconds, 6),
        "stopped": None if report.stopped is None else report.stopped.value,
        "interrupted": report.interrupted,
    }


def _reason(exn: Exception) -> str:
    if isinstance(exn, ShardCacheError):
        return exn.message
    if isinstance(exn, OSError):
        where = f"{exn.filename}: " if exn.filename else ""
        return f"the local disk failed: {where}{exn.strerror or exn}"
    return f"{type(exn).__name__}: {exn}"


def check_text(report: PrewarmReport) -> str:
    """``1,310 of 2,048 shards cached (655.0 GB); 738 missing``."""
    total = len(report.results)
    size = format_bytes(report.plan.cached_bytes)
    absent = total - report.cached
    rest = f"; {absent:,} missing" if absent else ""
    return f"{report.cached:,} of {counted(total, 'shard')} cached ({size}){rest}"


def summary_text(report: PrewarmReport) -> str:
    """``Warmed 737 of 738 shards (368.5 GB) in 2m 08s, 2.9 GB/s; 1 failed, 4 retried.``"""
    new = report.fetched + report.coalesced + report.linked
    wanted = len(report.results) - report.cached
    if not wanted:
        size = format_bytes(report.plan.cached_bytes)
        return f"All {counted(report.cached, 'shard')} cached ({size})."
    text = (
        f"Warmed {new:,} of {counted(wanted, 'shard')} ({format_bytes(report.bytes)}) "
        f"in {format_duration(report.seconds)}"
    )
    if report.received and report.seconds > 0:
        text += f", {format_rate(report.received / report.seconds)}"
    left_out = report.count(Outcome.LEFT_OUT)
    why = _WHY[report.stopped] if report.stopped is not None else ""
    notes = [
        f"{report.refreshed:,} replaced at the origin" if report.refreshed else "",
        f"{report.failed:,} failed" if report.failed else "",
        f"{report.retried:,} retried" if report.retried else "",
        f"{report.coalesced:,} fetched by other processes" if report.coalesced else "",
        f"{report.linked:,} linked" if report.linked else "",
        f"{left_out:,} left out for want of room" if left_out else "",
        f"{report.not_started:,} not done because {why}" if report.not_started else "",
    ]
    told = ", ".join(note for note in notes if note)
    return f"{text}; {told}." if told else f"{text}."


def tell_failures(console: Console, report: PrewarmReport, max_failures: int | None) -> None:
    """Why shards are not there; on stderr, and also when quiet."""
    failed = [r for r in report.results if r.outcome is Outcome.FAILED]
    alike: dict[str, list[ShardResult]] = {}
    for result in failed:
        assert result.error is not None
        reason = _reason(result.error)
        name = result.url.partition("://")[2]
        alike.setdefault(reason.replace(name, ""), []).append(result)
    for group in alike.values():
        for line in _group_text(group, everything=console.verbosity > 0):
            console.detail("failed", "red", line)
    if failed and max_failures is None and report.stopped is None:
        console.hint(f"  To accept that many failures, pass --max-failures {len(failed)}.")
    if report.stopped is None or not report.not_started:
        return
    if report.stopped is Stopped.REQUESTED:
        console.hint("What was fetched is kept; run the same command to go on.")
    elif console.quiet or not console.human:
        why = _WHY[report.stopped]
        console.warning(f"{counted(report.not_started, 'shard')} not done because {why}")


def _group_text(group: list[ShardResult], *, everything: bool) -> Iterator[str]:
    """Failures for one reason: it is told once, the other shards by name."""
    shown = group if everything else group[:1]
    for result in shown:
        assert result.error is not None
        reason = _reason(result.error)
        yield reason if result.url in reason else f"{result.url}: {reason}"
    rest = [result.url.rpartition("/")[2] for result in group[len(shown) :]]
    if rest:
        names = ", ".join(rest[:_NAMED]) + (", ..." if len(rest) > _NAMED else "")
        yield f"{len(rest):,} more for the same reason: {names}"
