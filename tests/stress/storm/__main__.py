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
import os
import random
import sched
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shardcache import Cache
from tests.stress.brokenflock import broken_environment
from tests.stress.storm.judge import Verdict, judge, read_all
from tests.stress.storm.origin import Origin
from tests.stress.storm.plan import MIB, Storm
from tests.stress.storm.worker import Log, run
from tests.support.disktools import disk
from tests.support.storetools import Child, Parent, crowd, forked

_PR_SET_CHILD_SUBREAPER = 36
#: Mean seconds between two of each.
_EVERY = {
    "kill": 2.0, "stop": 2.2, "terminate": 6.0, "unlock": 0.8, "put": 1.2, "slow": 10.0,
    "fill": 16.0, "sample": 0.7,
}  # fmt: skip
_SLOW, _FAST = 1.5e6, 12e6
_TICK = 0.02
#: Seconds beyond `lock_timeout` for everybody to end once nothing goes wrong any more.
_FAREWELL = 120.0


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
        self._due = sched.scheduler()
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
        self._due = sched.scheduler()
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
                self._due.enter(0.15, 0, self._spawn, (int(who.partition(".")[0]),))
        self._due.run(blocking=False)

    def _every(self, mean: float, action: Callable[[], None], *, begun: bool = False) -> None:
        if begun:
            action()
        again = lambda: self._every(mean, action, begun=True)  # noqa: E731
        self._due.enter(self.draw.expovariate(1 / mean), 0, again)

    def _spawn(self, slot: int) -> None:
        if self.storm.stop_file.exists():
            return
        life = self._lives[slot]
        self._lives[slot] += 1
        if (pid := os.fork()) == 0:
            run(self.storm, slot, life)
        self.who[pid] = f"{slot}.{life}"

    # -- faults --------------------------------------------------------------------

    def _victim(self) -> int | None:
        """Anyone who runs: at any moment most are in a long call, which fetches, waits or holds."""
        running = sorted(set(self.who) - self.stopped)
        return self.draw.choice(running) if running else None

    def _kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        if (pid := self._victim()) is not None:
            # Before it is sent: whatever the worker does of it comes later.
            self.log.write("kill", who=self.who[pid], signal=int(number))
            os.kill(pid, number)

    def _terminate(self) -> None:
        self._kill(self.draw.choice((signal.SIGTERM, signal.SIGINT)))

    def _stop(self) -> None:
        """Stop a process: for a moment, or past ``stale_after``; two at a time."""
        if len(self.stopped) >= 2 or (pid := self._victim()) is None:
            return
        self.stopped.add(pid)
        self.log.write("stop", who=self.who[pid])
        os.kill(pid, signal.SIGSTOP)
        stale = self.storm.stale_after
        seconds = self.draw.uniform(0.05, stale) if self.draw.random() < 0.5 else stale + 2.0
        self._due.enter(seconds, 0, self._continue, (pid,))

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
        """Replace an object: mostly one that is being fetched, where one is."""
        fetched = [path.name for path in below(self.storm.root / "v1" / "partial", ".tar")]
        some = fetched if fetched and self.draw.random() < 0.7 else self.storm.names
        name = self.draw.choice(some)
        self.versions[name] += 1
        self.log.write("put", name=name, version=self.versions[name])
        self.origin.ask("PUT", f"/{name}")

    def _slow(self) -> None:
        self.origin.ask("PUT", f"/?rate={_SLOW}")
        self._due.enter(self.draw.uniform(1, 4), 0, self.origin.ask, ("PUT", f"/?rate={_FAST}"))

    def _fill(self) -> None:
        self.log.write("fill")
        disk = self.storm.root.parent
        free = os.statvfs(disk)
        size = free.f_bavail * free.f_frsize - self.draw.randrange(1 << 19)
        with open(disk / "filler", "wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(1, size))
        self._due.enter(self.draw.uniform(0.5, 2.5), 0, self._free)

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


def cold_crowd(storm: Storm, origin: Origin, log: Log) -> None:
    """Everybody reads the same cold shards, in an order of their own: each is fetched once."""
    names = storm.names[: len(storm.names) // 4]
    calm = replace(storm, lock_timeout=600.0, stale_after=300.0)

    def read(parent: Parent, number: int) -> None:
        with Cache(**calm.options()) as cache:
            for name in random.Random(number).sample(names, len(names)):
                with cache.open(storm.url(name)) as stream:
                    assert storm.examine(name, stream.read()) == (0, None)

    with crowd(storm.workers, read) as children:
        for child in children:
            _ended(log, "the crowd", child)
    log.write("crowd", fetches=origin.fetches())


def audit(boss: Boss) -> None:
    """After the end: what is left, and whether everything can be read."""
    storm, log = boss.storm, boss.log
    log.write("served", fetches=boss.origin.fetches())
    boss.read_again([path for path, _ in published(storm.root).values()])
    for path in storm.root.rglob("partial/**/*"):  # what a dead process left may be kept a while
        os.utime(path, (1e9, 1e9), follow_symlinks=False)

    def read(parent: Parent) -> None:
        with Cache(**storm.options()) as cache:
            for name in storm.names:
                with cache.open(storm.url(name)) as stream:
                    right = storm.examine(name, stream.read()) == (boss.versions[name], None)
                assert right or cache.path(storm.url(name)) is not None

    _swept(storm, log, storm.max_size, "--max-size", str(storm.max_size))
    with forked(read) as child:
        _ended(log, "reading all", child)
    _swept(storm, log, 0, "--all", "-y")


def _ended(log: Log, what: str, child: Child) -> None:
    """Wait for a child, however long it takes, and write down what came of it."""
    said = ""
    if status := child.wait():
        with contextlib.suppress(EOFError):
            try:
                child.hear()
            except AssertionError as exn:
                said = str(exn)
    log.write("command", what=what, status=status, said=said)


def _swept(storm: Storm, log: Log, limit: int, *options: str) -> None:
    command = [sys.executable, "-m", "shardcache", "--dir", str(storm.root), "clean", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    log.write("command", what="clean", status=done.returncode, said=done.stdout + done.stderr)
    kinds = ("partial", "sessions")
    left = [path for kind in kinds for path in storm.root.glob(f"v1/**/{kind}/*")]
    left += [path for path in below(storm.root) if path.name.startswith(".")]
    total = sum(size for _, size in published(storm.root).values())
    log.write("swept", left=[str(path) for path in left], bytes=total, limit=limit)


def storm(seconds: float, seed: int, *, workers: int = 8, lying: bool = False) -> Verdict:
    """One storm, from beginning to end; in a process without threads."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="shardcache-storm-"))
        plan = Storm(Path(directory).resolve(), "", seconds, seed, workers, lying)
        origin = stack.enter_context(contextlib.closing(Origin(plan)))
        plan = replace(plan, endpoint=origin.url)
        plan.root.parent.mkdir()
        if own_disk := os.geteuid() == 0:
            size = int(plan.max_size * 1.5) + 16 * MIB
            stack.enter_context(disk(plan.root.parent, f"size={size}"))
        boss = Boss(plan, origin, own_disk)
        cold_crowd(plan, origin, boss.log)
        boss.blow()
        audit(boss)
        verdict = judge(plan, read_all(plan.directory))
        if verdict.violations and (keep := os.environ.get("STORM_KEEP")):
            shutil.copytree(plan.directory, keep, dirs_exist_ok=True)
        return verdict


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress.storm", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--flock", choices=["working", "lying"], default="working")
    given = parser.parse_args()
    lying = given.flock == "lying"
    if lying and "BROKEN_FLOCK" not in os.environ:
        os.execve(sys.executable, sys.orig_argv, broken_environment("lying"))
    verdict = storm(given.minutes * 60, given.seed, workers=given.workers, lying=lying)
    print(f"seed {given.seed}\n\n| | |\n|---|--:|")
    for name, figure in verdict.figures.items():
        print(f"| {name} | {round(figure, 1):,} |")
    print(*verdict.violations[:20], sep="\n\n")
    print(f"\n{len(verdict.violations)} violations" if verdict.violations else "\nAll held.")
    return 1 if verdict.violations else 0


if __name__ == "__main__":
    for variable in [v for v in os.environ if v.startswith(("SHARDCACHE_", "AWS_", "SLURM_"))]:
        del os.environ[variable]
    sys.exit(main())
