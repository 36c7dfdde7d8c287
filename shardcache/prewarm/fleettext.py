"""What is said of a fleet: to people in sentences, to machines in records.

Pure, apart from `tell_failures`, which prints. Fields are those of docs/schemas/prewarm-nodes.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardcache.cli.output import Console, counted
from shardcache.prewarm.fleet import Ending, Fleet, Node
from shardcache.prewarm.fleetlines import AMOUNTS
from shardcache.units import format_bytes, format_duration, format_rate

__all__ = [
    "end_text",
    "exit_code",
    "node_record",
    "plan_line",
    "progress_line",
    "shard_records",
    "summary_record",
    "tell_failures",
    "total_text",
]

#: Nodes or shards named that are like another one; ``-v`` and the other formats tell all.
_NAMED = 5
_NEW = ("fetched", "coalesced", "linked")
#: One word for an ending, where something is wrong.
_WORDS = {
    Ending.FULL: "full",
    Ending.FAILED: "failed",
    Ending.INTERRUPTED: "interrupted",
    Ending.LOST: "lost",
    Ending.NOT_STARTED: "not started",
}
_SOME_FAILED, _INCOMPLETE, _FULL = 3, 4, 5


def plan_line(plan: Mapping[str, Any]) -> str:
    """``Need 12 shards, 1.0 GB: 4 cached, 8 to fetch (700.0 MB); free 611.0 GB``."""
    total = int(plan["cached_bytes"]) + int(plan["to_fetch_bytes"])
    size = f", {format_bytes(total)}" if total else ""
    text = f"Need {counted(int(plan['shards']), 'shard')}{size}: {int(plan['cached']):,} cached"
    fetch = int(plan["to_fetch"])
    if not fetch:
        return f"{text}, nothing to fetch"
    need = format_bytes(plan["to_fetch_bytes"]) if plan["to_fetch_bytes"] else "sizes unknown"
    text += f", {fetch:,} to fetch ({need}); free {format_bytes(plan['free_bytes'])}"
    if left_out := int(plan["left_out"]):
        text += f"; {left_out:,} do not fit and are left out"
    if evict := int(plan["evict_bytes"]):
        text += f"; {format_bytes(evict)} of older shards make room"
    return text


def end_text(node: Node) -> str:
    """How a node ended, in one line."""
    if node.ending in _WORDS:
        done = "" if node.wanted is None else f" after {node.done:,} of {node.wanted:,} shards"
        return f"{_WORDS[node.ending]}{done}"
    totals = _totals(node)
    if node.ending is Ending.INCOMPLETE:
        return f"{totals['cached']:,} of {counted(len(node.shards), 'shard')} cached"
    if totals["missing"]:
        return f"{counted(totals['missing'], 'shard')} to fetch, {totals['cached']:,} cached"
    new, wanted = sum(totals[name] for name in _NEW), len(node.shards) - totals["cached"]
    if not wanted:
        return f"All {counted(totals['cached'], 'shard')} cached"
    text = f"Warmed {new:,} of {counted(wanted, 'shard')} ({format_bytes(totals['bytes'])})"
    if node.summary is not None:
        text += f" in {format_duration(float(node.summary['seconds']))}"
    notes = [
        f"{totals['failed']:,} failed" if totals["failed"] else "",
        f"{totals['retried']:,} retried" if totals["retried"] else "",
        f"{totals['left_out']:,} left out for want of room" if totals["left_out"] else "",
        f"{totals['not_started'] + totals['cancelled']:,} not done"
        if totals["not_started"] + totals["cancelled"]
        else "",
    ]
    told = ", ".join(note for note in notes if note)
    return f"{text}; {told}" if told else text


def total_text(fleet: Fleet, *, check: bool) -> str:
    """``Warmed 3 of 3 nodes: 36 shards (149.4 MB) in 4.1s, 36.4 MB/s.``"""
    summary = summary_record(fleet)
    count = len(fleet.nodes)
    good = summary["outcomes"][Ending.DONE.value]
    if check:
        wanted = sum(len(node.shards) for node in fleet.nodes)
        text = f"All cached on {good:,} of {counted(count, 'node')}: {summary['cached']:,} of "
        text += counted(wanted, "shard")
    elif summary["missing"]:
        text = f"To fetch on {counted(count, 'node')}: {counted(summary['missing'], 'shard')}"
    else:
        new = sum(summary[name] for name in _NEW)
        text = f"Warmed {good:,} of {counted(count, 'node')}: "
        if new:
            text += f"{counted(new, 'shard')} ({format_bytes(summary['bytes'])})"
        else:
            text += f"all {counted(summary['cached'], 'shard')} cached" if good else "nothing new"
        text += f" in {format_duration(fleet.seconds)}"
        if summary["received_bytes"] and fleet.seconds > 0:
            text += f", {format_rate(summary['received_bytes'] / fleet.seconds)}"
    notes = [
        f"{number:,} {_WORDS[Ending(name)]}"
        for name, number in summary["outcomes"].items()
        if number and Ending(name) in _WORDS
    ]
    if summary["failed"]:
        notes.append(f"{counted(summary['failed'], 'shard')} failed")
    if summary["left_out"]:
        notes.append(f"{counted(summary['left_out'], 'shard')} left out for want of room")
    return f"{text}; {', '.join(notes)}." if notes else f"{text}."


def progress_line(fleet: Fleet) -> str:
    """``2/3 nodes done, 20/36 shards, 2.9 GB/s; slowest node-b 4/12``."""
    nodes = fleet.nodes
    running = [node for node in nodes if not node.ended]
    wanted = sum(node.wanted or 0 for node in nodes)
    parts = [
        f"{len(nodes) - len(running):,}/{len(nodes):,} nodes done",
        f"{sum(node.done for node in nodes):,}/{wanted:,} shards",
        format_rate(rate_of(fleet)),
    ]
    known = [node for node in running if node.wanted]
    if known:
        last = min(known, key=lambda node: node.done / (node.wanted or 1))
        parts.append(f"slowest {last.name} {last.done:,}/{last.wanted:,}")
    return ", ".join(parts)


def rate_of(fleet: Fleet) -> float:
    """Bytes per second from the network, of all nodes that are at work."""
    return sum(
        float(node.progress["bytes_per_second"])
        for node in fleet.nodes
        if node.progress is not None and not node.ended
    )


def _totals(node: Node) -> dict[str, int]:
    """Its summary, or what its shards add up to where it had no time for one."""
    if node.summary is not None:
        return {name: int(node.summary[name]) for name in AMOUNTS}
    totals = dict.fromkeys(AMOUNTS, 0)
    for shard in node.shards:
        outcome = str(shard["outcome"])
        totals[outcome] += 1
        totals["received_bytes"] += int(shard["received_bytes"])
        totals["retried"] += bool(shard["retries"])
        totals["bytes"] += int(shard["size"] or 0) if outcome in _NEW else 0
    return totals


def node_record(node: Node) -> dict[str, Any]:
    """One node's end as raw values."""
    about = node.about or {}
    return {
        "number": node.number,
        "outcome": node.ending.value,
        "exit_code": node.code,
        "error": node.error,
        "host": about.get("host"),
        "dir": about.get("dir"),
        "library_version": about.get("library_version"),
        "shards": node.wanted,
        "in_cache": node.done,
        **_totals(node),
        "seconds": None if node.summary is None else node.summary["seconds"],
    }


def shard_records(fleet: Fleet) -> list[dict[str, Any]]:
    """Shards of all nodes, as raw values."""
    return [
        {"node": node.name, **{k: v for k, v in shard.items() if k not in ("schema", "type")}}
        for node in fleet.nodes
        for shard in node.shards
    ]


def summary_record(fleet: Fleet) -> dict[str, Any]:
    """All nodes by name, and what they add up to."""
    totals = dict.fromkeys(AMOUNTS, 0)
    outcomes = {ending.value: 0 for ending in Ending}
    for node in fleet.nodes:
        for name, number in _totals(node).items():
            totals[name] += number
        outcomes[node.ending.value] += 1
    return {
        **totals,
        "seconds": round(fleet.seconds, 6),
        "outcomes": outcomes,
        "nodes": {node.name: node_record(node) for node in fleet.nodes},
    }


def exit_code(fleet: Fleet) -> int:
    """0 if all nodes are done; what all that are not have in common; else some failed."""
    codes = {_SOME_FAILED if node.code is None else node.code for node in fleet.nodes}
    bad = codes - {0}
    if not bad:
        return 0
    # A wrong option or a full disk of one node among many is that node's failure; 4 and 5 say of
    # the whole what they say of a node.
    if len(bad) == 1 and (bad == codes or bad <= {_INCOMPLETE, _FULL}):
        return bad.pop()
    return _SOME_FAILED


def tell_failures(console: Console, fleet: Fleet) -> None:
    """Why nodes and shards are not done; on stderr, and also when quiet."""
    everything = console.verbosity > 0
    whys: dict[tuple[str, str], list[str]] = {}
    for node in fleet.nodes:
        if node.error is not None and node.ending is not Ending.INTERRUPTED:
            whys.setdefault((_WORDS.get(node.ending, "failed"), node.error), []).append(node.name)
    for (word, why), names in whys.items():
        console.detail(word, "red", f"{_some(names, everything)}: {why}")
    alike: dict[str, list[tuple[str, str, str]]] = {}
    for node in fleet.nodes:
        for shard in node.shards:
            if shard["outcome"] == "failed":
                url, reason = str(shard["url"]), str(shard["error"])
                key = reason.replace(url.partition("://")[2], "")
                alike.setdefault(key, []).append((node.name, url, reason))
    for group in alike.values():
        for line in _group(group, everything):
            console.detail("failed", "red", line)
    if any(n.ending in (Ending.LOST, Ending.NOT_STARTED, Ending.INTERRUPTED) for n in fleet.nodes):
        console.hint("What was fetched is kept; run the same command again for what is missing.")


def _group(group: list[tuple[str, str, str]], everything: bool) -> Iterator[str]:
    """Failures for one reason: told once, the other shards by name."""
    by_shard: dict[str, list[str]] = {}
    reasons = {}
    for name, url, reason in group:
        by_shard.setdefault(url, []).append(name)
        reasons[url] = reason if url in reason else f"{url}: {reason}"
    urls = list(by_shard)
    shown = urls if everything else urls[:1]
    for url in shown:
        yield f"{_some(by_shard[url], everything)}: {reasons[url]}"
    rest = [url.rpartition("/")[2] for url in urls[len(shown) :]]
    if rest:
        yield f"{len(rest):,} more for the same reason: {_some(rest, False)}"


def _some(names: list[str], everything: bool) -> str:
    shown = names if everything else names[:_NAMED]
    return ", ".join(shown) + (", ..." if len(names) > len(shown) else "")
