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
from shardcache.layout import IDLE_GRACE, Layout
from shardcache.locks.flock import Holder, remove_locks
from shardcache.locks.lease import KeyLease
from shardcache.store.root import make_root
from tests.support.storetools import Parent, age, forked, needs_root, wait_until
from tests.support.tars import make_tar

KEY = "0123456789abcdef" * 2
ME = Holder(1, "node-1", 0, "job", 1.0)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return replace(make_root(tmp_path / "cache", "1"), grace=IDLE_GRACE)


def test_what_is_no_lease_is_granted_and_left_alone(tmp_path, layout):
    first, odd = KeyLease(layout, KEY, 60.0), KeyLease(layout, KEY, 30.0)
    assert first.try_acquire(ME) and odd.try_acquire(
        ME
    )  # of another duration: a duplicate at worst
    odd.release()
    assert layout.lease(KEY).exists()
    first.release()
    (tmp_path / "v1").write_text("")
    assert KeyLease(Layout.of_root(tmp_path), KEY).try_acquire(ME)


def test_a_lease_is_taken_when_nobody_touches_it_for_its_time_and_no_sooner(layout, monkeypatch):
    ahead, real, path = [0.0], time.monotonic, layout.lease(KEY)
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead[0])
    holder, heir = KeyLease(layout, KEY, 6000.0), KeyLease(layout, KEY, 6000.0)
    assert holder.try_acquire(ME)
    marker, host = path.read_bytes(), socket.gethostname().encode()
    holder.release()
    assert host in marker
    path.write_bytes(marker.replace(host, b"another-node"))  # so that only time can tell
    for touched in range(5):
        os.utime(path, (touched, touched))
        assert not heir.try_acquire(ME)
        ahead[0] += 4000
    for _ in range(2):  # nobody touched it for 4,000 s
        assert not heir.try_acquire(ME)
    ahead[0] += 2000
    wait_until(lambda: heir.try_acquire(ME))
    heir.release()


def test_dead_leases_are_swept_and_live_ones_are_not(layout: Layout) -> None:
    mine = KeyLease(layout, KEY)
    assert mine.try_acquire(ME)
    stranger = layout.lease(KEY).with_name("notes.txt")
    stranger.write_text("mine")
    remove_locks(layout)
    assert set(os.listdir(stranger.parent)) == {f"{KEY}.lease", f"{KEY}.holder", "notes.txt"}
    age(stranger.parent)
    remove_locks(layout)
    assert os.listdir(stranger.parent) == ["notes.txt"]
    mine.release()


@needs_root
def test_two_nodes_with_one_directory_fetch_a_shard_once(
    s3, bucket, proxy, s3_environment, tmp_path
):
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
            parent.say([name.split("-")[0] for name in os.listdir("/dev/shm")])

    with forked(node) as first, forked(node) as second:
        first.tell()
        second.tell()
        # Each had sessions of its own: they agreed by nothing but the leases.
        assert [first.hear(), second.hear()] == [["shardcache"]] * 2
    fetches = {name: seen.object_fetches for name, seen in proxy.summary().items()}
    assert fetches == {f"{bucket}/{name}": 1 for name in shards}
    assert not [p for p in (tmp_path / "cache/v1/locks").rglob("*") if p.is_file()]
