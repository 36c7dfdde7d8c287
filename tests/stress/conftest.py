"""An origin in a process of its own, caches that read from it, and filesystems that fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcache import Cache
from tests.stress.fuse.shim import Shim, mounted
from tests.stress.origin import Origin, Shards

#: Bytes per second and connection: a fetch that others can meet under way.
SLOW, FAST = 400_000, 1e9


def under_way(root: Path) -> bool:
    """Whether a fetch has written something into a cache."""
    with contextlib.suppress(FileNotFoundError):  # a partial goes while it is looked at
        return any(path.stat().st_size for path in root.glob("v1/partial/*/*.tar"))
    return False


class Far:
    """The origin; its first shard has several blocks."""

    def __init__(self) -> None:
        self.shards = Shards(48, seed=7)
        self.origin = Origin(self.shards)
        big = max(self.shards.names, key=self.shards.sizes.__getitem__)
        self.names = [big, *(name for name in self.shards.names if name != big)]
        self.rate(FAST)

    def cache(self, root: Path, **options: Any) -> Cache:
        return Cache(root, min_free=0, prefetch=0, attempts=2, **options)

    def url(self, number: int = 0) -> str:
        return f"{self.origin.url}/{self.names[number]}"

    def read(self, cache: Cache, number: int = 0) -> bool:
        """Whether a shard is what it should be; whether it is stored is another matter."""
        with cache.open(self.url(number)) as stream:
            return self.right(stream.read(), number)

    def right(self, data: bytes, number: int = 0, version: int = 0) -> bool:
        return data == self.shards.data(self.names[number], version)

    def replace(self) -> None:
        """A new version of the first shard."""
        self.origin.replace(self.names[0])

    def fetches(self, number: int = 0) -> int:
        return self.origin.fetches().get(self.names[number], 0)

    def rate(self, value: float) -> None:
        self.origin.set("rate", value)


@pytest.fixture
def far() -> Iterator[Far]:
    found = Far()
    yield found
    found.origin.close()


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[Shim]:
    with mounted(tmp_path) as found:
        yield found


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Shim, Shim]]:
    """Two nodes: two mounts of one directory."""
    with mounted(tmp_path, name="here") as here, mounted(tmp_path, name="there") as there:
        yield here, there
