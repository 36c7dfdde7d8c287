"""The workers as the boss sees them: born, signalled, died, born again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.stress.storm.history import Log
from tests.stress.storm.nursery import Nursery
from tests.stress.storm.settings import Settings

__all__ = ["Crew"]

_TICK = 0.02
_COUNT_SECONDS = 0.25
#: Seconds beyond ``lock_timeout`` for everybody to end once nothing goes wrong any more.
_FAREWELL = 30.0
#: Seconds for a stuck process to write where it is.
_DUMP_SECONDS = 1.0


class Crew:
    """Keeps every slot occupied.

    Signals go by pidfd: a number that was given to another process is never hit.

    Args:
        settings: the storm.
        log: the boss's history.
        nursery: where workers come from.
        later: calls a function after some seconds.

    Attributes:
        who: pid -> worker, of those who live as far as is known.
    """

    def __init__(
        self,
        settings: Settings,
        log: Log,
        nursery: Nursery,
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self.who: dict[int, str] = {}
        self._settings = settings
        self._log = log
        self._nursery = nursery
        self._later = later
        self._lives = [0] * settings.workers
        self._handles: dict[int, int] = {}
        self._children = [-1]
        for slot in range(settings.workers):
            self._spawn(slot)

    def _spawn(self, slot: int) -> None:
        if not self._settings.stop_file.exists():
            self._nursery.tell(spawn=slot, life=self._lives[slot])
            self._lives[slot] += 1

    def hear(self, rest: float = 0.0) -> None:
        """Take note of who was born and who died, for a moment or ``rest`` seconds."""
        end = time.monotonic() + max(rest, _TICK)
        while True:
            for said in self._nursery.hear(_TICK):
                self._note(said)
            if time.monotonic() >= end:
                return

    def _note(self, said: dict[str, Any]) -> None:
        if "born" in said:
            self._born(said["born"], f"{said['slot']}.{said['life']}")
        elif "died" in said:
            self._died(said["died"], said["status"])
        else:
            self._children = said["children"]

    def _born(self, pid: int, who: str) -> None:
        self._log.write("spawn", worker=who, pid=pid)
        self.who[pid] = who
        try:
            self._handles[pid] = os.pidfd_open(pid)
        except ProcessLookupError:
            return  # dead already; that will be told

    def _died(self, pid: int, status: int) -> None:
        worker = self.who.pop(pid, None)
        self._log.write("died", worker=worker, pid=pid, status=status)
        if worker is None:
            return  # a child that outlived its parent
        if pid in self._handles:
            os.close(self._handles.pop(pid))
        slot = int(worker.partition(".")[0])
        self._later(0.15, lambda: self._spawn(slot))

    def send(self, pid: int, number: signal.Signals) -> bool:
        """Send a signal; False if the worker is gone."""
        handle = self._handles.get(pid)
        if handle is None:
            return False
        try:
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
        return True

    def wait_for_the_last(self) -> None:
        """Nobody may be left after the bound of a call; who is, shows where it hangs."""
        end = time.monotonic() + self._settings.lock_timeout + _FAREWELL
        while self._children and time.monotonic() < end:
            self._nursery.tell(count=1)
            self.hear(_COUNT_SECONDS)
        for pid in self._children:
            who = self.who.get(pid, f"child {pid}")
            self._log.write("stuck", worker=who, pid=pid, wchan=_wchan(pid))
            self.send(pid, signal.SIGUSR1)  # faulthandler: its stack goes to the history
        if self._children:
            self.hear(_DUMP_SECONDS)
        self._log.write("drained")


def _wchan(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/wchan").read_text() or "running"
    except OSError:
        return "gone"
