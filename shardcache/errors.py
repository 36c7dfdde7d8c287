"""Every error that shardcache raises on purpose.

The message says what happened, to which shard, and what to do next. It holds no credentials:
callers pass redacted URLs. Most classes also derive from the builtin exception that other code
would catch (``FileNotFoundError``, ...). An error can be pickled, also after WebDataset's handlers
have appended the URL to its ``args``.
"""

from __future__ import annotations

import errno
from typing import Any, TypeGuard


class ShardCacheError(Exception):
    """Base class of all errors raised by shardcache.

    Args:
        message: what happened, to which shard, and what to do, in one or two sentences.
        *appended: further ``args``, for unpickling.
        **fields: facts for programs; each becomes an attribute.
    """

    def __init__(self, message: str, *appended: object, **fields: Any) -> None:
        super().__init__(message, *appended)
        self.__dict__.update(fields)

    @property
    def message(self) -> str:
        """The message this error was raised with."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        return self.message  # without what handlers appended: it already names the shard


class ConfigError(ShardCacheError, ValueError):
    """An option, a URL or an environment variable is invalid. Nothing was changed."""


class ShardNotFoundError(ShardCacheError, FileNotFoundError):
    """The shard does not exist at the origin (404). Never retried."""

    errno = errno.ENOENT


class AccessDeniedError(ShardCacheError, PermissionError):
    """The origin refuses the credentials in use (401, 403). Never retried."""

    errno = errno.EACCES


class TransferError(ShardCacheError):
    """The shard could not be read from its origin within the allowed number of attempts.

    It is no ``OSError``: that is a fault of the local disk, after which a shard is streamed.
    """


class TransferTimeoutError(TransferError):
    """The origin stopped sending, or the download missed its deadline."""


class FetchCancelledError(TransferError):
    """This process cancelled the download. The next reader resumes it."""


class UnprovenError(ShardCacheError):
    """The response does not prove that it is complete, so the shard is not stored."""


class IntegrityError(ShardCacheError):
    """The data does not match the checksum or size that the origin or the entry records."""


class CacheFullError(ShardCacheError, OSError):
    """The cache has no room for the shard, and may evict nothing to make room."""

    errno = errno.ENOSPC


class LockTimeoutError(ShardCacheError, TimeoutError):
    """Another process held the lock of the shard for longer than ``lock_timeout``."""

    errno = errno.ETIMEDOUT


class WaitTimeoutError(ShardCacheError, TimeoutError):
    """A wait of `shardcache.sync` reached its timeout."""

    errno = errno.ETIMEDOUT


class BarrierTimeoutError(WaitTimeoutError):
    """Not all ranks reached a barrier in time; ``missing`` lists the absent ones."""


class InTheWayError(ShardCacheError, FileExistsError):
    """A directory cannot be made, because something else has its name."""

    errno = errno.EEXIST


class OnceError(ShardCacheError, RuntimeError):
    """Work that another rank did for all ranks failed there; ``traceback`` is the text."""


class BoardError(ShardCacheError, ConnectionError):
    """Ranks cannot communicate, because the store of torch.distributed does not answer."""

    errno = errno.ECONNRESET


def is_local_error(exn: BaseException) -> TypeGuard[OSError]:
    """Whether an error is one of the local disk or the process, and none of shardcache's own."""
    return isinstance(exn, OSError) and not isinstance(exn, ShardCacheError)
