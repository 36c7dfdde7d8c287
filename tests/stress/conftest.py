"""Fixtures: an origin in its own process, and filesystems that fail."""

from pathlib import Path
from typing import Any

import pytest

from shardcache import Cache
from tests.stress.fuse import mounted
from tests.stress.harness import Origin


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the soak first: after other tests, the memory of a process has gaps, and filling them
    looks like a leak.
    """
    items.sort(key=lambda item: item.path.name != "test_soak.py")


class Far(Origin):
    """Shards by number; the first has several blocks."""

    def __init__(self) -> None:
        super().__init__(48, seed=7)
        big = max(self.names, key=self.sizes.__getitem__)
        self.order = [big, *(name for name in self.names if name != big)]

    def cache(self, root: Path, **options: Any) -> Cache:
        return Cache(root, min_free=0, prefetch=0, attempts=2, **options)

    def url(self, number: int = 0) -> str:
        return f"{self.address}/{self.order[number]}"

    def read(self, cache: Cache, number: int = 0) -> bool:
        """Return whether a shard has the right bytes, cached or streamed."""
        with cache.open(self.url(number)) as stream:
            return self.right(stream.read(), number)

    def right(self, data: bytes, number: int = 0) -> bool:
        return data == self.data(self.order[number], version=0)

    def begun(self) -> int:
        """Return how many downloads of the first shard began."""
        return self.fetches[self.names.index(self.order[0])]


@pytest.fixture
def far():
    found = Far()
    with found.serving():
        yield found


@pytest.fixture
def shim(tmp_path):
    with mounted(tmp_path) as found:
        yield found


@pytest.fixture
def nodes(tmp_path):
    """Two mounts of one directory, as on two nodes."""
    with mounted(tmp_path, "here") as here, mounted(tmp_path, "there") as there:
        yield here, there
