"""What went wrong, and what follows: whether there is a way past it, and how it is counted."""

from __future__ import annotations

import errno
import os
from typing import TypeGuard

from shardcache.breaker import Breaker
from shardcache.errors import (
    CacheFullError,
    FetchCancelledError,
    IntegrityError,
    LockTimeoutError,
    ShardCacheError,
    TransferError,
)
from shardcache.urls import ShardURL

__all__ = ["TOO_MANY_FILES", "PausedError", "can_open", "exhausted", "gate", "is_final", "kind_of"]

TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
#: A socket, and what is open for a moment beside it: a name server, a file of certificates,
#: the machine's own configuration.
_CONNECTION_FILES = 4


class PausedError(OSError):
    """The disk failed lately and is left alone."""


def kind_of(fault: Exception) -> str | None:
    """The counter of an error."""
    if isinstance(fault, CacheFullError):
        return "bypassed_full"
    if isinstance(fault, LockTimeoutError):
        return "errors_lock"
    if isinstance(fault, IntegrityError):
        return "errors_integrity"
    if isinstance(fault, (PausedError, FetchCancelledError)):
        return None
    return "errors_origin" if isinstance(fault, ShardCacheError) else "errors_disk"


def is_final(error: BaseException | None) -> TypeGuard[ShardCacheError]:
    """Whether the origin, and not the cache, said no."""
    passing = (CacheFullError, LockTimeoutError, FetchCancelledError)
    return isinstance(error, ShardCacheError) and not isinstance(error, passing)


def gate(breaker: Breaker, gated: bool) -> None:
    """Go on, unless the disk is to be left alone and there is a way past it."""
    if gated and not breaker.allows():
        raise PausedError(errno.EIO, f"the disk failed; tried again in {breaker.left:.0f} s")


def can_open() -> bool:
    """Whether there are as many descriptors left as a connection may take."""
    fds = []
    try:
        for _ in range(_CONNECTION_FILES):
            fds.append(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as exn:
        return exn.errno not in TOO_MANY_FILES
    finally:
        for fd in fds:
            os.close(fd)
    return True


def exhausted(shard: ShardURL, cause: OSError) -> TransferError:
    """Neither the cache nor the origin can be opened, for a reason that is our own."""
    whose = "this process has" if cause.errno == errno.EMFILE else "the machine has"
    return TransferError(
        f"{shard} cannot be opened: {whose} too many open files. Close streams that were read "
        "to their end, or raise the limit (ulimit -n).",
        url=str(shard),
        errno=cause.errno,
    )
