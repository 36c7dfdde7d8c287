"""Locks: exclusive while held, and free when the holder dies."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from shardcache.files import dup_exclusive, locked_if_free, open_exclusive, try_flock
from shardcache.locks.keys import Flock, Holder, remove_locks
from tests.support.storetools import Parent, forked, make_store, no_descriptor_left, refusing, tree

ME = Holder.this_process(rank=3, job="job")


def free(path: Path) -> bool:
    """Return whether another holder could take the lock now."""
    lock = Flock(path)
    found = lock.try_acquire(ME)
    lock.release()
    return found


def test_a_lock_file_unlinked_between_open_and_flock_is_not_taken(tmp_path, monkeypatch):
    path = tmp_path / "key.lock"
    path.touch()
    real = fcntl.flock

    def slow(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        path.unlink()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    lock = Flock(path)
    assert lock.try_acquire(ME)
    assert path.exists() and not free(path)
    lock.release()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSPC])
def test_without_flock_or_room_every_lock_is_granted(tmp_path, monkeypatch, number):
    path = tmp_path / "key.lock"
    module, name = (os, "open") if number == errno.ENOSPC else (fcntl, "flock")
    monkeypatch.setattr(module, name, refusing(number, real=getattr(module, name)))
    one, other = Flock(path), Flock(path)
    with no_descriptor_left():
        assert one.try_acquire(ME) and other.try_acquire(ME)
        one.release()
        other.release()


@pytest.mark.parametrize("unwinding", [True, False])
def test_a_forked_child_has_no_part_in_the_lock_of_a_writer(tmp_path, unwinding):
    (path := tmp_path / "data").touch()
    file = open_exclusive(path, os.O_RDWR)
    copy = dup_exclusive(file)
    assert try_flock(file.fileno())

    def live(parent: Parent) -> None:
        for each in (file, copy) if unwinding else ():
            each.close()
        parent.say()
        parent.hear()

    with forked(live) as child, path.open("rb") as other:
        child.hear()
        assert try_flock(other.fileno()) is False
        file.close()
        copy.close()
        assert try_flock(other.fileno())


def test_free_lock_files_and_their_directories_are_removed(tmp_path: Path) -> None:
    layout = make_store(tmp_path).layout
    (tmp_path / "victim").touch()
    layout.named_lock("budget").touch()
    for name in ("ab", "zz"):
        (layout.locks / name).mkdir()
        (layout.locks / name / "notes").touch()
    (layout.locks / "ab" / f"{'cd' * 16}.lock").touch()  # in the directory of another key
    (layout.locks / "ab" / f"{'ab' * 16}.lock").symlink_to(tmp_path / "victim")
    (layout.locks / "ef").symlink_to(layout.locks / "ab")
    before = tree(tmp_path)
    locks = [Flock(layout.key_lock(f"{n:02x}" * 16)) for n in range(5)]
    for lock in locks:
        assert lock.try_acquire(ME)
    for lock in locks[1:]:
        lock.release()
    with no_descriptor_left():
        remove_locks(layout)
    assert not free(locks[0].path)
    assert [lock for lock in locks if lock.path.exists()] == locks[:1]
    locks[0].release()
    remove_locks(layout)
    assert tree(tmp_path) == before


def test_a_handler_that_raises_at_the_end_of_a_lock_leaves_nothing_open(tmp_path, monkeypatch):
    def handler(fd):
        raise TimeoutError

    (path := tmp_path / "a").touch()
    monkeypatch.setattr("shardcache.files.unlock", handler)
    with no_descriptor_left(), pytest.raises(TimeoutError), locked_if_free(path):
        pass
