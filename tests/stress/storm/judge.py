"""Reads what everybody wrote down, and says what must not have happened.

1. bytes: every completed read is one version of the shard, stored before the read ended;
2. visibility: what is under a published path never changes; what is pinned stays;
3. economy: a crowd on cold shards fetches each once, and a storm no more than its calls explain;
4. bounded wait: every call ends within its bound, the time that its process was stopped excepted;
5. nothing left: a sweep leaves nothing of dead processes; the budget holds;
6. errors: no exception reaches a caller that a healthy origin gives no reason for.
"""

from __future__ import annotations

import errno
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.stress.storm.plan import Storm

Event = dict[str, Any]
#: Seconds that a call may take beyond `lock_timeout`, on a machine that does much else.
_SLACK = 105.0
#: Looks at the budget in a row: what is being published or evicted counts twice for a moment.
_IN_A_ROW = 3


def read_all(directory: Path) -> list[Event]:
    """Everything that was written down, in its order; lines that a kill tore are left out."""
    events = []
    for path in directory.glob("*.jsonl"):
        for line in path.read_text(errors="replace").splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                continue
    return sorted(events, key=lambda event: float(event["at"]))


@dataclass(frozen=True)
class Verdict:
    """Figures for the table, and what was wrong."""

    figures: dict[str, float]
    violations: list[str]


def judge(storm: Storm, events: Iterable[Event]) -> Verdict:
    """Check everything."""
    kinds: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        kinds[event["event"]].append(event)
    stopped = _stopped(kinds)
    wrong = [
        *_bytes(kinds),
        *_visibility(storm, kinds),
        *_economy(storm, kinds),
        *_waits(storm, kinds, stopped),
        *_leftovers(storm, kinds, stopped),
        *_errors(storm, kinds),
        *_processes(kinds),
    ]
    return Verdict(_figures(kinds), wrong)


def _stopped(kinds: dict[str, list[Event]]) -> dict[str, list[tuple[float, float]]]:
    """Worker -> when it was stopped, and when it went on."""
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for stop in kinds["stop"]:
        ends = (e["at"] for e in [*kinds["cont"], *kinds["died"]] if e["who"] == stop["who"])
        end = min((at for at in ends if at >= stop["at"]), default=float("inf"))
        spans[stop["who"]].append((stop["at"], end))
    return spans


def _bytes(kinds: dict[str, list[Event]]) -> Iterator[str]:
    stored = {(put["name"], put["version"]): put["at"] for put in kinds["put"]}
    for call in kinds["end"]:
        what = f"bytes: {call['op']} of {call['name']} by {call['who']}"
        if call["outcome"] == "wrong":
            yield f"{what}: {call['text']}"
        elif call.get("version") and stored.get((call["name"], call["version"]), 1e99) > call["at"]:
            yield f"{what}: version {call['version']} was not stored when it ended"


def _visibility(storm: Storm, kinds: dict[str, list[Event]]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for sample in kinds["sample"]:
        if sample["wrong"] is not None:
            yield f"visibility: {sample['path']}: {sample['wrong']}"
        if seen.setdefault(sample["path"], sample["digest"]) != sample["digest"]:
            yield f"visibility: {sample['path']} changed"
    for call in kinds["end"]:
        if call.get("stayed") is False and not storm.lying:  # nobody can tell without locks
            yield f"in use: {call['name']} was evicted while {call['who']} had pinned it"


def _economy(storm: Storm, kinds: dict[str, list[Event]]) -> Iterator[str]:
    for crowd in kinds["crowd"]:
        many = {name: count for name, count in crowd["fetches"].items() if count != 1}
        if many and not storm.lying:
            yield f"economy: a crowd on cold shards fetched {many}"
    for served in kinds["served"]:
        fetches, calls = sum(served["fetches"].values()), len(kinds["begin"])
        if fetches > 1.5 * calls:
            yield f"economy: {fetches} fetches by {calls} calls"


def _waits(storm: Storm, kinds: dict[str, list[Event]], stopped: dict[str, Any]) -> Iterator[str]:
    for call in kinds["end"]:
        began, ended = call["began"], call["at"]
        spans = stopped.get(call["who"].partition("/")[0], [])
        took = ended - began - sum(max(0.0, min(ended, b) - max(began, a)) for a, b in spans)
        if took > storm.lock_timeout + _SLACK:
            yield f"bounded wait: {call['op']} of {call['name']} by {call['who']} took {took:.0f} s"
    for stuck in kinds["stuck"]:
        yield f"bounded wait: {stuck['who']} did not end: {stuck['stack']}"


def _leftovers(
    storm: Storm, kinds: dict[str, list[Event]], stopped: dict[str, Any]
) -> Iterator[str]:
    for swept in kinds["swept"]:
        for path in swept["left"]:
            yield f"nothing left: {path} is there after the sweep"
        if swept["bytes"] > swept["limit"]:
            yield f"budget: {swept['bytes']} bytes after the sweep, not {swept['limit']}"
    for done in kinds["command"]:
        if done["status"]:
            yield f"nothing left: {done['what']} ended with {done['status']}: {done['said']}"
    gone = [e["at"] for e in kinds["unlock"] if "budget.lock" in e["files"]]
    until = 0.0 if storm.lying else min(gone, default=float("inf"))
    spans = [span for each in stopped.values() for span in each]
    over = 0
    for look in kinds["budget"]:
        excess = look["bytes"] - storm.max_size
        excused = look["at"] > until or any(a <= look["at"] <= b for a, b in spans)
        over = over + 1 if excess > 0 and not excused else 0
        if over == _IN_A_ROW:
            yield f"budget: {excess} bytes too many, in {over} looks in a row"


def _errors(storm: Storm, kinds: dict[str, list[Event]]) -> Iterator[str]:
    puts: dict[str, list[float]] = defaultdict(list)
    for put in kinds["put"]:
        puts[put["name"]].append(put["at"])
    for call in kinds["end"]:
        if call["outcome"] != "error":
            continue
        error, stores = call["error"], call["op"] in ("pinned", "fetch")
        since = call["began"] - storm.lock_timeout
        replaced = any(since <= at <= call["at"] for at in puts[call["name"]])
        full = error == "CacheFullError" or call["errno"] in (errno.ENOSPC, errno.EDQUOT)
        late = error == "LockTimeoutError" and call["at"] - call["began"] >= storm.lock_timeout
        gone = error == "FileNotFoundError" or call["errno"] == errno.EBUSY
        if error in ("TransferError", "IntegrityError") and replaced:
            continue  # it was replaced while somebody had read some of it, or again and again
        if stores and (full or late or (gone and storm.lying)):
            continue  # a path needs a stored shard
        what = f"errors: {call['op']} of {call['name']} by {call['who']}"
        yield f"{what}: {error}: {call['text']}\n{call['trace']}"


def _processes(kinds: dict[str, list[Event]]) -> Iterator[str]:
    for crash in kinds["crash"]:
        yield f"errors: {crash['who']} ended with {crash['text']}"
    sent: dict[str, set[int]] = defaultdict(set)
    for kill in kinds["kill"]:
        sent[kill["who"]] |= {-kill["signal"], 143}
    for death in kinds["died"]:
        if death["status"] not in {0, 70} | sent[death["who"]]:
            yield f"errors: {death['who']} ended with status {death['status']}"


def _figures(kinds: dict[str, list[Event]]) -> dict[str, float]:
    reads = [call for call in kinds["end"] if call["outcome"] == "ok" and call.get("size")]
    deaths = Counter(death["status"] for death in kinds["died"])
    return {
        "verified reads": len(reads),
        "verified bytes": sum(call["size"] for call in reads),
        "other calls": len(kinds["end"]) - len(reads),
        "streamed past the cache": sum(call.get("streamed", False) for call in reads),
        "kills and terminations": deaths[-9] + deaths[143],
        "stops": len(kinds["stop"]),
        "overwrites": len(kinds["put"]),
        "lock files deleted": sum(len(event["files"]) for event in kinds["unlock"]),
        "disk filled": len(kinds["fill"]),
        "fetches": sum(sum(event["fetches"].values()) for event in kinds["served"]),
        "longest call, s": max((c["at"] - c["began"] for c in kinds["end"]), default=0.0),
    }
