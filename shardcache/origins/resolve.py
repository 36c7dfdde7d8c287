"""Which origin reads which URL.

Origins are made on first use and belong to the process that made them: a forked child makes an
`Origins` of its own, because sockets, event loops and locks must not be shared with the parent.
"""

from __future__ import annotations

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
    from shardcache.origins.upstream import Place, UpstreamOrigin

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
        self._places: list[Place] | None = None
        self._guard = threading.Lock()
        self._made: dict[str, Origin] = {}

    def of(self, url: ShardURL) -> Origin:
        """The origin of ``url``.

        Raises:
            ConfigError: its client cannot be set up.
        """
        with self._guard:
            origin = self._made.get(url.scheme)
            if origin is None:
                origin = self._made[url.scheme] = self._make(url.scheme)
            return origin

    def nearer(self, url: ShardURL) -> Iterator[UpstreamOrigin]:
        """The shard in each upstream that has it; each is asked when its turn comes."""
        for place in self._upstreams():
            if (found := place.find(url)) is not None:
                yield found

    def write_back(self, url: ShardURL, data: Path, sidecar: bytes) -> None:
        """Copy what was fetched to the upstreams that are to have it; nothing is raised.

        Args:
            url: the shard.
            data: its bytes.
            sidecar: what is known of them, as an entry's sidecar has it.
        """
        for place in self._upstreams():
            if place.writes:
                place.write(url, data, sidecar)

    @property
    def copies(self) -> bool:
        """Whether an upstream is to have what was fetched."""
        return any(upstream.write_back for upstream in self._config.upstreams)

    def _upstreams(self) -> list[Place]:
        if not self._config.upstreams:
            return []
        with self._guard:
            if self._places is None:
                from shardcache.origins.upstream import Place

                config, clock = self._config, self._clock
                self._places = [Place(each, config, clock) for each in config.upstreams]
            return self._places

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
