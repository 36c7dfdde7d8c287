"""Helpers for tests that use a `Cache`."""

import logging
from typing import Any

import pytest

from shardcache.cache import Cache
from tests.support.storetools import taken


def unfinished(cache: Cache) -> list[Any]:
    """Return the downloads that this process runs or waits for."""
    return cache.process.downloads.unfinished()


def read(cache: Cache, url: str) -> bytes:
    with cache.open(url) as stream:
        return stream.read()


def held_elsewhere(cache: Cache, url: str, now: float = 0.0, **holder: Any) -> Any:
    """Take the lock of a shard in the name of a process in another container."""
    path = cache.process.last_tier.store.layout.key_lock(cache.parse(url).key)
    return taken(path, pid=4711, host="node-7", rank=3, job="job", started=now, **holder)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
