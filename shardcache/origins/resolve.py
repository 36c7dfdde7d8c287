"""Which origin reads which URL.

Origins are made on first use and belong to the process that made them: a forked child makes an
`Origins` of its own, because sockets, event loops and locks must not be shared with the parent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

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
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._places: list[Place] | None = None
        self._guard = threading.Lock()
        self._made: dict[str, Origin] = {}

    def of(self, url: ShardURL) -> Origin:
        """The origin of ``url``; ConfigError if its client cannot be set up."""
        with self._guard:
            if url.scheme not in self._made:
                self._made[url.scheme] = self._make(url.scheme)
            return self._made[url.scheme]

    def _make(self, scheme: str) -> Origin:
        # Imported on first use: nobody needs all of them.
        config = self._config
        options = scheme_options(config, scheme)
        if scheme == "s3":
            from shardcache.origins.s3 import S3Origin

            return S3Origin(options, endpoint_url=config.endpoint_url, timeout=config.timeout)
        if scheme in ("http", "https"):
            from shardcache.origins.http import WebOrigin

            return WebOrigin(timeout=config.timeout)
        if scheme == "pipe":
            from shardcache.origins.command import PipeOrigin

            return PipeOrigin(config.timeout)
        from shardcache.origins.filesystem import FsspecOrigin

        return FsspecOrigin(scheme, options, timeout=config.timeout)

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

    def nearer(self, url: ShardURL) -> Iterator[UpstreamOrigin]:
        """The shard in each upstream that has it; each is asked when its turn comes."""
        for place in self._upstreams():
            if (found := place.find(url)) is not None:
                yield found

    @property
    def copies(self) -> bool:
        """Whether an upstream is to have what was fetched."""
        return any(upstream.write_back for upstream in self._config.upstreams)

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

    def _upstreams(self) -> list[Place]:
        if not self._config.upstreams:
            return []
        from shardcache.origins.upstream import Place

        with self._guard:
            if self._places is None:
                self._places = [Place(each, self._config) for each in self._config.upstreams]
            return self._places
