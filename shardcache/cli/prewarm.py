"""``shardcache prewarm`` and ``shardcache path``: the commands that fetch, and what they say."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardcache.cli.main import DURATION, SIZE, ExitCode, Invocation, Parsed, command
from shardcache.cli.output import Console, counted
from shardcache.cli.progress import Display, Position, Progress, Rate
from shardcache.errors import CacheFullError, ConfigError, ShardCacheError, ShardNotFoundError
from shardcache.fetch.connections import parse_rate
from shardcache.prewarm.plan import expand, own_share
from shardcache.prewarm.run import JOBS, prewarm
from shardcache.results import (
    Event,
    Finished,
    Outcome,
    Planned,
    PrewarmPlan,
    PrewarmReport,
    ShardResult,
    Stopped,
)
from shardcache.units import Limit, format_bytes, format_duration, format_rate

if TYPE_CHECKING:
    from shardcache.cache import Cache
    from shardcache.prewarm.ray import NodeReport

#: Shards named that failed like another one; ``-v`` and the other formats tell all.
_NAMED = 5
_NEW = (Outcome.FETCHED, Outcome.COALESCED, Outcome.LINKED)
_THERE = (Outcome.CACHED, *_NEW)
_WHY = {
    Stopped.REQUESTED: "the run was interrupted",
    Stopped.DEADLINE: "the deadline is over",
    Stopped.FAILURES: "too many failed",
    Stopped.REFUSED: "nothing there could be read",
    Stopped.FULL: "there is no room",
}


@command(
    "prewarm",
    short="Fill the cache before the job.",
    examples="""
        shardcache prewarm 's3://lab/train-{0000..2047}.tar' -j 16
        shardcache prewarm s3://lab/val/ 's3://lab/test-*.tar'
        shardcache prewarm -f shards.txt --deadline 5m --best-effort
        shardcache prewarm s3://lab/val/ --limit-rate 50MB
        shardcache prewarm --refresh 's3://lab/train-{0000..2047}.tar'
        shardcache prewarm --check 's3://lab/train-{0000..2047}.tar'
        srun --ntasks-per-node=1 shardcache prewarm --shard-by-node 's3://lab/{0000..2047}.tar'
        shardcache prewarm --ray 's3://lab/train-{0000..2047}.tar'
    """,
)
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be fetched, fetch nothing.")
@click.option(
    "--limit-rate",
    type=Parsed("RATE", parse_rate),
    help="Most bytes per second, such as 50MB, of all connections together.",
)
@click.option("--best-effort", is_flag=True, help="Leave out what does not fit; do not refuse.")
@click.option(
    "--max-failures",
    type=click.IntRange(0),
    metavar="N",
    help="Accept up to N failed shards, stop at the next.",
)
@click.option("--deadline", type=DURATION, help="Stop after this long, such as 5m.")
@click.option(
    "--max-size",
    type=SIZE,
    help="What the cache may hold, such as 800GB or 80%, instead of the configured size.",
)
@click.option("--check", is_flag=True, help="Only tell whether all is cached (exit 4 if not).")
@click.option(
    "--refresh", is_flag=True, help="Ask origins for what is cached; fetch what they replaced."
)
@click.option(
    "--node-count",
    type=click.IntRange(1),
    metavar="N",
    help="So many nodes, where no launcher tells; with --node-rank.",
)
@click.option(
    "--node-rank",
    type=click.IntRange(0),
    metavar="N",
    help="This node's number from 0 on, where no launcher tells.",
)
@click.option(
    "--ranks-per-node",
    type=click.IntRange(1),
    metavar="N",
    help="Processes of the training run on each node.  [default: 1]",
)
@click.option(
    "--shard-by-node",
    is_flag=True,
    help="Only the shards that split_by_node gives this node's ranks.",
)
@click.option(
    "--ray",
    is_flag=True,
    help="Prewarm every node of the Ray cluster (RAY_ADDRESS, else the one here).",
)
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(1, 256),
    metavar="N",
    help=f"Most shards at a time.  [default: {JOBS}]",
)
@click.option(
    "-f",
    "--file",
    "lists",
    multiple=True,
    metavar="LIST",
    help="Read SPECs from a file, one per line; - is stdin. May be repeated.",
)
@click.argument("specs", nargs=-1, metavar="SPEC...")
def prewarm_command(
    invocation: Invocation,
    specs: tuple[str, ...],
    lists: tuple[str, ...],
    jobs: int | None,
    max_size: Limit | None,
    ray: bool,
    shard_by_node: bool,
    ranks_per_node: int | None,
    node_rank: int | None,
    node_count: int | None,
    **options: Any,
) -> int:
    """Fetch shards into the cache, several at once, and show how it goes.

    A SPEC is a WebDataset shard specification with {braces}, a prefix ending in /
    (every tar file below it), or a name with * or ?. Interrupted, it leaves
    partials behind; the same command goes on where it ended.

    Shards that do not exist do not stop the others. When the first shards of a
    bucket are all refused (credentials, endpoint), the rest of it is not tried.

    With --ray every node prewarms its own cache, with its own configuration and
    credentials. A node that fails or dies is named; the others complete.
    """
    stated = node_rank is not None or node_count is not None
    if not shard_by_node and (stated or ranks_per_node is not None):
        raise click.UsageError(
            "--ranks-per-node, --node-rank and --node-count go with --shard-by-node."
        )
    if ray and stated:
        raise click.UsageError("With --ray each node is told which one it is.")
    wanted = [*specs, *(spec for name in lists for spec in _read_list(name))]
    if not wanted:
        raise click.UsageError(
            f"There is no shard in {', '.join(lists)}: one SPEC per line."
            if lists
            else "Which shards? Give a SPEC, or a list with -f."
        )
    options["jobs"] = jobs or JOBS
    ranks = (ranks_per_node or 1) if shard_by_node else None
    if ray:
        return _prewarm_ray(invocation, wanted, options, max_size, ranks)
    share = None if ranks is None else own_share(node_rank, node_count, ranks)
    cache = invocation.cache(connections=jobs or 0, looking=options["check"])
    if max_size is not None:
        cache = type(cache).from_config(cache.config.replace(max_size=max_size))
    console = invocation.console
    told: set[str] = set()

    def tell(event: Event) -> None:
        if isinstance(event, Planned) and not options["check"]:
            console.said(plan_text(event.plan))
            console.line("plan", plan_record(event.plan))
        elif isinstance(event, Finished):
            console.line("shard", shard_record(event.result))
            told.add(event.result.url)

    def run(on_event: Callable[[Event], None]) -> PrewarmReport:
        shards = [cache.parse(url) for url in expand(wanted, cache, share=share)]
        return prewarm(cache, shards, on_event=on_event, stop=invocation.signals.stop, **options)

    with cache:
        looking = options["check"] or options["dry_run"]
        report = _attended(invocation, run, tell, show=not looking)
        _print(console, report, told, options)
        tell_failures(console, report, options["max_failures"])
        _suggest_prefixes(console, cache, report)
    return _exit_code(report, options)


def _read_list(name: str) -> Iterator[str]:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exn:
        reason = exn.strerror if isinstance(exn, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"the list {name} cannot be read: {reason}") from exn
    for line in text.splitlines():
        spec = line.strip()
        if spec and not spec.startswith("#"):
            yield spec


def _attended(
    invocation: Invocation,
    run: Callable[[Callable[[Event], None]], PrewarmReport],
    tell: Callable[[Event], None],
    *,
    show: bool,
) -> PrewarmReport:
    """Run with progress; from the plan on, the first signal ends the run instead of raising."""
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(invocation.console))

        def on_event(event: Event) -> None:
            tell(event)
            if show:
                if isinstance(event, Planned):
                    stack.enter_context(invocation.signals.graceful())
                progress(event)

        return run(on_event)


def _print(
    console: Console, report: PrewarmReport, told: set[str], options: Mapping[str, Any]
) -> None:
    if console.human:
        if options["check"]:
            console.said(check_text(report))
        elif not options["dry_run"]:
            console.said(summary_text(report))
        return
    records = [shard_record(result) for result in report.results]
    if console.format == "jsonl":
        records = [record for record in records if record["url"] not in told]
    summary = summary_record(report)
    if console.format == "json":
        summary = {"plan": plan_record(report.plan), **summary}
    console.table("prewarm", "shard", [], records, summary=summary)


def _exit_code(report: PrewarmReport, options: Mapping[str, Any]) -> int:
    best_effort = options["best_effort"]
    if options["check"]:
        return 0 if report.cached == len(report.results) else ExitCode.DAMAGED
    if report.full or (report.missing and report.plan.missing and not best_effort):
        return ExitCode.FULL
    if report.failed > (options["max_failures"] or 0):
        return ExitCode.SOME_FAILED
    return ExitCode.SOME_FAILED if report.not_started and not best_effort else 0


def _suggest_prefixes(console: Console, cache: Cache, report: PrewarmReport) -> None:
    """Where nothing has the name, but names below it exist: say so."""
    absent = [r.url for r in report.results if isinstance(r.error, ShardNotFoundError)]
    for url in absent[:_NAMED]:
        if "." in url.rpartition("/")[2]:
            continue
        try:
            count = len(expand(f"{url}/", cache))
        except (ShardCacheError, OSError):
            continue  # the failure itself was told
        console.hint(f"  {counted(count, 'shard')} below {url}/ : did you mean that?")


# -- every node of a Ray cluster -----------------------------------------------


def _prewarm_ray(
    invocation: Invocation,
    specs: Sequence[str],
    options: Mapping[str, Any],
    max_size: Limit | None,
    ranks_per_node: int | None,
) -> int:
    from shardcache.prewarm.ray import prewarm_nodes

    console = invocation.console
    nodes: list[NodeReport] = []
    planned, ended = set[int](), set[int]()
    stated = invocation.stated_directory
    check, began, rate = options["check"], time.monotonic(), Rate()

    def look(now: float) -> Position:
        return _position(nodes, rate.update(now, sum(node.received for node in nodes)))

    def on_news(current: Sequence[NodeReport]) -> None:
        if not nodes:
            console.said(f"{counted(len(current), 'node')}: {', '.join(n.name for n in current)}")
        nodes[:] = current
        for node in current:
            if node.plan is not None and node.number not in planned and not check:
                planned.add(node.number)
                console.said(f"{node.name}  {plan_text(node.plan)}")
                console.line("plan", {"node": node.name, **plan_record(node.plan)})
            if node.ended and node.number not in ended:
                ended.add(node.number)
                console.said(f"{node.name}  {_node_text(node, options)}")

    with invocation.signals.graceful(), Display(console, look):
        prewarm_nodes(
            specs,
            settings={
                "dir": stated and stated.absolute(),
                "max_size": None if max_size is None else str(max_size),
            },
            config_file=invocation.stated_config,
            ranks_per_node=ranks_per_node,
            on_news=on_news,
            stop=invocation.signals.stop,
            **options,
        )
    codes = [_node_code(node, options) for node in nodes]
    good, seconds = codes.count(0), time.monotonic() - began
    received = sum(node.received for node in nodes)
    done = "All cached on" if check else "Planned for" if options["dry_run"] else "Warmed"
    console.said(
        f"{done} {good:,} of {counted(len(nodes), 'node')} in {format_duration(seconds)}, "
        f"{format_rate(received / seconds)}."
    )
    if not console.human:
        rows = [
            {"node": node.name, **shard_record(result)}
            for node in nodes
            for result in node.report.results
        ]
        summary = {
            "seconds": round(seconds, 6),
            "received_bytes": received,
            "nodes": {
                node.name: {
                    "number": node.number,
                    "exit_code": code,
                    "lost": node.lost,
                    "error": None if node.error is None else _reason(node.error),
                    **summary_record(node.report),
                }
                for node, code in zip(nodes, codes, strict=True)
            },
        }
        console.table("prewarm", "shard", [], rows, summary=summary)
    why: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        if node.error is not None:
            key = "lost" if node.lost else "failed", _reason(node.error)
            why.setdefault(key, []).append(node.name)
        for line in _failures(node.report, everything=console.verbosity > 0):
            why.setdefault(("failed", line), []).append(node.name)
    for (word, reason), names in why.items():
        console.detail(word, "red", f"{', '.join(names)}: {reason}")
    if any(node.lost or node.interrupted for node in nodes):
        console.hint("What was fetched is kept; run the same command again for what is missing.")
    bad = set(codes) - {0}
    # 2, 4 and 5 are the command's own if they are true of all nodes that are not done.
    return 0 if not bad else bad.pop() if len(bad) == 1 else ExitCode.SOME_FAILED


def _node_code(node: NodeReport, options: Mapping[str, Any]) -> int:
    if node.error is None:
        return _exit_code(node.report, options)
    if isinstance(node.error, CacheFullError):
        return ExitCode.FULL
    return ExitCode.USAGE if isinstance(node.error, ConfigError) else ExitCode.SOME_FAILED


def _node_text(node: NodeReport, options: Mapping[str, Any]) -> str:
    if node.error is not None or node.interrupted:
        word = "lost" if node.lost else "interrupted" if node.interrupted else "failed"
        if node.plan is None:
            return word
        done = node.report.count(*_THERE)
        return f"{word} after {done:,} of {counted(len(node.plan.shards), 'shard')}"
    if options["check"]:
        return check_text(node.report)
    return plan_text(node.report.plan) if options["dry_run"] else summary_text(node.report)


def _position(nodes: Sequence[NodeReport], rate: float) -> Position:
    """``56%, 2/3 nodes done, 20/36 shards, 2.9 GB/s, slowest node-b 4/12``."""
    if not nodes:
        return Position(None, ["Waiting for Ray"])
    shards = {node.name: (len(node.results), len(node.report.results)) for node in nodes}
    done, wanted = (sum(pair[i] for pair in shards.values()) for i in (0, 1))
    ended = sum(node.ended for node in nodes)
    parts = [f"{ended:,}/{len(nodes):,} nodes done", f"{done:,}/{wanted:,} shards"]
    parts.append(format_rate(rate))
    running = [node.name for node in nodes if not node.ended and shards[node.name][1]]
    if running:
        last = min(running, key=lambda name: shards[name][0] / shards[name][1])
        parts.append(f"slowest {last} {shards[last][0]:,}/{shards[last][1]:,}")
    return Position(done / wanted if wanted else None, parts)


# -- what is said of a prewarm: sentences for people, records for programs -----


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
    new = report.count(*_NEW)
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
    """Print why shards are not cached; on stderr, and also when quiet."""
    for line in _failures(report, everything=console.verbosity > 0):
        console.detail("failed", "red", line)
    if report.failed and max_failures is None and report.stopped is None:
        console.hint(f"  To accept that many failures, pass --max-failures {report.failed}.")
    if report.stopped is None or not report.not_started:
        return
    if report.stopped is Stopped.REQUESTED:
        console.hint("What was fetched is kept; run the same command to go on.")
    elif console.quiet or not console.human:
        why = _WHY[report.stopped]
        console.warning(f"{counted(report.not_started, 'shard')} not done because {why}")


def _failures(report: PrewarmReport, *, everything: bool) -> Iterator[str]:
    """Why shards failed; of many that failed alike only the first, and the others' names."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for result in report.results:
        if result.outcome is Outcome.FAILED and result.error is not None:
            reason = _reason(result.error)
            name = result.url.partition("://")[2]
            alike.setdefault(reason.replace(name, ""), []).append((result.url, reason))
    for group in alike.values():
        shown = group if everything else group[:1]
        for url, reason in shown:
            yield reason if url in reason else f"{url}: {reason}"
        rest = [url.rpartition("/")[2] for url, _ in group[len(shown) :]]
        if rest:
            names = ", ".join(rest[:_NAMED]) + (", ..." if len(rest) > _NAMED else "")
            yield f"{len(rest):,} more for the same reason: {names}"


# -- path ----------------------------------------------------------------------


@command(
    "path",
    short="Print where a shard is.",
    examples="""
        shardcache path s3://lab/train-0000.tar
        tar tf "$(shardcache path --fetch s3://lab/train-0000.tar)"
    """,
)
@click.option("--fetch", is_flag=True, help="Fetch it first if it is not cached.")
@click.argument("url", metavar="URL")
def path_command(invocation: Invocation, url: str, fetch: bool) -> int:
    """Print the local path of a cached shard, and nothing else.

    Not cached: exit code 1. The path is not pinned: another process may evict the
    shard later.
    """
    with invocation.cache(looking=not fetch) as cache:
        shard = cache.parse(url)
        found = cache.path(url)
        if found is None and fetch:
            stop = invocation.signals.stop
            report = _attended(
                invocation,
                lambda on_event: prewarm(cache, [shard], jobs=1, on_event=on_event, stop=stop),
                lambda event: None,
                show=True,
            )
            if report.interrupted:
                raise KeyboardInterrupt
            if error := report.results[0].error:
                raise error
            found = cache.path(url)
    if found is None:
        advice = "Pass --fetch to fetch it." if not fetch else "It was evicted again at once."
        raise ShardNotFoundError(f"{shard} is not cached in {cache.dir}. {advice}", url=str(shard))
    record = {"url": str(shard), "path": os.fspath(found)}
    invocation.console.record("path", record, os.fspath(found))
    return 0
