"""What goes wrong on the shim, decided per request.

A `Rule` strikes requests by operation and path: instead of them (``error``), after
them (``done``: the deed is done and only its answer is lost, as when an NFS
server's reply is dropped and the repeated request finds it done), or never
(``hang``). `Hanging` keeps requests nobody answers; no thread waits with them.
"""

from __future__ import annotations

import fnmatch
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.stress.fuse.proto import Request


@dataclass(slots=True)
class Rule:
    """One fault.

    Attributes:
        ops: names of operations (``rename``, ``lookup``, ...).
        pattern: shell pattern of paths relative to the mount; either of two.
        error: errno that is answered.
        done: whether the operation is carried out first.
        hang: never answer.
        times: how many requests it strikes; -1 is all.
        skip: how many it lets pass first.
        struck: how many it has struck.
    """

    ops: frozenset[str]
    pattern: str
    error: int = 0
    done: bool = False
    hang: bool = False
    times: int = 1
    skip: int = 0
    struck: int = 0


class Faults:
    """The rules in force; safe between threads."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []
        self._guard = threading.Lock()

    def add(self, rule: Rule) -> int:
        with self._guard:
            self._rules.append(rule)
            return len(self._rules) - 1

    def clear(self) -> None:
        """All rules have run out; their counts can still be asked for."""
        with self._guard:
            for rule in self._rules:
                rule.times = 0

    def struck(self) -> list[int]:
        return [rule.struck for rule in self._rules]

    def strike(self, op: str, paths: Callable[[], Iterable[str]]) -> Rule | None:
        """The rule that strikes this request, if one does."""
        if not any(op in rule.ops and rule.times for rule in self._rules):
            return None
        found = list(paths())
        with self._guard:
            for rule in self._rules:
                if op not in rule.ops or not rule.times:
                    continue
                if not any(fnmatch.fnmatchcase(path, rule.pattern) for path in found):
                    continue
                if rule.skip:
                    rule.skip -= 1
                    continue
                rule.times -= rule.times > 0
                rule.struck += 1
                return rule
        return None


class Hanging:
    """Requests without an answer.

    Args:
        give_up: answers a request that waited for ``limit`` seconds, so that no
            process of the machine is stuck for ever whatever becomes of a test.
    """

    def __init__(self, give_up: Callable[[Request], None], limit: float) -> None:
        self.killable = True
        self._waiting: dict[int, tuple[Request, float]] = {}
        self._interrupted: set[int] = set()
        self._guard = threading.Lock()
        self._give_up = give_up
        self._limit = limit
        threading.Thread(target=self._watch, daemon=True).start()

    def __len__(self) -> int:
        return len(self._waiting)

    def pids(self) -> list[int]:
        with self._guard:
            return sorted({request.pid for request, _ in self._waiting.values()})

    def add(self, request: Request) -> bool:
        """Keep it; False if its asker has been interrupted already."""
        with self._guard:
            if self.killable and request.unique in self._interrupted:
                self._interrupted.discard(request.unique)
                return False
            self._waiting[request.unique] = (request, time.monotonic())
            return True

    def interrupt(self, unique: int) -> bool:
        """The asker got a signal; True if its request must be answered with EINTR."""
        with self._guard:
            if not self.killable:
                return False
            if unique in self._waiting:
                del self._waiting[unique]
                return True
            self._interrupted.add(unique)  # it may come after its interrupt
            return False

    def take(self) -> list[Request]:
        """All of them, to be carried out now."""
        with self._guard:
            found = [request for request, _ in self._waiting.values()]
            self._waiting.clear()
            return found

    def _watch(self) -> None:
        while True:
            time.sleep(1.0)
            old = time.monotonic() - self._limit
            with self._guard:
                late = [r for r, since in self._waiting.values() if since < old]
                for request in late:
                    del self._waiting[request.unique]
            for request in late:
                self._give_up(request)
