"""Shards on a slow mount, and a cache in front of it."""

import os
from pathlib import Path
from typing import Any

from shardcache.cache import Cache
from shardcache.layout import Layout
from tests.support.storetools import room
from tests.support.tars import make_tar


class Shop:
    """Shards of one size on a slow mount, and a cache."""

    def __init__(self, path: Path, count: int = 8) -> None:
        self.path = path / "cache"
        self.origin = path / "origin"
        self.origin.mkdir()
        self.urls = [f"{self.origin}/{number}.tar" for number in range(count)]
        for number, url in enumerate(self.urls):
            self.size = Path(url).write_bytes(make_tar(number, members=4, size=4000))

    def cache(self, **options: Any) -> Cache:
        return Cache(self.path, cache_local=True, **options)

    def room(self, shards: float, links: int = 1) -> int:
        """Return the bytes on disk of cached shards that ``links`` ranks link each."""
        return int(shards * room(self.path, self.size, *(links - 1) * [0]))

    def entries(self) -> dict[str, Any]:
        """Return the cached entries by the path of their shard."""
        return {url: links[0] for url, links in self.links().items()}

    def links(self) -> dict[str, list[Any]]:
        """Return the entries of all namespaces by the path of their shard."""
        found: dict[str, list[Any]] = {}
        with self.cache() as cache:
            for entry in cache.entries():
                found.setdefault(entry.metadata().url.removeprefix("file://"), []).append(entry)
        return found

    def use(self, url: str, when: float) -> None:
        """Set the last use of an entry, and forget the last refusal."""
        os.utime(self.entries()[url].path / "meta.json", (when, when))
        Layout.of_root(self.path).refusal.unlink(missing_ok=True)
