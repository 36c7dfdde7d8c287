"""Which place a shard is read from: nearer copies first, then its origin.

    upstream 1 has it? ---- no, or does not answer ----> upstream 2 ... ----> the origin

An upstream, a NAS or a store of the cluster, keeps ``s3://bucket/key`` as
``<upstream>/bucket/key``, and other URLs likewise by what stands behind ``://``. So a copy that
somebody else made (``aws s3 sync``) is one, too. A copy that shardcache made (``write_back``) has
the entry's sidecar beside it, ``<name>.shardcache.json``: it is of the version that the origin had,
is compared with the digest in the sidecar, and a fetch that began with it can go on at the origin.
Other copies have the version that the upstream states.

Nothing that goes wrong with an upstream is an error; one that fails or is silent is left alone for
a minute. Shards with a query, a version or a client of their own are not looked for.

Origins belong to the process that made them: a forked child makes an `Origins` of its own, because
sockets, event loops and locks must not be shared with the parent.
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
    """The origins of one configuration, one per client, and its upstreams; safe between threads."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._guard = threading.Lock()
        self._made: dict[tuple[str, tuple[tuple[str, str], ...], str], Origin] = {}

    def of(self, shard: ShardURL) -> Origin:
        """Return the origin of ``url``; raise ConfigError if it lacks hidden values."""
        if shard.is_masked:
            raise ConfigError(
                f"{shard} cannot be read: parameters that may hold secrets are hidden (***), as in "
                "logs, lists and pickles. Pass the whole URL.",
                url=str(shard),
            )
        config, scheme = self._config, shard.scheme
        kind = needs_s3fs(shard.bucket_and_key()[0], {}) if scheme == "s3" else ""
        with self._guard:
            if (scheme, shard.options, kind) not in self._made:
                if shard.options:
                    config = for_command(config, shard.options)
                options = scheme_options(config, scheme)
                made = _make(shard, options, config.endpoint_url, config.timeout)
                self._made[scheme, shard.options, kind] = made
            return self._made[scheme, shard.options, kind]

    def add(self, scheme: str, origin: Origin) -> None:
        """Read ``scheme`` from ``origin`` in this process."""
        with self._guard:
            self._made[scheme, (), ""] = origin

    def prepare(self, shard: ShardURL) -> None:
        """Make the client that reading ``url`` takes (ConfigError: it cannot be set up)."""
        prepare = getattr(self.of(shard), "prepare", None)
        if prepare is not None:  # of S3: the others' take no time
            prepare()

    def upstreams(self, shard: ShardURL) -> Iterator[UpstreamOrigin]:
        """The shard in each upstream that has it; each is asked when its turn comes."""
        for place in self._places:
            if (found := place.find(shard)) is not None:
                yield found

    @property
    def writes_back(self) -> bool:
        """Whether an upstream is to have what was fetched."""
        return any(upstream.write_back for upstream in self._config.upstreams)

    def write_back(self, shard: ShardURL, data: Path, sidecar: bytes) -> None:
        """Copy an entry's data and sidecar to the upstreams that want them; nothing is raised."""
        for place in self._places:
            if place.upstream.write_back:
                place.write(shard, data, sidecar)

    @lazy
    def _places(self) -> list[_Place]:
        return [_Place(each, self._config.timeout) for each in self._config.upstreams]


def _make(
    shard: ShardURL, options: Mapping[str, Any], endpoint_url: str | None, timeout: float
) -> Origin:
    """The origin of ``shard``, and of the other shards that `Origins.of` does not tell from it."""
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
    """One shard as an upstream has it; a `base.Origin` of that shard alone."""

    name: str  # of the upstream, for people
    conditional: bool
    _origin: Origin
    _copy: ShardURL  # where it is
    _found: ObjectInfo  # what the upstream says of it
    _info: ObjectInfo  # the version at the origin, where a sidecar states it
    digest: str | None  # tree digest of the bytes, where a sidecar states it

    states_checksums = False  # the digest proves more

    def open(
        self, shard: ShardURL, start: int, stop: int | None, expected: ObjectInfo | None = None
    ) -> Body:
        """See `base.Origin.open`; whoever asks compares the answer's version."""
        body = self._origin.open(self._copy, start, stop, self._found)
        body.info = self._info
        return body

    def stat(self, shard: ShardURL) -> ObjectInfo:
        """See `base.Origin.stat`."""
        if self._origin.stat(self._copy).version != self._found.version:
            raise VersionChangedError(str(shard))
        return self._info


class _Place:
    """One upstream."""

    def __init__(self, upstream: Upstream, timeout: float) -> None:
        self.upstream = upstream
        self._name = redact(upstream.url)
        self._scheme = upstream.url.partition("://")[0].lower() if "://" in upstream.url else "file"
        self._breaker = Breaker(threshold=_FAILURES)
        options, timeout = upstream.storage_options, min(timeout, _TIMEOUT)
        inside = self._parse(f"{upstream.url.rstrip('/')}/x")
        self._origin = _make(inside, options, upstream.endpoint_url, timeout)

    def _copy_of(self, shard: ShardURL) -> ShardURL | None:
        """Where it would keep a shard; None if such a shard is not looked for."""
        name = shard.canonical.partition("://")[2].lstrip("/")
        if shard.scheme == "pipe" or shard.version_id is not None or shard.options or "?" in name:
            return None
        parts = name.split("/")
        if any(part in ("", ".", "..") or len(part.encode()) > _MAX_NAME for part in parts):
            return None
        return self._parse(f"{self.upstream.url.rstrip('/')}/{name}")

    def _parse(self, url: str) -> ShardURL:
        endpoint = self.upstream.endpoint_url
        return parse_url(url, endpoint=endpoint, allow_schemes={self._scheme})

    def find(self, shard: ShardURL) -> UpstreamOrigin | None:
        """A shard as it has it, or None."""
        origin, copy = self._origin, self._copy_of(shard)
        if copy is None or self._breaker.left:
            return None
        found, sidecar = None, b""
        try:
            found = origin.stat(copy)
            beside = self._parse(f"{copy.raw}{_SIDECAR}")
            sidecar = read_all(origin.open(beside, 0, _MOST), _MOST)
        except ShardNotFoundError:
            pass  # there is no copy, or somebody else's
        except _REFUSALS as exn:
            self._failed(exn)
            return None
        self._breaker.succeeded()
        if found is None or found.size is None:
            return None
        info, digest = found, None
        if sidecar:
            try:
                record = json.loads(sidecar)
                if (record["key"], record["size"]) != (shard.key, found.size):
                    raise ValueError("it is of another shard")
                info, digest = ObjectInfo.from_record(record["object"]), str(record["digest"])
            except (KeyError, TypeError, ValueError, RecursionError) as exn:
                logger.info("%s: its copy in %s is not used: %r", shard, self._name, exn)
                return None
        return UpstreamOrigin(self._name, origin.conditional, origin, copy, found, info, digest)

    def _failed(self, exn: Exception) -> None:
        opened = self._breaker.failed()
        text = "the upstream %s is left alone for a while: %s" if opened else "the upstream %s: %s"
        logger.log(logging.WARNING if opened else logging.INFO, text, self._name, exn)

    def write(self, shard: ShardURL, data: Path, sidecar: bytes) -> None:
        """Copy an entry there unless it is there, its sidecar last; nothing is raised."""
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

                options = dict(self.upstream.storage_options)
                if self._scheme == "s3":
                    options = s3fs_options(options, self.upstream.endpoint_url)
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
