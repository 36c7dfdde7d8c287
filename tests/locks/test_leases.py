"""Leases: nodes that share a directory download a shard once, and dead nodes lose their leases."""

import errno
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.files import IDLE_GRACE
from shardcache.layout import Layout
from shardcache.locks import mounts
from shardcache.locks.keys import Holder, KeyLease, remove_locks
from tests.support.caches import read
from tests.support.storetools import age, layout_of, refusing, together, wait_until
from tests.support.tars import make_tar

KEY = "0123456789abcdef" * 2
ME = Holder(1, "node-1", 0, "job", 1.0)


@pytest.fixture
def layout(layout: Layout) -> Layout:
    return replace(layout, grace=IDLE_GRACE)


def test_a_lease_is_granted_where_the_file_is_no_valid_lease(tmp_path, layout):
    first, other = KeyLease(layout, KEY, 60.0), KeyLease(layout, KEY, 30.0)
    assert first.try_acquire(ME)
    assert other.try_acquire(ME)  # another duration: at worst a second download
    other.release()
    assert layout.lease(KEY).exists()
    first.release()
    (tmp_path / "v1").write_text("")
    assert KeyLease(layout_of(tmp_path), KEY).try_acquire(ME)


def test_a_lease_expires_after_its_duration_without_a_touch(layout, monkeypatch):
    ahead, real, path = [0.0], time.monotonic, layout.lease(KEY)
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead[0])
    holder, heir = KeyLease(layout, KEY, 6000.0), KeyLease(layout, KEY, 6000.0)
    assert holder.try_acquire(ME)
    marker, host = path.read_bytes(), socket.gethostname().encode()
    holder.release()
    assert host in marker
    path.write_bytes(marker.replace(host, b"another-node"))  # so that only the time matters
    for touched in range(5):
        os.utime(path, (touched, touched))
        assert not heir.try_acquire(ME)
        ahead[0] += 4000
    for _ in range(2):  # untouched for 4,000 s
        assert not heir.try_acquire(ME)
    ahead[0] += 2000
    wait_until(lambda: heir.try_acquire(ME))
    heir.release()


def test_only_dead_leases_are_removed(layout) -> None:
    mine = KeyLease(layout, KEY)
    assert mine.try_acquire(ME)
    stranger = layout.lease(KEY).with_name("notes.txt")
    stranger.write_text("mine")
    remove_locks(layout)
    assert set(os.listdir(stranger.parent)) == {f"{KEY}.lease", f"{KEY}.holder", "notes.txt"}
    age(stranger.parent)
    remove_locks(layout)
    assert os.listdir(stranger.parent) == ["notes.txt"]
    stranger.unlink()
    remove_locks(layout)
    assert stranger.parent.is_dir()  # a process may be about to make its lease in it
    mine.release()


@pytest.mark.parametrize("is_linked", [True, False])
def test_a_shard_of_another_rank_is_in_use_from_the_start(
    make_cache, origin, set_variables, monkeypatch, is_linked
):
    url, data = "s3://lab/a.tar", make_tar(1)
    origin.objects[url] = data
    ranks = []
    for number in "01":
        set_variables(SHARDCACHE_JOB="job", SHARDCACHE_RANK=number)
        ranks.append(make_cache(isolation="rank", locks="lease", policy="lru", max_size="1MB"))
    entry = ranks[0].fetch(url)
    age(entry.path, 2 * IDLE_GRACE)
    if not is_linked:
        monkeypatch.setattr(os, "link", refusing(errno.EPERM, real=os.link))
    with ranks[1].open(url) as stream:
        ranks[1].clean(max_size=1)
        assert Path(stream.name).exists() and stream.read() == data
    assert len(origin.requests) == 1


def test_two_nodes_download_a_shard_once(files, tmp_path, monkeypatch):
    files.files = {f"/{n}.tar": make_tar(n, members=40, size=20_000) for n in range(4)}

    def node(number):
        """Each node has its own sessions, so the nodes share only the leases."""
        (own := tmp_path / f"node-{number}").mkdir()
        monkeypatch.setattr(mounts, "_NODE_DIRECTORIES", (str(own),))
        with Cache(tmp_path / "cache", locks="lease", min_free=0) as cache:
            found = [read(cache, files.url + name) for name in files.files]
            return found == [*files.files.values()] and len(list(own.rglob("*.session")))

    assert together(2, node) == [1, 1]
    assert len(files.heads) == len(files.files)
    assert not [p for p in (tmp_path / "cache/v1/locks").rglob("*") if p.is_file()]
