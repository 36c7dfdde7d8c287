"""Shards behind any fsspec filesystem: gs, az, hf, memory, slow mounts.

S3 comes this way if our own client cannot sign the requests (`endpoints.needs_s3fs`).

fsspec has no way to insist on a version, so `FsspecOrigin.pins` is false: the engine describes the
object again after the last byte and starts over if it changed meanwhile. Filesystems know no common
time-out, and a hung mount cannot be interrupted, so every call is made in a thread that its caller
gives up on after ``timeout``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shardcache import threads
from shardcache.errors import ConfigError, ShardCacheError
from shardcache.origins.base import ObjectInfo, TransientError, VersionChangedError, refusal
from shardcache.origins.credentials import chain_error
from shardcache.origins.endpoints import s3fs_options
from shardcache.threads import undivided
from shardcache.urls import ShardURL, quoted, redact

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Bytes asked for at once where every read is a request of its own (gs, az, hf).
#: Four blocks: few enough to bound memory, many enough to amortise a round trip.
_READING: dict[str, Any] = {"block_size": 4 << 20, "cache_type": "readahead"}
_VALIDATORS = ("ETag", "etag", "generation", "md5Hash", "content_md5", "Content-MD5", "Digest")
_TIMES = (
    *("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "modified"),
    "created",
)
#: Errors of botocore without an answer of S3; another attempt may succeed.
_UNANSWERED = frozenset({"ConnectionError", "HTTPClientError", "IncompleteReadError"})
_STATUS = {FileNotFoundError: 404, IsADirectoryError: 404, PermissionError: 403}
#: Open files. A forked child keeps those of its parent here: some (of SFTP, for one) send a message
#: over the parent's connection when they are finalised.
_files: dict[int, Any] = {}


class FsspecOrigin:
    """Reads the shards of one fsspec protocol; a call that takes ``timeout`` seconds is dead."""

    pins = False
    states_checksums = False

    def __init__(
        self, protocol: str, storage_options: Mapping[str, Any], *, timeout: float
    ) -> None:
        self._protocol = protocol
        self._options = dict(storage_options)
        self._timeout = timeout
        self._made: Any = None
        self._guard = threading.Lock()

    def open(
        self, url: ShardURL, start: int, stop: int | None, pin: ObjectInfo | None = None
    ) -> FsspecBody:
        """See `base.Origin.open`."""
        info = pin if pin is not None else self.stat(url)
        file = self.call(url, lambda: self._filesystem().open(self._path(url), "rb", **_READING))
        if file.seekable():
            file.seek(start)  # no request yet
        else:
            start, stop = 0, None
        stop = info.size if info.size is None or stop is None else min(stop, info.size)
        return FsspecBody(self, url, file, info, start, stop)

    def stat(self, url: ShardURL) -> ObjectInfo:
        """See `base.Origin.stat`."""

        def info() -> Mapping[str, Any]:
            self._filesystem().invalidate_cache()
            found: Mapping[str, Any] = self._filesystem().info(self._path(url))
            if found.get("type") == "directory":
                raise IsADirectoryError
            return found

        found = self.call(url, info)
        size = found.get("size")
        size = None if size is None else int(size)
        return ObjectInfo(size, _first(found, _VALIDATORS), modified=_first(found, _TIMES))

    def names_below(self, directory: ShardURL, *, deep: bool) -> list[str]:
        """Names of files relative to ``directory``; ``deep`` descends. Takes the time it takes."""

        def names() -> list[str]:
            filesystem = self._filesystem()
            if directory.scheme == "s3":
                root = directory.canonical.removeprefix("s3://").rstrip("/")
            else:
                root = self._path(directory)
            filesystem.invalidate_cache()
            found = filesystem.find(root, maxdepth=None if deep else 1)
            if not found and not filesystem.isdir(root):
                raise FileNotFoundError(root)
            start = len(root.rstrip("/")) + 1
            return [str(name)[start:] for name in found]

        return self.call(directory, names, patient=True)

    def _path(self, url: ShardURL) -> str:
        if url.is_local:
            return str(url.local_path)
        if url.scheme == "s3":
            path = url.canonical.removeprefix("s3://")
            found = self._filesystem().split_path(self._filesystem()._strip_protocol(path))
            if found != (*url.bucket_and_key(), url.version_id):
                raise ConfigError(
                    f"{url} cannot be read: s3fs takes it for another object. A versionId needs "
                    "storage_options={'version_aware': True}.",
                    url=str(url),
                )
            return path
        return str(self._filesystem()._strip_protocol(url.raw))

    def _filesystem(self) -> Any:
        import fsspec

        with self._guard:
            if self._made is None:
                try:
                    # Not the shared instance: it may belong to the parent process,
                    # and its listings cache to whoever made it.
                    self._made = fsspec.filesystem(
                        self._protocol, skip_instance_cache=True, **self._options
                    )
                    if self._protocol == "s3":
                        self._made.retries = 1  # attempts of s3fs: `origins.retry` retries
                except (ImportError, OSError, ValueError, TypeError) as exn:
                    reason = redact(str(exn))
            if self._made is None:
                raise ConfigError(f"{self._protocol}:// cannot be read here: {reason}")
            return self._made

    def call(
        self,
        url: ShardURL,
        function: Callable[[], T],
        answer: Future[T] | None = None,
        *,
        patient: bool = False,
    ) -> T:
        """What ``function`` returns, called in a thread of its own; raises as `base.Origin.open`.

        The thread of a call that never returns stays behind, and does not keep the process from
        ending. Another thread may put an exception into ``answer``, to end the wait; a ``patient``
        call may take any time.
        """
        outcome: Future[T] = Future() if answer is None else answer

        def run() -> None:
            with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
                try:
                    found = function()
                except Exception as exn:  # noqa: BLE001 - every filesystem has its own exceptions
                    outcome.set_exception(exn)
                else:
                    outcome.set_result(found)

        _start(run)
        wait([outcome], None if patient else self._timeout)
        if not outcome.done():
            raise TransientError(f"nothing came for {self._timeout:g} s", timed_out=True)
        if isinstance(failed := outcome.exception(), Exception):
            raise _sorted(failed, url, self._options.get("profile"))
        return outcome.result()


def s3fs_origin(
    reason: str, options: Mapping[str, Any], endpoint_url: str | None, timeout: float
) -> FsspecOrigin:
    """The origin of an S3 bucket that our own client cannot read, because of ``reason``.

    Raises:
        ConfigError: the installed aiobotocore, which s3fs uses, cannot read it either.
    """
    with undivided():  # a fork: this imports
        import aiobotocore.utils
        from botocore.compat import HAS_CRT

        options = s3fs_options(options, endpoint_url)
    if "Express" in reason and not hasattr(aiobotocore.utils, "AioS3ExpressIdentityCache"):
        raise ConfigError(
            f"{reason} take sessions, which aiobotocore {aiobotocore.__version__} cannot open; "
            "install a newer aiobotocore."
        )
    if "multi-region" in reason and not HAS_CRT:
        raise ConfigError(f"{reason} take signatures of awscrt; install awscrt.")
    _announce(reason)
    # Attempts of the SDK below s3fs, as in `FsspecOrigin._filesystem`.
    settings = {"retries": {"total_max_attempts": 1}, **(options.get("config_kwargs") or {})}
    return FsspecOrigin("s3", {**options, "config_kwargs": settings}, timeout=timeout)


@functools.cache
def _announce(reason: str) -> None:
    """Log once per process."""
    logger.info("our own client cannot serve %s: reading through s3fs, which is slower", reason)


def _sorted(exn: Exception, url: ShardURL, profile: str | None) -> Exception:
    """Our error for an exception of a filesystem; ``profile`` is that of S3."""
    if isinstance(exn, (ShardCacheError, TransientError)):
        return exn
    answered = exn if hasattr(exn, "response") else exn.__cause__  # s3fs translates botocore's
    if isinstance(answer := getattr(answered, "response", None), dict):
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
        reason = f"S3 answered {status} {quoted(str(answer.get('Error', {}).get('Code', '')))}"
        return refusal(url, status, reason, hint="check the credentials and storage_options")
    kinds = {kind.__name__ for kind in type(exn).__mro__}
    if "BotoCoreError" in kinds and not kinds & _UNANSWERED:
        return chain_error(exn, url, profile, worked=False)
    reason = type(exn).__name__
    status = next((status for kind, status in _STATUS.items() if isinstance(exn, kind)), None)
    if status is None:
        reason += f": {redact(str(exn))}"
        status = getattr(exn, "status", None) or getattr(exn, "code", None)
    if isinstance(status, int) and 400 <= status < 500:
        return refusal(url, status, reason, hint="check the credentials and storage_options")
    timed_out = isinstance(exn, TimeoutError)
    return TransientError(f"reading failed: {reason}", timed_out=timed_out)


@dataclass(eq=False)
class FsspecBody:
    """One open file of an fsspec filesystem; see `base.Body`."""

    _origin: FsspecOrigin
    _url: ShardURL
    _file: Any
    info: ObjectInfo
    start: int
    stop: int | None
    waited: float = 0.0
    _reading: Future[bytes] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self._at = self.start
        self.proven = self.stop is not None
        _files[id(self._file)] = self._file

    def readinto(self, buffer: memoryview) -> int:
        """See `base.Body.readinto`."""
        size = len(buffer) if self.stop is None else min(len(buffer), self.stop - self._at)
        if not size:
            return 0
        self._reading = Future()
        # Not into the buffer: a thread that is given up on may still read.
        data = self._origin.call(self._url, lambda: self._file.read(size), self._reading)
        if not data and self.stop is not None:
            if self._origin.stat(self._url).version != self.info.version:
                raise VersionChangedError(f"{self._url} became shorter")
            left = self.stop - self._at
            raise TransientError(f"the origin stopped {left} bytes before the end")
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def abort(self) -> None:
        """See `base.Body.abort`."""
        with contextlib.suppress(InvalidStateError):
            self._reading.set_exception(TransientError("the read was cancelled"))

    def close(self) -> None:
        """See `base.Body.close`; a hung mount would not let the file be closed, either."""
        _files.pop(id(self._file), None)
        _start(self._file.close)


def _start(function: Callable[[], object]) -> None:
    """Call ``function`` in a thread, or in this one if the process can start none.

    It cannot at a limit of threads, nor, from Python 3.12 on, while the interpreter ends.
    """
    try:
        threads.start(function, "shardcache-filesystem")
    except RuntimeError:
        function()


def _first(found: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    values = (found.get(name) for name in names)
    return next((str(value) for value in values if value not in (None, "")), None)
