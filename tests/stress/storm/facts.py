"""What the boss's events say, asked the way the judge asks."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from functools import cached_property

from tests.stress.storm.history import Event, History

__all__ = ["Facts"]

#: Seconds; shorter stops are not counted.
_STOP_SECONDS = 0.04


class Facts:
    """The boss's events, by what is asked of them."""

    def __init__(self, history: History) -> None:
        self.history = history
        self._by_kind: dict[str, list[Event]] = defaultdict(list)
        for event in history.boss:
            self._by_kind[event["event"]].append(event)

    def all(self, kind: str) -> list[Event]:
        """The events of one kind."""
        return self._by_kind[kind]

    @cached_property
    def versions(self) -> dict[tuple[str, str], tuple[int, float]]:
        """(shard, digest) -> (version, when its storing began)."""
        return {
            (put["name"], put["digest"]): (put["version"], put["at"])
            for put in self.all("put")
            if put["phase"] == "begin"
        }

    def puts(self, name: str | None, since: float, until: float) -> int:
        """How often the overwriting of a shard began in a span of time."""
        puts = [put for put in self.all("put") if put["phase"] == "begin"]
        times = [put["at"] for put in puts if put["name"] == name]
        return sum(since <= at <= until for at in times)

    @cached_property
    def _pauses(self) -> dict[str, list[tuple[float, float]]]:
        pauses: dict[str, list[tuple[float, float]]] = defaultdict(list)
        begun: dict[str, float] = {}
        for event in self.history.boss:
            if event["event"] == "stop":
                begun[event["worker"]] = event["at"]
            elif event["event"] in ("cont", "died") and event.get("worker") in begun:
                pauses[event["worker"]].append((begun.pop(event["worker"]), event["at"]))
        for worker, at in begun.items():
            pauses[worker].append((at, float("inf")))
        return pauses

    def stops(self) -> int:
        """Stops that lasted: the boss takes back those that come too late."""
        spans = [span for spans in self._pauses.values() for span in spans]
        return sum(end - begin >= _STOP_SECONDS for begin, end in spans)

    def stopped(self, who: str, since: float, until: float) -> float:
        """Seconds that a process was stopped in a span of time."""
        spans = self._pauses.get(who, [])
        return sum(max(0.0, min(until, end) - max(since, begin)) for begin, end in spans)

    def any_stopped(self, at: float) -> bool:
        """Whether somebody was stopped at a moment."""
        return any(begin <= at <= end for spans in self._pauses.values() for begin, end in spans)

    @cached_property
    def _fills(self) -> tuple[list[float], list[float]]:
        return [e["at"] for e in self.all("fill")], [e["at"] for e in self.all("free")]

    def was_full(self, since: float, until: float) -> bool:
        """Whether the disk was filled at some moment of a span."""
        fills, frees = self._fills
        last = bisect_right(fills, until) - 1
        if last < 0:
            return False
        end = next((at for at in frees if at >= fills[last]), float("inf"))
        return end >= since

    @cached_property
    def signals(self) -> dict[str, set[int]]:
        """Worker -> the signals it was sent."""
        sent: dict[str, set[int]] = defaultdict(set)
        for event in self.all("kill"):
            sent[event["worker"]].add(event["signal"])
        return sent
