"""Nodes that share a directory agree who fetches; a node that dies is waited for no longer."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.cli.demo import S3Server
from shardcache.layout import IDLE_GRACE, Layout, is_lease_name
from shardcache.locks.flock import Holder, read_holder, remove_locks
from shardcache.locks.lease import KeyLease
from shardcache.store.root import make_root
from tests.support.proxy import Proxy
from tests.support.storetools import PATIENCE, Parent, forked, needs_root
from tests.support.tars import make_tar

KEY = "0123456789abcdef" * 2
ME = Holder(1, "node-1", 0, "job", 1.0)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return replace(make_root(tmp_path / "cache", "1"), grace=IDLE_GRACE)


def lease(layout: Layout, seconds: float = 60.0) -> KeyLease:
    return KeyLease(layout, KEY, seconds)


def test_one_holder_at_a_time(layout: Layout) -> None:
    first, second = lease(layout), lease(layout)
    assert first.try_acquire(ME)
    assert not second.try_acquire(ME)
    assert read_holder(layout.holder(KEY)) == ME
    first.release()
    assert not layout.holder(KEY).exists()
    assert second.try_acquire(ME)
    second.release()
    second.release()
    assert not layout.lease(KEY).exists()


def test_a_lease_that_is_not_renewed_is_taken(layout: Layout) -> None:
    """The holder is of another host, as far as its marker says, so only time can tell."""
    dead = lease(layout, 1.0)
    assert dead.try_acquire(ME)
    marker = layout.lease(KEY).read_bytes()
    dead.release()
    host = socket.gethostname().encode()
    assert host in marker
    layout.lease(KEY).write_bytes(marker.replace(host, b"another-node"))
    heir = lease(layout, 1.0)
    assert not heir.try_acquire(ME)
    end = time.monotonic() + PATIENCE
    while not heir.try_acquire(ME):
        assert time.monotonic() < end
        time.sleep(0.1)
    heir.release()


def test_a_live_holder_keeps_its_lease(layout: Layout) -> None:
    holder, other = lease(layout, 1.0), lease(layout, 1.0)
    assert holder.try_acquire(ME)
    for _ in range(30):  # three times its duration
        assert not other.try_acquire(ME)
        time.sleep(0.1)
    holder.release()
    assert other.try_acquire(ME)
    other.release()


def test_what_cannot_be_a_lease_is_granted(tmp_path: Path, layout: Layout) -> None:
    first, second = lease(layout, 60.0), lease(layout, 30.0)
    assert first.try_acquire(ME)
    assert second.try_acquire(ME)  # of another duration, says filelock: a duplicate at worst
    second.release()
    assert layout.lease(KEY).exists()  # it was not the second one's to remove
    first.release()
    (tmp_path / "v1").write_text("")
    assert KeyLease(Layout.of_root(tmp_path), KEY).try_acquire(ME)


def test_dead_leases_are_swept_and_live_ones_are_not(layout: Layout) -> None:
    mine = lease(layout)
    assert mine.try_acquire(ME)
    assert {p.name for p in layout.lease(KEY).parent.iterdir()} == {
        f"{KEY}.lease",
        f"{KEY}.holder",
    }
    remove_locks(layout)
    assert layout.lease(KEY).exists() and layout.holder(KEY).exists()
    past = time.time() - 2 * IDLE_GRACE
    stranger = layout.lease(KEY).with_name("notes.txt")
    stranger.write_text("mine")
    for path in (stranger, layout.lease(KEY), layout.holder(KEY)):
        os.utime(path, (past, past))
    remove_locks(layout)
    assert os.listdir(stranger.parent) == ["notes.txt"]
    mine.release()
    assert is_lease_name(f"{KEY}.lease") and not is_lease_name(f"{KEY}.lease2")


@needs_root
def test_two_nodes_with_one_directory_fetch_a_shard_once(
    s3: S3Server, bucket: str, proxy: Proxy, s3_environment: dict[str, str], tmp_path: Path
) -> None:
    """Two mount namespaces with a /dev/shm each are two nodes."""
    shards = {f"{n}.tar": make_tar(n, members=40, size=20_000) for n in range(4)}
    for name, data in shards.items():
        s3.put(bucket, name, data)
    proxy.reset()

    def node(parent: Parent) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(0x00020000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWNS
        assert libc.mount(b"none", b"/", None, 0x44000, None) == 0  # MS_REC | MS_PRIVATE
        assert libc.mount(b"shm", b"/dev/shm", b"tmpfs", 0, None) == 0
        with Cache(tmp_path / "cache", locks="lease", min_free=0) as cache:
            parent.hear()
            for name, data in shards.items():
                with cache.open(f"s3://{bucket}/{name}") as stream:
                    assert stream.read() == data
            parent.say(os.listdir("/dev/shm"))

    with forked(node) as first, forked(node) as second:
        first.tell()
        second.tell()
        found = [first.hear(), second.hear()]
    # Each had sessions of its own: they agreed by nothing but the leases.
    names = [[name.split("-")[0] for name in names] for names in found]
    assert names == [["shardcache"]] * 2, found
    fetches = {name: seen.object_fetches for name, seen in proxy.summary().items()}
    assert fetches == {f"{bucket}/{name}": 1 for name in shards}
    left = {p.name for p in (tmp_path / "cache" / "v1" / "locks").rglob("*") if p.is_file()}
    assert left == set()
