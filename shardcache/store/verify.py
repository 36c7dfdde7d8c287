"""Verify that the bytes of entries are intact, and that the origin has no newer version.

A verification may run while jobs use the cache. One thread checks all copies of a shard, in all
tiers and namespaces. So the origin gets one request per version, and a file with several hard links
is read once. All links of a damaged file are set aside together; otherwise the next reader would
make a new link to one that was left.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum

from shardcache.archive import archive_problem
from shardcache.errors import ConfigError, ShardCacheError, ShardNotFoundError, TransferError
from shardcache.origins.base import ObjectInfo
from shardcache.origins.resolve import Origins
from shardcache.origins.retry import RetryPolicy
from shardcache.store.digest import block_digest, read_blocks, tree_digest
from shardcache.store.directory import GONE, DamagedError, Metadata, readable
from shardcache.store.entry import Entry, Store, open_data, set_aside
from shardcache.urls import ShardURL, redact


class State(StrEnum):
    """The result for one entry. The last three values occur only with ``remote``."""

    OK = "ok"
    DAMAGED = "damaged"
    MALFORMED = "malformed"  #: the shard is as at the origin, but readers miss a part of it
    UNCHECKED = "unchecked"
    CHANGED = "changed"
    GONE = "gone"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of `Cache.verify` for one entry.

    Attributes:
        url: the URL of the entry's shard; None if the sidecar is damaged.
        state: the result.
        reason: why the state is not ``ok``.
        set_aside: whether the entry was set aside, so that the next reader downloads the shard.
    """

    entry: Entry
    url: str | None
    state: State
    reason: str = ""
    set_aside: bool = False


@dataclass(slots=True)
class VerifyStatus:
    """The progress of a verification."""

    shards: int = 0  #: entries to check
    bytes: int = 0  #: bytes of the entries to check
    done: int = 0  #: entries that were checked
    passed: int = 0  #: bytes of the entries that were checked


def differs(then: ObjectInfo, now: ObjectInfo) -> str | None:
    """Describe how version ``now`` differs from version ``then``, or return None if it does not.

    Raises:
        ValueError: the origin states nothing by which the two versions can be compared.
    """
    if then.version_id and now.version_id and "null" not in (then.version_id, now.version_id):
        return _change("version", then.version_id, now.version_id)
    if then.size is not None and now.size is not None and then.size != now.size:
        return f"{now.size} bytes instead of {then.size}"
    if then.etag and now.etag:
        # A gateway that compresses responses marks the ETag as weak, but the object is the same.
        return _change("ETag", then.etag.removeprefix("W/"), now.etag.removeprefix("W/"))
    if then.modified and now.modified:
        return _change("modification time", then.modified, now.modified)
    raise ValueError("the origin states nothing to compare versions by")


def _change(what: str, then: str, now: str) -> str | None:
    return None if then == now else f"{what} {now} instead of {then}"


#: Number of shards to check at once. Flash disks and origins serve a few requests as fast as one,
#: but more requests would slow down the jobs that read from the same disk.
_THREADS = 4
#: If this many shards of one bucket or host in a row get no response to any of their attempts, no
#: further shards are requested there: with thousands of shards, that would take days.
_UNREACHABLE_SHARDS = 3


class _StoppedError(Exception):
    """The caller stopped the verification."""


@dataclass(kw_only=True, eq=False)
class Verifier:
    """Checks entries, with the options of `Cache.verify`. Call `findings` only once.

    Attributes:
        sole: returns a context that holds the lock of a key, or yields False if another process
            has the lock. Damaged entries are set aside under that lock. With None, they stay.
    """

    entries: Sequence[tuple[Store, Entry]]
    origins: Origins
    policy: RetryPolicy
    parse: Callable[[str], ShardURL]
    quick: bool
    remote: bool
    sample: float
    sole: Callable[[Store, str], AbstractContextManager[bool]] | None
    status: VerifyStatus
    stop: threading.Event

    def __post_init__(self) -> None:
        if not 0 < self.sample <= 1:
            raise ConfigError(f"sample={self.sample!r} is not above 0 and at most 1.")
        self._ended = False
        self._guard = threading.Lock()  # guards `status.passed`
        self._digests: dict[tuple[str, int, int], str] = {}  # by key, device and inode
        self._remote: dict[tuple[str, str], tuple[State, str]] = {}  # by key and version
        self._unreachable = Counter[str]()  # consecutive shards without a response, by bucket/host

    def findings(self) -> Generator[Finding, None, None]:
        """Check the entries, and yield the result for each in no particular order."""
        by_key: dict[str, list[tuple[Store, Entry]]] = {}
        for store, entry in self.entries:
            by_key.setdefault(entry.key, []).append((store, entry))
        shards = list(by_key.values())
        if self.sample < 1:
            shards = random.SystemRandom().sample(shards, math.ceil(len(shards) * self.sample))
        entries = [entry for copies in shards for _, entry in copies]
        self.status.shards, self.status.bytes = len(entries), sum(e.size for e in entries)
        pool = ThreadPoolExecutor(_THREADS, "shardcache-verify")
        try:
            for copies, results in zip(shards, pool.map(self._shard, shards), strict=True):
                self.status.done += len(copies)
                yield from results
        finally:
            self._ended = True
            pool.shutdown(cancel_futures=True)

    def _check_stopped(self, seconds: float = 0.0) -> None:
        """Sleep for ``seconds``; raise _StoppedError if the verification is stopped."""
        if self._ended or self.stop.wait(seconds) or self._ended:
            raise _StoppedError

    def _shard(self, copies: Iterable[tuple[Store, Entry]]) -> list[Finding]:
        """Check the entries of one shard, unless the verification is stopped."""
        results: list[Finding] = []
        with contextlib.suppress(_StoppedError):
            for store, entry in copies:
                self._check_stopped()
                try:
                    results.append(self._entry(store, entry))
                except OSError as exn:
                    if exn.errno not in GONE:  # an evicted entry has no result
                        reason = exn.strerror or str(exn)
                        results.append(Finding(entry, None, State.UNCHECKED, reason))
        return results

    def _entry(self, store: Store, entry: Entry) -> Finding:
        """Check one entry. Raises OSError if the entry is gone or the disk fails."""
        url = None
        try:
            before = os.lstat(entry.directory)
            with readable():
                metadata = entry.metadata()
                url = metadata.url
                problem = self._check_data(store, entry, metadata)
        except DamagedError as exn:
            if not _is_same(entry, before):  # it was evicted, and a new entry took its place
                raise FileNotFoundError(errno.ENOENT, "it is gone", entry.directory) from exn
            finding = Finding(entry, url, State.DAMAGED, str(exn))
            return finding if self.sole is None else self._set_aside(store, finding, before)
        finally:
            with self._guard:
                self.status.passed += entry.size
        # Readers get the newest of several versions, so only that one may be outdated.
        newest = next(store.entries_of(entry.key), entry)
        state, reason, version = State.OK, "", (entry.key, entry.version)
        if self.remote and newest.directory == entry.directory:
            if version not in self._remote:
                self._remote[version] = self._compare_with_origin(metadata)
            state, reason = self._remote[version]
        if problem and state is State.OK:
            state, reason = State.MALFORMED, problem
        return Finding(entry, url, state, reason)

    def _check_data(self, store: Store, entry: Entry, metadata: Metadata) -> str:
        """Open the data file as a reader does and, unless ``quick`` is set, compare its digest.

        Return what is wrong with the archive itself, or "".
        """
        path = f"{entry.directory}/{metadata.basename}"
        opened = open_data(entry.directory, path, entry.size, store.layout.grace)
        if opened is None:
            raise DamagedError("its data file is missing")
        with opened.file:
            if self.quick:
                return ""
            if self._digest(entry.key, opened.fd) != metadata.digest:
                raise DamagedError("its bytes changed since they were downloaded")
            return archive_problem(opened.fd, metadata.basename, entry.size)

    def _digest(self, key: str, fd: int) -> str:
        file = key, os.fstat(fd).st_dev, os.fstat(fd).st_ino
        if file not in self._digests:
            digests = []
            for block in read_blocks(fd):
                self._check_stopped()
                digests.append(block_digest(block))
            self._digests[file] = tree_digest(digests)
        return self._digests[file]

    def _set_aside(self, store: Store, finding: Finding, before: os.stat_result) -> Finding:
        """Set a damaged entry aside, unless a new entry has replaced it since it was read."""
        entry = finding.entry
        assert self.sole is not None
        try:
            with self.sole(store, entry.key) as alone:
                # Publishing takes this lock, so no process can replace the entry now.
                if alone and _is_same(entry, before):
                    set_aside(entry.path, f"found by verify: {finding.reason}")
                    return replace(finding, set_aside=True)
        except OSError as exn:
            reason = f"{finding.reason}; not set aside: {exn.strerror or exn}"
            return replace(finding, reason=reason)
        return finding

    def _compare_with_origin(self, metadata: Metadata) -> tuple[State, str]:
        """Compare the version with the origin's, without reading bytes; return state and reason."""
        if metadata.url.startswith("pipe:"):
            return State.UNREACHABLE, "a command wrote it, and commands state no version"
        try:
            shard = self.parse(metadata.url)
            if shard.key != metadata.key:
                text = "it came from another endpoint or partition than the one configured"
                return State.UNREACHABLE, text
            host = f"{shard.scheme} {'/'.join(str(shard).split('/')[:3])}"
            if self._unreachable[host] >= _UNREACHABLE_SHARDS:
                text = f"not requested: {_UNREACHABLE_SHARDS} shards before it got no response"
                return State.UNREACHABLE, text
            origin = self.origins.of(shard)
            attempts = self.policy.started(str(shard))
            current = attempts.call(lambda: origin.stat(shard), sleep=self._check_stopped)
            self._unreachable[host] = 0
            difference = differs(metadata.info, current)
        except ShardNotFoundError:
            return State.GONE, "the origin no longer has it"
        except TransferError as exn:
            self._unreachable[host] += 1
            return State.UNREACHABLE, redact(str(exn.__cause__ or exn))
        except ShardCacheError as exn:  # ConfigError is a subclass
            return State.UNREACHABLE, exn.message
        except ValueError as exn:
            return State.UNREACHABLE, str(exn)
        if difference is None:
            return State.OK, ""
        return State.CHANGED, f"the origin has another version ({difference})"


def _is_same(entry: Entry, before: os.stat_result) -> bool:
    return os.path.samestat(os.lstat(entry.directory), before)
