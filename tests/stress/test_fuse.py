"""The filesystem of these tests does what it is told to, and else what a plain directory does."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from tests.stress.fuse.shim import Shim
from tests.support.storetools import Parent, forked, wait_until


def takes(path: Path, operation: int = fcntl.LOCK_EX) -> str:
    """What an attempt to lock says."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
        return "granted"
    except OSError as exn:
        return errno.errorcode[exn.errno or 0]
    finally:
        os.close(fd)


def test_without_faults_it_is_a_directory(shim: Shim) -> None:
    (shim.root / "a" / "b").mkdir(parents=True)
    path = shim.root / "a" / "file"
    path.write_bytes(b"x" * 3_000_000)
    path.chmod(0o640)
    os.truncate(path, 2_000_000)
    os.utime(path, (1e9, 2e9))
    path.rename(shim.root / "a" / "b" / "file")
    (shim.root / "link").hardlink_to(shim.root / "a" / "b" / "file")
    for side in (shim.root, shim.backing):
        assert sorted(os.listdir(side)) == ["a", "link"]
        found = (side / "a" / "b" / "file").stat()
        assert (found.st_size, found.st_nlink, found.st_mtime) == (2_000_000, 2, 2e9)
    with open(shim.root / "link", "rb") as file:
        (shim.root / "link").unlink()
        assert len(file.read()) == 2_000_000  # as on any disk
    with pytest.raises(FileExistsError):
        (shim.root / "a").mkdir()
    with pytest.raises(OSError, match="not empty"):
        (shim.root / "a").rmdir()


def test_locks_work_lie_are_refused_and_hang(shim: Shim) -> None:
    path = shim.root / "lock"

    def hold(parent: Parent) -> None:
        fcntl.flock(os.open(path, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
        parent.say("held")
        parent.hear()

    with forked(hold) as child:
        child.hear()
        assert takes(path) == takes(path, fcntl.LOCK_SH) == "EAGAIN"
        shim.set(flock="lying")
        assert takes(path) == "granted"
        shim.set(flock="refused", flock_error=errno.ENOSYS)
        assert takes(path) == "ENOSYS"
        shim.heal()
    wait_until(lambda: takes(path) == "granted")


def test_what_hangs_ends_by_a_kill_or_when_it_is_let_go(shim: Shim) -> None:
    shim.set(flock="hanging")
    work = lambda parent: parent.say(takes(shim.root / "lock"))  # noqa: E731
    with forked(work) as killed, forked(work) as other:
        wait_until(lambda: shim.hanging() == 2)
        killed.kill()
        assert shim.hanging() == 1
        shim.heal()
        assert other.hear() == "granted" and shim.hanging() == 0


def test_faults_strike_what_they_name(shim: Shim) -> None:
    path = shim.root / "file"
    path.write_bytes(b"data")
    shim.fail("open", "fi*", error=errno.EIO, skip=1)
    assert path.read_bytes() == b"data"
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        path.read_bytes()
    assert path.read_bytes() == b"data"  # it strikes once
    rule = shim.fail("rename", error=errno.ENOENT, done=True)
    with pytest.raises(FileNotFoundError):
        path.rename(shim.root / "other")
    assert shim.struck(rule) == 1 and (shim.root / "other").read_bytes() == b"data"
    rule = shim.fail("mkdir", error=errno.EEXIST)
    with pytest.raises(FileExistsError):
        (shim.root / "directory").mkdir()
    assert not (shim.root / "directory").exists()


def test_two_mounts_are_two_nodes_that_see_each_other_late(nodes: tuple[Shim, Shim]) -> None:
    here, there = nodes
    there.set(negative=3600.0)
    assert not (there.root / "file").exists()
    (here.root / "file").write_bytes(b"data")
    assert not (there.root / "file").exists()  # its absence is remembered
    there.set(negative=0.0, delay=3600.0, stale=True)
    path = there.root / "other"
    (here.root / "other").write_bytes(b"data")
    assert not path.exists()
    there.set(delay=0.0)
    with open(path, "rb") as file:
        (here.root / "other").unlink()
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            file.read()
