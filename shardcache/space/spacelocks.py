"""The locks that a node's processes take to change what a cache holds.

    budget   for one admission and the evictions that it needs
    clean    for all that a cleaner does

Who waits for one of them says so, and whom for. See `locks` for what they are worth.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from shardcache.breaker import FULL
from shardcache.clock import Clock
from shardcache.errors import LockTimeoutError
from shardcache.layout import Layout
from shardcache.locks.flock import Holder, KeyLock, read_holder
from shardcache.units import format_duration

__all__ = ["budget_lock", "sole_cleaner"]

logger = logging.getLogger(__name__)

#: Seconds to wait for the budget lock. It is held for one look at the entries and the
#: evictions that follow; after this long something is wrong with its holder,
#: and going on without it risks only an overshoot.
_BUDGET_SECONDS = 60.0
_BUDGET_POLL = 0.01
_CLEAN_POLL = 0.1
_ANNOUNCE_EVERY = 10.0


@contextlib.contextmanager
def budget_lock(node: Layout, clock: Clock) -> Iterator[None]:
    """Hold the node's budget lock, or go on without it after a minute, with a warning.

    Raises:
        OSError: the disk fails.
    """
    lock = KeyLock(node.named_lock("budget"), node.modes)
    try:
        if not _wait_for(lock, "holds the budget lock", clock, _BUDGET_SECONDS, _BUDGET_POLL):
            logger.warning(
                "waiting for %s: %s holds the budget lock; going on without it",
                format_duration(_BUDGET_SECONDS),
                read_holder(lock.path) or "somebody",
            )
        yield
    finally:
        try:
            lock.release()
        finally:  # as in `coordination`: an interrupt may have struck the first
            lock.release()


@contextlib.contextmanager
def sole_cleaner(node: Layout, clock: Clock, seconds: float) -> Iterator[None]:
    """Hold the lock of those who clean the root.

    Not where the root is another user's, whose lock it would be from then on: what is
    cleaned is the same without it.

    Args:
        node: the node's namespace of the root.
        clock: time.
        seconds: how long to wait for another one.

    Raises:
        LockTimeoutError: another one cleans it.
        OSError: the disk fails.
    """
    if _is_foreign(node):
        yield
        return
    lock = KeyLock(node.named_lock("clean"), node.modes)
    if not _wait_for(lock, "cleans the cache", clock, seconds, _CLEAN_POLL):
        root, who = node.base.parent, read_holder(lock.path) or "another process"
        raise LockTimeoutError(
            f"{root} is being cleaned by {who}; nothing was removed. Try again when that has "
            "ended.",
            dir=root,
        )
    try:
        yield
    finally:
        lock.release()


def _is_foreign(node: Layout) -> bool:
    if node.modes.group is not None:
        return False
    try:
        return os.lstat(node.locks).st_uid != os.geteuid()
    except FileNotFoundError:
        return False


def _wait_for(lock: KeyLock, what: str, clock: Clock, seconds: float, poll: float) -> bool:
    """Take a lock, or tell that it did not come free in time."""
    holder = Holder.this_process(rank=None, job=None, now=clock.time())
    begun = announced = clock.monotonic()
    while not _take(lock, holder):
        now = clock.monotonic()
        if now - begun >= seconds:
            return False
        if now - announced >= _ANNOUNCE_EVERY:
            announced = now
            logger.warning(
                "waiting for %s: %s %s",
                format_duration(now - begun),
                read_holder(lock.path) or "somebody",
                what,
            )
        clock.sleep(min(poll, max(0.001, seconds)))
    return True


def _take(lock: KeyLock, holder: Holder) -> bool:
    try:
        return lock.try_acquire(holder)
    except OSError as exn:
        if exn.errno not in FULL:
            raise
        # There is no room for its file; without it there will not be any.
        logger.info("going on without %s: %s", lock.path.name, exn)
        return True
