"""The filesystem of these tests does what it is told to, and else what a plain directory does."""

from __future__ import annotations

import errno
import os

import pytest

from tests.stress.fuse.shim import Shim


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
