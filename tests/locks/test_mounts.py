"""The kind of lock depends on the filesystem of the cache."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.errors import ConfigError
from shardcache.layout import IDLE_GRACE, Layout
from shardcache.locks import mounts
from shardcache.locks.mounts import Mount, mount_of, node_namespace
from shardcache.store.root import make_root
from tests.support.caches import read
from tests.support.storetools import age, wait_until
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
        assert found is not None and (found.type, found.is_local) == (kind, local)
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
    root = tmp_path / "cache"
    make_root(root, "1")
    return root


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
    found = node_namespace(root, "auto", 600.0)
    if kind in ("ext4", "tmpfs"):
        assert found == Layout.of_root(root)
    else:
        assert found.grace == IDLE_GRACE
        assert found.local is not None and found.local.parent == node
        assert found.local.stat().st_mode & 0o777 == 0o700
    assert node_namespace(root, "lease", IDLE_GRACE).grace == 2 * IDLE_GRACE
    assert node_namespace(root, "flock", 600.0) == Layout.of_root(root)


def test_caches_of_a_root_share_a_node_directory(root, node, monkeypatch, tmp_path):
    def local(name: str = "cache") -> Path | None:
        return node_namespace(tmp_path / name, "lease", 600.0).local

    (tmp_path / "link").symlink_to(root)
    make_root(tmp_path / "cache2", "1")
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


@pytest.mark.locks_work("flock")
def test_leases_lock_no_file_of_the_cache(make_cache, origin, root, node, monkeypatch, caplog):
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
    [record] = caplog.records
    assert "leases" in record.getMessage() and "1h" in record.getMessage()
    assert cache.clean(everything=True).removed == ()  # too recently used
    assert list(node.glob("*/sessions/*.session"))
    assert not list((root / "v1" / "sessions").glob("*.session"))
    age(root)
    assert len(cache.clean(everything=True).removed) == 2
    assert locked and not any(name.startswith(str(root)) for name in locked)


KINDS = [("flock", "lease"), ("lease", "flock")]


@pytest.mark.locks_work
@pytest.mark.parametrize(("one", "other"), KINDS)
def test_another_kind_of_lock_is_an_error(make_cache, origin, root, one, other):
    origin.objects[URL] = make_tar(1)
    with make_cache(dir=root, locks=one) as running:
        running.fetch(URL)
        with pytest.raises(ConfigError, match=f"lock with {one}, and this .*{other}.*Set locks"):
            Cache(root, locks=other).open(URL)
        make_cache(dir=root, locks=one).close()
    assert read(make_cache(dir=root, locks=other), URL) == make_tar(1)
    assert len(origin.requests) == 1


@pytest.mark.locks_work
@pytest.mark.parametrize(("one", "other"), KINDS)
def test_commands_lock_as_live_processes(make_cache, origin, root, run, monkeypatch, one, other):
    def stays() -> bool:
        cleaned = run("--dir", root, "clean", "--all", "-y")[1]
        return run("--dir", root, "rm", "-y", URL)[0] == 6 and "kept 1 shard" in cleaned

    monkeypatch.setenv("SHARDCACHE_LOCKS", other)
    origin.objects[URL] = make_tar(1)
    with make_cache(dir=root, locks=one) as running:
        running.fetch(URL)
        with running.open(URL):
            if one == "flock":
                age(root)  # with leases it would count as unused
            assert stays()
        assert stays() == (one == "lease")  # used within the last hour


@pytest.mark.locks_work
def test_a_client_is_refused_while_the_server_of_the_disk_uses_the_cache(
    make_cache, origin, root, node, run, monkeypatch, clock
):
    origin.objects[URL] = make_tar(1)
    ahead, real = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])
    with make_cache(dir=root) as running:
        running.fetch(URL)
        [session] = (root / "v1/sessions").glob("*.session")
        before = session.stat()
        wait_until(lambda: real() > before.st_ctime + 0.1)  # the clock of a filesystem is coarse
        clock.sleep(100)
        read(running, URL)  # touches the session
        assert session.stat().st_ctime_ns > before.st_ctime_ns
        assert session.stat().st_mtime_ns == before.st_mtime_ns
        on("nfs4", monkeypatch)
        for command in f"rm -y {URL}", "clean":
            code, _, err = run("--dir", root, *command.split())
            assert code == 2 and "lock with flock, and this one with lease" in err
        assert "1 shard" in run("--dir", root, "ls")[1]
        ahead[0] = IDLE_GRACE + 60
        assert run("--dir", root, "clean")[0] == 0


@pytest.mark.locks_work
def test_a_session_is_renewed_while_its_process_uses_the_cache(make_cache, origin, root, clock):
    origin.objects[URL] = make_tar(1)
    with make_cache(dir=root, locks="lease") as running:
        running.fetch(URL)
        age(root / "v1/sessions")
        make_cache(dir=root, locks="flock").close()
        clock.sleep(100)
        read(running, URL)
        with pytest.raises(ConfigError, match="lock with lease"):
            make_cache(dir=root, locks="flock")
    assert list((root / "v1/sessions").iterdir()) == []
