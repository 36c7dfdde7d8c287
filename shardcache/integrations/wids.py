"""Read shards through a cache with wids, WebDataset's random access.

    names = shardcache.wids.LocalNames(cache, "/local/nvme/wids")
    dataset = wids.ShardListDataset(shards, localname=names)

wids locks a file next to the path that it gets, then opens, maps and closes the shard. Lock files
do not belong in the cache, so `LocalNames` returns symbolic links in a directory of the user. It
pins the last shard of each thread, so that no process evicts it before wids opens it. A mapped file
stays readable after its eviction.
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
    """Returns the paths of cached shards; for the argument ``localname`` of wids.

    Args:
        cache: the cache of the shards.
        directory: directory for the links and the lock files of wids; made if it does not exist.
            It may be removed when no process uses it.
    """

    def __init__(self, cache: Cache, directory: str | os.PathLike[str]) -> None:
        self.cache = cache
        self.directory = Path(directory)
        self._pinned = threading.local()

    def __reduce__(self) -> Any:
        return type(self), (self.cache, self.directory)

    def __call__(self, url: str) -> str:
        """Return a path of the shard, and pin the shard until this thread's next call.

        Raises:
            OSError: the directory cannot be written.
            ShardCacheError: see `Cache.pinned`.
        """
        with contextlib.ExitStack() as pin:
            path = pin.enter_context(self.cache.pinned(url))
            link = self._link(f"{self.cache.parse(url).key}-{path.name}", path.absolute())
            self.close()
            self._pinned.pin = pin.pop_all()
        return link

    def close(self) -> None:
        """Unpin the last shard of the calling thread."""
        if (pin := getattr(self._pinned, "pin", None)) is not None:
            del self._pinned.pin
            pin.close()

    def _link(self, name: str, target: Path) -> str:
        link = self.directory / name
        with contextlib.suppress(OSError):  # the path is no link, or it does not exist
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
