"""Shards behind any fsspec filesystem: gs, az, hf, memory, slow mounts.

fsspec has no way to insist on a version, so `FsspecOrigin.pins` is false: the engine describes the
object again after the last byte and starts over if it changed meanwhile. Filesystems know no common
time-out, and a hung mount cannot be interrupted, so every call is made in a thread that its caller
gives up on after ``timeout``.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from shardcache import threads
from shardcache.errors import AccessDeniedError, ConfigError, ShardNotFoundError
from shardcache.origins.base import ObjectInfo, TransientError, VersionChangedError, unchained
from shardcache.urls import ShardURL, redact

__all__ = ["FsspecOrigin"]

T = TypeVar("T")
_Calls = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]

#: Bytes asked for at once where every read is a request of its own (gs, az, hf).
#: Four blocks: few enough to bound memory, many enough to amortise a round trip.
_READING: dict[str, Any] = {"block_size": 4 << 20, "cache_type": "readahead"}
_VALIDATORS = ("ETag", "etag", "generation", "md5Hash", "content_md5", "Content-MD5", "Digest")
_TIMES = (
    "mtime",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "updated",
    "modified",
    "created",
)


class FsspecOrigin:
    """Reads the shards of one fsspec protocol.

    Args:
        protocol: as fsspec names it.
        storage_options: for the filesystem's constructor.
        timeout: seconds without an answer before a call counts as dead.
    """

    pins = False
    states_checksums = False

    def __init__(
        self, protocol: str, storage_options: Mapping[str, Any], *, timeout: float
    ) -> None:
        self.protocol = protocol
        self._options = dict(storage_options)
        self._timeout = timeout
        self._filesystem: Any = None
        self._guard = threading.Lock()

    @unchained
    def open(
        self, url: ShardURL, start: int, stop: int | None, pin: ObjectInfo | None = None
    ) -> FsspecBody:
        """See `base.Origin.open`."""
        info = pin if pin is not None else self.stat(url)
        worker = _Worker(self._timeout)
        try:
            with self._translated(url):
                file, seekable = worker.call(lambda: self._open(url, start))
        except Exception:
            worker.close()
            raise
        if not seekable:
            start, stop = 0, None
        stop = info.size if info.size is None or stop is None else min(stop, info.size)
        return FsspecBody(self, url, info, start, stop, file, worker)

    @unchained
    def stat(self, url: ShardURL) -> ObjectInfo:
        """See `base.Origin.stat`."""
        worker = _Worker(self._timeout)
        try:
            with self._translated(url):
                found = worker.call(lambda: self._info(url))
        finally:
            worker.close()
        if found.get("type") == "directory":
            raise ShardNotFoundError(f"{url} is a directory, not a shard.", url=str(url))
        size = found.get("size")
        return ObjectInfo(
            size=None if size is None else int(size),
            etag=_first(found, _VALIDATORS),
            modified=_first(found, _TIMES),
        )

    @unchained
    def names_below(self, directory: ShardURL, *, deep: bool) -> list[str]:
        """Names of files relative to ``directory``; ``deep`` descends. Takes the time it takes.

        Raises:
            As `base.Origin.open`.
        """
        with self._translated(directory):
            filesystem = self._ready()
            filesystem.invalidate_cache()
            root = self._path(directory)
            found = filesystem.find(root, maxdepth=None if deep else 1)
            if not found and not filesystem.isdir(root):
                raise FileNotFoundError(root)
            start = len(root.rstrip("/")) + 1
            return [str(name)[start:] for name in found]

    def _open(self, url: ShardURL, start: int) -> tuple[Any, bool]:
        """The file at ``start``, and whether it is there: some files cannot seek."""
        options = {} if self.protocol == "file" else _READING
        file = self._ready().open(self._path(url), "rb", **options)
        try:
            seekable = bool(getattr(file, "seekable", lambda: False)())
            if seekable and start:
                file.seek(start)
        except Exception:
            file.close()
            raise
        return file, seekable

    def _info(self, url: ShardURL) -> Mapping[str, Any]:
        filesystem = self._ready()
        path = self._path(url)
        filesystem.invalidate_cache()
        found: Mapping[str, Any] = filesystem.info(path)
        return found

    def _path(self, url: ShardURL) -> str:
        if url.is_local:
            return str(url.local_path)
        return str(self._ready()._strip_protocol(url.raw))

    def _ready(self) -> Any:
        with self._guard:
            if self._filesystem is None:
                import fsspec

                try:
                    # Not the shared instance: it may belong to the parent process,
                    # and its listings cache to whoever made it.
                    self._filesystem = fsspec.filesystem(
                        self.protocol, skip_instance_cache=True, **self._options
                    )
                except (ImportError, OSError, ValueError, TypeError) as exn:
                    raise ConfigError(
                        f"{self.protocol}:// cannot be read here: {redact(str(exn))}"
                    ) from None
            return self._filesystem

    @contextlib.contextmanager
    def _translated(self, url: ShardURL) -> Iterator[None]:
        # Not "from" what is caught: aiohttp and others name whole URLs, signatures included.
        try:
            yield
        except (ConfigError, ShardNotFoundError, TransientError):
            raise
        except FileNotFoundError:
            raise ShardNotFoundError(
                f"{url}: not found. Check the pattern and the path.", url=str(url)
            ) from None
        except PermissionError:
            raise _denied(url) from None
        except IsADirectoryError:
            raise ShardNotFoundError(f"{url} is a directory, not a shard.", url=str(url)) from None
        except Exception as exn:  # noqa: BLE001 - every filesystem has its own exceptions
            status = getattr(exn, "status", None) or getattr(exn, "code", None)
            if status in (401, 403):
                raise _denied(url) from None
            if status in (412, 416):
                raise VersionChangedError(str(url)) from None
            if isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429):
                raise ConfigError(
                    f"{url}: the origin refused the request: {redact(str(exn))}", url=str(url)
                ) from None
            reason = redact(f"{type(exn).__name__}: {exn}")
            timed_out = isinstance(exn, TimeoutError)
            raise TransientError(f"reading failed: {reason}", timed_out=timed_out) from None


class _Worker:
    """Makes calls in a thread of its own, one after another, and gives up on a silent one.

    The thread of a call that never returns stays behind; it does not keep the process from ending.

    Args:
        timeout: seconds for one call.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._calls: _Calls = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[Any] = Future()

    def call(self, function: Callable[[], T]) -> T:
        """What ``function`` returns or raises.

        Raises:
            TransientError: it did not return in time, or was given up by `abort`.
        """
        if self._thread is None or not self._thread.is_alive():  # a fork leaves it behind
            calls = self._calls = queue.SimpleQueue()
            self._thread = threads.start(lambda: _serve(calls), "shardcache-filesystem")
        answer: Future[T] = Future()
        self._last = answer
        self._calls.put((function, answer))
        try:
            return answer.result(self._timeout)
        except TimeoutError:
            if answer.done():
                raise  # the filesystem's own
            raise TransientError(f"nothing came for {self._timeout:g} s", timed_out=True) from None

    def abort(self) -> None:
        """End the call that another thread waits for."""
        with contextlib.suppress(InvalidStateError):
            self._last.set_exception(TransientError("the read was called off"))

    def close(self, last: Callable[[], object] | None = None) -> None:
        """End the thread as soon as it can, after a last call; waits for nothing."""
        if last is not None:
            self._calls.put((last, Future()))
        self._calls.put(None)


def _serve(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        function, answer = call
        with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
            try:
                found = function()
            except Exception as exn:  # noqa: BLE001 - every filesystem has its own exceptions
                answer.set_exception(exn)
            else:
                answer.set_result(found)
                del found
        del call, function, answer  # not to hold what was read until the next call


class FsspecBody:
    """One open file of an fsspec filesystem; see `base.Body`."""

    def __init__(
        self,
        origin: FsspecOrigin,
        url: ShardURL,
        info: ObjectInfo,
        start: int,
        stop: int | None,
        file: Any,
        worker: _Worker,
    ) -> None:
        self.info = info
        self.start = start
        self.stop = stop
        self._origin = origin
        self._url = url
        self._file = file
        self._worker = worker
        self._left = None if stop is None else stop - start

    @unchained
    def readinto(self, buffer: memoryview) -> int:
        """See `base.Body.readinto`."""
        buffer = buffer[: self._left]
        if not buffer:
            return 0
        size = len(buffer)  # not into it: who is given up on may still read
        with self._origin._translated(self._url):
            data = self._worker.call(lambda: self._file.read(size))
        count = len(data)
        if count == 0 and self._left:
            if self._origin.stat(self._url).version != self.info.version:
                raise VersionChangedError(f"{self._url} became shorter")
            raise TransientError(f"the origin stopped {self._left} bytes before the end")
        buffer[:count] = data
        if self._left is not None:
            self._left -= count
        return count

    def abort(self) -> None:
        """See `base.Body.abort`."""
        self._worker.abort()

    def close(self) -> None:
        """See `base.Body.close`; a hung mount would not let the file be closed, either."""
        self._worker.close(self._file.close)


def _denied(url: ShardURL) -> AccessDeniedError:
    return AccessDeniedError(
        f"{url}: access denied. Check the credentials and storage_options.", url=str(url)
    )


def _first(found: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    for name in names:
        value = found.get(name)
        if value is not None and value != "":
            return str(value)
    return None
