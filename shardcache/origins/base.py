"""What the fetch engine asks of the place a shard comes from.

Every origin may be used by several threads at once, in the process that made it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

from shardcache.urls import ShardURL

_P = ParamSpec("_P")
_R = TypeVar("_R")


def unchained(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make what ``function`` raises forget what it was raised instead of.

    The texts of lower libraries name whole URLs, signatures included. After ``from None``
    a traceback leaves them out, but the error still holds on to them, and whoever
    collects errors (Sentry, rich) may print them.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _R:
        try:
            return function(*args, **options)
        except Exception as exn:
            one: BaseException | None = exn
            while one is not None:
                if one.__suppress_context__:
                    one.__context__ = None
                one = one.__cause__ or one.__context__
            raise

    return call


class TransientError(Exception):
    """This attempt failed and the next may succeed.

    Attributes:
        retry_after: seconds the origin asked us to stay away, if it did.
        timed_out: whether the cause was silence rather than a refusal.
    """

    def __init__(
        self, reason: str, *, retry_after: float | None = None, timed_out: bool = False
    ) -> None:
        super().__init__(reason)
        self.retry_after = retry_after
        self.timed_out = timed_out


class VersionChangedError(Exception):
    """The object is no longer the version that was asked for (412 and its like)."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """A digest of the whole object that the origin states.

    Attributes:
        algorithm: lower case: crc32, crc32c, crc64nvme, sha1, sha256.
        value: base64, as S3 sends it.
    """

    algorithm: str
    value: str


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One version of an object, as its origin describes it.

    Attributes:
        size: bytes, or None where the origin does not say before the end.
        etag: opaque validator, quotes included where the origin sends them.
        version_id: the origin's own name for the version, where it keeps several.
        modified: the origin's modification time, as text.
        checksum: digest of all bytes, where the origin states one.
    """

    size: int | None
    etag: str | None = None
    version_id: str | None = None
    modified: str | None = None
    checksum: Checksum | None = None

    @property
    def version(self) -> str:
        """24 hexadecimal digits naming this version: of VersionId, else ETag and size.

        The modification time counts only where there is no validator at all.
        """
        if self.version_id and self.version_id != "null":
            parts: list[Any] = ["version-id", self.version_id]
        elif self.etag:
            parts = ["etag", self.etag, self.size]
        else:
            parts = ["mtime", self.modified, self.size]
        text = json.dumps(parts).encode()
        return hashlib.blake2b(text, digest_size=12, usedforsecurity=False).hexdigest()

    @property
    def identifiable(self) -> bool:
        """Whether two answers can be told to be of one version.

        Where they cannot, an object is read by a single request or not at all.
        """
        return bool(self.version_id or self.etag or self.modified)

    def as_record(self) -> dict[str, Any]:
        """The fields as JSON-ready values."""
        record = {name: getattr(self, name) for name in self.__slots__}
        if self.checksum is not None:
            record["checksum"] = asdict(self.checksum)
        return record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> ObjectInfo:
        """The inverse of `as_record`.

        Raises:
            KeyError, TypeError, ValueError: ``record`` is not one.
        """
        stated = record["checksum"]
        checksum = None if stated is None else Checksum(**stated)
        info = cls(**{**record, "checksum": checksum})
        if info.size is not None and (type(info.size) is not int or info.size < 0):
            raise ValueError("size")
        texts = [t for t in (info.etag, info.version_id, info.modified) if t is not None]
        if checksum is not None:
            texts += [checksum.algorithm, checksum.value]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a field that is not text")
        return info


class Body(Protocol):
    """Bytes of one response on their way in.

    Attributes:
        info: the version these bytes belong to.
        start: offset of the first byte that will arrive; an origin that ignores
            ranges answers 0 whatever was asked.
        stop: offset behind the last byte promised, or None if not stated; then the
            body goes on to the object's end, whatever was asked.
    """

    info: ObjectInfo
    start: int
    stop: int | None

    def readinto(self, buffer: memoryview) -> int:
        """Read up to ``len(buffer)`` bytes; 0 at the end.

        Raises:
            TransientError: the connection failed.
        """
        ...

    def abort(self) -> None:
        """Make a blocked `readinto` of another thread return or raise, soon."""
        ...

    def close(self) -> None:
        """Give the connection back, or drop it when bytes are left."""
        ...


class Origin(Protocol):
    """Where shards come from.

    Attributes:
        pins: whether it serves a pinned range from that version or not at all;
            if false, the object is described again after its last byte.
        states_checksums: whether `stat` may tell a checksum.
    """

    pins: bool
    states_checksums: bool

    def open(
        self, url: ShardURL, start: int, stop: int | None, pin: ObjectInfo | None = None
    ) -> Body:
        """Ask for bytes ``start`` to ``stop`` (exclusive; None = to the end).

        Args:
            url: the shard.
            start: first byte wanted.
            stop: behind the last byte wanted; more than the object has is fine.
            pin: the version to insist on.

        Raises:
            ShardNotFoundError, AccessDeniedError, ConfigError: for good.
            VersionChangedError: the object is no longer ``pin``.
            TransientError: worth another attempt.
        """
        ...

    def stat(self, url: ShardURL) -> ObjectInfo:
        """Describe the object as it is now, its checksum included.

        Raises:
            As `open`.
        """
        ...


@runtime_checkable
class WholeOrigin(Protocol):
    """An origin that can send an object and describe it in one answer."""

    def whole(self, url: ShardURL, most: int, listed: int | None) -> Body | None:
        """An object from its start, its checksum in ``Body.info`` if one is known.

        Args:
            url: the shard.
            most: bytes to deliver; of a longer one the rest is dropped with the connection.
            listed: bytes that a listing says it has; None without one.

        Returns:
            None if it comes in a form in which its size is another one.

        Raises:
            As `Origin.open`.
        """
        ...
