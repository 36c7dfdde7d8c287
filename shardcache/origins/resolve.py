"""Which place a shard is read from: nearer copies first, then its origin.

    upstream 1 has it? ---- no, or does not answer ----> upstream 2 ... ----> the origin

An upstream, a NAS or a store of the cluster, keeps ``s3://bucket/key`` as
``<upstream>/bucket/key``, and other URLs likewise by what stands behind ``://``. So a copy that
somebody else made (``aws s3 sync``) is one, too. A copy that shardcache made (``write_back``) has
the entry's sidecar beside it, ``<name>.shardcache.json``: it is of the version that the origin had,
is compared with the digest in the sidecar, and a fetch that began with it can go on at the origin.
Other copies have the version that the upstream states.

An upstream is believed: a shard that was replaced at its origin is served as the upstream has it.
One that fails or is silent is left alone for a minute (`files.Breaker`); nothing that goes
wrong with it is an error. Shards with a query or a version in their URL are not looked for.

Origins are made on first use and belong to the process that made them: a forked child makes an
`Origins` of its own, because sockets, event loops and locks must not be shared with the parent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from shardcache.config import Config, Upstream
from shardcache.errors import AccessDeniedError, ConfigError, ShardNotFoundError
from shardcache.files import Breaker, random_token
from shardcache.origins.base import Body, ObjectInfo, Origin, TransientError, VersionChangedError
from shardcache.origins.endpoints import s3_endpoint, scheme_options
from shardcache.urls import ShardURL, parse_url, redact

__all__ = ["Origins", "UpstreamOrigin"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SIDECAR = ".shardcache.json"
#: Bytes of a sidecar that are read; one has about 700.
_MOST = 64 * 1024
#: Errors of an upstream after which the next one is asked.
_REFUSALS = (AccessDeniedError, ConfigError, TransientError, VersionChangedError)
#: Bytes of a part of a name on disks.
_MAX_NAME = 200
#: Seconds for an upstream to answer: it is near, or of no use.
_TIMEOUT = 10.0
#: Failures in a row that are no accident.
_FAILURES = 2


class Origins:
    """The origins of one configuration, one per scheme, and its upstreams; safe between threads.

    Args:
        config: endpoint, storage options, time-outs, upstreams.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._places: list[_Place] | None = None
        self._guard = threading.Lock()
        self._made: dict[str, Origin] = {}

    def of(self, url: ShardURL) -> Origin:
        """The origin of ``url``; ConfigError if its client cannot be set up."""
        with self._guard:
            if url.scheme not in self._made:
                config = self._config
                self._made[url.scheme] = _make(
                    url.scheme,
                    scheme_options(config, url.scheme),
                    config.endpoint_url,
                    config.timeout,
                )
            return self._made[url.scheme]

    def add(self, scheme: str, origin: Origin) -> None:
        """Read ``scheme`` from ``origin`` in this process."""
        with self._guard:
            self._made[scheme] = origin

    def prepare(self, url: ShardURL) -> None:
        """Make the client that reading ``url`` takes, where it takes long; raises as `of`."""
        from shardcache.origins.s3 import S3Origin

        origin = self.of(url)
        if isinstance(origin, S3Origin):
            origin.prepare()

    def upstreams(self, url: ShardURL) -> Iterator[UpstreamOrigin]:
        """The shard in each upstream that has it; each is asked when its turn comes."""
        for place in self._made_places():
            if (found := place.find(url)) is not None:
                yield found

    @property
    def writes_back(self) -> bool:
        """Whether an upstream is to have what was fetched."""
        return any(upstream.write_back for upstream in self._config.upstreams)

    def write_back(self, url: ShardURL, data: Path, sidecar: bytes) -> None:
        """Copy what was fetched to the upstreams that are to have it; nothing is raised.

        Args:
            url: the shard.
            data: its bytes.
            sidecar: what is known of them, as an entry's sidecar has it.
        """
        for place in self._made_places():
            if place.writes:
                place.write(url, data, sidecar)

    def _made_places(self) -> list[_Place]:
        with self._guard:
            if self._places is None:
                config = self._config
                self._places = [_Place(each, config.timeout) for each in config.upstreams]
            return self._places


def _make(
    scheme: str, options: Mapping[str, Any], endpoint_url: str | None, timeout: float
) -> Origin:
    # Imported on first use: nobody needs all of them.
    if scheme == "s3":
        from shardcache.origins.s3 import S3Origin

        return S3Origin(options, endpoint_url=endpoint_url, timeout=timeout)
    if scheme in ("http", "https"):
        from shardcache.origins.http import WebOrigin

        return WebOrigin(timeout=timeout)
    if scheme == "pipe":
        from shardcache.origins.command import PipeOrigin

        return PipeOrigin(timeout)
    from shardcache.origins.filesystem import FsspecOrigin

    return FsspecOrigin(scheme, options, timeout=timeout)


class UpstreamOrigin:
    """One shard as an upstream has it; a `base.Origin` of that shard alone.

    Attributes:
        name: of the upstream, for people.
        digest: tree digest of the bytes, where a sidecar states it.
    """

    states_checksums = False  # the digest proves more

    def __init__(
        self,
        place: _Place,
        copy: ShardURL,
        found: ObjectInfo,
        info: ObjectInfo | None = None,
        digest: str | None = None,
    ) -> None:
        self.name = place.name
        self.digest = digest
        self.pins = place.origin.pins
        self._place = place
        self._copy = copy  # where it is
        self._found = found  # what the upstream says of it
        self._info = info or found  # the version at the origin, where a sidecar states it

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
        """Read this copy no more in this process: it is damaged."""
        self._place.distrusted.add(self._copy.key)


class _Place:
    """One upstream.

    Attributes:
        name: for people, without credentials.
        origin: reads it.
        writes: whether what was fetched is copied there.
        distrusted: keys of copies that are damaged.
    """

    def __init__(self, upstream: Upstream, timeout: float) -> None:
        self.name = redact(upstream.url)
        self.writes = upstream.write_back
        self.distrusted: set[str] = set()
        self._base = upstream.url.rstrip("/")
        self._endpoint = upstream.endpoint_url
        self._options: dict[str, Any] = dict(upstream.storage_options)
        self._scheme = upstream.url.partition("://")[0].lower() if "://" in upstream.url else "file"
        self._breaker = Breaker(threshold=_FAILURES)
        self.origin = _make(self._scheme, self._options, self._endpoint, min(timeout, _TIMEOUT))

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
        found = self._try(lambda: self.origin.stat(copy))
        if found is None or found.size is None:
            return None
        sidecar = self._try(lambda: self._read_sidecar(copy))
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
        found, buffer = b"", memoryview(bytearray(_MOST))
        with contextlib.closing(self.origin.open(url, 0, _MOST)) as body:
            while len(found) < _MOST and (count := body.readinto(buffer)):
                found += buffer[:count]
        return found

    def _try(self, ask: Callable[[], T]) -> T | None:
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
        present = self.find(url)
        if present is not None and present.digest == json.loads(sidecar)["digest"]:
            return
        try:
            if self._scheme == "file":
                _copy_file(data, copy.local_path, sidecar)
            else:
                import fsspec

                options = self._options
                if self._scheme == "s3" and (endpoint := s3_endpoint(options, self._endpoint)):
                    options = {**options, "endpoint_url": endpoint}
                writer = fsspec.filesystem(self._scheme, **options)
                path = writer._strip_protocol(copy.raw)
                writer.put_file(os.fspath(data), path)
                writer.pipe_file(f"{path}{_SIDECAR}", sidecar)
        except Exception as exn:  # noqa: BLE001 - every filesystem has its own exceptions
            self._failed(OSError(redact(f"it cannot be written: {type(exn).__name__}: {exn}")))
        else:
            self._breaker.succeeded()


def _copy_file(data: Path, path: Path, sidecar: bytes) -> None:
    """Make a copy and its sidecar, which appear when they are complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{random_token()}")
    try:
        shutil.copyfile(data, temporary)
        temporary.replace(path)
        temporary.write_bytes(sidecar)
        temporary.replace(path.with_name(f"{path.name}{_SIDECAR}"))
    finally:
        temporary.unlink(missing_ok=True)
