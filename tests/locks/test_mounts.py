"""The kind of lock depends on the filesystem of the cache."""

import fcntl
import logging
import os
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.config import Config
from shardcache.errors import ConfigError
from shardcache.files import IDLE_GRACE
from shardcache.layout import META, read_manifest
from shardcache.locks import mounts
from shardcache.locks.mounts import LOCAL_TYPES, Mount, mount_of, node_namespace
from tests.support.caches import read
from tests.support.storetools import age, layout_of
from tests.support.tars import make_tar

URL, OTHER = "s3://lab/a.tar", "s3://lab/b.tar"
OBJECTS = dict.fromkeys((URL, OTHER), make_tar(1))

TABLE = """\
22 1 253:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,errors=remount-ro
30 22 0:25 / /dev/shm rw,nosuid,nodev - tmpfs tmpfs rw,size=1024k
41 22 0:40 / /data rw,relatime shared:9 master:2 - nfs4 nas:/export/data rw,vers=4.2,proto=tcp
42 41 0:41 / /data/local\\040disk rw - xfs /dev/nvme0n1 rw
43 22 0:42 / /juice rw - fuse.juicefs JuiceFS:vol rw,user_id=0
44 22 0:43 / /scratch rw - xfs /dev/nvme1n1 rw
45 22 0:44 / /scratch rw - lustre mgs@tcp:/fs rw,flock
46 22 0:45 / /odd\r\x1c\x85name rw - fuse.sshfs host: rw
"""


def test_the_mount_of_a_path_is_the_innermost_and_latest(tmp_path, monkeypatch):
    (tmp_path / "mountinfo").write_text(TABLE)
    (tmp_path / "link").symlink_to("/juice/cache")
    monkeypatch.setattr(mounts, "_MOUNTINFO", tmp_path / "mountinfo")
    for path, kind, local in (
        ("/", "ext4", True),
        ("/dev/shm/x/y", "tmpfs", True),
        ("/data/shards", "nfs4", False),
        ("/database", "ext4", True),  # not below /data
        ("/data/local disk/cache", "xfs", True),
        (tmp_path / "link", "fuse.juicefs", False),
        ("/scratch/me", "lustre", False),  # mounted over another
    ):
        found = mount_of(path)
        assert found is not None and (found.type, found.type in LOCAL_TYPES) == (kind, local)
    monkeypatch.setattr(mounts, "_MOUNTINFO", tmp_path / "absent")
    assert mount_of(tmp_path) is None


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for the local files of this node."""
    directory = tmp_path / "node"
    directory.mkdir()
    monkeypatch.setattr(mounts, "_NODE_DIRECTORIES", (str(directory),))
    return directory


@pytest.fixture
def root(tmp_path: Path, node: Path) -> Path:
    return tmp_path / "cache"


def on(kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the cache is on such a filesystem; None is an unknown one."""
    real = mount_of

    def found(path: Path | str) -> Mount | None:
        if "cache" not in Path(path).name:
            return real(path)
        return kind and Mount("/", kind)  # type: ignore[return-value]

    monkeypatch.setattr(mounts, "mount_of", found)


@pytest.mark.parametrize("kind", ["ext4", "tmpfs", "nfs4", "lustre", "fuse.juicefs", "9p", None])
def test_only_local_filesystems_are_locked_by_flock(root, node, monkeypatch, kind):
    on(kind, monkeypatch)
    Cache(root).pin(URL)
    found = node_namespace(Config(root), read_manifest(root))
    if kind in ("ext4", "tmpfs"):
        assert found == layout_of(root)
    else:
        assert found.grace == IDLE_GRACE
        assert found.local is not None and found.local.parent == node
        assert found.local.stat().st_mode & 0o777 == 0o700
    assert node_namespace(Config(root, locks="lease"), read_manifest(root)).grace == IDLE_GRACE
    assert node_namespace(Config(root, locks="flock"), read_manifest(root)) == layout_of(root)


def test_caches_of_a_root_share_a_node_directory(root, node, monkeypatch, tmp_path):
    def local(name: str = "cache") -> Path | None:
        path = tmp_path / name
        return node_namespace(Config(path, locks="lease"), read_manifest(path)).local

    (tmp_path / "link").symlink_to(root)
    for name in ("cache", "cache2"):
        Cache(tmp_path / name).pin(URL)
    first, other = local(), tmp_path / "other-node"
    assert first is not None and first.parent == node
    assert local("link") == first != local("cache2")
    assert local("cache3") is None  # does not exist
    other.mkdir()
    monkeypatch.setattr(mounts, "_NODE_DIRECTORIES", (str(node), str(other)))
    first.chmod(0o777)
    assert local() == other / first.name
    first.rmdir()
    first.symlink_to(tmp_path)
    assert local() == other / first.name


def test_leases_lock_no_file_of_the_cache(make_cache, root, node, monkeypatch, caplog):
    locked, real = [], fcntl.flock

    def watched(fd: int, operation: int) -> None:
        locked.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", watched)
    on("nfs4", monkeypatch)
    with caplog.at_level(logging.WARNING, "shardcache"):
        cache = make_cache(dir=root, max_size="1MB")
        assert read(cache, URL) == read(cache, OTHER) == OBJECTS[URL]
    [record] = caplog.records
    assert "leases" in record.getMessage() and "1h" in record.getMessage()
    assert cache.clean(everything=True).removed == ()  # too recently used
    assert cache.stats().misses == 2 and list(node.glob("*/stats.db"))
    assert list(node.glob("*/sessions/*.session"))
    assert not [*root.glob("v1/sessions/*.session"), *root.glob("v1/stats.db")]
    age(root)
    assert len(cache.clean(everything=True).removed) == 2
    assert locked and not any(name.startswith(str(root)) for name in locked)


def test_all_processes_lock_as_the_one_that_made_the_cache(make_cache, root, run):
    def stays() -> bool:
        cleaned = run("--dir", root, "clean", "--all", "-y")[1]
        return run("--dir", root, "rm", "-y", URL)[0] == 6 and "kept 1 shard" in cleaned

    with make_cache(dir=root, locks="lease") as running:
        running.fetch(URL)
    assert stays()  # used within the last hour
    assert read(make_cache(dir=root), URL) == OBJECTS[URL]


@pytest.mark.parametrize(
    ("made", "locks", "kind"),
    [("flock", "auto", "nfs4"), ("flock", "lease", "ext4"), ("lease", "flock", "ext4")],
)
def test_another_kind_of_lock_is_refused(root, run, monkeypatch, made, locks, kind):
    fix = "Set" if made == "lease" else "delete .*manifest.json, and set"
    Cache(root, locks=made).pin(URL)
    on(kind, monkeypatch)
    monkeypatch.setenv("SHARDCACHE_LOCKS", locks)
    with pytest.raises(ConfigError, match=f"locked by {made}, and .*{fix} locks to lease"):
        Cache(root).fetch(URL)
    for command in f"rm -y {URL}", "clean":
        code, _, err = run("--dir", root, *command.split())
        assert code == 2 and f"is locked by {made}" in err


def test_nodes_that_share_a_cache_may_have_booted_at_other_times(make_cache, monkeypatch):
    with make_cache(locks="lease") as cache:
        sidecar = cache.fetch(URL).path / META
    before = sidecar.stat()
    monkeypatch.setattr("shardcache.store.entry.boot_id", lambda: "of another node")
    assert read(make_cache(locks="lease"), URL) == OBJECTS[URL]
    assert sidecar.stat().st_ino == before.st_ino  # it was not hashed
