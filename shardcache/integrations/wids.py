"""Read shards through a cache with wids, WebDataset's package for random access.

    names = shardcache.wids.LocalNames(cache, "/local/nvme/wids")
    dataset = wids.ShardListDataset(shards, localname=names)

wids locks a file next to the path that it gets, then opens, maps and closes the shard. The lock
files must not be in the cache, so `LocalNames` returns symbolic links in a directory that the user
chooses. It pins the last shard of each thread, so that no process evicts the shard before wids has
opened it. A mapped file stays readable after its eviction.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardcache.cache import Cache


class LocalNames:
    """Returns paths of cached shards, as wids expects from its argument ``localname``.

    Args:
        cache: the cache to read through.
        directory: the directory for the links, and for the lock files of wids. It is created if
            necessary, and may be removed when no process uses it.
    """

    def __init__(self, cache: Cache, directory: str | os.PathLike[str]) -> None:
        self.cache = cache
        self.directory = Path(directory)
        self._pinned = threading.local()

    def __reduce__(self) -> Any:
        return type(self), (self.cache, self.directory)

    def __call__(self, url: str) -> str:
        """Return a link to the cached shard, and pin the shard until this thread's next call.

        Raises:
            OSError: the directory of the links cannot be written.
            ShardCacheError: the shard cannot be cached, for one of the reasons of `Cache.pinned`.
        """
        with contextlib.ExitStack() as pin:
            path = pin.enter_context(self.cache.pinned(url))
            link = self._link(f"{self.cache.parse(url).key}-{path.name}", path.absolute())
            self.close()
            self._pinned.pin = pin.pop_all()
        return link

    def close(self) -> None:
        """Unpin the last shard that the calling thread has pinned."""
        if (pin := getattr(self._pinned, "pin", None)) is not None:
            del self._pinned.pin
            pin.close()

    def _link(self, name: str, target: Path) -> str:
        link = self.directory / name
        with contextlib.suppress(OSError):  # there is no file yet, or it is not a link
            if link.readlink() == target:
                return str(link)
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = self.directory / f".{name}.{secrets.token_hex(8)}"
        temporary.symlink_to(target)
        try:
            temporary.replace(link)
        finally:
            temporary.unlink(missing_ok=True)
        return str(link)
