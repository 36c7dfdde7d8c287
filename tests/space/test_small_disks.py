"""Many processes on a disk that is too small for what they read: a budget that always holds."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcache.cache import Cache
from shardcache.layout import Layout, parse_entry_name, parse_partial_name
from tests.support.disktools import disk, needs_mounts
from tests.support.storetools import Parent, crowd, forked
from tests.support.tars import make_tar

MIB = 1 << 20
_LOOK = 0.01

pytestmark = [needs_mounts, pytest.mark.locks_work]


class Shelf:
    """Shards of about 2 MiB, and a RAM disk for a fifth of them."""

    def __init__(self, home: Path, ram: Path, count: int = 40) -> None:
        self.cache = ram / "cache"
        self.digests: dict[str, str] = {}
        for number in range(count):
            data = make_tar(number, members=20, size=100_000)
            path = home / f"{number}.tar"
            path.write_bytes(data)
            self.size = len(data)
            self.digests[str(path)] = hashlib.sha256(data).hexdigest()
        self.limit = count // 5 * self.size

    def open(self, **options: Any) -> Cache:
        return Cache(
            self.cache, cache_local=True, min_free=0, max_size=self.limit, strict=False, **options
        )

    def read(self, cache: Cache, url: str) -> None:
        with cache.open(url) as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        assert digest == self.digests[url], url


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    (tmp_path / "origin").mkdir()
    with disk(tmp_path / "ram", "size=24m") as ram:
        yield Shelf(tmp_path / "origin", ram)


def data_bytes(root: Path) -> int:
    """Bytes of data files below a root, entries and partials, as they lie on the disk."""
    layout, total = Layout.of_root(root), 0
    for above, names, files in os.walk(layout.base):
        here = Path(above)
        mine = parse_entry_name(here.name) or parse_partial_name(here.name)
        for name in files if mine else ():
            if name.endswith(".tar"):
                try:
                    total += os.lstat(here / name).st_blocks * 512
                except FileNotFoundError:
                    continue  # evicted meanwhile
        if mine:
            names.clear()
    return total


class Watch:
    """Looks every 10 ms how full the cache is."""

    def __init__(self, root: Path) -> None:
        self.most = self.looks = 0
        self._root = root
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_LOOK):
            self.most = max(self.most, data_bytes(self._root))
            self.looks += 1


@pytest.mark.parametrize("policy", ["working-set", "lru"])
def test_sixteen_processes_never_pass_the_limit_and_never_see_a_full_disk(
    shelf: Shelf, policy: str
) -> None:
    def work(parent: Parent, number: int) -> None:
        chance = random.Random(number)
        with shelf.open(policy=policy) as cache:
            parent.say("ready")
            parent.hear()
            for url in chance.sample(list(shelf.digests), len(shelf.digests)):
                shelf.read(cache, url)
        parent.say("done")

    with Watch(shelf.cache) as watch, crowd(16, work) as children:
        for child in children:
            assert child.hear() == "ready"
        for child in children:
            child.tell("go")
        for child in children:
            assert child.hear() == "done"
    # A file of the filesystem is a whole number of blocks.
    slack = 4096 * len(shelf.digests)
    assert watch.looks > 50 and 0 < watch.most <= shelf.limit + slack
    with shelf.open() as cache:
        assert sum(entry.size for entry in cache.entries()) <= shelf.limit


def test_cleaners_readers_and_fetchers_beside_each_other(shelf: Shelf) -> None:
    end = time.monotonic() + 4.0
    urls = list(shelf.digests)
    with shelf.open() as cache:
        cache.fetch(urls[0])  # there is something to clean

    def clean(parent: Parent, number: int) -> None:
        count = 0
        with shelf.open() as cache:
            while time.monotonic() < end:
                how = [{}, {"max_size": shelf.limit // 2}, {"everything": True}, {"orphans": True}]
                cache.clean(**how[(number + count) % len(how)])
                count += 1
        parent.say(count)

    def look(parent: Parent, number: int) -> None:
        chance, count = random.Random(number), 0
        with shelf.open() as cache:
            while time.monotonic() < end or not count:
                shelf.read(cache, chance.choice(urls))
                count += 1
        parent.say(count)

    def fetch(parent: Parent, number: int) -> None:
        chance, count, full = random.Random(number), 0, 0
        with shelf.open() as cache:
            while time.monotonic() < end or not count:
                try:
                    cache.fetch(chance.choice(urls))
                except OSError as exn:  # there is no room: all is in use
                    assert exn.errno == errno.ENOSPC and type(exn).__name__ == "CacheFullError"
                    full += 1
                count += 1
        parent.say(count)

    with Watch(shelf.cache) as watch, contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(forked(role, number))
            for role, count in ((clean, 4), (look, 8), (fetch, 4))
            for number in range(count)
        ]
        time.sleep(4.0)
        counts = [child.hear() for child in children]
    # Cleaners take turns, and one may not get its turn in four seconds. The others all get one,
    # in the end, or would not be heard.
    assert sum(counts[:4]) > 3 and min(counts[4:]) > 0
    assert watch.most <= shelf.limit + 4096 * len(urls)
    layout = Layout.of_root(shelf.cache)
    with shelf.open() as cache:
        cache.clean(orphans=True)
        assert list(layout.partial.iterdir()) == [] == list(layout.quarantine.iterdir())
        assert sum(entry.size for entry in cache.entries()) <= shelf.limit
