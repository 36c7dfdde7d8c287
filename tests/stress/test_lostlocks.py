"""Locks that are deleted under their holders, and locks that outlive them."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from shardcache.layout import Layout
from shardcache.locks.flock import Holder, KeyLock, lock_exclusive
from shardcache.store.digest import BLOCK
from tests.stress.nettools import DATA, URL, Read, partials, reader, using, wait_for_bytes
from tests.support.fakes import Fault, MemoryOrigin
from tests.support.storetools import Parent, crowd, forked, wait_until
from tests.support.tars import make_tar

ME = Holder.this_process(rank=None, job=None, now=1.0)
#: Does not take the interpreter's lock away: the child of a fork has one thread.
_LIBC = ctypes.PyDLL(None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# -- deleted -------------------------------------------------------------------------


@contextlib.contextmanager
def deleting(doomed: Callable[[], Iterable[Path]]) -> Iterator[None]:
    """Removes directories, as often as it can."""
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.001):
            for directory in doomed():
                shutil.rmtree(directory, ignore_errors=True)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def reads_all(parent: Parent, _number: int, root: Path, shards: dict[str, bytes]) -> None:
    origin = MemoryOrigin(objects=shards)
    with using(root, origin) as cache:
        parent.hear()
        for url, data in shards.items():
            with cache.open(url) as stream:
                assert stream.read() == data
        parent.say(sum(start == 0 for _, start, _ in origin.requests))
        parent.hear()


@pytest.mark.parametrize("what", ["files", "directory", "every directory"])
def test_locks_deleted_all_the_time_cost_duplicates_and_nothing_else(root: Path, what: str) -> None:
    layout = Layout.of_root(root)
    shards = {f"s3://lab/{n}.tar": make_tar(n, members=2, size=BLOCK // 4) for n in range(12)}
    with using(root, MemoryOrigin()):
        pass  # the root is made
    doomed: dict[str, Callable[[], Iterable[Path]]] = {
        "files": lambda: list(layout.locks.glob("*")),
        "directory": lambda: [layout.locks],
        "every directory": lambda: [layout.locks, layout.sessions, layout.quarantine],
    }
    with crowd(4, reads_all, root, shards) as children, deleting(doomed[what]):
        for child in children:
            child.tell()
        fetches = sum(child.hear() for child in children)
    assert len(shards) <= fetches <= 4 * len(shards)
    with using(root, MemoryOrigin()) as cache:
        assert len(list(cache.entries())) == len(shards)
        cache.clean(limits=False)
    assert partials(root) == []


def test_a_lock_deleted_once_while_it_is_held_costs_one_fetch_at_most(root: Path) -> None:
    gate = multiprocessing.Event()
    with forked(reader, 0, root, {}, gate) as holder, forked(reader, 1, root, {}) as other:
        for child in (holder, other):
            child.hear()
        holder.tell()
        wait_for_bytes(root, BLOCK)
        shutil.rmtree(Layout.of_root(root).locks)
        other.tell()
        second: Read = other.hear()
        gate.set()
        first: Read = holder.hear()
        assert first.right and second.right
        assert (first.fetches, second.fetches) == (1, 1)
    with using(root, MemoryOrigin()) as cache:
        assert len(list(cache.entries())) == 1
    assert partials(root) == []


def test_a_lock_that_is_unlinked_and_made_again_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    # Only `remove_free_locks` unlinks, under the lock; here somebody else does the same.
    path, inside = tmp_path / "key.lock", tmp_path / "inside"

    def work(parent: Parent, number: int) -> None:
        parent.hear()
        taken = 0
        while taken < 40:
            lock = KeyLock(path)
            if lock.try_acquire(ME):
                os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # fails if two are in
                os.unlink(inside)
                if number % 2:
                    path.unlink(missing_ok=True)
                lock.release()
                taken += 1
        parent.say(taken)

    with crowd(4, work) as children:
        for child in children:
            child.tell()
        assert [child.hear() for child in children] == [40] * 4


# -- kept by a child that nobody told of it --------------------------------------------


def forks_in_c(parent: Parent, root: Path, gate: Event) -> None:
    """Fetches, and forks meanwhile as a C library would: no hook of Python runs."""
    origin = MemoryOrigin(objects={URL: DATA})
    origin.faults.append(Fault(after=2 * BLOCK, wait=gate))  # type: ignore[arg-type]
    with using(root, origin) as cache:
        thread = threading.Thread(target=cache.fetch, args=(URL,), daemon=True)
        thread.start()
        parent.hear()
        pid = _LIBC.fork()
        if pid == 0:
            _LIBC.pause()
            _LIBC._exit(0)
        parent.say(pid)
        parent.hear()


@contextlib.contextmanager
def orphaned_lock(root: Path) -> Iterator[int]:
    """A fetch died half-way, and a child of its process keeps all its locks."""
    gate = multiprocessing.Event()
    with forked(forks_in_c, root, gate) as child:
        wait_for_bytes(root, BLOCK)
        grandchild = child.ask()
        try:
            child.kill()
            yield grandchild
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(grandchild, signal.SIGKILL)


def test_a_lock_kept_by_a_child_of_a_dead_process_is_passed_by(root: Path) -> None:
    origin = MemoryOrigin(objects={URL: DATA})
    with orphaned_lock(root) as pid, using(root, origin, stale_after=1) as cache:
        lock = KeyLock(Layout.of_root(root).key_lock(cache.parse(URL).key))
        assert not lock.try_acquire(ME)  # it is kept indeed
        with cache.open(URL) as stream:
            assert stream.read() == DATA
            assert stream.name != URL  # stored, too
        assert sum(start == 0 for _, start, _ in origin.requests) == 1
        cache.clean(limits=False)
        assert len(partials(root)) == 1  # nobody can tell that its writer is dead
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: lock.try_acquire(ME))
        lock.release()
        cache.clean(limits=False)
        assert partials(root) == []


def test_a_reader_that_may_not_wait_so_long_streams(root: Path) -> None:
    origin = MemoryOrigin(objects={URL: DATA})
    with orphaned_lock(root), using(root, origin, lock_timeout=1) as cache:
        with cache.open(URL) as stream:
            assert stream.read() == DATA
            assert stream.name == URL
        assert URL not in cache


def pins_and_forks_in_c(parent: Parent, root: Path) -> None:
    with using(root) as cache, cache.pinned(URL):
        pid = _LIBC.fork()
        if pid == 0:
            _LIBC.pause()
            _LIBC._exit(0)
        parent.say(pid)
        parent.hear()


def test_a_pin_kept_by_a_child_of_a_dead_process_delays_eviction_and_no_fetch(root: Path) -> None:
    other = "s3://lab/other.tar"
    data = make_tar(9, members=2, size=BLOCK)
    origin = MemoryOrigin(objects={URL: DATA, other: data})
    with forked(pins_and_forks_in_c, root) as child:
        pid = child.hear()
        child.kill()
    try:
        with using(root, origin, max_size=len(DATA) + 1) as cache:
            assert cache.remove(URL) == (0, 1)
            with cache.open(other) as stream:
                assert stream.read() == data
                assert stream.name == other  # no room: streamed
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: cache.remove(URL)[1] == 0)
            with cache.open(other) as stream:
                assert stream.read() == data
            assert other in cache
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def open_files(pid: int) -> list[str]:
    names = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it starts, and closes what it has read
            names.append(os.readlink(path))
    assert names
    return names


@pytest.mark.parametrize("how", ["posix_spawn", "subprocess"])
def test_a_program_that_is_started_keeps_no_lock(root: Path, how: str) -> None:
    command = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
    gate = multiprocessing.Event()
    origin = MemoryOrigin(objects={URL: DATA})
    origin.faults.append(Fault(after=2 * BLOCK, wait=gate))  # type: ignore[arg-type]
    ours, theirs = os.pipe()
    with using(root, origin) as cache:
        thread = threading.Thread(target=cache.fetch, args=(URL,))
        thread.start()
        wait_for_bytes(root, BLOCK)
        (partial,) = partials(root)
        if how == "posix_spawn":
            actions = [(os.POSIX_SPAWN_DUP2, ours, 0)]
            pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=actions)
        else:
            process = subprocess.Popen(command, stdin=ours, close_fds=False)
            pid = process.pid
        try:
            wait_until(lambda: b"stdin" in Path(f"/proc/{pid}/cmdline").read_bytes())
            assert not any(str(root) in name for name in open_files(pid))
            gate.set()
            thread.join()
            fd = os.open(cache.fetch(URL).data, os.O_RDONLY)
            try:
                assert lock_exclusive(fd)
            finally:
                os.close(fd)
            assert not partial.exists()
        finally:
            gate.set()
            os.close(ours)
            os.close(theirs)
            if how == "posix_spawn":
                os.waitpid(pid, 0)
            else:
                process.wait()
