"""Open a shard from the cache if possible, and bypass the cache otherwise.

    look for the entry --- the disk cannot be read ------------> bypass the cache
      | miss
    a `stream.ShardStream` over a download in the background:
      wait, link or download --- the disk cannot be written ---> bypass the cache
        | the cache fails in another way ----------------------> bypass the cache

With ``strict``, the cache is never bypassed, and its faults are raised. The same holds for
`pin_shard`, whose caller needs a local path.
"""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING, BinaryIO

from shardcache import clock
from shardcache.download.download import Download
from shardcache.errors import LockTimeoutError, ShardCacheError, ShardNotFoundError
from shardcache.faults import os_error
from shardcache.files import is_file
from shardcache.process import ProcessCache
from shardcache.reading.fallback import read_nearest, read_past
from shardcache.reading.readers import DownloadReader
from shardcache.reading.stream import ShardStream
from shardcache.store.directory import DamagedError
from shardcache.store.entry import Opened
from shardcache.urls import ShardURL, advise_scheme, unexpanded

if TYPE_CHECKING:
    from shardcache.reading.readers import Reader

logger = logging.getLogger(__name__)

#: Seconds between attempts to pin an entry while a stopped process is about to evict it.
_STUCK_POLL = 0.25
#: Bytes of a stream's buffer. WebDataset reads 10 KiB at a time, and with Python's default buffer
#: each read would be a system call.
BUFFER = 1 << 18


def open_shard(
    cache: ProcessCache,
    shard: ShardURL,
    *,
    finish: bool = True,
    whole: bool = False,
    ahead: Opened | DownloadReader | None = None,
) -> BinaryIO:
    """Return a stream of the shard.

    Args:
        cache: the cache to read through.
        shard: the shard to open.
        finish: whether to complete a download even if the stream is closed earlier.
        whole: whether to wait until the shard is complete, even with ``fill="follow"``. Then the
            stream has a descriptor (``fileno``), unless it bypasses the cache.
        ahead: an entry or a download that a look-ahead began; the stream takes it over.

    Raises:
        The errors of `Cache.open`.
    """
    if shard.scheme == "file" and cache.is_in_place(shard):
        return _open_in_place(shard)
    started = clock.monotonic()
    if isinstance(ahead, DownloadReader) and not ahead.attend():
        ahead.close()
        ahead = None
    opened = ahead if isinstance(ahead, Opened) else None
    try:
        if ahead is None:
            directories = cache.directories
            if directories is None or cache.disk.reading.faults:
                opened = cache.lookup(shard)
            else:  # hot path: keep the number of calls small
                try:
                    opened = directories.open(shard.key, shard.basename)
                except (DamagedError, os_error()):
                    opened = cache.lookup(shard)
        reader = opened or ahead or DownloadReader(cache, shard, finish=finish)
    except (ShardCacheError, os_error()) as exn:
        return _buffered(cache, shard, read_past(cache, shard, exn))
    if opened is None:
        return _buffered(cache, shard, reader, whole=whole)
    stream = ShardStream(cache, shard, reader)
    cache.touch(opened)
    tiers = cache.tiers
    tier = tiers.index(cache.tier_of(opened.directory)) if len(tiers) > 1 else None
    cache.counters.opened("hit", clock.monotonic() - started, tier)
    if logger.isEnabledFor(logging.DEBUG):
        facts = {"event": "hit", "shard": str(shard), "bytes": opened.size}
        logger.debug("%s: hit", shard, extra=facts)
    return io.BufferedReader(stream, BUFFER)


def _buffered(
    cache: ProcessCache, shard: ShardURL, reader: Reader, *, whole: bool = False
) -> BinaryIO:
    stream = ShardStream(cache, shard, reader)
    stream.wait(whole=whole or cache.config.fill == "complete")
    return io.BufferedReader(stream, BUFFER)


def stream_file(cache: ProcessCache, file: ShardURL) -> BinaryIO:
    """Return a stream of a file without storing it. Raises the errors of `Cache.open`."""
    return _buffered(cache, file, read_nearest(cache, file))


def pin_shard(cache: ProcessCache, shard: ShardURL) -> Opened:
    """Return an entry that stays at its path until closed.

    Raises the errors of `ProcessCache.obtain`.
    """
    started = clock.monotonic()
    while True:
        opened, outcome = cache.obtain(Download(shard))
        waited = clock.monotonic() - started
        if not opened.stuck and is_file(opened.path, opened.fd):
            cache.counters.opened(outcome, waited)
            cache.counters.read(opened.size)  # assume that the caller reads the whole file
            return opened
        opened.close()  # the entry was evicted before it was pinned, or is being evicted
        if opened.stuck:
            if waited >= cache.config.lock_timeout:
                raise LockTimeoutError(
                    f"{shard} is being evicted by a process that does not continue. Look for "
                    "one that is stopped, or read the shard with open().",
                    url=str(shard),
                )
            clock.sleep(_STUCK_POLL)


def _open_in_place(shard: ShardURL) -> BinaryIO:
    path = str(shard.local_path)
    try:
        return open(path, "rb")
    except FileNotFoundError as exn:
        raise unexpanded(shard) or ShardNotFoundError(
            f"{path} does not exist. {advise_scheme(shard, 'Check the pattern.')}", url=str(shard)
        ) from exn
