"""Whether what is cached is still what was fetched, and what the origin still has.

Made to run beside jobs: an entry is pinned while it is read, no time of last use changes,
and what is evicted meanwhile is left out without a word. Nothing is written, unless damaged
entries are to be set aside; then only an entry that is still the one that was read, under
the lock of its key, and whoever reads it reads on.

Memory is bounded by the number of entries, which are listed before the first one is read.
All copies of a shard, in whichever tier or namespace, are looked at by one thread, one after
another: its origin is asked once, a file that has several names is read once, and all of a
damaged file's names go together, or the next reader would link the one that was left.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from shardcache.errors import ConfigError
from shardcache.layout import META
from shardcache.locks.flock import is_file
from shardcache.origins.base import ObjectInfo
from shardcache.origins.resolve import Origins
from shardcache.origins.retry import RetryPolicy
from shardcache.runtime import Process
from shardcache.store.digest import block_digest, read_blocks, tree_digest
from shardcache.store.drift import Answer, Drift, differs
from shardcache.store.entry import Entry, lacks, read_sidecar
from shardcache.store.findings import Checks, Finding, State, VerifyStatus
from shardcache.store.metadata import DamagedError, Metadata
from shardcache.store.opening import open_data, readable
from shardcache.urls import ShardURL

__all__ = ["verify"]

#: Shards looked at side by side: a flash disk and an origin answer several as soon as one,
#: and more would keep a disk from the jobs that it is for.
_AT_ONCE = 4
#: Seconds until a retry that waits notices that nobody wants it any more.
_SLICE = 0.25
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def verify(
    process: Process,
    origins: Origins,
    policy: RetryPolicy,
    parse: Callable[[str], ShardURL],
    *,
    checks: Checks,
    wanted: Callable[[str], bool] | None = None,
    status: VerifyStatus | None = None,
    stop: threading.Event | None = None,
) -> Generator[Finding, None, None]:
    """Look at every entry; yields what was found of each, in no order.

    Args:
        process: whose cache.
        origins: where shards come from.
        policy: how often an origin is asked.
        parse: names the shard of a URL.
        checks: what to do.
        wanted: says of a URL whether its shard is to be looked at, or of the data file's name
            where the sidecar does not tell the URL; None takes all.
        status: is kept up to date.
        stop: ends it early once set; entries that are not done with yield nothing.

    Raises:
        ConfigError: with ``repair``, the directory must not be used.
        OSError: a directory cannot be read, or with ``repair`` and ``strict`` not be written.
    """
    status = status or VerifyStatus()
    if checks.repair:
        process.coordinator()  # with its errors, before anything is read
    shards = _chosen(process, wanted, checks.sample)
    status.shards = sum(map(len, shards))
    status.bytes = sum(entry.size for entries in shards for entry in entries)
    verifier = _Verifier(process, origins, policy, parse, checks, status, stop)
    pool = ThreadPoolExecutor(_AT_ONCE, "shardcache-verify")
    pending: deque[Future[list[Finding]]] = deque()
    try:
        for entries in shards:
            pending.append(pool.submit(verifier.shard, entries))
            if len(pending) > 2 * _AT_ONCE:
                yield from pending.popleft().result()
            if stop is not None and stop.is_set():
                break
        while pending:
            yield from pending.popleft().result()
    finally:
        verifier.ended.set()
        pool.shutdown(cancel_futures=True)


def _chosen(
    process: Process, wanted: Callable[[str], bool] | None, sample: float
) -> list[list[Entry]]:
    """The entries to look at, those of one shard together."""
    shards: dict[str, list[Entry]] = {}
    for store in process.stores():
        for entry in store.entries():
            if wanted is None or wanted(_name(entry)):
                shards.setdefault(entry.key, []).append(entry)
    found = list(shards.values())
    if sample < 1:
        return random.SystemRandom().sample(found, math.ceil(len(found) * sample))
    return found


def _name(entry: Entry) -> str:
    """The URL of a shard; where its sidecar does not tell, the name of its data file."""
    with contextlib.suppress(DamagedError, OSError):
        return entry.metadata().url
    with contextlib.suppress(DamagedError, OSError):
        return entry.data.name
    return ""


class _StoppedError(Exception):
    """Nobody wants to know any more."""


@dataclass(slots=True)
class _Copies:
    """What the copies of one shard share while they are looked at, one after another.

    Attributes:
        digests: of files that have several names, by device and inode.
        now: what the origin said.
        read: bytes read of the present one.
    """

    digests: dict[tuple[int, int], str] = field(default_factory=dict)
    now: ObjectInfo | tuple[Answer, str] | None = None
    read: int = 0


class _Verifier:
    """Looks at shards; safe between threads.

    Args:
        process, checks, parse, status, stop: as for `verify`.
        origins, policy: likewise.

    Attributes:
        ended: set once nobody reads what it finds.
    """

    def __init__(
        self,
        process: Process,
        origins: Origins,
        policy: RetryPolicy,
        parse: Callable[[str], ShardURL],
        checks: Checks,
        status: VerifyStatus,
        stop: threading.Event | None,
    ) -> None:
        self.ended = threading.Event()
        self._process = process
        self._drift = Drift(origins, policy, parse, self._sleep)
        self._clock = policy.clock
        self._parse = parse
        self._checks = checks
        self._status = status
        self._stop = stop or self.ended

    def _sleep(self, seconds: float) -> None:
        while seconds > 0:
            self._go_on()
            nap = min(seconds, _SLICE)
            self._clock.sleep(nap)
            seconds -= nap
        self._go_on()

    def _go_on(self) -> None:
        if self.ended.is_set() or self._stop.is_set():
            raise _StoppedError

    def shard(self, entries: Iterable[Entry]) -> list[Finding]:
        """What is found of all entries of one shard; nothing if it is stopped meanwhile."""
        copies = _Copies()
        found: list[tuple[Finding, int | None]] = []
        with contextlib.ExitStack() as opened:
            try:
                for entry in entries:
                    self._go_on()
                    with contextlib.suppress(FileNotFoundError):  # evicted
                        found.append(self._entry(entry, copies, opened))
                    self._status.was_done(entry.size, copies.read)
                    copies.read = 0
            except _StoppedError:
                return []
            return [kept for finding, fd in found if (kept := self._dealt_with(finding, fd))]

    def _entry(
        self, entry: Entry, copies: _Copies, opened: contextlib.ExitStack
    ) -> tuple[Finding, int | None]:
        """What is found of one entry, and its directory, which stays open."""
        url = fd = None
        try:
            fd = os.open(entry.directory, _DIRECTORY)
            opened.callback(os.close, fd)
            with readable():
                metadata = _sidecar(entry)
                url = metadata.url
                self._check_data(entry, metadata, copies)
            if not self._checks.remote or self._superseded(entry):
                return Finding(entry, url, State.OK), fd
            return Finding(entry, url, *self._at_origin(metadata, copies)), fd
        except DamagedError as exn:
            return Finding(entry, url, State.DAMAGED, str(exn)), fd
        except OSError as exn:
            if exn.errno in _GONE:
                raise FileNotFoundError(exn.errno, exn.strerror) from exn
            return Finding(entry, url, State.UNCHECKED, exn.strerror or str(exn)), fd

    def _check_data(self, entry: Entry, metadata: Metadata, copies: _Copies) -> None:
        data = entry.data
        with contextlib.suppress(ConfigError):  # of a scheme that is no longer allowed
            if data.name != self._parse(metadata.url).basename:
                raise DamagedError("its data file is missing")
        grace = self._process.store_of(entry).layout.grace
        opened = open_data(entry.directory, str(data), entry.size, grace)
        if opened is None:
            raise FileNotFoundError(errno.ENOENT, "it was evicted", str(data))
        with opened.file:
            if not self._checks.quick and self._digest(opened.fd, copies) != metadata.digest:
                raise DamagedError("its bytes changed since they were fetched")

    def _digest(self, fd: int, copies: _Copies) -> str:
        found = os.fstat(fd)
        known = copies.digests.get((found.st_dev, found.st_ino))
        if known is None:
            known = tree_digest(map(block_digest, self._blocks(fd, copies)))
            if found.st_nlink > 1:
                copies.digests[found.st_dev, found.st_ino] = known
        return known

    def _blocks(self, fd: int, copies: _Copies) -> Iterator[memoryview]:
        for block in read_blocks(fd):
            self._go_on()
            yield block
            copies.read += len(block)
            self._status.was_read(len(block))

    def _superseded(self, entry: Entry) -> bool:
        """Whether readers are given another version of the shard, of the same namespace."""
        newest = next(self._process.store_of(entry).entries_of(entry.key), entry)
        return newest.directory != entry.directory

    def _at_origin(self, metadata: Metadata, copies: _Copies) -> tuple[State, str]:
        if copies.now is None:
            copies.now = self._drift.now(metadata)
        if isinstance(copies.now, tuple):
            answer, reason = copies.now
            return State(answer), reason
        try:
            difference = differs(metadata.info, copies.now)
        except ValueError as exn:
            return State.UNREACHABLE, str(exn)
        if difference is None:
            return State.OK, ""
        return State.CHANGED, f"the origin has another version ({difference})"

    def _dealt_with(self, finding: Finding, fd: int | None) -> Finding | None:
        """Set an entry aside if that is to be; None if a damaged one went meanwhile."""
        if finding.state is not State.DAMAGED or fd is None:
            return finding
        entry = finding.entry
        if not is_file(entry.directory, fd):
            return None
        if not self._checks.repair:
            return finding
        store = self._process.store_of(entry)
        try:
            with self._process.coordinator().sole(store, entry.key) as alone:
                if alone:
                    # Whoever publishes has this lock, so what has the name now, keeps it.
                    reason = f"found by verify: {finding.reason}"
                    done = is_file(entry.directory, fd) and store.condemn(entry.path, reason)
                    return replace(finding, set_aside=True) if done else None
            reason = "not set aside: another process fetches it"
        except OSError as exn:
            reason = f"not set aside: {exn.strerror or exn}"
        return replace(finding, reason=f"{finding.reason}; {reason}")


def _sidecar(entry: Entry) -> Metadata:
    """The sidecar of an entry.

    Raises:
        DamagedError: it is missing, or is not this entry's.
        OSError: it cannot be read, or the entry is gone.
    """
    try:
        metadata = Metadata.decode(read_sidecar(entry.directory))
    except FileNotFoundError as exn:
        if lacks(entry.path, META.__eq__):
            raise DamagedError("it has no sidecar") from exn
        raise
    said = (metadata.key, metadata.info.version, metadata.size)
    if said != (entry.key, entry.version, entry.size):
        raise DamagedError("its sidecar describes another shard")
    return metadata
