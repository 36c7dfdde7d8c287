"""Choose where to read a shard: from an upstream with a nearer copy, or from its origin.

An upstream holds ``s3://bucket/key`` as ``<upstream>/bucket/key``, and any other URL by its part
after ``://``, so that it may be the copy of another program (``aws s3 sync``). A copy that
shardcache made (``write_back``) comes with a sidecar, ``<name>.shardcache.json``. It states the
version at the origin, which may continue the download, and a digest of the bytes.

A fault of an upstream never fails a download. A forked child makes its own `Origins`, because it
must not share sockets, event loops or locks with its parent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import Empty
from typing import Any
from urllib.parse import quote

from shardcache import threads
from shardcache.config import Config, Upstream
from shardcache.errors import ConfigError, ShardCacheError, ShardNotFoundError, TransferError
from shardcache.faults import Breaker
from shardcache.files import replacing
from shardcache.origins.aws import needs_s3fs, s3fs_options, with_options
from shardcache.origins.base import (
    NO_BUCKET,
    Body,
    ObjectInfo,
    Origin,
    TransientError,
    VersionChangedError,
    compare_version,
    read_all,
)
from shardcache.origins.retry import try_once
from shardcache.urls import ShardURL, find_scheme, parse_url, redact, refuse_control

logger = logging.getLogger(__name__)

_SIDECAR = ".shardcache.json"
_MOST = 64 * 1024  #: bytes that are read of a sidecar; most have about 700
#: Longest component of a copy's path, in bytes. Filesystems allow 255; temporary names are longer.
_MAX_NAME = 200
_FAILURES = 2  #: in a row, after which an upstream is not used for a minute
_SLOWEST = 1e6  #: bytes per second of a copy that is being written, below which it is given up


class Origins:
    """The origins and the upstreams of one configuration. Threads may share it.

    ``is_new`` returns whether a kind of warning is the first of its job on this node.
    """

    def __init__(self, config: Config, is_new: Callable[[str], bool] = lambda kind: True) -> None:
        self._config = config
        self._is_new = is_new
        self._made: dict[tuple[str, tuple[tuple[str, str], ...], str], Origin] = {}

    def of(self, shard: ShardURL) -> Origin:
        """Return the origin of a shard; ConfigError if its URL is masked (``***``) or not valid."""
        refuse_control(shard.raw)
        if shard.is_masked:
            raise ConfigError(
                f"{shard} cannot be read: the parts that may hold secrets are hidden, as in logs, "
                "lists and pickles. Pass the whole URL.",
                url=str(shard),
            )
        # S3 Express buckets and multi-region access points need another client than other buckets.
        kind = needs_s3fs(shard.bucket_and_key()[0], {}) if shard.scheme == "s3" else ""
        key = shard.scheme, shard.options, kind
        if key not in self._made:
            options = shard.options
            config = with_options(self._config, options) if options else self._config
            made = _make(shard, config.scheme_options(shard.scheme), config.timeout)
            self._made.setdefault(key, made)  # another thread may have been faster
        return self._made[key]

    def use(self, scheme: str, origin: Origin) -> None:
        self._made[scheme, (), ""] = origin

    def limit_open(self, most: int) -> int:
        """Close idle connections while more than ``most`` are open; return how many are open."""
        origins = [*self._made.values(), *(upstream.origin for upstream in self._upstreams)]
        transports, count = [o.transport for o in origins if o.transport is not None], 0
        for transport in sorted(transports, key=lambda t: -t.used):  # the last one keeps most
            count += transport.limit_open(max(0, most - count))
        return count

    def sources(self, shard: ShardURL, size: int | None = None) -> Iterator[Origin]:
        """Yield each upstream that has the shard, queried only when it is reached, and the origin.

        ``size`` is that of the object, if known. A copy of another size is incomplete.
        """
        for upstream in self._upstreams:
            if (copy := upstream.find(shard, size)) is not None:
                yield copy
        yield self.of(shard)

    def write_back(self, shard: ShardURL, data: Path, sidecar: bytes) -> None:
        """Copy an entry to all upstreams with ``write_back``. Faults are logged, not raised."""
        for upstream in self._upstreams:
            if upstream.config.write_back:
                upstream.write(shard, data, sidecar)

    @threads.lazy
    def _upstreams(self) -> list[_Upstream]:
        return [
            _Upstream(config, self._config.timeout, self._is_new)
            for config in self._config.upstreams
        ]


def _make(shard: ShardURL, options: Mapping[str, Any], timeout: float) -> Origin:
    """Return a new origin for ``shard``, and for other shards that need the same client."""
    scheme = shard.scheme
    if scheme == "s3" and (reason := needs_s3fs(shard.bucket_and_key()[0], options)):
        from shardcache.origins.filesystem import s3fs_origin

        return s3fs_origin(reason, options, timeout)
    # The module is imported only when it is needed, because no program needs all of them.
    module, _, name = find_scheme(scheme).origin.partition(".")
    origin: type[Origin] = getattr(import_module(f"shardcache.origins.{module}"), name)
    return origin(scheme, options, timeout)


@dataclass(eq=False)
class UpstreamOrigin(Origin):
    """The copy of one shard in an upstream, as a `base.Origin` that reads only this shard."""

    _upstream: _Upstream
    _copy: ShardURL
    _copied: ObjectInfo  #: the version in the upstream
    stated: ObjectInfo  #: the version at the origin if a sidecar states it, otherwise `_copied`
    digest: str | None  #: tree digest of the bytes, if a sidecar states it
    states_checksums = False  # the digest proves more than a checksum

    def __post_init__(self) -> None:
        self.upstream, self._origin = self._upstream.name, self._upstream.origin
        self.proves_version = self._origin.proves_version

    def ended(self, exn: Exception | None = None) -> None:
        self._upstream.ended(exn)

    def open(
        self, shard: ShardURL, start: int, stop: int | None, expected: ObjectInfo | None = None
    ) -> Body:
        """Open the version that was found. The caller compares that version with ``expected``."""
        body = self._origin.open(self._copy, start, stop, self._copied)
        body.info = self.stated
        return body

    def stat(self, shard: ShardURL) -> ObjectInfo:
        """Return the version of the copy; raise VersionChangedError if the copy was replaced."""
        compare_version(self._origin, self._copy, self._copied)
        return self.stated


def check_upstream(config: Upstream, timeout: float) -> None:
    """Raise an error if an upstream cannot be read."""
    upstream = _Upstream(config, timeout, lambda kind: False)
    upstream.check(upstream.copy_named("shardcache-test"))


class _Upstream:
    """An upstream of the configuration, with its origin and its breaker."""

    def __init__(self, config: Upstream, timeout: float, is_new: Callable[[str], bool]) -> None:
        self.config, self._timeout, self._is_new = config, timeout, is_new
        self.name = redact(config.url)
        self._scheme = self.copy_named("x").scheme
        self._breaker = Breaker(threshold=_FAILURES)
        self._exists = False  # whether `check` has found the store
        self._options = dict(config.storage_options)
        if self._scheme == "s3" and config.endpoint_url:
            self._options["endpoint_url"] = config.endpoint_url
        self.origin = _make(self.copy_named("x"), self._options, timeout)

    def _copy_of(self, shard: ShardURL) -> ShardURL | None:
        """Return the URL of the shard's copy, or None if upstreams are not searched for it."""
        name = shard.canonical.partition("://")[2].lstrip("/")
        if shard.scheme == "pipe" or shard.version_id is not None or shard.options:
            return None
        parts = name.split("/")
        if any(part in ("", ".", "..") or len(os.fsencode(part)) > _MAX_NAME for part in parts):
            return None
        if not set("?*{").isdisjoint(name):  # such a name may be a pattern
            return None
        is_quoted = find_scheme(shard.scheme).is_web or not find_scheme(self._scheme).is_web
        return self.copy_named(name if is_quoted else quote(os.fsencode(name)))

    def copy_named(self, name: str) -> ShardURL:
        base, endpoint = self.config.url.rstrip("/"), self.config.endpoint_url
        scheme = base.partition(":")[0].lower()
        return parse_url(f"{base}/{name}", endpoint=endpoint, allow_schemes={scheme})

    def check(self, copy: ShardURL) -> None:
        """Raise ConfigError if the whole store is missing, which no HEAD tells."""
        try:
            try_once(str(copy), lambda: self.origin.open(copy, 0, 1)).close()
        except ShardNotFoundError as exn:
            base = self.copy_named("x")
            is_unmounted = base.is_local and not base.local_path.parent.is_dir()
            if is_unmounted or NO_BUCKET in exn.message:
                raise ConfigError(f"there is no {self.name}") from None
        self._exists = True

    def _look(self, copy: ShardURL) -> tuple[ObjectInfo | None, bytes]:
        """Return the version of a copy, None without one, and its sidecar, empty without one."""
        sidecar = b""
        try:
            copied = try_once(str(copy), lambda: self.origin.stat(copy))
        except ShardNotFoundError:
            if not self._exists:
                self.check(copy)
            return None, b""
        with contextlib.suppress(ShardNotFoundError):
            beside = parse_url(f"{copy.raw}{_SIDECAR}", allow_schemes={self._scheme})
            opened = try_once(str(beside), lambda: self.origin.open(beside, 0, _MOST))
            sidecar = read_all(opened, _MOST)
        return copied, sidecar

    def find(self, shard: ShardURL, size: int | None) -> UpstreamOrigin | None:
        """Return the upstream's copy of the shard, or None if it has no usable one."""
        copy = self._copy_of(shard)
        if copy is None or self._breaker.left:
            return None
        try:
            copied, sidecar = self._look(copy)
        except (ShardCacheError, TransientError, VersionChangedError) as exn:
            self.ended(exn)
            return None
        if copied is None or not copied.size or size not in (None, copied.size):
            return None
        info, digest = copied, None
        if sidecar:
            try:
                record = json.loads(sidecar)
                if (record["key"], record["size"]) != (shard.key, copied.size):
                    raise ValueError("the sidecar belongs to another shard")
                info, digest = ObjectInfo.from_record(record["object"]), str(record["digest"])
            except (KeyError, TypeError, ValueError, RecursionError) as exn:
                logger.info("%s: ignoring the copy in %s: %r", shard, self.name, exn)
                return None
        return UpstreamOrigin(self, copy, copied, info, digest)

    def ended(self, exn: Exception | None) -> None:
        """Note a success or count a fault. The first pause of a job causes a warning."""
        if exn is None:
            self._breaker.succeeded()
            return
        cause = exn.__cause__ if isinstance(exn, TransferError) else None
        reason = redact(str(cause or exn))
        if not self._breaker.failed(at_once=isinstance(exn, ConfigError)):
            logger.info("the upstream %s: %s", self.name, reason)
            return
        level = logging.WARNING if self._is_new(f"upstream-{self.name}") else logging.INFO
        logger.log(level, "not using the upstream %s for a while: %s", self.name, reason)

    def write(self, shard: ShardURL, data: Path, sidecar: bytes) -> None:
        """Copy an entry and its sidecar unless the upstream has them. Faults are logged."""
        copy, stated = self._copy_of(shard), json.loads(sidecar)
        if copy is None or self._breaker.left:
            return
        seconds = self._timeout + stated["size"] / _SLOWEST
        try:  # in a thread, because nothing can interrupt a call to a dead filesystem
            write = partial(self._write, shard, copy, data, stated)
            threads.call(write, seconds, "shardcache-put")
        except Empty:
            self.ended(OSError(f"it was not written within {seconds:.0f} s"))
        except Exception as exn:  # noqa: BLE001 - every filesystem has its own exceptions
            self.ended(OSError(redact(f"it cannot be written: {type(exn).__name__}: {exn}")))
        else:
            self.ended(None)

    def _write(self, shard: ShardURL, copy: ShardURL, data: Path, stated: dict[str, Any]) -> None:
        """Write a copy unless the upstream has it or another program's.

        A sidecar without data is no copy, but data without its own sidecar would count as one.
        """
        (copied, found_sidecar), record = self._look(copy), dict[str, Any]()
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            record = dict(json.loads(found_sidecar))
        if copied is not None and record.get("digest") == stated["digest"]:
            return
        is_link = self._scheme == "file" and copy.local_path.is_symlink()
        if is_link or (copied is not None and record.get("size") != copied.size):
            logger.info("%s: %s has another file of this name, which stays", shard, self.name)
            return
        sidecar = json.dumps(stated).encode()
        if self._scheme == "file":
            file = copy.local_path
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as new, replacing(Path(f"{file}{_SIDECAR}")) as beside:
                shutil.copyfile(data, new)
                beside.write_bytes(sidecar)
                file.unlink(missing_ok=True)
            return
        import fsspec

        options = s3fs_options(self._options) if self._scheme == "s3" else self._options
        writer = fsspec.filesystem(self._scheme, **options)
        path = writer._strip_protocol(copy.raw)
        if copied is not None:
            writer.rm_file(path)
        writer.pipe_file(f"{path}{_SIDECAR}", sidecar)
        writer.put_file(os.fspath(data), path)
