"""The filesystem of a path, as the kernel states it, decides which kind of lock is used there."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

import pytest

from shardcache.layout import IDLE_GRACE, Layout
from shardcache.locks import mounts
from shardcache.locks.mounts import Mount, mount_of, node_namespace
from shardcache.store.root import make_root
from tests.support.storetools import age
from tests.support.tars import make_tar

URL = "s3://lab/a.tar"

TABLE = """\
22 1 253:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,errors=remount-ro
30 22 0:25 / /dev/shm rw,nosuid,nodev - tmpfs tmpfs rw,size=1024k
41 22 0:40 / /data rw,relatime shared:9 master:2 - nfs4 nas:/export/data rw,vers=4.2,proto=tcp
42 41 0:41 / /data/local\\040disk rw - xfs /dev/nvme0n1 rw
43 22 0:42 / /juice rw - fuse.juicefs JuiceFS:vol rw,user_id=0
44 22 0:43 / /scratch rw - xfs /dev/nvme1n1 rw
45 22 0:44 / /scratch rw - lustre mgs@tcp:/fs rw,flock
"""


def test_the_innermost_latest_mount_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mountinfo").write_text(TABLE)
    (tmp_path / "link").symlink_to("/juice/cache")
    monkeypatch.setattr(mounts, "_MOUNTINFO", tmp_path / "mountinfo")
    for path, kind, local in (
        ("/", "ext4", True),
        ("/dev/shm/x/y", "tmpfs", True),
        ("/data/shards", "nfs4", False),
        ("/database", "ext4", True),  # a name that begins alike is another directory
        ("/data/local disk/cache", "xfs", True),
        (tmp_path / "link", "fuse.juicefs", False),
        ("/scratch/me", "lustre", False),  # mounted over another
    ):
        found = mount_of(path)
        assert found is not None and (found.type, found.is_local) == (kind, local)
    monkeypatch.setattr(mounts, "_MOUNTINFO", tmp_path / "absent")
    assert mount_of(tmp_path) is None


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of this node, for this test alone."""
    place = tmp_path / "node"
    place.mkdir()
    monkeypatch.setattr(mounts, "_NODE_DIRECTORIES", (str(place),))
    return place


@pytest.fixture
def root(tmp_path: Path, node: Path) -> Path:
    root = tmp_path / "cache"
    make_root(root, "1")
    return root


def on(kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is on such a filesystem; None is one that the kernel does not name."""
    real = mount_of

    def found(path: Path | str) -> Mount | None:
        if "cache" not in Path(path).name:
            return real(path)
        return kind and Mount("/", kind)  # type: ignore[return-value]

    monkeypatch.setattr(mounts, "mount_of", found)


@pytest.mark.parametrize("kind", ["ext4", "tmpfs", "nfs4", "lustre", "fuse.juicefs", "9p", None])
def test_local_filesystems_are_locked_by_flock_and_all_others_by_leases(
    root, node, monkeypatch, kind
):
    on(kind, monkeypatch)
    found = node_namespace(root, "auto", 600.0)
    if kind in ("ext4", "tmpfs"):
        assert found == Layout.of_root(root)
    else:
        assert found.grace == IDLE_GRACE
        assert found.local is not None and found.local.parent == node
        assert found.local.stat().st_mode & 0o777 == 0o700
    assert node_namespace(root, "lease", IDLE_GRACE).grace == 2 * IDLE_GRACE
    assert node_namespace(root, "flock", 600.0) == Layout.of_root(root)


def test_all_who_share_a_root_share_a_directory_of_the_node_that_nobody_planted(
    root, node, monkeypatch, tmp_path
):
    def place(name: str = "cache") -> Path | None:
        return node_namespace(tmp_path / name, "lease", 600.0).local

    (tmp_path / "link").symlink_to(root)
    make_root(tmp_path / "cache2", "1")
    first, other = place(), tmp_path / "other-node"
    assert first is not None and first.parent == node
    assert place("link") == first != place("cache2")
    assert place("cache3") is None  # not made yet
    other.mkdir()
    monkeypatch.setattr(mounts, "_NODE_DIRECTORIES", (str(node), str(other)))
    first.chmod(0o777)
    assert place() == other / first.name
    first.rmdir()
    first.symlink_to(tmp_path)
    assert place() == other / first.name


@pytest.mark.locks_work("flock")
def test_with_leases_nothing_in_the_cache_is_locked(
    make_cache, origin, root, node, monkeypatch, caplog
):
    locked, real = [], fcntl.flock

    def watched(fd: int, operation: int) -> None:
        locked.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", watched)
    on("nfs4", monkeypatch)
    origin.objects[URL] = origin.objects["s3://lab/b.tar"] = make_tar(1)
    with caplog.at_level(logging.WARNING, "shardcache"):
        cache = make_cache(dir=root, max_size="1MB")
        for url in (URL, "s3://lab/b.tar"):
            with cache.open(url) as stream:
                assert stream.read() == make_tar(1)
    [record] = caplog.records  # said once
    assert "leases" in record.getMessage() and "1h" in record.getMessage()
    assert cache.clean(everything=True).removed == ()  # used a moment ago
    assert list(node.glob("*/sessions/*.session"))
    assert not list((root / "v1" / "sessions").iterdir())
    age(root)
    assert len(cache.clean(everything=True).removed) == 2
    assert locked and not any(name.startswith(str(root)) for name in locked)
