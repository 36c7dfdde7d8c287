"""Read shards through any fsspec filesystem: gs, az, hf, memory, slow mounts.

It also reads S3 buckets that shardcache's own client cannot (`aws.needs_s3fs`). A call to a hung
mount cannot be interrupted, so each call runs in another thread, which the caller abandons after
``timeout`` seconds.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from shardcache import threads
from shardcache.errors import ConfigError, ShardCacheError
from shardcache.origins.aws import chain_error, s3fs_options
from shardcache.origins.base import ObjectInfo, Origin, TransientError, compare_version, refusal
from shardcache.threads import Results, no_fork
from shardcache.urls import ShardURL, quoted, redact

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Options of fsspec's `open`, for filesystems that send one request per read (gs, az, hf). A block
#: of 4 MiB fits into memory, and its transfer takes longer than the round trip of its request.
_READING: dict[str, Any] = {"block_size": 4 << 20, "cache_type": "readahead"}
_VALIDATORS = (
    *("ETag", "etag", "generation", "md5Hash", "content_md5", "Content-MD5", "Digest"),
    "blob_id",  # of Hugging Face
)
_TIMES = (
    *("mtime", "LastModified", "last_modified", "Last-Modified"),
    *("updated", "modified", "created"),
)
#: botocore errors for requests that got no complete response. Another attempt may succeed.
_NO_RESPONSE = frozenset({"ConnectionError", "HTTPClientError", "IncompleteReadError"})
_STATUS = {FileNotFoundError: 404, IsADirectoryError: 404, PermissionError: 403}
_THREAD = "shardcache-filesystem"
#: All open files. The references keep a forked child from finalising its parent's files: some, such
#: as SFTP's, would send a message over the parent's connection.
_files: dict[int, Any] = {}


class FsspecOrigin(Origin):
    """Reads shards of one fsspec protocol. Each of its calls fails after ``timeout`` seconds."""

    def __init__(self, scheme: str, options: Mapping[str, Any], timeout: float) -> None:
        self._protocol, self._options, self.timeout = scheme, dict(options), timeout

    def open(
        self, shard: ShardURL, start: int, stop: int | None, expected: ObjectInfo | None = None
    ) -> FsspecBody:
        """Open the object at ``start``. Assumes that its current version is ``expected``."""
        info = expected if expected is not None else self.stat(shard)
        began = time.monotonic()
        file = self._call(shard, lambda: self._filesystem.open(self._path(shard), "rb", **_READING))
        if self._protocol == "memory":  # one object, with one position, for all opens
            file = io.BytesIO(file.getvalue())
        if file.seekable():
            file.seek(start)  # sends no request yet
        else:
            start, stop = 0, None
        stop = info.size if info.size is None or stop is None else min(stop, info.size)
        return FsspecBody(self, shard, file, info, start, stop, time.monotonic() - began)

    def stat(self, shard: ShardURL) -> ObjectInfo:
        def info() -> Mapping[str, Any]:
            self._filesystem.invalidate_cache()
            found: Mapping[str, Any] = self._filesystem.info(self._path(shard))
            if found.get("type") == "directory":
                raise IsADirectoryError
            return found

        return described(self._call(shard, info))

    def list_page(
        self, directory: ShardURL, prefix: str, token: str, *, deep: bool
    ) -> tuple[dict[str, int | None], str]:
        """Return all files of a directory, with any prefix, on one page. No timeout applies."""

        def sizes() -> dict[str, int | None]:
            root = str(self._filesystem._strip_protocol(str(directory)))
            self._filesystem.invalidate_cache()
            found = self._filesystem.find(root, maxdepth=None if deep else 1, detail=True)
            if not found and not self._filesystem.isdir(root):
                raise FileNotFoundError(root)
            start = len(root.rstrip("/")) + 1
            return {str(name)[start:]: info.get("size") for name, info in found.items()}

        return self._call(directory, sizes, timed=False), ""

    def _path(self, shard: ShardURL) -> str:
        if shard.is_local:
            return str(shard.local_path)
        if shard.scheme == "s3":
            path = shard.canonical.removeprefix("s3://")
            parts = self._filesystem.split_path(self._filesystem._strip_protocol(path))
            if parts != (*shard.bucket_and_key(), shard.version_id):
                raise ConfigError(
                    f"{shard} cannot be read: s3fs would read another object. A versionId needs "
                    "storage_options={'version_aware': True} in code, or "
                    """SHARDCACHE_STORAGE_OPTIONS='{"version_aware": true}'.""",
                    url=str(shard),
                )
            return path
        return str(self._filesystem._strip_protocol(shard.raw))

    @threads.lazy
    def _filesystem(self) -> Any:
        import fsspec

        if self._protocol == "gs":
            _skip_google_metadata()
        # Not fsspec's shared instance: it may belong to the parent process, and other parts of the
        # program use its cache of listings.
        options = {**self._options, "skip_instance_cache": True}
        try:
            made = fsspec.filesystem(self._protocol, **options)
        except (ImportError, OSError, ValueError, TypeError) as exn:
            reason = redact(str(exn))
        else:
            if self._protocol == "s3":
                made.retries = 1  # s3fs makes one attempt: `retry` makes the others
            return made
        raise ConfigError(f"{self._protocol}:// cannot be read here: {reason}")

    def _call(self, shard: ShardURL, function: Callable[[], T], *, timed: bool = True) -> T:
        """Call ``function`` in a thread; return its result, or raise as `Origin.open`."""
        seconds = self.timeout if timed else None
        call = partial(self.translated, shard, function)
        return self.result(lambda: threads.call(call, seconds, _THREAD))

    def translated(self, shard: ShardURL, function: Callable[[], T]) -> T:
        """Call ``function``, and raise the errors of `Origin.open` for those of the filesystem."""
        try:
            return function()
        except Exception as exn:  # noqa: BLE001 - every filesystem has its own exceptions
            error = _error_for(exn, shard, self._options.get("profile"))
        raise error

    def result(self, wait: Callable[[], T]) -> T:
        """Return the result of ``wait``, or raise TransientError if none comes in time."""
        with contextlib.suppress(Empty):
            return wait()
        raise TransientError(f"no data for {self.timeout:g} s", timed_out=True)


def described(info: Mapping[str, Any]) -> ObjectInfo:
    """Return the version of a file that its filesystem's ``info`` describes, without a checksum."""
    size = None if info.get("size") is None else int(info["size"])
    return ObjectInfo(size, _first(info, _VALIDATORS), modified=_first(info, _TIMES))


def _skip_google_metadata() -> None:
    """Keep google.auth from searching 15 s for a metadata server that does not exist."""
    try:
        socket.create_connection(("169.254.169.254", 80), timeout=1).close()
    except OSError:
        os.environ.setdefault("NO_GCE_CHECK", "true")


def s3fs_origin(reason: str, options: Mapping[str, Any], timeout: float) -> FsspecOrigin:
    """Return the origin of an S3 bucket that only s3fs can read; ``reason`` says why."""
    with no_fork():  # a fork must not copy the locks of an import
        options = s3fs_options(options)
    logger.info("%s: reading through s3fs, which is slower", reason)
    # The SDK below s3fs also makes one attempt, because `retry` makes the others.
    settings = {"retries": {"total_max_attempts": 1}, **(options.get("config_kwargs") or {})}
    return FsspecOrigin("s3", {**options, "config_kwargs": settings}, timeout)


def _error_for(exn: Exception, shard: ShardURL, profile: str | None) -> Exception:
    """Return the exception to raise for one of a filesystem; ``profile`` is the AWS profile."""
    if isinstance(exn, (ShardCacheError, TransientError)):
        return exn
    source = exn if hasattr(exn, "response") else exn.__cause__  # s3fs wraps botocore's errors
    hint = "check the credentials and storage_options"
    if isinstance(response := getattr(source, "response", None), dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
        reason = f"S3 answered {status} {quoted(str(response.get('Error', {}).get('Code', '')))}"
        return refusal(shard, status, reason, hint=hint)
    kinds = {kind.__name__ for kind in type(exn).__mro__}
    if "BotoCoreError" in kinds and not kinds & _NO_RESPONSE:
        return chain_error(exn, shard, profile, worked=False)
    reason = type(exn).__name__
    status = next((status for kind, status in _STATUS.items() if isinstance(exn, kind)), None)
    if status is None:
        reason += f": {redact(str(exn))}"
        status = getattr(exn, "status", None) or getattr(exn, "code", None)
    if isinstance(status, int) and 400 <= status < 500:
        return refusal(shard, status, reason, hint=hint)
    return TransientError(f"reading failed: {reason}", timed_out=isinstance(exn, TimeoutError))


@dataclass(eq=False)
class FsspecBody:
    """An open file of an fsspec filesystem; implements `base.Body`.

    One thread reads the file, and closes it, because a mount may hang.
    """

    _origin: FsspecOrigin
    _shard: ShardURL
    _file: Any
    info: ObjectInfo
    start: int
    stop: int | None
    waited: float

    def __post_init__(self) -> None:
        self._at = self.start
        self.proven = self.stop is not None
        self._results: Results[bytes] = threads.Queue()
        self._sizes: SimpleQueue[int | None] | None = SimpleQueue()  # None without a thread
        file = _files[id(self._file)] = self._file
        origin, shard = self._origin, self._shard  # the thread must not keep this body alive
        self._read = lambda size: origin.translated(shard, partial(file.read, size))
        try:
            threads.start(partial(_serve, file, self._read, self._sizes, self._results), _THREAD)
        except threads.NoThreadError:
            self._sizes = None

    def readinto(self, buffer: memoryview) -> int:
        """Read bytes; return their number, or 0 at the end. Raises the errors of `Origin.open`."""
        size = len(buffer) if self.stop is None else min(len(buffer), self.stop - self._at)
        if not size:
            return 0
        if self._sizes is None:
            threads.put_result(partial(self._read, size), self._results)
        else:
            self._sizes.put(size)
        # The thread does not read into `buffer`, because it may go on after a timeout.
        seconds = self._origin.timeout
        data = self._origin.result(lambda: threads.get_result(self._results, seconds))
        if not data and self.stop is not None:
            compare_version(self._origin, self._shard, self.info)
            left = self.stop - self._at
            raise TransientError(f"the origin stopped {left} bytes before the end")
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def abort(self) -> None:
        self._results.put((None, [TransientError("the read was cancelled")]))

    def close(self) -> None:
        """Close the file, without waiting for it."""
        if self._sizes is not None:
            self._sizes.put(None)
        elif _files.pop(id(self._file), None) is not None:
            self._file.close()


def _serve(
    file: Any, read: Callable[[int], bytes], sizes: SimpleQueue[int | None], results: Results[bytes]
) -> None:
    """Read as many bytes as requested, until None is requested; then close the file."""
    while (size := sizes.get()) is not None:
        threads.put_result(partial(read, size), results)
    _files.pop(id(file), None)  # a filesystem in memory opens the same object again
    with contextlib.suppress(Exception):  # every filesystem has its own exceptions
        file.close()


def _first(found: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    values = (found.get(name) for name in names)
    return next((str(value) for value in values if value not in (None, "")), None)
