"""A history in numbers, for the table."""

from __future__ import annotations

from collections import Counter

from tests.stress.storm.facts import Facts
from tests.stress.storm.history import READS, Call, History
from tests.stress.storm.rules import Violation

__all__ = ["figures"]

_KILLED = -9
_TERMINATED = (143, -15, -2)


def _overlaps(calls: list[Call]) -> int:
    """How many calls began while another of them, by another process, was running."""
    running: list[Call] = []
    count = 0
    for call in sorted(calls, key=lambda call: call.began):
        running = [c for c in running if c.ended is not None and c.ended > call.began]
        count += bool(running)
        running.append(call)
    return count


def figures(history: History, facts: Facts, violations: list[Violation]) -> dict[str, float]:
    """What happened, in numbers."""
    calls = history.calls
    reads = [call for call in calls if call.op in READS and call.outcome == "ok"]
    ended = [call for call in calls if call.ended is not None]
    kinds = Counter(violation.invariant for violation in violations)
    deaths = Counter(event["status"] for event in facts.all("died") if event["worker"])
    unlocked = [name for event in facts.all("unlock") for name in event["files"]]
    before = facts.all("before-sweep")
    return {
        "verified reads": len(reads),
        "verified bytes": sum(call.told["size"] for call in reads),
        "other calls": len(calls) - len(reads),
        "kills": deaths[_KILLED],
        "terminations": sum(deaths[status] for status in _TERMINATED),
        "stops": facts.stops(),
        "overwrites": sum(put["phase"] == "end" and put["version"] > 0 for put in facts.all("put")),
        "lock files deleted": len(unlocked),
        "disk filled": len(facts.all("fill")),
        "bypasses": sum(call.told.get("place") == "stream" for call in calls),
        "refused for want of room": sum(c.told.get("error") == "CacheFullError" for c in calls),
        "cleaners at once": _overlaps([c for c in ended if c.op in ("clean", "sweep", "remove")]),
        "held open": sum(call.op in ("hold", "pinned") for call in reads),
        "samples": len(facts.all("sample")),
        "longest call, s": max(
            (c.ended - c.began - facts.stopped(c.who, c.began, c.ended) for c in ended if c.ended),
            default=0.0,
        ),
        "dead partials seen": max((s["dead"] for s in facts.all("budget")), default=0),
        "left to the sweep": sum(_is_partial(name) for e in before for name in e["names"]),
        "wrong bytes": kinds["bytes"] + kinds["visibility"],
        "stuck callers": kinds["bounded wait"],
        "orphans after the sweep": kinds["nothing left"],
        "violations": len(violations),
    }


def _is_partial(name: str) -> bool:
    return "." in name and not name.endswith(".session")
