"""Which origin reads which URL.

Origins are made on first use and belong to the process that made them: after a
fork the child makes its own, because sockets, event loops and locks must not be
shared with the parent.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from shardcache.config import Config
from shardcache.origin import Origin
from shardcache.urls import ShardURL

__all__ = ["Origins"]


class Origins:
    """The origins of one configuration, one per scheme; safe between threads."""

    def __init__(self, config: Config) -> None:
        self._config = config
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
            self._pid = os.getpid()
        with self._guard:
            origin = self._made.get(url.scheme)
            if origin is None:
                origin = self._made[url.scheme] = self._make(url.scheme)
            return origin

    def prepare(self, url: ShardURL) -> None:
        """Make the client that reading ``url`` takes, where it takes long.

        Raises:
            As `of`.
        """
        prepare = getattr(self.of(url), "prepare", None)
        if prepare is not None:
            prepare()

    def add(self, scheme: str, origin: Origin) -> None:
        """Read ``scheme`` from ``origin`` in this process."""
        with self._guard:
            self._made[scheme] = origin

    def _make(self, scheme: str) -> Origin:
        config = self._config
        if scheme == "s3":
            from shardcache.s3 import S3Origin

            own = config.storage_options.get("s3")
            return S3Origin(
                own if isinstance(own, Mapping) else config.storage_options,
                endpoint_url=config.endpoint_url,
                connections=config.connections,
                timeout=config.timeout,
            )
        if scheme in ("http", "https"):
            from shardcache.web import WebOrigin

            return WebOrigin(connections=config.connections, timeout=config.timeout)
        if scheme == "pipe":
            from shardcache.pipes import PipeOrigin

            return PipeOrigin(config.timeout)
        from shardcache.generic import FsspecOrigin

        # storage_options are S3's unless a table is named after the scheme.
        options = config.storage_options.get(scheme)
        return FsspecOrigin(scheme, options if isinstance(options, Mapping) else {})
