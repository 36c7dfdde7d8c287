"""Copies of shards that are nearer than their origin: a NAS, a store of the cluster.

    upstream 1 has it? ---- no, or does not answer ----> upstream 2 ... ----> the origin

An upstream keeps ``s3://bucket/key`` as ``<upstream>/bucket/key``, and other URLs likewise by
what stands behind ``://``. So a copy that somebody else made (``aws s3 sync``) is one, too. A copy
that shardcache made (``write_back``) has the entry's sidecar beside it, ``<name>.shardcache.json``:
then it is of the version that the origin had, is compared with the digest of that, and whoever
began with it can go on at the origin. Of other copies the version is what the upstream says.

An upstream is believed: a shard that was replaced at its origin is served as the upstream has it.
One that fails or is silent is left alone for a minute (`files.Breaker`); nothing that goes
wrong with it is an error. Shards with a query or a version in their URL are not looked for.

A `Place` belongs to the process that made it, and may be used by its threads.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from shardcache.config import Config, Upstream
from shardcache.errors import AccessDeniedError, ConfigError, ShardNotFoundError
from shardcache.files import Breaker, random_token
from shardcache.origins.base import Body, ObjectInfo, Origin, TransientError, VersionChangedError
from shardcache.origins.endpoints import s3_endpoint
from shardcache.origins.filesystem import FsspecOrigin
from shardcache.origins.s3 import S3Origin
from shardcache.urls import ShardURL, parse_url, redact

__all__ = ["Place", "UpstreamOrigin"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SIDECAR = ".shardcache.json"
#: Bytes of a sidecar that are read; one has about 700.
_MOST = 64 * 1024
#: What an upstream says that has not got a shard, or not for us; the next one may have it.
_REFUSALS = (AccessDeniedError, ConfigError, TransientError, VersionChangedError)
#: Bytes of a part of a name on disks.
_MAX_NAME = 200
#: Seconds for an upstream to answer: it is near, or of no use.
_TIMEOUT = 10.0
#: Failures in a row that are no accident.
_FAILURES = 2


class UpstreamOrigin:
    """One shard as an upstream has it; a `base.Origin` of that shard alone.

    Args:
        place: the upstream.
        copy: where it has the shard.
        found: what it says of that.
        info, digest: version at the origin and tree digest of the bytes, where a sidecar tells.
    """

    def __init__(
        self,
        place: Place,
        copy: ShardURL,
        found: ObjectInfo,
        info: ObjectInfo | None = None,
        digest: str | None = None,
    ) -> None:
        self.name = place.name
        self.digest = digest
        self.pins = place.origin.pins
        self.states_checksums = info is not None and info.checksum is not None
        self._place = place
        self._copy = copy
        self._found = found
        self._info = info or found

    def open(
        self, url: ShardURL, start: int, stop: int | None, pin: ObjectInfo | None = None
    ) -> Body:
        """See `base.Origin.open`."""
        if pin is not None and pin.version != self._info.version:
            raise VersionChangedError(str(url))
        body = self._place.origin.open(self._copy, start, stop, self._found)
        body.info = self._info
        return body

    def stat(self, url: ShardURL) -> ObjectInfo:
        """See `base.Origin.stat`."""
        if self._place.origin.stat(self._copy).version != self._found.version:
            raise VersionChangedError(str(url))
        return self._info

    def distrust(self) -> None:
        """Take this shard from there no more, in this process: it is damaged."""
        self._place.distrusted.add(self._copy.key)


class Place:
    """One upstream.

    Attributes:
        name: for people, without credentials.
        origin: reads it.
        writes: whether what was fetched is copied there.
        distrusted: keys of copies that are damaged.
    """

    def __init__(self, upstream: Upstream, config: Config) -> None:
        self.name = redact(upstream.url)
        self.writes = upstream.write_back
        self.distrusted: set[str] = set()
        self._base = upstream.url.rstrip("/")
        self._endpoint = upstream.endpoint_url
        self._options: dict[str, Any] = dict(upstream.storage_options)
        self._scheme = upstream.url.partition("://")[0].lower() if "://" in upstream.url else "file"
        self._breaker = Breaker(threshold=_FAILURES)
        timeout = min(config.timeout, _TIMEOUT)
        self.origin: Origin
        if self._scheme == "s3":
            self.origin = S3Origin(self._options, endpoint_url=self._endpoint, timeout=timeout)
        else:
            self.origin = FsspecOrigin(self._scheme, self._options, timeout=timeout)

    def _copy_of(self, url: ShardURL) -> ShardURL | None:
        """Where it would keep a shard; None if such a shard is not looked for."""
        name = url.canonical.partition("://")[2].lstrip("/")
        if url.scheme == "pipe" or url.version_id is not None or "?" in name:
            return None
        parts = name.split("/")
        if any(part in ("", ".", "..") or len(part.encode()) > _MAX_NAME for part in parts):
            return None
        return self._parse(f"{self._base}/{name}")

    def _parse(self, url: str) -> ShardURL:
        return parse_url(url, endpoint=self._endpoint, allow_schemes={self._scheme})

    def find(self, url: ShardURL) -> UpstreamOrigin | None:
        """A shard as it has it, or None."""
        copy = self._copy_of(url)
        if copy is None or copy.key in self.distrusted or not self._breaker.allows():
            return None
        found = self._asked(lambda: self.origin.stat(copy))
        if found is None or found.size is None:
            return None
        sidecar = self._asked(lambda: self._read_sidecar(copy))
        if sidecar is None:
            return UpstreamOrigin(self, copy, found)
        try:
            record = json.loads(sidecar)
            if (record["key"], record["size"]) != (url.key, found.size):
                raise ValueError("it is of another shard")
            info = ObjectInfo.from_record(record["object"])
            return UpstreamOrigin(self, copy, found, info, str(record["digest"]))
        except (KeyError, TypeError, ValueError, RecursionError) as exn:
            logger.info("%s: its copy in %s is not used: its sidecar: %r", url, self.name, exn)
            return None

    def _read_sidecar(self, copy: ShardURL) -> bytes:
        url = self._parse(f"{copy.raw}{_SIDECAR}")
        said, buffer = b"", memoryview(bytearray(_MOST))
        with contextlib.closing(self.origin.open(url, 0, _MOST)) as body:
            while len(said) < _MOST and (count := body.readinto(buffer)):
                said += buffer[:count]
        return said

    def _asked(self, ask: Callable[[], T]) -> T | None:
        try:
            answer = ask()
        except ShardNotFoundError:
            answer = None
        except _REFUSALS as exn:
            self._failed(exn)
            return None
        self._breaker.succeeded()
        return answer

    def _failed(self, exn: Exception) -> None:
        if self._breaker.failed():
            logger.warning(
                "the upstream %s is left alone for a while, shards come from elsewhere: %s",
                self.name,
                exn,
            )
        else:
            logger.info("the upstream %s: %s", self.name, exn)

    def write(self, url: ShardURL, data: Path, sidecar: bytes) -> None:
        """Copy an entry there unless it is there, its sidecar last; nothing is raised."""
        copy = self._copy_of(url)
        if copy is None or not self._breaker.allows():
            return
        self.distrusted.discard(copy.key)
        there = self.find(url)
        if there is not None and there.digest == json.loads(sidecar)["digest"]:
            return
        try:
            if self._scheme == "file":
                path = copy.local_path
                path.parent.mkdir(parents=True, exist_ok=True)
                with data.open("rb") as source:
                    _write_file(path, source)
                _write_file(path.with_name(f"{path.name}{_SIDECAR}"), io.BytesIO(sidecar))
            else:
                place = self._writer._strip_protocol(copy.raw)
                self._writer.put_file(os.fspath(data), place)
                self._writer.pipe_file(f"{place}{_SIDECAR}", sidecar)
        except Exception as exn:  # noqa: BLE001 - every filesystem has its own exceptions
            self._failed(OSError(redact(f"it cannot be written: {type(exn).__name__}: {exn}")))
        else:
            self._breaker.succeeded()

    @functools.cached_property
    def _writer(self) -> Any:
        import fsspec

        options = self._options
        if self._scheme == "s3" and (endpoint := s3_endpoint(options, self._endpoint)):
            options = {**options, "endpoint_url": endpoint}
        return fsspec.filesystem(self._scheme, skip_instance_cache=True, **options)


def _write_file(path: Path, source: BinaryIO) -> None:
    """Write a file that appears when it is complete."""
    temporary = path.with_name(f".{path.name}.{random_token()}")
    try:
        with temporary.open("xb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
