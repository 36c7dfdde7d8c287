"""Helpers for tests that use a `Cache`."""

import logging
from collections.abc import Callable
from typing import TypeAlias

import pytest

from shardcache.cache import Cache
from shardcache.layout import Layout
from shardcache.locks.keys import Holder, KeyLock

MakeCache: TypeAlias = Callable[..., Cache]


def read(cache: Cache, url: str) -> bytes:
    with cache.open(url) as stream:
        return stream.read()


def held_elsewhere(cache: Cache, url: str, now: float = 0.0) -> KeyLock:
    """Take the lock of a shard in the name of a process in another container."""
    lock = KeyLock(Layout.of_root(cache.dir).key_lock(cache.parse(url).key))
    assert lock.try_acquire(Holder(4711, "node-7", 3, "job", now))
    return lock


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
