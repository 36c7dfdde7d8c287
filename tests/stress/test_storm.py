"""Many processes, one cache, every fault at once: ``MINUTES=30 pytest tests/stress/test_storm.py``.

Workers open, hold, pin, link, evict, clean, remove and fork. The boss kills, terminates, stops and
continues them, deletes lock files, replaces objects, slows the origin down, and fills the disk.
All of them record violations of these promises:

* bytes: a completed read is one version of the shard, stored before the read ended;
* visibility: a published file never changes, and a pinned one stays;
* economy: the calls explain all downloads;
* bounded wait: every call ends within its bound;
* budget and crash: the limit holds, and a sweep removes everything of dead processes;
* errors: a caller gets no exception without a reason.

The seed decides the faults, and the kernel decides which calls they hit.
"""

import contextlib
import ctypes
import errno
import faulthandler
import os
import random
import sched
import shutil
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import pytest
import webdataset  # noqa: F401 - torch aborts a worker whose signal handler raises in its import

from shardcache import Cache, errors
from tests.stress.harness import MIB, MINUTES, Result, Shared, below, check, swept
from tests.support.disktools import disk

#: Processes that use the cache at any time.
_WORKERS = 8
STALE_AFTER, LOCK_TIMEOUT = 1.5, 20.0
#: Seconds that a call may take beyond `LOCK_TIMEOUT` on a busy machine.
_SLACK = 120.0
#: Seconds for which a worker holds a shard open, at most.
_HOLD = 0.8
#: Relative frequencies of calls.
_CALLS = {
    "read": 700, "hold": 45, "pinned": 20, "fetch": 30, "path": 50, "opener": 35, "forked": 10,
    "remove": 25, "clean": 54, "restart": 8,
}  # fmt: skip
#: Mean seconds between two faults of a kind.
_FAULTS = {
    "kill": 1.5, "stop": 2.2, "unlock": 0.8, "put": 1.2, "slow": 10.0, "fill": 16.0, "sample": 0.7,
}  # fmt: skip
_SLOW, _FAST = 1.5e6, 12e6
_TICK = 0.02
_SIGNALS, _TERMINATED = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT), 143
#: Samples above the budget in a row that count: an entry counts twice while it moves.
_IN_A_ROW = 3


class Storm(Shared):
    """The state that all processes of a storm share."""

    def __init__(self, directory: Path, seed: int, lying: bool) -> None:
        super().__init__(directory, 48, seed)
        self.lying, self.root = lying, directory / "disk" / "cache"
        self.stop_file = directory / "stop"
        #: Less than half of the data, so that workers evict.
        self.max_size = max(int(sum(self.sizes.values()) * 0.45), 12 * MIB)
        self.replaced = RawArray("d", len(self.names))  # times of the last replacements
        self.calls = RawArray("q", _WORKERS)

    def cache(self, **options: Any) -> Cache:
        options |= {"attempts": 6, "timeout": 5.0}
        return super().cache(lock_timeout=LOCK_TIMEOUT, stale_after=STALE_AFTER, **options)

    def url(self, name: str) -> str:
        return f"{self.address}/{name}"


class Worker:
    """A process that uses the cache."""

    def __init__(self, storm: Storm, slot: int, life: int) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: sys.exit(_TERMINATED))
        faulthandler.register(signal.SIGUSR1)
        self.storm, self.slot = storm, slot
        self.draw = random.Random(f"{storm.seed}/{slot}.{life}")
        os.environ["SHARDCACHE_RANK"] = str(slot)
        self.isolation = "rank" if slot == _WORKERS - 1 else "node"
        self._open_cache()

    def _open_cache(self) -> None:
        self.cache = self.storm.cache(isolation=self.isolation, prefetch=self.slot % 3)

    def live(self) -> None:
        """Make calls until the storm ends."""
        try:
            while not self.storm.stop_file.exists():
                (call,) = self.draw.choices(list(_CALLS), list(_CALLS.values()))
                name = self._choose()
                with self._call(call, name):
                    getattr(self, f"_{call}")(self.storm.url(name), name)
                time.sleep(self.draw.expovariate(250))
        finally:
            self.cache.close()

    def _choose(self) -> str:
        """Choose a shard, mostly one that is popular now."""
        window, at = int(time.monotonic() / 2) * 3, int(self.draw.paretovariate(0.8)) % 12
        return self.storm.names[(window + at) % len(self.storm.names)]

    @contextlib.contextmanager
    def _call(self, op: str, name: str) -> Iterator[None]:
        """Check that a call ends in time, and that its error has a reason."""
        began = time.monotonic()
        self.storm.calls[self.slot] += 1
        try:
            yield
        except Exception as exn:
            if not self._explained(exn, op in ("pinned", "fetch"), name, began):
                self.storm.wrong("errors", f"{op} of {name}: {traceback.format_exc()[-3000:]}")
        if (took := time.monotonic() - began) > LOCK_TIMEOUT + _SLACK:
            self.storm.wrong("bounded wait", f"{op} of {name} took {took:.0f} s")

    def _explained(self, exn: Exception, stores: bool, name: str, began: float) -> bool:
        """Return whether the shard or the disk explains an error."""
        if type(exn) in (errors.TransferError, errors.IntegrityError):
            return self.storm.replaced[self.storm.names.index(name)] >= began - LOCK_TIMEOUT
        if isinstance(exn, errors.LockTimeoutError):
            return stores and time.monotonic() - began >= LOCK_TIMEOUT
        number = getattr(exn, "errno", None)
        if isinstance(exn, FileNotFoundError) or number == errno.EBUSY:
            return stores and self.storm.lying  # without locks, shards in use are evicted
        full = number in (errno.ENOSPC, errno.EDQUOT) or isinstance(exn, errors.CacheFullError)
        return stores and full

    def _check(self, name: str, data: bytes) -> None:
        version, wrong = self.storm.examine(name, data)
        if wrong is None and version > self.storm.versions[self.storm.names.index(name)]:
            wrong = f"version {version} was not stored when it ended"
        if wrong is not None:
            self.storm.wrong("bytes", f"{name}: {wrong}")

    def _read(self, url: str, name: str) -> None:
        with self.cache.open(url) as stream:
            self._check(name, stream.read())

    def _hold(self, url: str, name: str) -> None:
        """Read a part, wait while others evict, and read the rest or close."""
        with self.cache.open(url) as stream:
            head = stream.read(self.draw.randrange(200_000))
            if self.draw.random() < 0.5:
                time.sleep(self.draw.random() * _HOLD)
                self._check(name, head + stream.read())

    def _pinned(self, url: str, name: str) -> None:
        with self.cache.pinned(url) as path:
            before = path.stat().st_ino
            time.sleep(self.draw.random() * _HOLD)
            gone = not path.exists() or path.stat().st_ino != before
            if gone and not self.storm.lying:
                self.storm.wrong("in use", f"{name} was evicted while it was pinned")
            self._check(name, path.read_bytes())

    def _fetch(self, url: str, name: str) -> None:
        self.cache.fetch(url)

    def _path(self, url: str, name: str) -> None:
        """Read by path without a pin, as other programs do: the file may vanish but not change."""
        with contextlib.suppress(FileNotFoundError):
            if path := self.cache.path(url):
                self._check(name, path.read_bytes())

    def _opener(self, url: str, name: str) -> None:
        """Read as WebDataset does, with prefetching."""
        names = [name, *(self._choose() for _ in range(self.draw.randint(1, 4)))]
        samples = self.cache.url_opener(iter([{"url": self.storm.url(name)} for name in names]))
        for each in names:
            done = False
            with self._call("opener", each), next(samples)["stream"] as stream:
                self._check(each, stream.read())
                done = True
            if not done:
                return  # the generator has ended

    def _forked(self, url: str, name: str) -> None:
        """Read in a forked child through the same cache."""

        def read() -> None:
            with self._call("read", name):
                self._read(url, name)
            self.cache.close()

        assert os.waitpid(self.storm.fork("a child", read), 0)[1] == 0

    def _remove(self, url: str, name: str) -> None:
        self.cache.remove(url)

    def _clean(self, url: str, name: str) -> None:
        """Clean to a limit, or remove leftovers, or, seldom, everything."""
        limit = {"max_size": int(self.storm.max_size * self.draw.uniform(0.5, 1))}
        ways = [limit, {"orphans": True}, {"everything": True}]
        self.cache.clean(**self.draw.choices(ways, (18, 35, 1))[0])

    def _restart(self, url: str, name: str) -> None:
        self.cache.close()
        self._open_cache()


def published(root: Path) -> dict[int, tuple[Path, int]]:
    """Return path and size of every published file, by inode, because links take no room."""
    found = {}
    for path in below(root / "v1", ".tar"):
        if path.parts[-5] == "objects":
            with contextlib.suppress(FileNotFoundError):
                found[path.stat().st_ino] = path, path.stat().st_size
    return found


class Boss:
    """Replaces workers that ended, and causes faults, in one thread."""

    def __init__(self, storm: Storm, own_disk: bool) -> None:
        self.storm, self.own_disk = storm, own_disk
        self.draw = random.Random(f"{storm.seed}/boss")
        self.slots: dict[int, int] = {}  # of live workers, by process
        self.stopped: set[int] = set()
        self.done: defaultdict[str, int] = defaultdict(int)
        self._sent: defaultdict[int, set[int]] = defaultdict(set)
        self._seen: dict[tuple[Path, int], int] = {}  # versions that were published
        self._over = 0
        self._budget_unlocked = storm.lying
        self._due = sched.scheduler()
        self._filler = storm.root.parent / "filler"

    def blow(self, seconds: float) -> None:
        """Cause faults until a violation or the end, then wait until every worker has ended."""
        storm = self.storm
        self._half = time.monotonic() + seconds / 2
        end = time.monotonic() + seconds
        storm.rate.value, storm.faults.value = _FAST, 60
        for slot in range(_WORKERS):
            self._spawn(slot)
        for name, mean in _FAULTS.items():
            if name != "fill" or self.own_disk:
                self._every(mean, name)
        while time.monotonic() < end and not storm.wrongs.stat().st_size:
            self._tick()
        self._due = sched.scheduler()
        for pid in sorted(self.stopped):
            self._continue(pid)
        storm.rate.value, storm.faults.value = _FAST, 0
        self._filler.unlink(missing_ok=True)
        storm.stop_file.touch()
        end = time.monotonic() + LOCK_TIMEOUT + _SLACK
        while self.slots and time.monotonic() < end:
            self._tick()
        for pid in self.slots:
            storm.end_stuck("bounded wait", pid)

    def _tick(self) -> None:
        time.sleep(_TICK)
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found[0], os.waitstatus_to_exitcode(found[1])
                self.stopped.discard(pid)
                if (slot := self.slots.pop(pid, None)) is None:
                    continue  # an orphaned child of a worker, or the origin
                if status not in {0} | self._sent.pop(pid, set()):
                    self.storm.wrong("errors", f"a worker ended with status {status}")
                self.done["lives"] += 1
                self._due.enter(0.15, 0, self._spawn, (slot,))
        self._due.run(blocking=False)

    def _every(self, mean: float, name: str) -> None:
        def act() -> None:
            getattr(self, f"_{name}")()
            self.done[name] += 1
            self._every(mean, name)

        self._due.enter(self.draw.expovariate(1 / mean), 0, act)

    def _spawn(self, slot: int) -> None:
        if not self.storm.stop_file.exists():
            life = self.done["lives"]
            what = f"worker {slot}.{life}"
            pid = self.storm.fork(what, lambda: Worker(self.storm, slot, life).live())
            self.slots[pid] = slot

    def _kill(self) -> None:
        """Kill or terminate a running worker."""
        if running := sorted(set(self.slots) - self.stopped):
            pid = self.draw.choice(running)
            (number,) = self.draw.choices(_SIGNALS, (6, 1, 1))
            self._sent[pid] |= {-number, _TERMINATED}
            os.kill(pid, number)

    def _stop(self) -> None:
        """Stop a worker for a moment, or for longer than ``stale_after``; at most two at a time."""
        running = sorted(set(self.slots) - self.stopped)
        if len(self.stopped) >= 2 or not running:
            return
        pid = self.draw.choice(running)
        self.stopped.add(pid)
        os.kill(pid, signal.SIGSTOP)
        seconds = self.draw.choice((self.draw.uniform(0.05, STALE_AFTER), STALE_AFTER + 2.0))
        self._due.enter(seconds, 0, self._continue, (pid,))

    def _continue(self, pid: int) -> None:
        if pid in self.stopped:  # still alive
            self.stopped.discard(pid)
            os.kill(pid, signal.SIGCONT)

    def _unlock(self) -> None:
        """Delete lock files, but that of the budget only in the second half."""
        now = time.monotonic()
        if int(now / 9) % 2 == 0:
            return  # let stopped holders keep their locks until others pass them by
        victims = below(self.storm.root / "v1" / "locks", ".lock")
        if now < self._half:
            victims = [path for path in victims if path.stem != "budget"]
        if victims:
            chosen = self.draw.choice(victims)
            self._budget_unlocked |= chosen.stem == "budget"
            if self.draw.random() < 0.3 and chosen.parent.name != "locks":
                shutil.rmtree(chosen.parent, ignore_errors=True)  # others may create new locks
            chosen.unlink(missing_ok=True)

    def _put(self) -> None:
        """Replace an object, mostly one that a worker is downloading."""
        fetched = [path.name for path in below(self.storm.root / "v1" / "partial", ".tar")]
        some = fetched if fetched and self.draw.random() < 0.7 else self.storm.names
        index = self.storm.names.index(self.draw.choice(some))
        self.storm.replaced[index] = time.monotonic()
        self.storm.versions[index] += 1

    def _slow(self) -> None:
        self.storm.rate.value = _SLOW
        self._due.enter(self.draw.uniform(1, 4), 0, setattr, (self.storm.rate, "value", _FAST))

    def _fill(self) -> None:
        size = shutil.disk_usage(self._filler.parent).free - self.draw.randrange(1 << 19)
        with open(self._filler, "wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(1, size))
        self._due.enter(self.draw.uniform(0.5, 2.5), 0, self._filler.unlink, (True,))

    def _sample(self) -> None:
        """Check the budget, and read some published files."""
        first, entries = published(self.storm.root), published(self.storm.root)
        # Files in two listings in a row existed at the same time.
        total = sum(size for inode, (_, size) in entries.items() if inode in first)
        excused = self.stopped or self._budget_unlocked
        self._over = self._over + 1 if total > self.storm.max_size and not excused else 0
        if self._over == _IN_A_ROW:
            self.storm.wrong("budget", f"{total} bytes in {_IN_A_ROW} samples in a row")
        paths = sorted(path for path, _ in entries.values())
        self.read_again(self.draw.sample(paths, min(3, len(paths))))

    def read_again(self, paths: list[Path]) -> None:
        """Check that published files are complete and unchanged."""
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                inode, data = path.stat().st_ino, path.read_bytes()
                version, wrong = self.storm.examine(path.name, data)
                if wrong or self._seen.setdefault((path, inode), version) != version:
                    self.storm.wrong("visibility", f"{path}: {wrong or 'it changed'}")


def audit(storm: Storm) -> None:
    """Check that later processes read everything, and that a sweep leaves nothing."""

    def sweep(limit: int, **options: Any) -> None:
        assert not swept(storm.root, storm.cache(), **options)
        assert sum(size for _, size in published(storm.root).values()) <= limit

    def read() -> None:
        with storm.cache() as cache:
            for name, version in zip(storm.names, storm.versions, strict=True):
                with cache.open(storm.url(name)) as stream:
                    found, wrong = storm.examine(name, stream.read())
                assert wrong is None, wrong
                assert found == version or cache.path(storm.url(name)) is not None

    alone(storm, lambda: sweep(storm.max_size, max_size=storm.max_size))
    alone(storm, read)
    alone(storm, lambda: sweep(0, everything=True))


def alone(storm: Storm, work: Callable[[], object]) -> None:
    """Run a function that must not fail in a child, without a time limit."""
    if status := os.waitpid(storm.fork("the end", work), 0)[1]:
        storm.wrong("the end", f"{work} ended with status {status}")


@pytest.mark.timeout(MINUTES * 60 + 1800)
@pytest.mark.parametrize("flock", ["working", "lying"])
def test_a_storm_breaks_no_promise(flock, tmp_path):
    def blow(directory: Path, seed: int, seconds: float) -> Result:
        if flock == "lying":
            os.environ["BROKEN_FLOCK"] = "lying"
            from tests.stress.brokensite import sitecustomize  # noqa: F401

        set_child_subreaper = 36
        ctypes.CDLL(None).prctl(set_child_subreaper, 1)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a worker has its own handler
        storm = Storm(directory, seed, flock == "lying")
        storm.root.parent.mkdir()
        with contextlib.ExitStack() as stack:
            stack.enter_context(storm.serving())
            if own_disk := os.geteuid() == 0:
                size = int(storm.max_size * 1.5) + 16 * MIB
                stack.enter_context(disk(storm.root.parent, f"size={size}"))
            alone(storm, lambda: storm.cache().fetch(storm.url(storm.names[0])))  # makes the root
            boss = Boss(storm, own_disk)
            boss.blow(seconds)
            fetches = sum(storm.fetches)
            boss.read_again([path for path, _ in published(storm.root).values()])
            audit(storm)
            calls = sum(storm.calls)
            if fetches > 1.5 * calls + len(storm.names):
                storm.wrong("economy", f"{fetches} fetches by {calls} calls")
            return {"calls": calls, **boss.done, "fetches": fetches}, storm.violations()

    check(blow, tmp_path)
