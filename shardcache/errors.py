"""The exceptions that shardcache raises on purpose.

A message says what happened, to which shard, and what to do next, without credentials. Most
classes also derive from the built-in exception that other code would catch. An error can be
pickled, even after a handler of WebDataset has appended the URL to its ``args``.
"""

from __future__ import annotations

import errno
from typing import Any

#: Removed names, commands and options, and what to use instead. Errors quote these sentences.
REMOVED = {
    "option protect_for": "Shards of running jobs stay for a day after their last use.",
    "option stats": "Every process counts; leave the option out.",
    "option touch_interval": "A last use is recorded at most every ten minutes.",
    "policy fifo": "fifo was removed. Use lru, which keeps what is still read.",
    "shardcache demo": "Run examples/demo.py of the repository.",
    "shardcache recipe": "Copy a file from the folder examples of the repository.",
    "shardcache.lightning": "Copy the callback from docs/integrations.md, section Lightning.",
    "shardcache.telemetry": "OpenTelemetry collectors read `shardcache stats --format prometheus`.",
    "verify --remote": "`prewarm --refresh -n` says how many shards their origins have replaced.",
    "verify --sample": "Name some of the shards, such as 'train-00*.tar'.",
    "shardcache.wids": "Use TarDataset, or the function in docs/integrations.md, section wids.",
}


class ShardCacheError(Exception):
    """The base class of all errors raised by shardcache.

    ``fields`` are details for programs, such as ``url``; each becomes an attribute. Unpickling
    passes the ``args`` that a handler has appended.
    """

    def __init__(self, message: str, *appended: object, **fields: Any) -> None:
        super().__init__(message, *appended)
        self.__dict__.update(fields)

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        return self.message  # omit the URL that a handler appended: the message names the shard


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

    It is not an ``OSError``, because an ``OSError`` means a fault of the local disk, after which
    the shard is streamed from its origin.
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
    """The cache has no room for the shard, and cannot make room by evicting others."""

    errno = errno.ENOSPC


class LockTimeoutError(ShardCacheError, TimeoutError):
    """Another process held the lock of the shard for longer than ``lock_timeout``."""

    errno = errno.ETIMEDOUT


class WaitTimeoutError(ShardCacheError, TimeoutError):
    """A wait of `shardcache.sync` reached its timeout."""

    errno = errno.ETIMEDOUT


class BarrierTimeoutError(WaitTimeoutError):
    """Not all ranks reached a barrier in time; ``missing`` lists the absent ranks."""


class InTheWayError(ShardCacheError, FileExistsError):
    """A directory cannot be created, because its path names something else, such as a file."""

    errno = errno.EEXIST


class OnceError(ShardCacheError, RuntimeError):
    """The rank that did some work for all ranks failed; ``traceback`` is its traceback as text."""


class TorchStoreError(ShardCacheError, ConnectionError):
    """Ranks cannot communicate, because the store of torch.distributed does not respond."""

    errno = errno.ECONNRESET
