"""``python -m tests.stress.storm --minutes 30``: many processes, one cache, every fault at once.

Workers open, hold, pin, evict, clean, remove and fork. The boss kills, terminates, stops and
continues them, deletes lock files, replaces objects, slows the origin down, fills the disk. The
same seed plans the same faults; which call they hit is the kernel's choice. Exit 1 if the judge
found anything; see `judge` for what that may be.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import heapq
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shardcache import Cache
from tests.stress import machine
from tests.stress.brokenflock import broken_environment
from tests.stress.storm.judge import Verdict, judge, read_all
from tests.stress.storm.origin import Origin
from tests.stress.storm.plan import MIB, Storm
from tests.stress.storm.worker import Log, die_with_parent, run

_PR_SET_CHILD_SUBREAPER = 36
#: Mean seconds between two of each.
_EVERY = {
    "kill": 2.0, "stop": 2.2, "terminate": 6.0, "unlock": 0.8, "put": 1.2, "slow": 10.0,
    "fill": 16.0, "sample": 0.7,
}  # fmt: skip
_SLOW, _FAST = 1.5e6, 12e6
_TICK = 0.02
#: Seconds beyond `lock_timeout` for everybody to end once nothing goes wrong any more.
_FAREWELL = 30.0


def below(directory: Path, suffix: str = "") -> list[Path]:
    """Files anywhere below a directory; what goes away meanwhile is passed over."""
    return sorted(
        Path(where, name)
        for where, _, names in os.walk(directory)
        for name in names
        if name.endswith(suffix)
    )


def published(root: Path) -> dict[int, tuple[Path, int]]:
    """Inode -> (path, bytes) of every entry's data: a link takes no room."""
    found = {}
    for base in (root / "v1", *(root / "v1" / "ranks").glob("*")):
        for path in below(base / "objects", ".tar"):
            with contextlib.suppress(FileNotFoundError):
                found[path.stat().st_ino] = path, path.stat().st_size
    return found


class Boss:
    """One thread, one loop: keeps every slot occupied, and makes the workers' lives hard."""

    def __init__(self, storm: Storm, origin: Origin, own_disk: bool) -> None:
        self.storm, self.origin, self.own_disk = storm, origin, own_disk
        self.log = Log(storm.directory / "boss.jsonl")
        self.draw = random.Random(f"{storm.seed}/boss")
        self.versions = dict.fromkeys(storm.names, 0)
        self.who: dict[int, str] = {}
        self.stopped: set[int] = set()
        self._busy = mmap.mmap(-1, 8 * storm.workers)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._lives = [0] * storm.workers

    # -- the loop ------------------------------------------------------------------

    def blow(self) -> None:
        """Let it blow, then wait until every worker has ended or is stuck."""
        self.begun = time.monotonic()
        self.origin.ask("PUT", f"/?rate={_FAST}&faults=1")
        for slot in range(self.storm.workers):
            self._spawn(slot)
        for name, mean in _EVERY.items():
            if name != "fill" or self.own_disk:
                self._every(mean, getattr(self, f"_{name}"))
        while time.monotonic() - self.begun < self.storm.seconds:
            self._tick()
        self._due.clear()
        for pid in sorted(self.stopped):
            self._continue(pid)
        self.origin.ask("PUT", f"/?rate={_FAST}&faults=0")
        self._free()
        self.storm.stop_file.touch()
        end = time.monotonic() + self.storm.lock_timeout + _FAREWELL
        while self.who and time.monotonic() < end:
            self._tick()
        for pid, who in self.who.items():
            os.kill(pid, signal.SIGUSR1)  # faulthandler writes where it is
            time.sleep(1.0)
            stack = (self.storm.directory / f"stuck-{who}.txt").read_text()
            self.log.write("stuck", who=who, stack=stack)
            os.kill(pid, signal.SIGKILL)

    def _tick(self) -> None:
        time.sleep(_TICK)
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found[0], os.waitstatus_to_exitcode(found[1])
                self.stopped.discard(pid)
                if (who := self.who.pop(pid, None)) is None:
                    continue  # a child that outlived its parent, or the origin
                self.log.write("died", who=who, status=status)
                self._at(0.15, partial(self._spawn, int(who.partition(".")[0])))
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()

    def _at(self, seconds: float, action: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._due, (time.monotonic() + seconds, self._serial, action))

    def _every(self, mean: float, action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self._at(self.draw.expovariate(1 / mean), again)

        self._at(self.draw.expovariate(1 / mean), again)

    def _spawn(self, slot: int) -> None:
        if self.storm.stop_file.exists():
            return
        life = self._lives[slot]
        self._lives[slot] += 1
        self._busy[slot * 8 : slot * 8 + 8] = bytes(8)
        if (pid := os.fork()) == 0:
            run(self.storm, slot, life, self._busy)
        self.who[pid] = f"{slot}.{life}"

    # -- faults --------------------------------------------------------------------

    def _victim(self) -> int | None:
        """Anyone, or, mostly, who is longest in its call: it fetches, waits or holds."""
        running = sorted(set(self.who) - self.stopped)
        if not running:
            return None
        if self.draw.random() < 0.4:
            return self.draw.choice(running)

        def since(pid: int) -> int:
            at = 8 * int(self.who[pid].partition(".")[0])
            return int.from_bytes(self._busy[at : at + 8], "little") or 1 << 63

        return min(running, key=since)

    def _signal(self, number: signal.Signals) -> None:
        if (pid := self._victim()) is not None:
            # Before it is sent: whatever the worker does of it comes later.
            self.log.write("kill", who=self.who[pid], signal=int(number))
            os.kill(pid, number)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _terminate(self) -> None:
        self._signal(self.draw.choice((signal.SIGTERM, signal.SIGINT)))

    def _stop(self) -> None:
        """Stop a process: for a moment, or past ``stale_after``; two at a time."""
        if len(self.stopped) >= 2 or (pid := self._victim()) is None:
            return
        self.stopped.add(pid)
        self.log.write("stop", who=self.who[pid])
        os.kill(pid, signal.SIGSTOP)
        stale = self.storm.stale_after
        seconds = self.draw.uniform(0.05, stale) if self.draw.random() < 0.5 else stale + 2.0
        self._at(seconds, lambda: self._continue(pid))

    def _continue(self, pid: int) -> None:
        if pid in self.stopped:  # else it was killed
            self.stopped.discard(pid)
            os.kill(pid, signal.SIGCONT)
            self.log.write("cont", who=self.who[pid])

    def _unlock(self) -> None:
        """Delete a lock file or a directory of them; the budget's only in the second half."""
        passed = time.monotonic() - self.begun
        if int(passed / 9) % 2 == 0:
            return  # a stopped holder must keep its lock long enough to be passed by
        victims = below(self.storm.root / "v1" / "locks", ".lock")
        if passed < self.storm.seconds / 2:
            victims = [path for path in victims if path.stem != "budget"]
        if not victims:
            return
        chosen = self.draw.choice(victims)
        whole = self.draw.random() < 0.3 and chosen.parent.name != "locks"
        gone = [path for path in victims if path.parent == chosen.parent] if whole else [chosen]
        self.log.write("unlock", files=[path.name for path in gone])
        for path in gone:
            path.unlink(missing_ok=True)
        if whole:
            with contextlib.suppress(OSError):  # a new lock file is there already
                chosen.parent.rmdir()

    def _put(self) -> None:
        """Replace an object: mostly a large one, of several blocks."""
        large = [name for name, size in self.storm.sizes.items() if size > MIB]
        name = self.draw.choice(large if self.draw.random() < 0.7 else self.storm.names)
        self.versions[name] += 1
        self.log.write("put", name=name, version=self.versions[name])
        self.origin.ask("PUT", f"/{name}")

    def _slow(self) -> None:
        self.origin.ask("PUT", f"/?rate={_SLOW}")
        self._at(self.draw.uniform(1, 4), lambda: self.origin.ask("PUT", f"/?rate={_FAST}"))

    def _fill(self) -> None:
        self.log.write("fill")
        disk = self.storm.root.parent
        free = os.statvfs(disk)
        size = free.f_bavail * free.f_frsize - self.draw.randrange(1 << 19)
        with open(disk / "filler", "wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(1, size))
        self._at(self.draw.uniform(0.5, 2.5), self._free)

    def _free(self) -> None:
        (self.storm.root.parent / "filler").unlink(missing_ok=True)

    def _sample(self) -> None:
        """Add up the budget, and read some of what is published."""
        first, entries = published(self.storm.root), published(self.storm.root)
        # What was there in two looks in a row was there at one moment.
        self.log.write("budget", bytes=sum(size for n, (_, size) in entries.items() if n in first))
        paths = sorted(path for path, _ in entries.values())
        self.read_again(self.draw.sample(paths, min(3, len(paths))))

    def read_again(self, paths: list[Path]) -> None:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                inode, data = path.stat().st_ino, path.read_bytes()
                _, wrong = self.storm.examine(path.name, data)
                digest = hashlib.sha256(data).hexdigest()
                self.log.write("sample", path=f"{path}#{inode}", digest=digest, wrong=wrong)


# -- before and after ------------------------------------------------------------------


def crowd(storm: Storm, origin: Origin, log: Log) -> None:
    """Everybody reads the same cold shards, in an order of their own: each is fetched once."""
    names = storm.names[: len(storm.names) // 4]
    calm = replace(storm, lock_timeout=600.0, stale_after=300.0)
    pids = []
    for number in range(storm.workers):
        if (pid := os.fork()) == 0:
            die_with_parent()
            status = 1
            with contextlib.suppress(Exception), Cache(**calm.options()) as cache:
                for name in random.Random(number).sample(names, len(names)):
                    with cache.open(storm.url(name)) as stream:
                        assert storm.examine(name, stream.read()) == (0, None)
                status = 0
            os._exit(status)
        pids.append(pid)
    failed = [pid for pid in pids if os.waitpid(pid, 0)[1]]
    log.write("command", what="the crowd", status=len(failed), said="")
    log.write("crowd", fetches=origin.fetches())


def audit(boss: Boss) -> None:
    """After the end: what is left, and whether everything can be read."""
    storm, log = boss.storm, boss.log
    log.write("served", fetches=boss.origin.fetches())
    boss.read_again([path for path, _ in published(storm.root).values()])
    for path in storm.root.rglob("partial/**/*"):  # what a dead process left may be kept a while
        os.utime(path, (1e9, 1e9), follow_symlinks=False)

    def swept(limit: int, *options: str) -> None:
        command = ["--dir", str(storm.root), "clean", *options]
        _command(log, "clean", ["-m", "shardcache", *command])
        kinds = ("partial", "quarantine", "sessions")
        left = [p for kind in kinds for p in storm.root.glob(f"v1/**/{kind}/*")]
        left += [path for path in below(storm.root) if path.name.startswith(".")]
        total = sum(size for _, size in published(storm.root).values())
        log.write("swept", left=[str(path) for path in left], bytes=total, limit=limit)

    swept(storm.max_size, "--max-size", str(storm.max_size))
    if (pid := os.fork()) == 0:
        status = 1
        with contextlib.suppress(Exception), Cache(**storm.options()) as cache:
            for name in storm.names:
                with cache.open(storm.url(name)) as stream:
                    assert storm.examine(name, stream.read()) == (boss.versions[name], None) or (
                        cache.path(storm.url(name)) is not None
                    )
            status = 0
        os._exit(status)
    log.write("command", what="reading all", status=os.waitpid(pid, 0)[1], said="")
    swept(0, "--all", "-y")


def _command(log: Log, what: str, arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)
    log.write("command", what=what, status=done.returncode, said=done.stdout + done.stderr)


@contextlib.contextmanager
def disk(path: Path, size: int) -> Iterator[bool]:
    """A small filesystem where we may mount one; whether we may."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "storm", str(path)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(path)], check=False)


def storm(seconds: float, seed: int, *, workers: int = 8, lying: bool = False) -> Verdict:
    """One storm, from beginning to end; in a process without threads."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory(prefix="shardcache-storm-") as name:
        plan = Storm(Path(name).resolve(), "", seconds, seed, workers, lying)
        origin = Origin(plan)
        try:
            plan = replace(plan, endpoint=origin.url)
            with disk(plan.root.parent, int(plan.max_size * 1.5) + 16 * MIB) as own_disk:
                boss = Boss(plan, origin, own_disk)
                crowd(plan, origin, boss.log)
                boss.blow()
                audit(boss)
        finally:
            origin.close()
        verdict = judge(plan, read_all(plan.directory))
        if verdict.violations and (keep := os.environ.get("STORM_KEEP")):
            shutil.copytree(plan.directory, keep, dirs_exist_ok=True)
        return verdict


def show(verdict: Mapping[str, Any]) -> None:
    print(f"{machine()}\n\n| | |\n|---|--:|")
    for name, figure in verdict["figures"].items():
        print(f"| {name} | {round(figure, 1):,} |")
    for text in verdict["violations"][:20]:
        print(f"\n{text}")
    print(f"\n{len(verdict['violations'])} violations" if verdict["violations"] else "\nAll held.")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress.storm", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--flock", choices=["working", "lying"], default="working")
    given = parser.parse_args()
    if given.flock == "lying" and "BROKEN_FLOCK" not in os.environ:
        os.execve(sys.executable, sys.orig_argv, broken_environment("lying"))
    lying = given.flock == "lying"
    verdict = vars(storm(given.minutes * 60, given.seed, workers=given.workers, lying=lying))
    print(f"seed {given.seed}")
    show(verdict)
    return 1 if verdict["violations"] else 0


if __name__ == "__main__":
    for variable in [v for v in os.environ if v.startswith(("SHARDCACHE_", "AWS_", "SLURM_"))]:
        del os.environ[variable]
    sys.exit(main())
