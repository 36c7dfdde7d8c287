"""Choose the reader that replaces a failed one, and warn about the failure.

    failed     replacement
    entry      the entry, reopened once if its handle is stale; otherwise an upstream or the origin
    download   an upstream or the origin, bypassing the cache
    upstream   the origin
    origin     none, so the user gets the error

If bytes were delivered, the remaining bytes must be of the same version. A fault of the cache is
logged as one warning per kind of fault. It is raised only with ``strict``.
"""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

from shardcache.errors import (
    AccessDeniedError,
    CacheFullError,
    FetchCancelledError,
    IntegrityError,
    LockTimeoutError,
    ShardCacheError,
    ShardNotFoundError,
    TransferError,
    UnprovenError,
)
from shardcache.faults import (
    PausedError,
    fault_kind,
    ignoring,
    is_disk_fault,
    is_local_error,
    os_error,
)
from shardcache.files import is_file
from shardcache.process import ProcessCache
from shardcache.reading.readers import DownloadReader, OriginReader
from shardcache.store.directory import DamagedError
from shardcache.store.entry import Opened, set_aside
from shardcache.store.root import UnusableError

if TYPE_CHECKING:
    from shardcache.reading.readers import Reader
    from shardcache.urls import ShardURL

logger = logging.getLogger(__name__)

_TOO_MANY_FILES = frozenset({errno.EMFILE, errno.ENFILE})
#: The counter of an error. The first class in the error's MRO that is listed here decides.
_COUNTERS = {
    CacheFullError: "streamed_full",
    LockTimeoutError: "errors_lock",
    IntegrityError: "errors_integrity",
    FetchCancelledError: None,
    ShardCacheError: "errors_origin",
    PausedError: None,
    UnusableError: "errors_disk",
    OSError: "errors_disk",
}


def next_reader(
    cache: ProcessCache,
    shard: ShardURL,
    failed: Reader,
    fault: Exception,
    position: int,
    same_version: bool,
) -> Reader:
    """Return the reader that replaces a failed one, which the caller closes.

    Args:
        position: offset of the next byte to read.
        same_version: whether the rest must be of the same version, as bytes were delivered.

    Raises:
        ``fault``, if no reader can replace ``failed``; the errors of the new reader.
    """
    if isinstance(failed, Opened) and is_disk_fault(fault):
        assert isinstance(fault, OSError)
        return _replace_entry(cache, shard, failed, fault, position, same_version)
    if isinstance(failed, DownloadReader):
        return read_past(cache, shard, fault, failed, position, same_version)
    if isinstance(failed, OriginReader) and failed.nearer is not None:
        logger.info("%s: the upstream failed, so the origin serves the rest: %s", shard, fault)
        return OriginReader(cache, shard, position, info=failed.info if same_version else None)
    raise fault  # nothing can replace the origin


def _replace_entry(
    cache: ProcessCache,
    shard: ShardURL,
    opened: Opened,
    fault: OSError,
    position: int,
    same_version: bool,
) -> Reader:
    """Reopen an entry whose handle is stale. Set any other aside, and bypass the cache."""
    entry = opened.entry
    info = None
    with ignoring(DamagedError, OSError):
        if fault.errno == errno.ESTALE and not opened.reopened:
            grace = cache.tier_of(entry.directory).store.layout.grace
            if (again := opened.reopen(grace)) is not None:
                return again
        info = entry.metadata().info
    cache.disk.failed(cache.disk.reading, fault)
    try:
        with cache.prepare().locked(entry.path) as is_locked:
            # Publishing takes this lock, so the path names the same file until the lock is
            # released. If the path names another file now, our file was already replaced.
            if is_locked and is_file(opened.path, opened.fd):
                set_aside(entry.path, f"{shard}: {fault.strerror}")
    except os_error() as exn:
        logger.info("%s: %s cannot be set aside: %s", shard, opened.path, exn)
    if cache.config.strict:
        raise fault
    cache.notices.warn(
        fault_kind(fault),
        "%s cannot be read at byte %d of %s (%s); the rest is streamed",
        shard,
        position,
        opened.path,
        fault.strerror,
    )
    if not same_version:
        return read_nearest(cache, shard, position)
    return OriginReader(cache, shard, position, info=info, stored=entry)


def read_past(
    cache: ProcessCache,
    shard: ShardURL,
    fault: Exception,
    failed: DownloadReader | None = None,
    position: int = 0,
    same_version: bool = False,
) -> OriginReader:
    """Return a reader that bypasses the cache after a fault, and count and log the fault.

    The arguments are those of `next_reader`; ``failed`` is None if no reader could be made.

    Raises:
        ``fault``, with ``strict`` or if it is an error of the origin; the errors of `OriginReader`.
    """
    counter = next(_COUNTERS[kind] for kind in type(fault).__mro__ if kind in _COUNTERS)
    counts = {} if counter is None else {counter: 1}
    try:
        _warn(cache, shard, fault)
        if failed is not None and same_version:
            reader = OriginReader(cache, shard, position, info=failed.info)
        else:
            reader = read_nearest(cache, shard, position, failed)
    except Exception as exn:
        cache.counters.add({"failed": 1, **counts})
        number = getattr(fault, "errno", None)
        is_final = exn is fault or isinstance(exn, (ShardNotFoundError, AccessDeniedError))
        if is_final or number not in _TOO_MANY_FILES:
            raise
        raise TransferError(
            f"{shard} cannot be opened: there are too many open files ({exn}). "
            "Close streams that were read to their end, or raise the limit (ulimit -n).",
            url=str(shard),
            errno=number,
        ) from exn
    cache.counters.add({"streamed": 1, **counts})
    return reader


def _warn(cache: ProcessCache, shard: ShardURL, fault: Exception) -> None:
    """Log why a shard is streamed. Raises ``fault`` if the shard must not be streamed."""
    if isinstance(fault, (CacheFullError, LockTimeoutError, UnprovenError, UnusableError)):
        kind, reason = type(fault).__name__, fault.message
    elif is_local_error(fault):
        kind, reason = fault_kind(fault), str(fault.strerror or fault)
        place = str(fault.filename or cache.config.dir)
        if place not in reason:
            reason = f"{place}: {reason}"
    else:  # an error of the origin, which streaming would only repeat
        raise fault
    if cache.config.strict:
        raise fault
    text = "%s is streamed, not cached: %s"
    facts = {"event": "streamed", "shard": str(shard), "reason": kind}
    if isinstance(fault, (PausedError, UnusableError)):  # logged before
        logger.info(text, shard, reason, extra=facts)
    elif not isinstance(fault, CacheFullError):
        cache.notices.warn(kind, text, shard, reason, extra=facts)
    elif not cache.notices.is_new("full"):
        logger.info(text, shard, reason, extra=facts)
    else:
        config = cache.config
        most = "" if config.max_size is None else f"max_size {config.max_size}, "
        logger.warning(
            "%s is full (%smin_free %s): shards that find no room are streamed each time they are "
            "read; the first is %s. Raise max_size, lower min_free, or free the disk. This is "
            "logged once per job; `shardcache stats` counts them.",
            *(config.dir, most, config.min_free, shard),
            extra=facts,
        )


def read_nearest(
    cache: ProcessCache, shard: ShardURL, position: int = 0, failed: DownloadReader | None = None
) -> OriginReader:
    """Return a reader of the response that ``failed`` kept, or of an upstream, or of the origin."""
    response = failed.take_response() if failed is not None and position == 0 else None
    if position == 0 and response is None:
        for upstream in cache.origins.upstreams(shard):
            try:
                return OriginReader(cache, shard, nearer=upstream)
            except (ShardCacheError, os_error()) as exn:
                upstream.failed(exn)
    return OriginReader(cache, shard, position, response=response)
