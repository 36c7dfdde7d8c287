"""The directories of a cache in one process: namespaces, sessions, budgets, locks, and cleaning.

Each directory is a cache of its own, with a manifest, sessions, pins and limits, so another job may
use it alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shardcache import clock, threads
from shardcache.config import Config
from shardcache.errors import ConfigError, LockTimeoutError
from shardcache.faults import Disk, ignoring, is_disk_fault, system_error
from shardcache.files import is_directory, modified, read_json
from shardcache.layout import MANIFEST, Layout, read_manifest
from shardcache.locks.keys import Flock, Holder, KeyLease
from shardcache.locks.mounts import node_namespace
from shardcache.locks.sessions import Session, live_sessions
from shardcache.notices import Notices
from shardcache.ranks import Ranks, safe_name
from shardcache.space.budget import Space
from shardcache.space.eviction import POLICIES, SKEW
from shardcache.stats.counters import Counters
from shardcache.store import root
from shardcache.store.directory import DamagedError
from shardcache.store.entry import OpenEntry, Store, open_first, set_aside, versions
from shardcache.units import format_duration
from shardcache.urls import ShardURL

logger = logging.getLogger(__name__)

#: The job of processes without a launcher. They share one namespace per rank.
_NO_JOB = "local"
#: Seconds between two cleanings of a node, and seconds that a process waits before its first
#: cleaning, because many processes end earlier.
_INTERVAL, _FIRST = 300.0, 60.0
#: Errors of a disk that can perhaps be read.
_MAY_READ = errno.EROFS, errno.EACCES, errno.EPERM
#: Seconds between two checks of the memory that a RAM disk leaves to the job.
_MEMORY_INTERVAL = 2.0


@dataclass(eq=False)
class Tier:
    """One directory of a cache in one process."""

    config: Config  #: its ``dir`` and limits are those of this tier
    _ranks: Ranks
    _started: float | None  # when the job began to use the cache; None for a command
    _notices: Notices
    _counters: Counters
    _home: Path  # the directory of the cache, whose pins hold in all tiers
    node: Layout = field(init=False)  #: the node's namespace
    store: Store = field(init=False)  #: the namespace that this process stores into
    space: Space = field(init=False)  #: the budget of the directory
    made: tuple[int, int] | None = None  #: `identity` after `make`; None if the tier failed
    _session: Session | None = None

    def __post_init__(self) -> None:
        self._policy, manifest = POLICIES[self.config.policy], None
        with ignoring(OSError):  # `check` and `make` try again
            manifest = read_manifest(self.config.dir)
        self._locate(manifest)

    def _locate(self, manifest: dict[str, Any] | None) -> None:
        """Determine the namespaces from the configuration and the manifest, if it is known."""
        self._is_located = manifest is not None
        namespace = self.node = node_namespace(self.config, manifest or {})
        if self.config.isolation != "node":
            name = self._ranks.job or _NO_JOB
            if self.config.isolation == "rank":
                name += f"-{self._ranks.rank}"
            namespace = self.node.namespace(safe_name(name))
        self.store = self._store(namespace)
        self.space = self.space_with(self.config)

    def _store(self, layout: Layout) -> Store:
        # Nodes that share a directory boot at other times: with leases, `publish` flushes the data.
        is_flushed = layout.grace is not None or self.config.fsync != "verify-after-boot"
        return Store(layout, verify_after_boot=not is_flushed)

    def stores(self) -> list[Store]:
        """Return all namespaces on the disk, this process's namespace first."""
        own_base, namespaces = self.store.layout.base, self.node.namespaces()
        return [self.store, *(self._store(other) for other in namespaces if other.base != own_base)]

    def check(self) -> bool:
        """Return whether the directory has a cache; ConfigError if it must not be used."""
        if not self._is_located:
            self._locate(read_manifest(self.config.dir))
        root.check_manifest(self.config)
        root.check_symlinks(self.store.layout)
        return self.made is not None or root.is_cache(self.config.dir)

    def make(self) -> None:
        """Create the directories that are missing, and a session for this process.

        Raises ConfigError or OSError if the directory must not or cannot be used.
        """
        self.end_session()
        self.made = None
        node = root.make_root(self.config)
        # Again, because the manifest names the directory of this node.
        self._locate(read_manifest(self.config.dir))
        root.check_symlinks(self.store.layout)
        if self.store.layout != node:
            self.store.layout.make()
        self._session = Session(self.node, self._started or clock.time())
        _record_limits(self.node, self._started, self.config.job_settings())
        self.made = self.identity()
        if self.node.grace is not None and self.config.locks == "auto":
            self._notices.warn(
                "locking",
                "%s is not on a local disk, or was made where it is not, so shardcache uses leases "
                "instead of locks, and evicts entries only after %s without use. A local disk is "
                "faster.",
                self.config.dir,
                format_duration(self.node.grace),
            )

    def identity(self) -> tuple[int, int] | None:
        """Return the device and inode of the directory, which change if it is replaced; None if a
        part of it is gone, or the disk fails.
        """
        layout = self.store.layout
        try:
            status = self.config.dir.stat()
            os.lstat(f"{self.config.dir}/{MANIFEST}")
            layout.base.lstat()  # the directories in it are made when they are needed
        except system_error():
            return None
        # With leases, the filesystem may be FUSE, whose inode numbers may change.
        return status.st_dev, 0 if layout.grace is not None else status.st_ino

    def is_intact(self) -> bool:
        """Return whether the directory is still the one that was made, and its disk works."""
        if self.made is None or self.made != self.identity():
            return False
        # It was removed, or could not be made because the disk was full.
        if self._session is not None and not os.path.lexists(self._session.path):
            self._session = Session(self.node, self._started or clock.time())
        return True

    def failed(self, exn: OSError | ConfigError) -> None:
        """Warn that this tier is skipped. If its disk is broken, do not use it again."""
        if is_disk_fault(exn) and exn.errno not in _MAY_READ:
            self.made = None
        path, reason = self.config.dir, getattr(exn, "strerror", None) or exn
        self._notices.warn(f"tier {path}", "the tier %s is not used: %s", path, reason)

    def space_with(self, config: Config) -> Space:
        home = Layout.of_root(self._home)
        return Space(self.node, self.stores, config, self._policy, self._counters, home)

    def stop_keeping_used(self) -> None:
        """From now on, let shards be evicted that running jobs have used."""
        if self._policy.keeps_used:
            self._policy = self._policy._replace(keeps_used=False)
            self.space = self.space_with(self.config)

    def owns(self, directory: str) -> bool:
        return directory.startswith(f"{self.node.base}/")

    def end_session(self) -> None:
        """Close the session, so that the shards that this job used may be evicted."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
            with ignoring(OSError):
                # Not if a process began as early, such as the owner of a DataLoader's worker.
                others = live_sessions(self.node)
                if (self._started or 0.0) < min(others, default=math.inf):
                    self.space.forget_refusal()


def _record_limits(layout: Layout, started: float | None, limits: dict[str, Any]) -> None:
    """Store the limits of a job for commands, unless a job that began later has stored its own.

    A command has no ``started``, and stores only its tiers.
    """
    with ignoring(OSError):  # the disk is full or read-only, or a directory has the name
        known, last, tiers = job_limits(layout), modified(layout.limits), limits["tiers"]
        if started is None:
            if not tiers:
                return
            limits, started = known, last
        elif started < last <= clock.time() + SKEW:
            return
        tiers = tiers or known.get("tiers")  # those of earlier jobs may still hold shards
        layout.write(layout.limits, json.dumps({**limits, "tiers": tiers}).encode())
        os.utime(layout.limits, (started, started))


def job_limits(layout: Layout) -> dict[str, Any]:
    """Return the limits that the last job stated, unchecked; an empty dict if there are none."""
    limits = read_json(layout.limits)
    return limits if isinstance(limits, dict) else {}


def lock_layout(last: Tier, base: Path) -> Layout:
    """Return the namespace in the ``last`` tier with the locks for the one at ``base``."""
    is_rank = base.parent.name == "ranks" and base.parents[1].name == "v1"
    return last.node.namespace(base.name) if is_rank else last.node


class Directories:
    """The directories of a cache as a process found them: the usable tiers, fastest first.

    The last tier holds the locks of all keys. If a directory is unmounted or emptied, new
    `Directories` replace these. Safe between threads.
    """

    def __init__(self, tiers: Sequence[Tier], ranks: Ranks, disk: Disk, notices: Notices) -> None:
        self.tiers, self.ranks, self.disk, self.notices = tiers, ranks, disk, notices
        stores = [tier.store for tier in tiers]
        self.open = stores[0].open if len(stores) == 1 else partial(open_first, stores)
        self.layout = stores[-1].layout  #: holds the locks

    def are_intact(self) -> bool:
        return all(tier.is_intact() for tier in self.tiers)

    def lookup(
        self, shard: ShardURL, outdated: frozenset[str] = frozenset(), *, condemn: bool = False
    ) -> OpenEntry | None:
        """Open the newest sound entry of a shard, except ``outdated`` versions; None for a miss.

        With ``condemn``, a damaged entry is set aside; the caller must then hold the key's lock.
        """
        try:
            return self.open(shard.key, shard.basename, outdated)
        except DamagedError as exn:
            logger.info("%s: not used: %s", shard, exn)
            if isinstance(exn.__cause__, OSError):
                self.read_failed(exn.directory, exn.__cause__)
            if condemn and set_aside(Path(exn.directory), f"{shard}: {exn}"):
                text = "%s was damaged and is downloaded again: %s"
                self.notices.warn("damaged", text, shard, exn)
            return None

    def faster_tier(self, path: str) -> Tier | None:
        """Return the tier that has a path, or None if it is the last one."""
        return next((tier for tier in self.tiers[:-1] if tier.owns(path)), None)

    def read_failed(self, directory: str, exn: OSError) -> None:
        """Count a fault of the disk in an entry, or do without its tier if it is not the last."""
        if (tier := self.faster_tier(directory)) is None:
            self.disk.failed(self.disk.reading, exn)
        elif is_disk_fault(exn):
            tier.failed(exn)

    def versions(self, key: str) -> list[Path]:
        return [Path(row[0]) for tier in self.tiers for row in versions(tier.store.layout, key)]

    def holder(self) -> Holder:
        """Return the record that this process writes into a lock that it holds."""
        ranks = self.ranks
        return Holder.this_process(None if ranks.launcher == "none" else ranks.rank, ranks.job)

    def key_lock(self, key: str, base: Path | None = None) -> Flock | KeyLease:
        """Return the lock of a key, whose holder may download, set aside or amend its entries.

        ``base`` is the directory of the namespace, by default that of this process.
        """
        layout = self.layout if base is None else lock_layout(self.tiers[-1], base)
        if layout.grace is not None:
            return KeyLease(layout, key)
        return Flock(layout.key_lock(key), layout.modes)

    def release(self, lock: Flock | KeyLease) -> None:
        """Release the lock of a key. Its record stays if it names a partial to be resumed."""
        name = lock.partial_name
        partials = (store.layout.partials for tier in self.tiers for store in tier.stores())
        lock.release(keep=name is not None and any(is_directory(p / name) for p in partials))

    @contextlib.contextmanager
    def key_locked(self, entry: Path) -> Iterator[bool]:
        """Hold the lock of an entry's key in the body; yield False if another process has it."""
        lock = self.key_lock(entry.parent.name, entry.parents[3])
        try:
            yield lock.try_acquire(self.holder())
        finally:
            self.release(lock)

    def slot(self, name: str, count: int) -> Flock | None:
        """Take one of the node's ``count`` slots for ``name``; return None if all are taken."""
        layout, holder = self.tiers[-1].node, self.holder()
        slots = (Flock(layout.named_lock(f"{name}-{n}"), layout.modes) for n in range(count))
        return next((slot for slot in slots if slot.try_acquire(holder)), None)


class Housekeeper:
    """Cleans the tiers of a job in the background, as ``shardcache clean`` does.

    A process may end in the middle of a cleaning, which does no harm.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.due = 0.0  #: when `check` must act again, on the monotonic clock
        self._tiers = tiers
        self._next = clock.monotonic() + _FIRST
        self._threads: dict[Tier, threading.Thread] = {}

    def check(self) -> None:
        """Start a cleaning in a thread if one is due, or if a RAM disk takes the job's memory."""
        if (now := clock.monotonic()) < self.due:
            return
        self.due = now + _MEMORY_INTERVAL  # set first, so that other threads return above
        if is_due := now >= self._next:
            self._next = now + _INTERVAL
        for tier in self._tiers:
            # A thread each, because a RAM disk must not wait for a slow disk.
            thread = self._threads.get(tier)
            is_busy = thread is not None and thread.is_alive()  # it may wait for a lock
            if tier.made and not is_busy and (is_due or tier.space.lacks_memory()):
                with contextlib.suppress(threads.NoThreadError):
                    work = partial(_clean, tier.space)
                    self._threads[tier] = threads.start(work, "shardcache-clean")


def _clean(space: Space) -> None:
    """Clean a directory in the background, unless a process of the node has done so recently."""
    try:
        last = modified(space.node.named_lock("clean"))  # each cleaning writes to it
        if not 0 <= clock.time() - last < _INTERVAL or space.lacks_memory():
            report = space.clean()
            if report.removed:
                logger.info("cleaned: %d removed, %d bytes", len(report.removed), report.freed)
    except LockTimeoutError as exn:
        logger.debug("%s", exn)
    except system_error() as exn:
        logger.info("background cleaning failed: %s", exn)
