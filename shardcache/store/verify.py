"""Verify that the bytes of entries are intact.

A verification may run while jobs use the cache. One thread checks all copies of a shard, in all
tiers and namespaces. So a file with several hard links is read once, and all links of a damaged
file are set aside together; otherwise the next reader would make a new link to one that was left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from shardcache.archive import archive_problem
from shardcache.faults import os_error
from shardcache.store.digest import block_digest, read_blocks, tree_digest
from shardcache.store.directory import GONE, DamagedError, Metadata, readable
from shardcache.store.entry import Entry, Store, open_data, set_aside


class State(StrEnum):
    """The result for one entry."""

    OK = "ok"
    DAMAGED = "damaged"
    MALFORMED = "malformed"  #: the shard is as at the origin, but readers miss a part of it
    UNCHECKED = "unchecked"


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


#: Number of shards to check at once. Flash disks serve a few reads as fast as one, but more would
#: slow down the jobs that read from the same disk.
_THREADS = 4


@dataclass(kw_only=True, eq=False)
class Verifier:
    """Checks entries, with the options of `Cache.verify`. Call `findings` only once.

    Damaged entries are set aside under the lock of their key, ``sole`` (`Directories.locked`).
    Without ``sole``, they stay.
    """

    entries: Sequence[tuple[Store, Entry]]
    quick: bool
    sole: Callable[[Path], AbstractContextManager[bool]] | None
    status: VerifyStatus
    stop: threading.Event

    def __post_init__(self) -> None:
        self._ended = False
        self._guard = threading.Lock()  # guards `status.passed`
        self._digests: dict[tuple[str, int, int], str] = {}  # by key, device and inode

    def findings(self) -> Generator[Finding, None, None]:
        """Check the entries, and yield the result for each in no particular order."""
        by_key: dict[str, list[tuple[Store, Entry]]] = {}
        for store, entry in self.entries:
            by_key.setdefault(entry.key, []).append((store, entry))
        self.status.shards = len(self.entries)
        self.status.bytes = sum(entry.size for _, entry in self.entries)
        pool = ThreadPoolExecutor(_THREADS, "shardcache-verify")
        try:
            shards = by_key.values()
            for copies, results in zip(shards, pool.map(self._shard, shards), strict=True):
                self.status.done += len(copies)
                yield from results
        finally:
            self._ended = True
            pool.shutdown(cancel_futures=True)

    def _check_stopped(self) -> None:
        """Raise CancelledError if the verification is stopped."""
        if self._ended or self.stop.is_set():
            raise CancelledError

    def _shard(self, copies: Iterable[tuple[Store, Entry]]) -> list[Finding]:
        """Check the entries of one shard until the verification is stopped."""
        results: list[Finding] = []
        with contextlib.suppress(CancelledError):
            for store, entry in copies:
                self._check_stopped()
                try:
                    results.append(self._entry(store, entry))
                except os_error() as exn:
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
        return Finding(entry, url, State.MALFORMED if problem else State.OK, problem)

    def _check_data(self, store: Store, entry: Entry, metadata: Metadata) -> str:
        """Open the data file and, unless ``quick``, hash it; return what is wrong inside it."""
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
            with self.sole(entry.path) as alone:
                # Publishing takes this lock, so no process can replace the entry now.
                if alone and _is_same(entry, before):
                    set_aside(entry.path, f"found by verify: {finding.reason}")
                    return replace(finding, set_aside=True)
        except os_error() as exn:
            reason = f"{finding.reason}; not set aside: {exn.strerror or exn}"
            return replace(finding, reason=reason)
        return finding


def _is_same(entry: Entry, before: os.stat_result) -> bool:
    return os.path.samestat(os.lstat(entry.directory), before)
