"""Open a shard from the cache if possible, and bypass the cache otherwise.

    look for the entry --- the disk cannot be read ------------> bypass the cache
      | miss
    a `stream.ShardStream` over a download in the background:
      wait, link or download --- the disk cannot be written ---> bypass the cache
        | the cache fails in another way ----------------------> bypass the cache

With ``strict``, the cache is never bypassed, and its faults are raised. The same holds for calls
that need a local path (`Opener.obtain`).
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

from shardcache import clock
from shardcache.config import Config
from shardcache.download.download import Download, Result
from shardcache.errors import ConfigError, LockTimeoutError, ShardCacheError, ShardNotFoundError
from shardcache.files import os_error
from shardcache.locks.flock import is_file
from shardcache.process import Process
from shardcache.reading.fallback import read_nearest, read_past
from shardcache.reading.readers import DownloadReader
from shardcache.reading.stream import ShardStream
from shardcache.store.directory import DamagedError
from shardcache.store.entry import Opened
from shardcache.urls import ShardURL, advise_scheme

if TYPE_CHECKING:
    from shardcache.reading.readers import Reader

logger = logging.getLogger(__name__)

#: Seconds between attempts to pin an entry while a stopped process is about to evict it.
_STUCK_POLL = 0.25
#: Bytes of a stream's buffer. WebDataset reads 10 KiB at a time, and with Python's default buffer
#: each read would be a system call.
_BUFFER = 1 << 18


class Opener:
    """Opens the shards of one cache; safe between threads and across forks.

    ``here`` returns the `Process` of the calling process.
    """

    def __init__(self, config: Config, here: Callable[[], Process]) -> None:
        self.config = config
        self.here = here

    # -- streams -----------------------------------------------------------------

    def open(
        self,
        shard: ShardURL,
        *,
        finish: bool = True,
        whole: bool = False,
        ahead: Opened | DownloadReader | None = None,
    ) -> BinaryIO:
        """Return a stream of the shard.

        Args:
            shard: the shard to open.
            finish: whether to complete a download even if the stream is closed earlier.
            whole: whether to wait until the shard is complete, even with ``fill="follow"``. Then
                the stream has a descriptor (``fileno``), unless it bypasses the cache.
            ahead: an entry or a download that a look-ahead began; the stream takes it over.

        Raises:
            The errors of `Cache.open`.
        """
        if shard.scheme == "file" and self.is_in_place(shard):
            return _open_in_place(shard)
        process, started = self.here(), clock.monotonic()
        if isinstance(ahead, DownloadReader) and not ahead.attend():
            ahead.close()
            ahead = None
        opened = ahead if isinstance(ahead, Opened) else None
        try:
            if ahead is None:
                site = process.made_site
                if site is None or process.reading.faults:
                    opened = process.find(shard)
                else:  # hot path: keep the number of calls small
                    try:
                        opened = site.open(shard.key, shard.basename)
                    except (DamagedError, os_error()):
                        opened = process.find(shard)
            reader = opened or ahead or DownloadReader(self.here, shard, finish=finish)
        except (ShardCacheError, os_error()) as exn:
            return self._buffered(shard, read_past(self.here, shard, exn))
        if opened is None:
            return self._buffered(shard, reader, whole=whole)
        stream = ShardStream(self.here, shard, reader, process.counters)
        process.touch(opened)
        tiers = process.tiers
        tier = tiers.index(process.tier_of(opened.directory)) if len(tiers) > 1 else None
        process.counters.opened("hit", clock.monotonic() - started, tier)
        if logger.isEnabledFor(logging.DEBUG):
            facts = {"event": "hit", "shard": str(shard), "bytes": opened.size}
            logger.debug("%s: hit", shard, extra=facts)
        return io.BufferedReader(stream, _BUFFER)

    def _buffered(self, shard: ShardURL, reader: Reader, *, whole: bool = False) -> BinaryIO:
        stream = ShardStream(self.here, shard, reader, self.here().counters)
        stream.wait(whole=whole or self.config.fill == "complete")
        return io.BufferedReader(stream, _BUFFER)

    def stream(self, shard: ShardURL) -> BinaryIO:
        """Return a stream of a file without storing it. Raises the errors of `open`."""
        return self._buffered(shard, read_nearest(self.here, shard))

    # -- entries ---------------------------------------------------------------

    def pin(self, shard: ShardURL) -> Opened:
        """Return an entry that stays at its path until closed. Raises the errors of `obtain`."""
        started = clock.monotonic()
        while True:
            opened, outcome = self.obtain(Download(shard))
            waited = clock.monotonic() - started
            if not opened.stuck and is_file(opened.path, opened.fd):
                counters = self.here().counters
                counters.opened(outcome, waited)
                counters.read(opened.size)  # assume that the caller reads the whole file
                return opened
            opened.close()  # the entry was evicted before it was pinned, or is being evicted
            if opened.stuck:
                if waited >= self.config.lock_timeout:
                    raise LockTimeoutError(
                        f"{shard} is being evicted by a process that does not continue. Look for "
                        "one that is stopped, or read the shard with open().",
                        url=str(shard),
                    )
                clock.sleep(_STUCK_POLL)

    def obtain(self, download: Download) -> Result:
        """Return the shard's entry, which the calling thread downloads if necessary.

        The caller needs a local file, so the disk is used even while it is paused after faults. The
        caller must close the entry. This does not count as an open.

        Raises:
            The errors of `open` with ``strict``.
        """
        shard = download.shard
        self.refuse_in_place(shard)
        process = self.here()
        opened = process.find(shard, download.outdated, insist=True)
        if opened is None:
            result = process.run(download, insist=True)
            assert result is not None  # only a download ahead gives way
        else:
            result = Result(opened, "hit")
        process.touch(result.opened)
        facts = {"event": result.outcome, "shard": str(shard)}
        logger.debug("%s: %s", shard, result.outcome, extra=facts)
        return result

    # -- files that are not cached -------------------------------------------------

    def is_in_place(self, shard: ShardURL) -> bool:
        """Return whether a shard is a local file that is read in place and not cached."""
        return shard.is_local and not self.config.cache_local

    def refuse_in_place(self, shard: ShardURL) -> None:
        """Raise ConfigError for a shard that is read in place."""
        if self.is_in_place(shard):
            raise ConfigError(
                f"{shard.local_path} is opened where it is and not cached. "
                f"{advise_scheme(shard, 'Set cache_local if it lies on a slow mount.')}",
                url=str(shard),
            )


def _open_in_place(shard: ShardURL) -> BinaryIO:
    path = str(shard.local_path)
    try:
        return open(path, "rb")
    except FileNotFoundError as exn:
        raise ShardNotFoundError(
            f"{path} does not exist. {advise_scheme(shard, 'Check the pattern.')}", url=str(shard)
        ) from exn
