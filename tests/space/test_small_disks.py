"""Many processes on a disk that is too small for what they read: a budget that always holds."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.layout import Layout, parse_entry_name, parse_partial_name
from shardcache.locks.flock import Holder, KeyLock
from tests.support.disktools import disk, needs_mounts
from tests.support.storetools import Parent, crowd
from tests.support.tars import make_tar

COUNT = 40


def data_bytes(base: Path) -> int:
    """Bytes of data files, entries and partials, as they lie on the disk."""
    total = 0
    # Objects first: what is published meanwhile is missed, not counted twice.
    for path in (*base.glob("objects/*/*/*/*.tar"), *base.glob("partial/*/*.tar")):
        if parse_entry_name(path.parent.name) or parse_partial_name(path.parent.name):
            with contextlib.suppress(FileNotFoundError):
                total += path.lstat().st_blocks * 512
    return total


@needs_mounts
@pytest.mark.locks_work
@pytest.mark.parametrize("policy", ["working-set", "lru"])
def test_sixteen_processes_never_pass_the_limit_and_never_see_a_full_disk(
    tmp_path: Path, policy: str
) -> None:
    shards = {}
    for number in range(COUNT):
        data = shards[str(tmp_path / f"{number}.tar")] = make_tar(number, 10, 50_000)
        (tmp_path / f"{number}.tar").write_bytes(data)
    limit = COUNT // 5 * len(data)
    root = tmp_path / "ram" / "cache"
    layout, seen, ended = Layout.of_root(root), list[int](), threading.Event()

    def work(parent: Parent, number: int) -> None:
        options = {"cache_local": True, "min_free": 0, "max_size": limit, "policy": policy}
        with Cache(root, **options) as cache:
            parent.hear()
            for url in random.Random(number).sample(list(shards), COUNT):
                with cache.open(url) as stream:
                    assert stream.read() == shards[url]
        parent.say()

    def watch() -> None:
        # With the budget's lock, so that nothing is evicted for a newcomer meanwhile: what went
        # and what took its place would count both, though they were never there together.
        me = Holder.this_process(rank=None, job=None, now=time.time())
        while not ended.wait(0.005):
            lock = KeyLock(layout.named_lock("budget"))
            with contextlib.suppress(FileNotFoundError):  # the cache is not made yet
                if lock.try_acquire(me):
                    seen.append(data_bytes(layout.base))
                    lock.release()

    with disk(tmp_path / "ram", "size=24m"):
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with crowd(16, work) as children:
                for child in children:
                    child.tell()
                for child in children:
                    child.hear()
        finally:
            ended.set()
            watcher.join()
        # A file of the filesystem is a whole number of blocks.
        assert 0 < max(seen) <= limit + 4096 * COUNT
        with Cache(root) as cache:
            assert sum(entry.size for entry in cache.entries()) <= limit
