"""Every error shardcache raises on purpose.

One message, whose last sentence says what to do next. Each class also derives from the builtin a
caller would catch without knowing shardcache (``FileNotFoundError``, ``PermissionError``, ...). An
error survives pickling, also after ``exn.args += (url,)`` as WebDataset's handlers do it; its text
holds no credential (callers pass redacted URLs only).
"""

from __future__ import annotations

import errno
from typing import Any, TypeGuard


class ShardCacheError(Exception):
    """Base of all errors raised by shardcache.

    Args:
        message: one or two sentences: what happened, to which shard, what to do.
        **fields: facts a program may want; kept as attributes.
    """

    def __init__(self, message: str, *grown: object, **fields: Any) -> None:
        super().__init__(message, *grown)  # what handlers have added, when it is unpickled
        self.__dict__.update(fields)

    @property
    def message(self) -> str:
        """The sentence this error was raised with."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        # args may have grown by a URL; the message names the shard already.
        return self.message


class ConfigError(ShardCacheError, ValueError):
    """An option, a URL or an environment that cannot work. Nothing was touched."""


class ShardNotFoundError(ShardCacheError, FileNotFoundError):
    """The origin says that the shard does not exist (404). Never retried."""

    errno = errno.ENOENT


class AccessDeniedError(ShardCacheError, PermissionError):
    """The origin refuses the credentials in force (401, 403). Never retried."""

    errno = errno.EACCES


class TransferError(ShardCacheError, OSError):
    """The origin could not be read after the allowed number of attempts."""

    errno = errno.EIO


class TransferTimeoutError(TransferError, TimeoutError):
    """The origin stopped sending, or the fetch passed its deadline."""

    errno = errno.ETIMEDOUT


class FetchCancelledError(TransferError):
    """This process called the fetch off; what was fetched can be resumed."""

    errno = errno.ECANCELED


class UnprovenError(ShardCacheError, OSError):
    """Nothing proves that the origin sent all of a shard, so it is not stored."""

    errno = errno.EIO


class IntegrityError(ShardCacheError):
    """Bytes do not match what the origin or the entry's own record states."""


class CacheFullError(ShardCacheError, OSError):
    """There is no room for the shard and nothing may be evicted."""

    errno = errno.ENOSPC


class LockTimeoutError(ShardCacheError, TimeoutError):
    """Another process held the shard for longer than this caller may wait."""

    errno = errno.ETIMEDOUT


class WaitTimeoutError(ShardCacheError, TimeoutError):
    """What `shardcache.sync` waited for did not come in time."""

    errno = errno.ETIMEDOUT


class BarrierTimeoutError(WaitTimeoutError):
    """Not all ranks came to a barrier; ``missing`` names them."""


class InTheWayError(ShardCacheError, FileExistsError):
    """Something else is where a directory is to be."""

    errno = errno.EEXIST


class OnceError(ShardCacheError, RuntimeError):
    """What another rank ran for all of them failed there; ``traceback`` is its text."""


class BoardError(ShardCacheError, ConnectionError):
    """Ranks cannot tell one another anything: the store of torch.distributed does not answer."""

    errno = errno.ECONNRESET


def is_local_error(exn: BaseException) -> TypeGuard[OSError]:
    """Whether an error is one of the local disk or the process, and none of shardcache's own."""
    return isinstance(exn, OSError) and not isinstance(exn, ShardCacheError)
