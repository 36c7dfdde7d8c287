"""Choose where to read a shard: from an upstream with a nearer copy, or from its origin.

    upstream 1 has it? ---- no, or no response ----> upstream 2 ... ----> the origin

An upstream is a NAS or a store of the cluster. It keeps ``s3://bucket/key`` as
``<upstream>/bucket/key``, and other URLs likewise by the part behind ``://``. So a copy that
another program made (``aws s3 sync``) can be used, too; its version is the one that the upstream
states. A copy that shardcache made (``write_back``) has the entry's sidecar beside it,
``<name>.shardcache.json``. The sidecar holds the version at the origin, and a digest with which the
copy is compared. A download that began with such a copy can continue at the origin.

A fault of an upstream is never an error. After two failures in a row, it is not used for a minute.
Upstreams are not searched for shards with a query, a version or a client of their own.

Origins belong to the process that made them. A forked child makes its own `Origins`, because it
must not share sockets, event loops and locks with its parent.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcache.config import Config, Upstream
from shardcache.errors import AccessDeniedError, ConfigError, ShardNotFoundError
from shardcache.files import Breaker, random_token
from shardcache.origins.base import (
    Body,
    ObjectInfo,
    Origin,
    TransientError,
    VersionChangedError,
    read_all,
)
from shardcache.origins.endpoints import for_command, needs_s3fs, s3fs_options, scheme_options
from shardcache.threads import lazy
from shardcache.urls import ShardURL, parse_url, redact

logger = logging.getLogger(__name__)

_SIDECAR = ".shardcache.json"
#: Longest sidecar in bytes; most have about 700.
_MOST = 64 * 1024
#: Errors of an upstream after which the next one is tried.
_FAULTS = (AccessDeniedError, ConfigError, TransientError, VersionChangedError)
#: Longest component of a name in bytes; filesystems allow 255, and temporary names add to it.
_MAX_NAME = 200
#: Seconds for the response of an upstream, which should be near.
_TIMEOUT = 10.0
#: Failures in a row after which an upstream is not used for a while.
_FAILURES = 2


class Origins:
    """The origins of one configuration, one per client, and its upstreams; safe between threads."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._guard = threading.Lock()
        self._made: dict[tuple[str, tuple[tuple[str, str], ...], str], Origin] = {}

    def of(self, shard: ShardURL) -> Origin:
        """Return the origin of a shard; raise ConfigError if parts of the URL are hidden."""
        if shard.is_masked:
            raise ConfigError(
                f"{shard} cannot be read: parameters that may hold secrets are hidden (***), as in "
                "logs, lists and pickles. Pass the whole URL.",
                url=str(shard),
            )
        config, scheme = self._config, shard.scheme
        # Two kinds of buckets take a client of their own.
        kind = needs_s3fs(shard.bucket_and_key()[0], {}) if scheme == "s3" else ""
        key = scheme, shard.options, kind
        with self._guard:
            if key not in self._made:
                if shard.options:
                    config = for_command(config, shard.options)
                options = scheme_options(config, scheme)
                self._made[key] = _make(shard, options, config.endpoint_url, config.timeout)
            return self._made[key]

    def add(self, scheme: str, origin: Origin) -> None:
        """Read ``scheme`` from ``origin`` in this process."""
        with self._guard:
            self._made[scheme, (), ""] = origin

    def prepare(self, shard: ShardURL) -> None:
        """Make the client that reads a shard; raise ConfigError if it cannot be set up."""
        prepare = getattr(self.of(shard), "prepare", None)
        if prepare is not None:  # only S3's takes time
            prepare()

    def upstreams(self, shard: ShardURL) -> Iterator[UpstreamOrigin]:
        """Yield the upstreams that have a shard. Each is queried only when its turn comes."""
        for upstream in self._upstreams:
            if (found := upstream.find(shard)) is not None:
                yield found

    @property
    def writes_back(self) -> bool:
        """Whether downloaded shards are copied to an upstream."""
        return any(upstream.write_back for upstream in self._config.upstreams)

    def write_back(self, shard: ShardURL, data: Path, sidecar: bytes) -> None:
        """Copy an entry to the upstreams with ``write_back``. Faults are logged, not raised."""
        for upstream in self._upstreams:
            if upstream.config.write_back:
                upstream.write(shard, data, sidecar)

    @lazy
    def _upstreams(self) -> list[_Upstream]:
        return [_Upstream(each, self._config.timeout) for each in self._config.upstreams]


def _make(
    shard: ShardURL, options: Mapping[str, Any], endpoint_url: str | None, timeout: float
) -> Origin:
    """Make the origin that reads ``shard`` and others of its kind (see `Origins.of`)."""
    # Imported on first use: no program needs all of them.
    scheme = shard.scheme
    if scheme == "s3":
        if reason := needs_s3fs(shard.bucket_and_key()[0], options):
            from shardcache.origins.filesystem import s3fs_origin

            return s3fs_origin(reason, options, endpoint_url, timeout)
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


@dataclass(slots=True)
class UpstreamOrigin:
    """One shard in an upstream; a `base.Origin` of that shard alone."""

    name: str  # of the upstream, for messages
    _origin: Origin
    _copy: ShardURL
    _found: ObjectInfo  # the version in the upstream
    _info: ObjectInfo  # the version at the origin if a sidecar states it, else `_found`
    digest: str | None  # tree digest of the bytes if a sidecar states it
    conditional: bool

    states_checksums = False  # the digest proves more

    def open(
        self, shard: ShardURL, start: int, stop: int | None, expected: ObjectInfo | None = None
    ) -> Body:
        """See `base.Origin.open`. The caller compares the version of the response."""
        body = self._origin.open(self._copy, start, stop, self._found)
        body.info = self._info
        return body

    def stat(self, shard: ShardURL) -> ObjectInfo:
        """See `base.Origin.stat`."""
        if self._origin.stat(self._copy).version != self._found.version:
            raise VersionChangedError(str(shard))
        return self._info


class _Upstream:
    """One upstream."""

    def __init__(self, config: Upstream, timeout: float) -> None:
        self.config = config
        self._name = redact(config.url)
        self._scheme = config.url.partition("://")[0].lower() if "://" in config.url else "file"
        self._breaker = Breaker(threshold=_FAILURES)
        options, timeout = config.storage_options, min(timeout, _TIMEOUT)
        inside = self._parse(f"{config.url.rstrip('/')}/x")
        self._origin = _make(inside, options, config.endpoint_url, timeout)

    def _copy_of(self, shard: ShardURL) -> ShardURL | None:
        """Return the URL of a shard's copy; None for shards that upstreams are not searched for."""
        name = shard.canonical.partition("://")[2].lstrip("/")
        if shard.scheme == "pipe" or shard.version_id is not None or shard.options or "?" in name:
            return None
        parts = name.split("/")
        if any(part in ("", ".", "..") or len(part.encode()) > _MAX_NAME for part in parts):
            return None
        return self._parse(f"{self.config.url.rstrip('/')}/{name}")

    def _parse(self, url: str) -> ShardURL:
        endpoint = self.config.endpoint_url
        return parse_url(url, endpoint=endpoint, allow_schemes={self._scheme})

    def find(self, shard: ShardURL) -> UpstreamOrigin | None:
        """Return the shard if the upstream has a usable copy, or None."""
        origin, copy = self._origin, self._copy_of(shard)
        if copy is None or self._breaker.left:
            return None
        found, sidecar = None, b""
        try:
            found = origin.stat(copy)
            beside = self._parse(f"{copy.raw}{_SIDECAR}")
            sidecar = read_all(origin.open(beside, 0, _MOST), _MOST)
        except ShardNotFoundError:
            pass  # no copy, or one without a sidecar
        except _FAULTS as exn:
            self._failed(exn)
            return None
        self._breaker.succeeded()
        if found is None or found.size is None:
            return None
        if not sidecar:
            return UpstreamOrigin(self._name, origin, copy, found, found, None, origin.conditional)
        try:
            record = json.loads(sidecar)
            if (record["key"], record["size"]) != (shard.key, found.size):
                raise ValueError("the sidecar belongs to another shard")
            info, digest = ObjectInfo.from_record(record["object"]), str(record["digest"])
        except (KeyError, TypeError, ValueError, RecursionError) as exn:
            logger.info("%s: ignoring the copy in %s: %r", shard, self._name, exn)
            return None
        return UpstreamOrigin(self._name, origin, copy, found, info, digest, origin.conditional)

    def _failed(self, exn: Exception) -> None:
        opened = self._breaker.failed()
        text = "not using the upstream %s for a while: %s" if opened else "the upstream %s: %s"
        logger.log(logging.WARNING if opened else logging.INFO, text, self._name, exn)

    def write(self, shard: ShardURL, data: Path, sidecar: bytes) -> None:
        """Copy an entry unless the upstream has it, its sidecar last. Faults are logged."""
        copy = self._copy_of(shard)
        if copy is None or self._breaker.left:
            return
        present = self.find(shard)
        if present is not None and present.digest == json.loads(sidecar)["digest"]:
            return
        try:
            if self._scheme == "file":
                _copy_file(data, copy.local_path, sidecar)
            else:
                import fsspec

                options = dict(self.config.storage_options)
                if self._scheme == "s3":
                    options = s3fs_options(options, self.config.endpoint_url)
                writer = fsspec.filesystem(self._scheme, **options)
                path = writer._strip_protocol(copy.raw)
                writer.put_file(os.fspath(data), path)
                writer.pipe_file(f"{path}{_SIDECAR}", sidecar)
        except Exception as exn:  # noqa: BLE001 - every filesystem has its own exceptions
            self._failed(OSError(redact(f"it cannot be written: {type(exn).__name__}: {exn}")))
        else:
            self._breaker.succeeded()


def _copy_file(data: Path, path: Path, sidecar: bytes) -> None:
    """Copy a file and write its sidecar. Both appear only when they are complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{random_token()}")
    try:
        shutil.copyfile(data, temporary)
        temporary.replace(path)
        temporary.write_bytes(sidecar)
        temporary.replace(path.with_name(f"{path.name}{_SIDECAR}"))
    finally:
        temporary.unlink(missing_ok=True)
