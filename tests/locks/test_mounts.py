"""The filesystem of a path is found in the kernel's table of mounts, whatever the names."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from shardcache.locks.mounts import LOCAL_TYPES, Mount, mount_of, parse_mountinfo
from tests.support.storetools import needs_root

TABLE = """\
22 1 253:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,errors=remount-ro
30 22 0:25 / /dev/shm rw,nosuid,nodev - tmpfs tmpfs rw,size=1024k
41 22 0:40 / /data rw,relatime shared:9 master:2 - nfs4 nas:/export/data rw,vers=4.2,proto=tcp
42 41 0:41 / /data/local\\040disk rw - xfs /dev/nvme0n1 rw
43 22 0:42 / /juice rw - fuse.juicefs JuiceFS:vol rw,user_id=0
44 22 0:43 / /scratch rw - xfs /dev/nvme1n1 rw
45 22 0:44 / /scratch rw - lustre mgs@tcp:/fs rw,flock
nonsense
46 22 0:45 / /short rw - ext4
"""


@pytest.mark.parametrize(
    ("path", "kind", "local"),
    [
        ("/", "ext4", True),
        ("/home/me", "ext4", True),
        ("/dev/shm/x/y", "tmpfs", True),
        ("/data", "nfs4", False),
        ("/data/shards", "nfs4", False),
        ("/database", "ext4", True),  # a name that begins alike is another directory
        ("/data/local disk/cache", "xfs", True),
        ("/juice/cache", "fuse.juicefs", False),
        ("/scratch/me", "lustre", False),  # mounted over another
        ("/short/x", "ext4", True),
    ],
)
def test_the_innermost_latest_mount_counts(path: str, kind: str, local: bool) -> None:
    found = mount_of(path, TABLE)
    assert found is not None and (found.type, found.is_local) == (kind, local)


def test_a_line_is_read_whole() -> None:
    found = {mount.point: mount for mount in parse_mountinfo(TABLE)}
    assert set(found) == {"/", "/dev/shm", "/data", "/data/local disk", "/juice", "/scratch"}
    assert found["/data"] == Mount(
        "/data",
        "nfs4",
        "nas:/export/data",
        frozenset({"rw", "relatime", "vers=4.2", "proto=tcp"}),
    )


def test_a_symbolic_link_leads_to_the_mount_behind_it(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/juice/cache")
    found = mount_of(link, TABLE)
    assert found is not None and found.type == "fuse.juicefs"


def test_a_path_that_does_not_exist_has_a_mount(tmp_path: Path) -> None:
    assert mount_of(tmp_path / "a" / "b") == mount_of(tmp_path) is not None


def test_no_table_is_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shardcache.locks.mounts._MOUNTINFO", tmp_path / "absent")
    assert mount_of(tmp_path) is None
    assert mount_of(tmp_path, "") is None


def test_unknown_types_are_not_local() -> None:
    assert not LOCAL_TYPES & {"nfs", "nfs4", "lustre", "gpfs", "cifs", "9p", "ceph", "fuse"}


@needs_root
def test_a_real_mount_is_found(tmp_path: Path) -> None:
    place = tmp_path / "a place"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "mine", place], check=True)
    try:
        found = mount_of(place / "below")
        assert found is not None
        assert (found.point, found.type, found.source) == (os.fspath(place), "tmpfs", "mine")
    finally:
        subprocess.run(["umount", place], check=True)
    found = mount_of(place / "below")
    assert found is not None and found.source != "mine"
