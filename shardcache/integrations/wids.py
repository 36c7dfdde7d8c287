"""The way in for wids, WebDataset's random access: a ``localname=`` for ``ShardListDataset``.

    names = shardcache.wids.LocalNames(cache, "/local/nvme/wids")
    dataset = wids.ShardListDataset(shards, localname=names)

wids asks for the local name of a shard's URL, takes a lock file beside that name, downloads
if nothing is there, opens the file, maps it and closes it. A name in the cache itself would
have foreign lock files in the cache, and a copy would be a second cache that nobody cleans.
So the names are symbolic links, in a directory of the user's choosing, to shards that are
fetched before the name is given away; wids never downloads.

The shard that was named last is pinned by each thread, so that it is not evicted between the
name and the opening; what is mapped can be read to its end whatever becomes of its name.

Any number of processes and threads may use one directory: a link has its name by a rename,
and two of them for one shard say the same. Picklable, so that it works under spawn.
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

__all__ = ["LocalNames"]


class LocalNames:
    """Names shards of a cache for wids; see the module.

    Args:
        cache: fetches and keeps the shards.
        directory: where the links are; made if need be. It holds links and wids' lock files
            alone, and may be removed when no process uses it.
    """

    def __init__(self, cache: Cache, directory: str | os.PathLike[str]) -> None:
        self.cache = cache
        self.directory = Path(directory)
        self._held = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {"cache": self.cache, "directory": self.directory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"<shardcache.wids.LocalNames {str(self.directory)!r} of {self.cache!r}>"

    def __call__(self, url: str) -> str:
        """A path of the shard, which is in the cache and pinned until the next call.

        Raises:
            As `Cache.pinned`: a path needs a stored shard.
            OSError: the directory cannot be written.
        """
        with contextlib.ExitStack() as pin:
            path = pin.enter_context(self.cache.pinned(url))
            link = self._link(f"{self.cache.parse(url).key}-{path.name}", path.absolute())
            # Only now: two shards are pinned for a moment rather than none.
            before = getattr(self._held, "pin", None)
            self._held.pin = pin.pop_all()
            if before is not None:
                before.close()
        return link

    def close(self) -> None:
        """Let go of the shard that the calling thread named last."""
        if (held := getattr(self._held, "pin", None)) is not None:
            del self._held.pin
            held.close()

    def _link(self, name: str, target: Path) -> str:
        link = self.directory / name
        with contextlib.suppress(OSError):  # not there, or no link: made below, or refused there
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
