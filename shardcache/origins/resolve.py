"""Which origin reads which URL.

Origins are made on first use and belong to the process that made them: after a
fork the child makes its own, because sockets, event loops and locks must not be
shared with the parent.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shardcache.clock import SYSTEM_CLOCK, Clock
from shardcache.config import Config
from shardcache.origins.base import Origin
from shardcache.origins.endpoints import scheme_options
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.origins.upstream import UpstreamOrigin, Upstreams

__all__ = ["Origins"]


class Origins:
    """The origins of one configuration, one per scheme; safe between threads.

    Args:
        config: endpoint, storage options, time-outs, upstreams.
        clock: time.
    """

    def __init__(self, config: Config, clock: Clock = SYSTEM_CLOCK) -> None:
        self._config = config
        self._clock = clock
        self._upstreams: Upstreams | None = None
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._made: dict[str, Origin] = {}

    def of(self, url: ShardURL) -> Origin:
        """The origin of ``url``.

        Raises:
            ConfigError: its client cannot be set up.
        """
        if self._pid != os.getpid():  # one thread only: we are just forked
            self._guard = threading.Lock()
            self._made = {}
            self._upstreams = None
            self._pid = os.getpid()
        with self._guard:
            origin = self._made.get(url.scheme)
            if origin is None:
                origin = self._made[url.scheme] = self._make(url.scheme)
            return origin

    def nearer(self, url: ShardURL) -> Iterator[UpstreamOrigin]:
        """Where the shard is to be had before its origin is asked, in order; see `upstreams`."""
        upstreams = self._ready_upstreams()
        return iter(()) if upstreams is None else upstreams.sources(url)

    def write_back(self, url: ShardURL, data: Path, sidecar: bytes) -> None:
        """Copy what was fetched to the upstreams that are to have it; nothing is raised.

        Args:
            url: the shard.
            data: its bytes.
            sidecar: what is known of them, as an entry's sidecar has it.
        """
        upstreams = self._ready_upstreams()
        if upstreams is not None:
            upstreams.write_back(url, data, sidecar)

    @property
    def copies(self) -> bool:
        """Whether an upstream is to have what was fetched."""
        return any(upstream.write_back for upstream in self._config.upstreams)

    def _ready_upstreams(self) -> Upstreams | None:
        if not self._config.upstreams:
            return None
        with self._guard:
            if self._upstreams is None:
                from shardcache.origins.upstream import Upstreams

                self._upstreams = Upstreams(self._config, self._clock)
            return self._upstreams

    def prepare(self, url: ShardURL) -> None:
        """Make the client that reading ``url`` takes, where it takes long.

        Raises:
            As `of`.
        """
        from shardcache.origins.s3 import S3Origin

        origin = self.of(url)
        if isinstance(origin, S3Origin):
            origin.client()

    def add(self, scheme: str, origin: Origin) -> None:
        """Read ``scheme`` from ``origin`` in this process."""
        with self._guard:
            self._made[scheme] = origin

    def _make(self, scheme: str) -> Origin:
        config = self._config
        if scheme == "s3":
            from shardcache.origins.s3 import S3Origin

            return S3Origin(
                scheme_options(config, "s3"),
                endpoint_url=config.endpoint_url,
                connections=config.connections,
                timeout=config.timeout,
            )
        if scheme in ("http", "https"):
            from shardcache.origins.http import WebOrigin

            return WebOrigin(connections=config.connections, timeout=config.timeout)
        if scheme == "pipe":
            from shardcache.origins.command import PipeOrigin

            return PipeOrigin(config.timeout)
        from shardcache.origins.filesystem import FsspecOrigin

        return FsspecOrigin(scheme, scheme_options(config, scheme), timeout=config.timeout)
