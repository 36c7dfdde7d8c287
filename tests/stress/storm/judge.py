"""The judge: a history in, violations out. Pure; see `economy` for the bound on fetches.

Invariants, by their number in the list of what a storm proves:

1. bytes: every completed read is exactly one version of the shard, and of one that was
   being stored, at the latest, when the read ended;
2. visibility: what is under a published path never changes; what is in use stays;
3. economy: see `economy`;
4. bounded wait: every call ends within its bound, times when its process was stopped
   excepted, and all workers end when they are asked to;
5. nothing left: a sweep leaves nothing of dead processes; the budget holds;
6. errors: no exception reaches a caller that a healthy origin gives no reason for.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.stress.storm import economy
from tests.stress.storm.facts import Facts
from tests.stress.storm.figures import figures
from tests.stress.storm.history import READS, Call, Event, History
from tests.stress.storm.rules import Rules, Violation

__all__ = ["DAMAGED", "Verdict", "judge"]

#: How the library says that it found an entry damaged.
DAMAGED = "set aside a damaged entry: "
_KILLED, _CRASHED = -9, 70
#: Samples in a row above the budget that make a violation: what a resumer has just
#: claimed counts as reserved before it is admitted or let go again, for a moment.
_IN_A_ROW = 3
#: An object that changes so often while it is fetched is reported, not chased.
_VERSION_RESTARTS = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a history says.

    Attributes:
        figures: name -> count or seconds, for the table.
        violations: none if every invariant held.
    """

    figures: dict[str, float]
    violations: list[Violation]


def judge(history: History, rules: Rules) -> Verdict:
    """Check everything."""
    facts = Facts(history)
    account = economy.account(history, rules)
    violations = [
        *_bytes(history, facts),
        *_visibility(history, facts, rules),
        *economy.violations(account, rules),
        *_waits(history, facts, rules),
        *_leftovers(facts, rules),
        *_budget(facts, rules),
        *_errors(history, facts, rules),
        *_processes(history, facts),
    ]
    counted = figures(history, facts, violations) | economy.figures(account)
    return Verdict(counted, violations)


def _bytes(history: History, facts: Facts) -> Iterator[Violation]:
    for call in history.calls:
        if call.outcome == "wrong":
            text = f"{call.op} of {call.name} by {call.who}: {call.told.get('text')}"
            yield Violation("bytes", f"{text} (from the {call.told.get('place')})")
        elif call.outcome == "ok" and call.op in READS:
            problem = _unknown(call, facts)
            if problem:
                yield Violation("bytes", f"{call.op} of {call.name} by {call.who}: {problem}")


def _unknown(call: Call, facts: Facts) -> str | None:
    """What is wrong with a read that its reader found right."""
    assert call.name is not None and call.ended is not None
    known = facts.versions.get((call.name, call.told["digest"]))
    if known is None:
        return f"its digest {call.told['digest']} is that of no version ever stored"
    version, stored = known
    if version != call.told["version"]:
        return f"it states version {call.told['version']} but is version {version}"
    if stored > call.ended:
        return f"version {version} was stored {stored - call.ended:.3f} s after the read ended"
    return None


def _visibility(history: History, facts: Facts, rules: Rules) -> Iterator[Violation]:
    seen: dict[str, Event] = {}
    for sample in facts.all("sample"):
        path = sample["path"]
        if sample["wrong"] is not None:
            yield Violation("visibility", f"published {path}: {sample['wrong']}")
        elif (sample["name"], sample["digest"]) not in facts.versions:
            yield Violation("visibility", f"published {path} is no version ever stored")
        before = seen.setdefault(path, sample)
        if before["digest"] != sample["digest"]:
            inodes = f"inode {before['inode']} and then {sample['inode']}"
            yield Violation(
                "visibility",
                f"published {path} held version {before['version']} and then "
                f"{sample['version']} ({inodes})",
            )
    if rules.lying:
        return  # without locks nobody can tell that an entry is in use
    for call in history.calls:
        if call.told.get("links") == 0 or call.told.get("same") is False:
            yield Violation("in use", f"{call.name} was evicted while {call.who} used it")


def _waits(history: History, facts: Facts, rules: Rules) -> Iterator[Violation]:
    for call in history.calls:
        if call.ended is None:
            continue
        took = call.ended - call.began - facts.stopped(call.who, call.began, call.ended)
        if took > rules.call_bound * call.calls:
            yield Violation(
                "bounded wait",
                f"{call.op} of {call.name} by {call.who} took {took:.1f} s, "
                f"its bound is {rules.call_bound * call.calls:.0f} s",
            )
    for stuck in facts.all("stuck"):
        open_calls = [
            f"{call.op} of {call.name}"
            for call in history.calls
            if call.ended is None and call.worker == stuck["worker"]
        ]
        yield Violation(
            "bounded wait",
            f"{stuck['worker']} did not end, in {', '.join(open_calls) or 'no call'} "
            f"({stuck['wchan']})",
        )


def _leftovers(facts: Facts, rules: Rules) -> Iterator[Violation]:
    for kind in ("swept", "emptied"):
        for event in facts.all(kind):
            for path in event["left"]:
                yield Violation("nothing left", f"{path} is there after the sweep")
    for event in facts.all("swept"):
        if event["occupied"] > rules.max_size:
            yield Violation(
                "budget", f"{event['occupied']} bytes after the sweep, not {rules.max_size}"
            )
    for event in facts.all("emptied"):
        if event["entries"]:
            yield Violation("nothing left", f"{event['entries']} entries after clean --all")
    for kind in ("clean-command", "read-all"):
        for event in facts.all(kind):
            if event["status"]:
                yield Violation(
                    "nothing left", f"{kind} ended with {event['status']}: {event['said']}"
                )


def _budget(facts: Facts, rules: Rules) -> Iterator[Violation]:
    """Published and reserved bytes, while the lock of the budget works.

    Excused: samples while somebody is stopped, who may hold the lock or be between
    claiming and being admitted; and all after that lock was first deleted.
    """
    if rules.lying:
        return
    deleted = [e["at"] for e in facts.all("unlock") if "budget.lock" in e["files"]]
    end = min(deleted, default=float("inf"))
    over = 0
    for sample in facts.all("budget"):
        excess = sample["occupied"] - rules.max_size
        counts = excess > 0 and sample["at"] < end and not facts.any_stopped(sample["at"])
        over = over + 1 if counts else 0
        if over == _IN_A_ROW:
            yield Violation("budget", f"{excess} bytes too many, in {over} looks in a row")


_Excuse = Callable[[Call, Facts, Rules], bool]


def _too_often_changed(call: Call, facts: Facts, rules: Rules) -> bool:
    """The object was replaced while it was streamed, or again and again while fetched."""
    if call.told["error"] != "TransferError" or call.ended is None:
        return False
    text = call.told["text"]
    if "was replaced while" in text:
        # What is followed may have been begun, and replaced, before this call.
        return facts.puts(call.name, call.began - rules.lock_timeout, call.ended) > 0
    puts = facts.puts(call.name, call.began - 1.0, call.ended)
    return f"changed {_VERSION_RESTARTS} times" in text and puts >= _VERSION_RESTARTS


def _no_room(call: Call, facts: Facts, rules: Rules) -> bool:
    """A path needs a stored shard; there may be no room for one."""
    if call.op not in ("pinned", "fetch") or call.ended is None:
        return False
    if call.told["error"] == "CacheFullError":
        return True
    full = call.told["errno"] in (errno.ENOSPC, errno.EDQUOT)
    return full and "OSError" in call.told["family"] and facts.was_full(call.began, call.ended)


def _waited(call: Call, facts: Facts, rules: Rules) -> bool:
    """Another process was fetching it for the whole of ``lock_timeout``."""
    if call.op not in ("pinned", "fetch") or call.ended is None:
        return False
    waited = call.ended - call.began
    return call.told["error"] == "LockTimeoutError" and waited >= rules.lock_timeout


def _unpinnable(call: Call, facts: Facts, rules: Rules) -> bool:
    """Where locks lie, a path may go as soon as it is there; a stream would have been had."""
    vanished = call.told["error"] == "FileNotFoundError" and call.op == "pinned"
    at_once = call.told["errno"] == errno.EBUSY and call.op in ("pinned", "fetch")
    return rules.lying and (vanished or at_once)


_EXCUSES: tuple[_Excuse, ...] = (_too_often_changed, _no_room, _waited, _unpinnable)


def _errors(history: History, facts: Facts, rules: Rules) -> Iterator[Violation]:
    for call in history.calls:
        if call.outcome == "error" and not any(e(call, facts, rules) for e in _EXCUSES):
            told = call.told
            yield Violation(
                "errors",
                f"{call.op} of {call.name} by {call.who}: {told['error']}: {told['text']}\n"
                f"{told.get('trace', '')}",
            )
    for log in history.logs:
        if log["template"].startswith(DAMAGED):
            yield Violation("visibility", f"{log['who']} found a damaged entry: {log['args']}")


def _processes(history: History, facts: Facts) -> Iterator[Violation]:
    for crash in history.crashes:
        yield Violation("errors", f"{crash['who']} ended with {crash['text']}")
    for death in facts.all("died"):
        worker, status = death["worker"], death["status"]
        if worker is None or status == 0 or status == _CRASHED:
            continue  # told by itself, if it crashed
        sent = facts.signals[worker]
        expected = {-number for number in sent} | ({143} if sent & {2, 15} else set())
        if status not in expected:
            yield Violation("errors", f"{worker} ended with status {status}; it was sent {sent}")
    torn = history.torn
    kills = sum(event["signal"] == -_KILLED for event in facts.all("kill"))
    if torn > kills:
        yield Violation("history", f"{torn} lines cannot be read, of {kills} killed workers")
