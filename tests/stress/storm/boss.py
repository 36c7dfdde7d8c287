"""The boss: keeps the workers alive, and makes their lives hard.

One thread, one loop. What happens, and when, comes from one seeded generator, so the
same seed plans the same faults; which call they hit is the kernel's choice.
"""

from __future__ import annotations

import heapq
import json
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.stress.storm.arena import Arena
from tests.stress.storm.audit import Sampler, locked_inodes
from tests.stress.storm.crew import Crew
from tests.stress.storm.files import below, inside
from tests.stress.storm.nursery import Nursery
from tests.stress.storm.settings import MIB

__all__ = ["Boss"]

#: Mean seconds between two of each. 30 minutes of it are some 1,500 kills and stops.
KILL_EVERY = 2.0
STOP_EVERY = 2.2
TERMINATE_EVERY = 6.0
SABOTAGE_EVERY = 0.8
OVERWRITE_EVERY = 1.2
FILL_EVERY = 16.0
BROWNOUT_EVERY = 10.0
SAMPLE_EVERY = 0.7
#: Stopped at a time: with more, a storm is mostly waiting.
_STOPPED = 2
#: Bytes per second and connection while the origin is slow: fetches last long enough to
#: be hit by what happens meanwhile.
_SLOW = 1_500_000.0
_FAST = 12_000_000.0
#: So many times longer, at most, until there were enough calls.
_PROLONGED = 4
_TICK = 0.02
#: Looks for somebody who is fetching, before anyone will do.
_AMBUSH = 50
#: Seconds in turn with and without deleted locks.
_PEACE = 9.0


class Boss:
    """See the module.

    Args:
        arena: what there is.
        sabotage: whether lock files are deleted.
    """

    def __init__(self, arena: Arena, *, sabotage: bool) -> None:
        self.arena = arena
        self.settings = arena.settings
        self.log = arena.log
        self.rng = random.Random(f"{self.settings.seed}/boss")
        self.sampler = Sampler(arena)
        self._sabotage = sabotage
        self._stopped: dict[int, str] = {}  # pid -> who
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._overwritten = ""
        self.counts = dict.fromkeys(("kill", "stop", "put", "unlock"), 0)
        self._begun = time.monotonic()

    # -- the loop --------------------------------------------------------------

    def run(self, nursery: Nursery) -> None:
        """Let the storm blow, then wait until every worker has ended or is stuck."""
        self._begun = time.monotonic()
        self.arena.meter.throttle = _FAST
        self.crew = Crew(self.settings, self.log, nursery, self._at)
        self._plan()
        while not self._is_over():
            self._tick()
        self._calm()
        self.crew.wait_for_the_last()

    def _is_over(self) -> bool:
        passed, asked = time.monotonic() - self._begun, self.settings.seconds
        if passed < asked or passed >= asked * _PROLONGED:
            return passed >= asked
        return self._calls() >= self.settings.least_calls

    def _calls(self) -> int:
        data = self.settings.counters.read_bytes()
        return sum(int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 64))

    def _tick(self) -> None:
        self.crew.hear()
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()

    def _at(self, seconds: float, action: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._due, (time.monotonic() + seconds, self._serial, action))

    def _every(self, mean: float, action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self._at(self.rng.expovariate(1.0 / mean), again)

        self._at(self.rng.expovariate(1.0 / mean), again)

    def _plan(self) -> None:
        self._every(KILL_EVERY, self._strike(self._kill))
        self._every(STOP_EVERY, self._strike(self._stop))
        self._every(TERMINATE_EVERY, self._strike(self._terminate))
        self._every(OVERWRITE_EVERY, self._overwrite)
        self._every(BROWNOUT_EVERY, self._slow_down)
        self._every(SAMPLE_EVERY, self.sampler.sample)
        if self._sabotage:
            self._every(SABOTAGE_EVERY, self._unlock)
        if self.arena.disk.mounted:
            self._every(FILL_EVERY, self._fill)
        patience = 10.0 if sys.stderr.isatty() else 60.0

        def progress() -> None:
            self._progress()
            self._at(patience, progress)

        self._at(patience, progress)

    def _progress(self) -> None:
        calls = self._calls()
        done = ", ".join(f"{count} {what}s" for what, count in self.counts.items())
        sys.stderr.write(f"storm: {time.monotonic() - self._begun:.0f} s, {calls} calls, {done}\n")

    # -- faults ----------------------------------------------------------------

    def _strike(self, fault: Callable[[int], None]) -> Callable[[], None]:
        """Do something to a worker: to anyone, or, mostly, to the next one seen fetching."""

        def anyone() -> None:
            if running := sorted(self.crew.who):
                fault(self.rng.choice(running))

        def ambush(tries: int) -> None:
            fetching = [pid for pid, _ in self._fetching() if pid in self.crew.who]
            if fetching:
                fault(self.rng.choice(fetching))
            elif tries:
                self._at(_TICK / 2, lambda: ambush(tries - 1))
            else:
                anyone()

        return lambda: ambush(_AMBUSH) if self.rng.random() < 0.6 else anyone()

    def _fetching(self) -> list[tuple[int, str]]:
        """(pid, key) of those who say in a lock that they write a partial which is there."""
        found = []
        for path in below(self.settings.cache / "v1" / "locks", ".lock"):
            try:
                record = json.loads(path.read_bytes())
                partial = self.settings.cache / "v1" / "partial" / record["partial"]
                if partial.is_dir():
                    found.append((int(record["pid"]), path.stem))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # written or deleted this moment, or not fetching
        return sorted(found)

    def _signal(self, pid: int, number: signal.Signals) -> None:
        # Before it is sent: whatever the worker does of it comes later.
        self.log.write("kill", worker=self.crew.who[pid], signal=int(number))
        self.counts["kill"] += self.crew.send(pid, number)

    def _kill(self, pid: int) -> None:
        keys = [key for fetching, key in self._fetching() if fetching == pid]
        self._signal(pid, signal.SIGKILL)
        if keys and keys[0] in self.arena.keys and self.rng.random() < 0.5:
            # What it leaves is of a version that is no more: not to be resumed with the next.
            self._put(self.arena.keys[keys[0]])

    def _terminate(self, pid: int) -> None:
        self._signal(pid, self.rng.choice((signal.SIGTERM, signal.SIGINT)))

    def _stop(self, pid: int) -> None:
        """Stop a process: for a moment, or in the middle of a fetch and past ``stale_after``."""
        self._stopped = {p: who for p, who in self._stopped.items() if p in self.crew.who}
        if pid in self._stopped or len(self._stopped) >= _STOPPED:
            return
        who = self._stopped[pid] = self.crew.who[pid]
        self.log.write("stop", worker=who)
        self.crew.send(pid, signal.SIGSTOP)
        stale = self.settings.stale_after
        if self.rng.random() < 0.5:
            seconds = self.rng.uniform(0.05, stale)
        elif pid in [fetching for fetching, _ in self._fetching()]:
            seconds = stale + self.rng.uniform(0.5, 4.0)
        else:  # too late: it had finished
            self._continue(pid, who)
            self._at(_TICK, self._strike(self._stop))
            return
        self.counts["stop"] += 1
        self._at(seconds, lambda: self._continue(pid, who))

    def _continue(self, pid: int, who: str) -> None:
        if self._stopped.pop(pid, None) is None:
            return
        self.crew.send(pid, signal.SIGCONT)  # it may have been killed
        self.log.write("cont", worker=who)

    def _unlock(self) -> None:
        """Delete a lock file, a directory of them, or all: never mind who holds them.

        The budget's lock only in the second half: in the first the budget must hold.
        """
        if int((time.monotonic() - self._begun) / _PEACE) % 2 == 0:
            return  # a stopped holder must keep its lock long enough to be passed by
        locks = self.settings.cache / "v1" / "locks"
        late = time.monotonic() - self._begun > self.settings.seconds / 2
        chance = self.rng.random()
        victims = below(locks, ".lock")
        if chance > 0.1 or not late:
            chosen = self.rng.choice(victims) if victims else locks
            directory = chosen.parent
            victims = [chosen] if chance > 0.3 or directory == locks else inside(directory)
        spared = "" if late else "budget"
        gone, held = [], []
        for path in victims:
            inode = _unlink(path) if path.stem != spared else None
            if inode is not None:
                gone.append(path.name)
                held += [path.name] if inode in locked_inodes() else []
        for directory in {path.parent for path in victims} - {locks}:
            _rmdir(directory)
        if gone:
            self.log.write("unlock", files=gone, held=held)
            self.counts["unlock"] += 1

    def _overwrite(self, tries: int = 3 * _AMBUSH) -> None:
        """Store a new version: mostly of a shard that is being fetched, in several parts."""
        running = [key for pid, key in self._fetching() if pid not in self._stopped]
        names = {self.arena.keys.get(key, "") for key in running} - {self._overwritten}
        large = sorted(name for name in names if self.settings.sizes.get(name, 0) > MIB)
        if not large and tries:
            self._at(_TICK / 2, lambda: self._overwrite(tries - 1))
            return
        self._put(self.rng.choice(large or self.settings.names))

    def _put(self, name: str) -> None:
        self._overwritten = name  # once is enough: a fetch gives up when it changes four times
        self.arena.put(name)
        self.counts["put"] += 1

    def _slow_down(self) -> None:
        self.arena.meter.throttle = _SLOW
        self.log.write("slow")

        def recover() -> None:
            self.arena.meter.throttle = _FAST

        self._at(self.rng.uniform(1.0, 4.0), recover)

    def _fill(self) -> None:
        self.log.write("fill")
        self.arena.disk.fill(self.rng.randrange(1 << 19))

        def free() -> None:
            self.arena.disk.free()
            self.log.write("free")

        self._at(self.rng.uniform(0.5, 2.5), free)

    # -- the end ---------------------------------------------------------------

    def _calm(self) -> None:
        """No more faults; everybody may finish."""
        self._due.clear()
        for pid, who in list(self._stopped.items()):
            self._continue(pid, who)
        self.arena.meter.throttle = _FAST
        self.arena.disk.free()
        self.log.write("free")
        self.settings.stop_file.touch()
        self.log.write("finish")


def _unlink(path: Path) -> int | None:
    """Delete a lock file; its inode, or None if it is gone already."""
    try:
        inode = path.stat().st_ino
        path.unlink()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    return inode


def _rmdir(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        return  # a new lock file is there already
