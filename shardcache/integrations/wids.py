"""The way in for wids, WebDataset's random access: a ``localname=`` for ``ShardListDataset``.

    names = shardcache.wids.LocalNames(cache, "/local/nvme/wids")
    dataset = wids.ShardListDataset(shards, localname=names)

wids asks for the local name of a shard's URL, takes a lock file beside that name, downloads if
nothing is there, opens the file, maps it and closes it. Its lock files do not belong into the
cache. So the names are symbolic links, in a directory of the user's, to shards that are fetched
before the name is given away. Each thread pins the shard that it named last, so that it is not
evicted before it is opened; what is mapped can be read to its end.
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
    """Gives wids the paths of cached shards: its argument ``localname``.

    Args:
        cache: fetches and keeps the shards.
        directory: for links to the shards and for wids' lock files; made if it does not exist.
            It may be removed when no process uses it.
    """

    def __init__(self, cache: Cache, directory: str | os.PathLike[str]) -> None:
        self.cache = cache
        self.directory = Path(directory)
        self._held = threading.local()

    def __reduce__(self) -> Any:
        return type(self), (self.cache, self.directory)

    def __call__(self, url: str) -> str:
        """A path of the shard, which stays in the cache until this thread's next call.

        Raises:
            OSError: the directory cannot be written. For other errors see `Cache.pinned`.
        """
        with contextlib.ExitStack() as pin:
            path = pin.enter_context(self.cache.pinned(url))
            link = self._link(f"{self.cache.parse(url).key}-{path.name}", path.absolute())
            self.close()  # only now: two shards are pinned for a moment rather than none
            self._held.pin = pin.pop_all()
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
