"""Locks: exclusive while held, free at death, never in the way."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from shardcache.files import dup_exclusive, open_exclusive
from shardcache.locks.flock import (
    Holder,
    KeyLock,
    lock_exclusive,
    lock_shared,
    pin,
    read_holder,
    seize,
)
from tests.support.storetools import Parent, crowd, forked, no_descriptor_left, refusing, wait_until

ME = Holder.this_process(rank=3, job="job", now=12.5)


def free(path: Path) -> bool:
    """Whether somebody else could take the lock now."""
    lock = KeyLock(path)
    found = lock.try_acquire(ME)
    lock.release()
    return found


def unheld(path: Path) -> bool:
    """As `free`, for a file that is locked as a whole; creates and leaves nothing."""
    fd = os.open(path, os.O_RDWR)
    try:
        return lock_exclusive(fd)
    finally:
        os.close(fd)


# -- flock ---------------------------------------------------------------------


@pytest.mark.locks_work("flock")
def test_a_shared_lock_admits_readers_and_no_evictor(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.touch()
    fds = [os.open(path, os.O_RDONLY) for _ in range(3)]
    try:
        assert lock_shared(fds[0]) and lock_shared(fds[1])
        assert not lock_exclusive(fds[2])
        os.close(fds.pop(0))
        assert not lock_exclusive(fds[1])
        os.close(fds.pop(0))
        assert lock_exclusive(fds[0])
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.locks_work("flock")
def test_who_meets_an_evictor_waits_for_a_moment_and_no_longer_than_there_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    path = tmp_path / "data"
    path.touch()
    with open(path, "rb") as evictor, open(path, "rb") as other:
        assert lock_exclusive(evictor.fileno())
        assert not pin(other.fileno(), str(path))
        assert 0 < sum(naps) < 0.1
        naps.clear()
        assert seize(other.fileno(), path) is False
        assert 0 < sum(naps) < 0.1
        naps.clear()
        path.unlink()
        assert not pin(other.fileno(), str(path))
        with pytest.raises(FileNotFoundError):
            seize(other.fileno(), path)
        assert naps == []


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_filesystem_without_flock_grants_every_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(number, real=fcntl.flock))
    path = tmp_path / "aa" / "key.lock"
    one, other = KeyLock(path), KeyLock(path)
    with no_descriptor_left():
        assert one.try_acquire(ME) and other.try_acquire(ME)
        one.update(ME)
        one.release()
        other.release()
    assert lock_shared(0) and lock_exclusive(0)


# -- the lock of a key ---------------------------------------------------------


@pytest.mark.locks_work("flock")
def test_one_holds_a_key_and_the_next_after_release(tmp_path: Path) -> None:
    path = tmp_path / "aa" / "key.lock"
    one, other = KeyLock(path), KeyLock(path)
    with no_descriptor_left():
        assert one.try_acquire(ME)
        assert not other.try_acquire(ME)
        one.release()
        one.release()
        assert other.try_acquire(ME)
        assert not free(path)
        other.release()
        assert free(path)
    assert path.exists()


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    path = tmp_path / "key.lock"
    inside, most, rounds = 0, 0, 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most, rounds
        for _ in range(50):
            lock = KeyLock(path)
            if not lock.try_acquire(ME):
                continue
            with guard:
                inside += 1
                most = max(most, inside)
                rounds += 1
            with guard:
                inside -= 1
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and rounds > 0


@pytest.mark.locks_work("flock")
def test_a_killed_holder_frees_its_key_at_once(tmp_path: Path) -> None:
    path = tmp_path / "key.lock"

    def hold(parent: Parent) -> None:
        lock = KeyLock(path)
        parent.say(lock.try_acquire(Holder.this_process(rank=None, job=None, now=1.0)))
        parent.hear()

    with forked(hold) as child:
        assert child.hear()
        assert not free(path)
        holder = read_holder(path)
        assert holder is not None and holder.pid == child.pid
        child.kill(signal.SIGSTOP)
        assert not free(path)
        child.kill()
        assert free(path)


@pytest.mark.locks_work("flock")
def test_a_childs_copy_does_not_keep_a_dead_holders_key(tmp_path: Path) -> None:
    path = tmp_path / "key.lock"

    def hold(parent: Parent) -> None:
        lock = KeyLock(path)
        assert lock.try_acquire(ME)
        pid = os.fork()
        if pid == 0:
            lock.update(ME)  # must not write into whatever has that number now
            lock.release()
            parent.say("runs")
            signal.alarm(120)
            signal.pause()
        parent.hear()
        parent.say(pid)
        parent.hear()

    with forked(hold) as child:
        assert child.hear() == "runs"
        grandchild = child.ask()
        try:
            assert not free(path)  # the child's release was not the parent's
            child.kill()
            assert free(path)
            os.kill(grandchild, 0)  # lives
        finally:
            os.kill(grandchild, signal.SIGKILL)


@pytest.mark.locks_work("flock")
def test_a_stale_handle_in_a_child_touches_no_other_file(tmp_path: Path) -> None:
    path, victim = tmp_path / "key.lock", tmp_path / "victim"
    victim.write_text("mine" * 100)
    lock = KeyLock(path)
    assert lock.try_acquire(ME)
    number = lock._fds[-1]

    def reuse(parent: Parent) -> None:
        fd = os.open(victim, os.O_RDWR)
        if fd != number:
            os.dup2(fd, number)
        lock.update(ME)
        lock.release()
        parent.say(os.fstat(number).st_ino == victim.stat().st_ino)

    with forked(reuse) as child:
        assert child.hear()
    assert victim.read_text() == "mine" * 100
    assert not free(path)
    lock.release()


@pytest.mark.locks_work("answers")
def test_a_lock_file_unlinked_between_open_and_flock_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key.lock"
    path.touch()
    real = fcntl.flock

    def slow(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and path.exists():
            path.unlink()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    lock = KeyLock(path)
    assert not lock.try_acquire(ME)  # busy: the caller looks again
    monkeypatch.setattr(fcntl, "flock", real)
    assert lock.try_acquire(ME)
    assert path.exists()
    lock.release()


@pytest.mark.locks_work("files")
def test_the_directory_may_be_removed_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "aa" / "key.lock"
    stop = threading.Event()

    def sabotage() -> None:
        while not stop.wait(0.0002):
            for directory in (path.parent, path.parent.parent):
                with contextlib.suppress(OSError):
                    directory.rmdir()

    thread = threading.Thread(target=sabotage)
    taken = 0
    thread.start()
    try:
        for _ in range(300):
            lock = KeyLock(path)
            if lock.try_acquire(ME):
                taken += 1
                lock.release()
                path.unlink()
    finally:
        stop.set()
        thread.join()
    assert taken == 300  # nobody else wants it


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG]
)
@pytest.mark.locks_work("flock")
def test_a_full_disk_takes_the_record_and_not_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "key.lock"
    lock = KeyLock(path)
    monkeypatch.setattr(os, "pwrite", refusing(number, real=os.pwrite))
    assert lock.try_acquire(ME)
    assert not free(path)
    assert read_holder(path) is None
    lock.release()


# -- who holds it --------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "good"),
    [
        *[({name: value}, True) for name in ("rank", "size") for value in (None, 0, 2**63 - 1)],
        *[({name: value}, False) for name in ("rank", "size") for value in (-1, 2**63, 1.0, True)],
        *[({"pid": value}, value in (0, 2**63 - 1)) for value in (0, 2**63 - 1, -1, 2**63, None)],
        *[({"partial": value}, value != 1) for value in (None, "name", 1)],
        *[({"job": value}, value != 1) for value in (None, "name", 1)],
        *[({"host": value}, value == "name") for value in ("name", None, 1)],
    ],
)
def test_a_record_has_counts_that_are_counts_and_names_that_are_names(
    tmp_path: Path, field: dict[str, object], good: bool
) -> None:
    record = {"pid": 1, "host": "h", "rank": 1, "job": "j", "started": 1.0, "partial": None}
    path = tmp_path / "key.lock"
    path.write_text(json.dumps({**record, "size": 3, **field}))
    holder = read_holder(path)
    assert (holder is not None) == good
    if holder is not None:
        [(name, value)] = field.items()
        assert getattr(holder, name) == value


# -- descriptors and forks -----------------------------------------------------


@pytest.mark.parametrize("unwinding", [True, False])
@pytest.mark.locks_work("flock")
def test_a_forked_child_does_not_keep_a_dead_writers_lock(tmp_path: Path, unwinding: bool) -> None:
    path = tmp_path / "data"

    def write(parent: Parent) -> None:
        file = open_exclusive(path, os.O_RDWR | os.O_CREAT)
        assert lock_exclusive(file.fileno())
        copy = dup_exclusive(file)
        pid = os.fork()
        if pid == 0:
            if unwinding:
                file.close()
                copy.close()
            parent.say("child")
            signal.alarm(120)
            signal.pause()
        parent.hear()
        parent.say(pid)
        parent.hear()

    with forked(write) as child:
        assert child.hear() == "child"
        assert not unheld(path)
        grandchild = child.ask()
        try:
            child.kill()
            assert unheld(path)
            os.kill(grandchild, 0)
        finally:
            os.kill(grandchild, signal.SIGKILL)


@pytest.mark.locks_work("flock")
def test_of_many_processes_one_holds_a_key_at_a_time(tmp_path: Path) -> None:
    path, inside = tmp_path / "key.lock", tmp_path / "inside"

    def work(parent: Parent, number: int) -> None:
        taken = 0
        parent.hear()
        while taken < 20:
            lock = KeyLock(path)
            if lock.try_acquire(ME):
                os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # fails if two are in
                os.unlink(inside)
                taken += 1
                lock.release()
        parent.say(taken)

    with crowd(4, work) as children:
        for child in children:
            child.tell()
        assert [child.hear() for child in children] == [20] * 4
    wait_until(lambda: free(path))
