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
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import StrEnum

from shardcache.errors import ConfigError, ShardCacheError, ShardNotFoundError, TransferError
from shardcache.locks.flock import is_file
from shardcache.origins.base import ObjectInfo
from shardcache.origins.resolve import Origins
from shardcache.origins.retry import RetryPolicy
from shardcache.store.digest import block_digest, read_blocks, tree_digest
from shardcache.store.entry import (
    DamagedError,
    Entry,
    Metadata,
    open_data,
    readable,
)
from shardcache.store.store import Store
from shardcache.urls import ShardURL, redact


class State(StrEnum):
    """What is known of an entry now. The last three need ``remote``."""

    OK = "ok"
    DAMAGED = "damaged"
    UNCHECKED = "unchecked"
    CHANGED = "changed"
    GONE = "gone"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Checks:
    """What to do.

    Attributes:
        quick: compare sizes, read no data.
        remote: ask the origin of each shard which version it has.
        sample: share of the shards to look at, above 0 and up to 1; at least one is.

    Raises:
        ConfigError: ``sample`` is no such share.
    """

    quick: bool = False
    remote: bool = False
    sample: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a share of nothing."""
        if not 0 < self.sample <= 1:
            raise ConfigError(f"sample={self.sample!r} is no share: give one above 0 and up to 1")


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one entry.

    Attributes:
        entry: which.
        url: its shard; None where the sidecar does not tell.
        state: what it is.
        reason: why it is not ok; empty if it is.
        set_aside: whether it was, so that the next reader fetches the shard anew.
    """

    entry: Entry
    url: str | None
    state: State
    reason: str = ""
    set_aside: bool = False


class VerifyStatus:
    """How far it is. Safe between threads.

    Attributes:
        shards: entries to look at.
        bytes: of them.
        done: entries that are done with.
        passed: bytes of the data that are done with, read or not.
    """

    def __init__(self) -> None:
        self.shards = self.bytes = self.done = self.passed = 0
        self._guard = threading.Lock()

    def was_read(self, count: int) -> None:
        """So many bytes more were read."""
        with self._guard:
            self.passed += count

    def was_done(self, size: int, read: int) -> None:
        """One entry more is done with, of whose ``size`` bytes so many were read."""
        with self._guard:
            self.done += 1
            self.passed += max(0, size - read)


#: Shards of one bucket or host in a row, each with all its attempts, that get no answer
#: before the others are not asked for.
_SILENT = 3


class Drift:
    """Asks origins which version of a shard they have.

    One request for a description per shard; nothing of the shard itself is fetched. An origin
    that does not answer is left alone after a few shards: asking it for each of thousands, with
    all retries, would take days and tell nothing more.

    Args:
        origins: where shards come from.
        policy: how often each is asked.
        parse: names the shard of a sidecar's URL.

    Attributes:
        sleep: how to wait between attempts; may raise.
    """

    def __init__(
        self, origins: Origins, policy: RetryPolicy, parse: Callable[[str], ShardURL]
    ) -> None:
        self.policy = policy
        self.parse = parse
        self.sleep: Callable[[float], None] = policy.clock.sleep
        self._origins = origins
        self._guard = threading.Lock()
        self._silent: Counter[str] = Counter()

    def now(self, metadata: Metadata) -> ObjectInfo | tuple[State, str]:
        """What the origin has under the URL of a sidecar now, or why that is not known.

        Raises:
            Whatever ``sleep`` raises.
        """
        if metadata.url.startswith("pipe:"):
            return State.UNREACHABLE, "it is what a command wrote, which states no version"
        try:
            shard = self.parse(metadata.url)
        except ConfigError as exn:
            return State.UNREACHABLE, exn.message
        if shard.key != metadata.key:
            return State.UNREACHABLE, "it came from another endpoint than the one configured"
        place = f"{shard.scheme} {'/'.join(str(shard).split('/')[:3])}"
        if self._silent[place] >= _SILENT:
            return State.UNREACHABLE, f"not asked: {_SILENT} shards before it got no answer"
        try:
            found = self._ask(shard)
        except ShardNotFoundError:
            return State.GONE, "the origin has it no longer"
        except TransferError as exn:
            with self._guard:
                self._silent[place] += 1
            return State.UNREACHABLE, redact(str(exn.__cause__ or exn))
        except ShardCacheError as exn:
            return State.UNREACHABLE, exn.message
        with self._guard:
            self._silent[place] = 0
        return found

    def _ask(self, shard: ShardURL) -> ObjectInfo:
        origin = self._origins.of(shard)
        attempts = self.policy.started(str(shard))
        return attempts.call(lambda: origin.stat(shard), sleep=self.sleep)


def differs(then: ObjectInfo, now: ObjectInfo) -> str | None:
    """How the origin's version differs from the one that was fetched; None if it does not.

    Raises:
        ValueError: they have nothing in common that tells versions apart.
    """
    if then.version_id and now.version_id and "null" not in (then.version_id, now.version_id):
        if then.version_id == now.version_id:
            return None
        return f"version {now.version_id} instead of {then.version_id}"
    if then.size is not None and now.size is not None and then.size != now.size:
        return f"{now.size} bytes instead of {then.size}"
    if then.etag and now.etag:
        # What a gateway compresses on its way gets a weak validator, and is the same object.
        if then.etag.removeprefix("W/") == now.etag.removeprefix("W/"):
            return None
        return f"ETag {now.etag} instead of {then.etag}"
    if then.modified and now.modified:
        if then.modified == now.modified:
            return None
        return f"modified {now.modified}, not {then.modified}"
    raise ValueError("the origin states nothing that tells versions apart")


#: Shards looked at side by side: a flash disk and an origin answer several as soon as one,
#: and more would keep a disk from the jobs that it is for.
_AT_ONCE = 4
#: Seconds until a retry that waits notices that nobody wants it any more.
_SLICE = 0.25
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def verify(
    stores: Sequence[Store],
    origins: Origins,
    policy: RetryPolicy,
    parse: Callable[[str], ShardURL],
    *,
    checks: Checks,
    sole: Callable[[Store, str], AbstractContextManager[bool]] | None = None,
    wanted: Callable[[str], bool] | None = None,
    status: VerifyStatus | None = None,
    stop: threading.Event | None = None,
) -> Generator[Finding, None, None]:
    """Look at every entry; yields what was found of each, in no order.

    Args:
        stores: of every namespace and tier.
        origins: where shards come from.
        policy: how often an origin is asked.
        parse: names the shard of a URL.
        checks: what to do.
        sole: damaged entries are set aside while it holds the lock of their key (False if
            somebody else has it); None to leave them.
        wanted: says of a URL whether its shard is to be looked at, or of the data file's name
            where the sidecar does not tell the URL; None takes all.
        status: is kept up to date.
        stop: ends it early once set; entries that are not done with yield nothing.

    Raises:
        OSError: a directory cannot be read.
    """
    status = status or VerifyStatus()
    shards = _chosen(stores, wanted, checks.sample)
    status.shards = sum(map(len, shards))
    status.bytes = sum(entry.size for entries in shards for entry in entries)
    drift = Drift(origins, policy, parse)
    verifier = _Verifier(stores, drift, checks, sole, status, stop)
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
    stores: Sequence[Store], wanted: Callable[[str], bool] | None, sample: float
) -> list[list[Entry]]:
    """The entries to look at, those of one shard together."""
    shards: dict[str, list[Entry]] = {}
    for store in stores:
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
    now: ObjectInfo | tuple[State, str] | None = None
    read: int = 0


class _Verifier:
    """Looks at shards; safe between threads.

    Args:
        stores, checks, sole, status, stop: as for `verify`.
        drift: asks origins.

    Attributes:
        ended: set once nobody reads what it finds.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        drift: Drift,
        checks: Checks,
        sole: Callable[[Store, str], AbstractContextManager[bool]] | None,
        status: VerifyStatus,
        stop: threading.Event | None,
    ) -> None:
        self.ended = threading.Event()
        self._stores = {store.layout.base: store for store in stores}
        self._drift = drift
        self._drift.sleep = self._sleep
        self._checks = checks
        self._sole = sole
        self._status = status
        self._stop = stop or self.ended

    def _store_of(self, entry: Entry) -> Store:
        return self._stores[entry.path.parents[3]]  # objects/<aa>/<key>/<entry>

    def _sleep(self, seconds: float) -> None:
        while seconds > 0:
            self._go_on()
            nap = min(seconds, _SLICE)
            self._drift.policy.clock.sleep(nap)
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
                metadata = entry.metadata()
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
            if data.name != self._drift.parse(metadata.url).basename:
                raise DamagedError("its data file is missing")
        grace = self._store_of(entry).layout.grace
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
        newest = next(self._store_of(entry).entries_of(entry.key), entry)
        return newest.directory != entry.directory

    def _at_origin(self, metadata: Metadata, copies: _Copies) -> tuple[State, str]:
        if copies.now is None:
            copies.now = self._drift.now(metadata)
        if isinstance(copies.now, tuple):
            return copies.now
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
        if self._sole is None:
            return finding
        store = self._store_of(entry)
        try:
            with self._sole(store, entry.key) as alone:
                if alone:
                    # Whoever publishes has this lock, so what has the name now, keeps it.
                    reason = f"found by verify: {finding.reason}"
                    done = is_file(entry.directory, fd) and store.condemn(entry.path, reason)
                    return replace(finding, set_aside=True) if done else None
            reason = "not set aside: another process fetches it"
        except OSError as exn:
            reason = f"not set aside: {exn.strerror or exn}"
        return replace(finding, reason=f"{finding.reason}; {reason}")
