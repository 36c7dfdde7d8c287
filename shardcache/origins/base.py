"""The interface between downloads and origins, and the errors for refused requests.

An origin raises its own exception after the ``except`` block. Otherwise, error reporters (Sentry,
rich) would print its ``__context__``, an exception of a library that may quote a signed URL.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from shardcache.errors import AccessDeniedError, ConfigError, ShardNotFoundError
from shardcache.urls import ShardURL, advise_name, advise_scheme, unexpanded

if TYPE_CHECKING:
    import socket

#: HTTP statuses below 500 after which another attempt may succeed: timeouts and throttling.
_TRANSIENT = frozenset({408, 425, 429})
#: Server faults that last: not implemented, and an unknown HTTP version. All other statuses from
#: 500 on are transient, also unknown ones (RFC 9110, 15), such as 520 to 527 of Cloudflare.
_LASTING = frozenset({501, 505})

#: The text of the error for a bucket that does not exist.
NO_BUCKET = "there is no bucket"


class TransientError(Exception):
    """This attempt failed, but the next one may succeed."""

    def __init__(
        self,
        reason: str,
        *,
        retry_after: float | None = None,
        timed_out: bool = False,
        patient: bool = False,
    ) -> None:
        super().__init__(reason)
        self.patient = patient  # waited out, not counted as an attempt: throttling, credentials
        self.retry_after = retry_after  # seconds, from the origin's Retry-After header
        self.timed_out = timed_out  # the origin was silent; it did not refuse


class RepeatError(Exception):
    """The request has to be sent again at once, because its response said how.

    Args:
        remedy: what the next request does differently. `retry` applies each remedy once.
        error: the error to raise if the remedy does not help.
        apply: applies the remedy, or returns False if it cannot.
    """

    def __init__(
        self, remedy: str, error: Exception, apply: Callable[[], object] = lambda: True
    ) -> None:
        super().__init__(remedy)
        self.remedy, self.error, self.apply = remedy, error, apply


class VersionChangedError(Exception):
    """The object no longer has the requested version (status 412), or became shorter (416)."""


def failure(kind: type[OSError], text: str) -> OSError:
    """Return a connection error with an ``errno``; one without is taken for a signal handler's."""
    error = kind(text)
    error.errno = errno.EPROTO
    return error


def receive(sock: socket.socket, buffer: memoryview, count: int, flags: int) -> int:
    """Call ``recv_into``. Return -1 if nothing came for the time of SO_RCVTIMEO."""
    try:
        return sock.recv_into(buffer, count, flags)
    except BlockingIOError as exn:
        # If a signal handler raised it, in a frame of its own, bytes may have left the socket.
        if exn.__traceback__ is not None and exn.__traceback__.tb_next is not None:
            raise
        return -1


def refusal(
    shard: ShardURL,
    status: int,
    reason: str,
    *,
    hint: str = "check the credentials, and whether a signed URL expired",
    headers: Mapping[str, str] | None = None,
    throttled: bool = False,
) -> Exception:
    """Return the exception for a refused request of any protocol.

    Args:
        status: the HTTP status, or its nearest equivalent.
        reason: the name of the server and its reason for the refusal, without secrets.
        hint: advice for the error message if access is denied.
        headers: the response headers, which may contain Retry-After.
        throttled: whether the origin's error code means throttling.
    """
    if status == 412:
        return VersionChangedError(str(shard))
    if status == 416:
        return VersionChangedError(f"{shard} became shorter")
    if throttled or status in _TRANSIENT or (status >= 500 and status not in _LASTING):
        text = (headers or {}).get("retry-after", "")
        # The date in a Retry-After is rare and ignored: the jitter of `retry` is pause enough.
        seconds = float(text) if text.isdecimal() and len(text) < 20 else None
        throttled |= status == 429 or (status == 503 and bool(text))
        return TransientError(reason, retry_after=seconds, patient=throttled)
    if status in (403, 404, 410) and (error := unexpanded(shard)):
        return error
    if status in (404, 410):
        advice = advise_scheme(shard, "Check the name and the endpoint.")
        text = f"{shard}: not found ({reason}). {advice}"
        if shard.scheme == "s3" and "NoSuchBucket" in reason:
            text = f"{shard}: {NO_BUCKET} {shard.bucket_and_key()[0]} ({reason}). "
            text += "Check the name and the endpoint."
        return ShardNotFoundError(f"{text}{advise_name(str(shard))}", url=str(shard))
    if status == 407:
        hint = "the proxy demands a login; check http_proxy and https_proxy"
    if status in (401, 403, 407):
        return AccessDeniedError(f"{shard}: access denied ({reason}): {hint}.", url=str(shard))
    text = f"{shard}: the request is refused ({reason}). Check the region, the endpoint and "
    return ConfigError(f"{text}the URL.", url=str(shard))


@functools.lru_cache(256)  # a download needs that of its version several times
def _hash(*parts: str | int | None) -> str:
    text = json.dumps(parts).encode()
    return hashlib.blake2b(text, digest_size=12, usedforsecurity=False).hexdigest()


class Checksum(NamedTuple):
    """A checksum of the whole object, as the origin states it."""

    algorithm: str  # crc32, crc32c, crc64nvme, sha1 or sha256
    value: str  # base64, as S3 sends it


class ObjectInfo(NamedTuple):
    """One version of an object, as its origin describes it."""

    size: int | None  # bytes; None if the origin does not state it in advance
    etag: str | None = None  # including its quotes
    version_id: str | None = None  # set if the origin keeps several versions
    modified: str | None = None  # modification time, in the origin's own format
    checksum: Checksum | None = None  # of the whole object, if stated

    @property
    def version(self) -> str:
        """Return a hash (24 hex digits) of the version id, or of the size and ETag or timestamp."""
        if self.version_id and self.version_id != "null":
            return _hash("version-id", self.version_id)
        if self.etag:
            return _hash("etag", self.etag, self.size)
        return _hash("mtime", self.modified, self.size)

    def is_of(self, version: str, size: int | None) -> bool:
        """Return whether this is a version; with a strong ETag also if one of the sizes is unknown,
        because a server may at first send an object in chunks.
        """
        is_weak = not self.etag or self.etag.startswith("W/")
        known = self if is_weak or None not in (size, self.size) else self._replace(size=size)
        return known.version == version

    @property
    def identifiable(self) -> bool:
        """Whether two responses can be compared. If not, one response must have the whole shard."""
        return bool(self.version_id or self.etag or self.modified)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> ObjectInfo:
        """Return the object of a record; raise KeyError, TypeError or ValueError if malformed."""
        checksum = record["checksum"]
        size, texts = record["size"], [record["etag"], record["version_id"], record["modified"]]
        texts += dict(checksum or {}).values()
        if size is not None and (type(size) is not int or size < 0):
            raise ValueError("size")
        if not set(map(type, texts)) <= {str, NoneType}:
            raise TypeError("a field that is not text")
        return cls(**{**record, "checksum": checksum and Checksum(**checksum)})


class Body(Protocol):
    """The body of one response, while it is received."""

    info: ObjectInfo  # the version that the bytes belong to
    start: int  # offset of the first byte; 0 if the origin ignored the requested range
    stop: int | None  # offset after the last byte; None if unknown, for the object's end
    waited: float = 0.0  # seconds from the request to the first byte of the response, if known
    #: Whether a length, a last chunk or an exit status proves that no bytes are missing.
    proven: bool = True

    def readinto(self, buffer: memoryview) -> int:
        """Read into ``buffer``; return the number of bytes, 0 at the end. Raises TransientError."""
        ...

    def abort(self) -> None:
        """Make a `readinto` that blocks in another thread return or raise soon."""
        ...

    def close(self) -> None:
        """Release the connection for reuse, or close it if bytes are left unread."""
        ...


class Origin(Protocol):
    """A source of shards. All threads of the process that made it may use it at once."""

    #: Whether each response shows the version of its bytes. If not, a download calls `stat` again
    #: after its last byte, to find out whether the object has changed.
    proves_version: bool = False
    #: Whether `stat` may return a checksum.
    states_checksums: bool = False
    #: Whether `list_page` sends one request and sorts by name, so that prewarms may list sizes.
    lists_pages: bool = False
    #: The name of the upstream that has this copy; "" for the origin itself.
    upstream: str = ""
    transport: Any = None  #: a `connection.Transport`, once there is one, if connections are kept
    #: For an upstream, the version of its copy, and the tree digest if the upstream states it.
    stated: ObjectInfo | None = None
    digest: str | None = None

    def __init__(self, scheme: str, options: Mapping[str, Any], timeout: float) -> None:
        """Send no request yet. An attempt has to fail after ``timeout`` seconds without data."""

    def open(
        self, shard: ShardURL, start: int, stop: int | None, expected: ObjectInfo | None = None
    ) -> Body:
        """Request a range of bytes.

        Args:
            start: offset of the first byte.
            stop: offset after the last byte, which may exceed the size; None reads to the end.
            expected: the version that the response must have; None accepts any version.

        Raises:
            ShardNotFoundError, AccessDeniedError, ConfigError: another attempt would also fail.
            VersionChangedError: the object is no longer ``expected``.
            TransientError: another attempt may succeed.
        """
        ...

    def stat(self, shard: ShardURL) -> ObjectInfo:
        """Return the current version, with its checksum if stated. Raises the errors of `open`."""
        ...

    def list_page(
        self, directory: ShardURL, prefix: str, token: str, *, deep: bool
    ) -> tuple[Mapping[str, int | None], str]:
        """Return the sizes of files by their names below a directory, and the next page's token.

        Args:
            prefix: the beginning of the names that are needed. The page may have others, too.
            token: "" for the first page. The token of the page after the last one is "", too.
            deep: whether to list the directories in this one as well.

        Raises the errors of `open`.
        """
        text = f"{directory}: {directory.scheme}:// cannot be listed. "
        raise ConfigError(f"{text}Write ranges as {{0000..0127}}.", url=str(directory))

    def ended(self, exn: Exception | None = None) -> None:
        """Note how reading a shard ended. After faults, an upstream is left alone for a while."""
        return

    def prepare(self) -> object:
        """Set up the client, if that takes time, so that the first request need not."""
        return None


def compare_version(origin: Origin, shard: ShardURL, info: ObjectInfo) -> None:
    """Raise VersionChangedError if the current version of an object is not that of ``info``."""
    if not origin.stat(shard).is_of(info.version, info.size):
        raise VersionChangedError(str(shard))


def skip(body: Body, position: int) -> int:
    """Discard the bytes before ``position`` if the range was ignored. Return their number."""
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
    """Return up to ``most`` bytes of a body, and close it."""
    data, buffer = b"", memoryview(bytearray(min(most, 64 * 1024)))
    with contextlib.closing(body):
        while len(data) < most and (count := body.readinto(buffer[: most - len(data)])):
            data += buffer[:count]
    return data
