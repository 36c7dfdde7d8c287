"""How many fetches the origin may have seen. Pure.

A *fetch* is a successful GET that begins with byte 0 of an object. Per shard::

    fetches <= removals          entries that went
             + present           entries that are there in the end
             + excuses           see below
             + a share of ``unseen``, for all shards together

It is sound, because a fetch either becomes an entry, which was removed or is still there,
or is one of the *excuses*, each of which leaves a line in the history:

* a call about the shard that was refused, failed, was interrupted, or whose process died
  in it: its first request may have been made for nothing;
* a call that streamed: the request that learned that there is no room, and the stream's;
* a repeated attempt, an object that changed meanwhile, a full disk and a second try, a
  fetch past a stopped holder: all logged by the library, one line for each;
* a fetch in the background that failed or was called off when nobody wanted it any more,
  which the library logs, or whose process ended, which the worker tells of;
* a lock file that was deleted while it was held: its holder is no longer noticed by one
  other process.

It is tight, because what two processes fetch at once becomes one entry.

A *removal* is an eviction that the library logged; what a call of ``remove`` freed, or
might have, if it did not come to its end; and a half-removed entry of a killed process that
a sweep found. Killed between the removal's last step and its line in the history, some
microseconds, a process leaves nothing: ``unseen`` is one per `_UNSEEN` killed processes. A
new version of an object needs no term: it is fetched when the old entry is gone, or while
it is being fetched, which is logged.

Where locks lie, everybody may fetch at once. Then all that is asked is that one call
makes one fetch, apart from what is logged.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.stress.storm.history import Event, History
from tests.stress.storm.rules import Rules, Violation

__all__ = ["AGAIN", "EVICTED", "LOST", "SWEPT", "Account", "account", "figures", "violations"]

#: Beginnings of what the library logs, whichever module does, with the shard as the first
#: argument: of lines about removals, ...
EVICTED = "evicted %s, "
SWEPT = "removed %s, "
#: ... about byte 0 being asked for again, ...
AGAIN = {
    "%s: %s; fetching it here too": "past a stopped holder",
    "%s: the disk is full": "disk full",
    "%s changed while it was fetched; starting over": "changed meanwhile",
    "%s: %s; attempt %d of %d failed": "attempts repeated",
    "%s: not fetched in the background: %s": "background, for nobody",
}
#: ... and about a live partial that somebody took away.
LOST = "%s: %s; starting over"
#: What a sweep calls the half-removed entry of a key.
_HALF = re.compile(r"evict\.([0-9a-f]{32})\.")
_UNSEEN = 50
#: Calls that may fetch; the others only look or remove.
_FETCHING = frozenset({"read", "hold", "leave", "pinned", "fetch", "opener"})


@dataclass
class Account:
    """Fetches and what excuses them, by shard.

    Attributes:
        fetches: what the origin saw.
        calls: that may have fetched.
        removals: how often an entry went.
        present: entries in the end.
        excuses: reason -> shard -> how many.
        lost: live partials that were taken from their writer.
        killed: processes that were killed or terminated.
        unknown: log lines about shards that nobody knows: the harness is wrong.
    """

    fetches: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    removals: Counter[str] = field(default_factory=Counter)
    present: Counter[str] = field(default_factory=Counter)
    excuses: dict[str, Counter[str]] = field(default_factory=dict)
    lost: list[Event] = field(default_factory=list)
    killed: int = 0
    unknown: list[str] = field(default_factory=list)

    @property
    def unseen(self) -> int:
        """Removals that may be missing in ``removals``."""
        return 1 + self.killed // _UNSEEN if self.killed else 0

    def excuse(self, reason: str, name: str, count: int = 1) -> None:
        """Note an excuse."""
        self.excuses.setdefault(reason, Counter())[name] += count

    def excused(self, name: str) -> int:
        """All excuses of a shard."""
        return sum(counter[name] for counter in self.excuses.values())

    def bound(self, name: str, rules: Rules) -> int:
        """Fetches of a shard that can be explained, ``unseen`` apart."""
        if rules.lying:
            return self.calls[name] + self.excused(name)
        return self.removals[name] + self.present[name] + self.excused(name)


def account(history: History, rules: Rules) -> Account:
    """Add everything up."""
    found = Account()
    for event in history.boss:
        match event["event"]:
            case "served":
                found.fetches[event["name"]] += event["fetches"]
            case "present":
                found.present[event["name"]] += event["entries"]
            case "kill":
                found.killed += 1
            case "before-sweep":
                _count_swept(event["names"], rules, found)
            case "unlock":
                for file in event["held"]:
                    name = rules.keys.get(file.removesuffix(".lock"))
                    if name is not None:
                        found.excuse("locks deleted", name)
    _count_calls(history, rules, found)
    _count_logs(history, rules, found)
    return found


def _count_swept(names: list[str], rules: Rules, found: Account) -> None:
    for half in filter(None, map(_HALF.match, names)):
        found.removals[rules.keys[half.group(1)]] += 1


def _count_calls(history: History, rules: Rules, found: Account) -> None:
    for call in history.calls:
        name = call.name
        if name is None:
            _count_swept(call.told.get("swept", []), rules, found)
            continue
        if call.op == "remove":
            whole = call.outcome == "ok"
            found.removals[name] += call.told["gone"] if whole else rules.namespaces
        if call.op not in _FETCHING:
            continue
        found.calls[name] += 1
        if call.told.get("place") == "stream":
            # One more where the same was learned ahead, by an opener.
            found.excuse("streamed", name, 3 if call.op == "opener" else 2)
        elif call.outcome in ("error", "interrupted", "unfinished"):
            found.excuse("not completed", name)
            for other in call.ahead:
                found.excuse("not completed", other)
    for names in history.background.values():
        for name in names:
            found.excuse("in the background of a process that ended", name)


def _count_logs(history: History, rules: Rules, found: Account) -> None:
    for log in history.logs:
        template, first = log["template"], next(iter(log["args"]), "")
        reason = next((AGAIN[start] for start in AGAIN if template.startswith(start)), None)
        if template.startswith(SWEPT):
            _count_swept([first], rules, found)
        elif template.startswith(EVICTED):
            if (name := _known(first, rules.keys, found)) is not None:
                found.removals[name] += 1
        elif template.startswith(LOST):
            found.lost.append(log)
            reason = "partial lost"
        if reason is not None and (name := _known(first, rules.urls, found)) is not None:
            found.excuse(reason, name)


def _known(what: str, names: dict[str, str], found: Account) -> str | None:
    if what not in names:
        found.unknown.append(what)
    return names.get(what)


def violations(found: Account, rules: Rules) -> Iterator[Violation]:
    """Fetches that nothing explains; and partials lost while locks worked."""
    excess = {
        name: count - found.bound(name, rules)
        for name, count in found.fetches.items()
        if count > found.bound(name, rules)
    }
    if sum(excess.values()) > found.unseen:
        worst = sorted(excess, key=excess.__getitem__, reverse=True)[:5]
        told = ", ".join(
            f"{name} {found.fetches[name]}, explained {found.bound(name, rules)}" for name in worst
        )
        yield Violation(
            "economy",
            f"{sum(excess.values())} fetches are not explained, {found.unseen} may be: {told}",
        )
    if not rules.lying:
        for log in found.lost:
            yield Violation("economy", f"{log['who']} lost a live partial: {log['args']}")
    for what in found.unknown[:3]:
        yield Violation(
            "history", f"the library logged something about {what}, which nobody stored"
        )


def figures(found: Account) -> dict[str, float]:
    """For the table."""
    total = {f"fetches excused: {why}": sum(c.values()) for why, c in found.excuses.items()}
    return {
        "fetches": sum(found.fetches.values()),
        "removals": sum(found.removals.values()),
        **total,
        "partials lost": len(found.lost),
    }
