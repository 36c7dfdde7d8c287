"""The protocol between downloads and origins, and the meaning of refusals.

Errors of lower libraries contain whole URLs, with signatures. So an origin makes its own error
inside ``except`` and raises it after the block. Raised inside, it would refer to the other error,
which tools that collect errors (Sentry, rich) would print.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from shardcache.errors import AccessDeniedError, ConfigError, ShardNotFoundError
from shardcache.urls import ShardURL

#: Statuses of HTTP after which another attempt may succeed: time-outs, throttling, trouble inside.
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})


class TransientError(Exception):
    """This attempt failed and the next may succeed."""

    def __init__(
        self,
        reason: str,
        *,
        retry_after: float | None = None,
        timed_out: bool = False,
        patient: bool = False,
    ) -> None:
        super().__init__(reason)
        self.patient = patient  # it ends without action: throttling, a busy credential service
        self.retry_after = retry_after  # seconds; the origin's Retry-After
        self.timed_out = timed_out  # by silence rather than a refusal


class VersionChangedError(Exception):
    """The object is no longer the requested version (412), or became shorter (416)."""


def refusal(
    shard: ShardURL,
    status: int,
    reason: str,
    *,
    hint: str = "check the credentials, and whether a signed URL expired",
    headers: Mapping[str, str] | None = None,
    throttled: bool = False,
) -> Exception:
    """Return the error for a refusal, of any protocol.

    Args:
        shard: the shard.
        status: the HTTP status, or its nearest equivalent.
        reason: the name of the server and its reason, without secrets.
        hint: advice if access is denied.
        headers: of the response.
        throttled: whether the origin's error code means throttling.
    """
    if status == 412:
        return VersionChangedError(str(shard))
    if status == 416:
        return VersionChangedError(f"{shard} became shorter")
    if throttled or status in _TRANSIENT:
        text = (headers or {}).get("retry-after", "")
        # Not a date, which is rare: full jitter will do.
        seconds = float(text) if text.isdecimal() and len(text) < 20 else None
        throttled |= status == 429 or (status == 503 and seconds is not None)
        return TransientError(reason, retry_after=seconds, patient=throttled)
    if status in (404, 410):
        text = f"{shard}: not found ({reason}). Check the pattern and the endpoint."
        if shard.scheme == "s3" and "NoSuchBucket" in reason:
            name, _ = shard.bucket_and_key()
            text = (
                f"{shard}: there is no bucket {name} ({reason}). Check the name and the endpoint."
            )
        return ShardNotFoundError(text, url=str(shard))
    if status in (401, 403, 407):
        return AccessDeniedError(f"{shard}: access denied ({reason}): {hint}.", url=str(shard))
    text = (
        f"{shard}: the request is refused ({reason}). Check the region, the endpoint and the URL."
    )
    return ConfigError(text, url=str(shard))


class Checksum(NamedTuple):
    """A digest of the whole object that the origin states."""

    algorithm: str  # crc32, crc32c, crc64nvme, sha1 or sha256
    value: str  # base64, as S3 sends it


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One version of an object, as its origin describes it."""

    size: int | None  # bytes; None if the origin does not state it beforehand
    etag: str | None = None  # with its quotes
    version_id: str | None = None  # if the origin keeps several versions
    modified: str | None = None  # the origin's modification time
    checksum: Checksum | None = None  # of all bytes, if the origin states one

    @property
    def version(self) -> str:
        """Return 24 hexadecimal digits: a hash of VersionId, or of the size and ETag or time."""
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
        """Whether responses can be compared; if not, one response must have the whole shard."""
        return bool(self.version_id or self.etag or self.modified)

    def as_record(self) -> dict[str, Any]:
        """Return the fields as values for JSON. `dataclasses.asdict` takes ten times as long."""
        record = {name: getattr(self, name) for name in self.__slots__}
        return {**record, "checksum": self.checksum and self.checksum._asdict()}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> ObjectInfo:
        """Read the result of `as_record`; raise KeyError, TypeError or ValueError if it is none."""
        stated = record["checksum"]
        size, texts = record["size"], [record["etag"], record["version_id"], record["modified"]]
        if size is not None and (type(size) is not int or size < 0):
            raise ValueError("size")
        if not all(isinstance(t, str) for t in (*texts, *(stated or {}).values()) if t is not None):
            raise TypeError("a field that is not text")
        return cls(**{**record, "checksum": stated and Checksum(**stated)})


class Body(Protocol):
    """The body of one response while it is received."""

    #: The version these bytes belong to.
    info: ObjectInfo
    #: Offset of the first byte; 0 if the origin ignores ranges.
    start: int
    #: Offset behind the last byte; None if the response ends with the object.
    stop: int | None
    #: Seconds from the request to the first byte of the response; 0 if unknown.
    waited: float = 0.0
    #: Whether its end proves that nothing is missing: a length, a last chunk, an exit status.
    proven: bool = True

    def readinto(self, buffer: memoryview) -> int:
        """Read up to ``len(buffer)`` bytes; 0 at the end. TransientError: the connection failed."""
        ...

    def abort(self) -> None:
        """Make a blocked `readinto` of another thread return or raise, soon."""
        ...

    def close(self) -> None:
        """Give the connection back, or drop it when bytes are left."""
        ...


class Origin(Protocol):
    """A source of shards. Several threads of the process that made it may use it at once."""

    #: Whether a request can insist on a version. If not, a download describes the object again
    #: after its last byte.
    conditional: bool
    #: Whether `stat` may return a checksum.
    states_checksums: bool

    def open(
        self, shard: ShardURL, start: int, stop: int | None, expected: ObjectInfo | None = None
    ) -> Body:
        """Request a range of bytes.

        Args:
            shard: the shard.
            start: offset of the first byte.
            stop: offset behind the last byte, which may exceed the size; None reads to the end.
            expected: the version that the response must have.

        Raises:
            ShardNotFoundError, AccessDeniedError, ConfigError: another attempt would fail, too.
            VersionChangedError: the object is no longer ``expected``.
            TransientError: another attempt may succeed.
        """
        ...

    def stat(self, shard: ShardURL) -> ObjectInfo:
        """Describe the current version of the object, with its checksum. Raises as `open` does."""
        ...


def skip(body: Body, position: int) -> int:
    """Read up to ``position`` if the origin ignored the range. Returns the bytes passed over."""
    if body.start not in (0, position):
        raise TransientError(f"asked for byte {position}, the origin began at {body.start}")
    left = position - body.start
    scratch = memoryview(bytearray(min(left, 1 << 20)))
    while left:
        count = body.readinto(scratch[:left])
        if count == 0:
            raise TransientError("the origin ended early")
        left -= count
    return position - body.start


def read_all(body: Body, most: int) -> bytes:
    """Read up to ``most`` bytes of a body, and close it."""
    found, buffer = b"", memoryview(bytearray(min(most, 64 * 1024)))
    with contextlib.closing(body):
        while len(found) < most and (count := body.readinto(buffer[: most - len(found)])):
            found += buffer[:count]
    return found
