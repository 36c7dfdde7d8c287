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
from shardcache.files import GONE
from shardcache.store.digest import block_digest, read_blocks, tree_digest
from shardcache.store.directory import DamagedError, Metadata, readable
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

    def expect(self, entries: Iterable[Entry]) -> None:
        """Add entries to check."""
        sizes = [entry.size for entry in entries]
        self.shards += len(sizes)
        self.bytes += sum(sizes)

    def add(self, shards: int = 0, size: int = 0) -> None:
        """Count entries and bytes that were checked."""
        self.done += shards
        self.passed += size


#: Number of shards to check at once. Flash disks serve a few reads as fast as one, but more would
#: slow down the jobs that read from the same disk.
_THREADS = 4


class Verifier:
    """Checks entries, with the options of `Cache.verify`. Call `findings` only once.

    Damaged entries are set aside under the lock of their key, ``sole`` (`Directories.locked`), if
    any.
    """

    def __init__(
        self,
        entries: Sequence[tuple[Store, Entry]],
        *,
        quick: bool,
        sole: Callable[[Path], AbstractContextManager[bool]] | None,
        status: VerifyStatus,
        stop: threading.Event,
    ) -> None:
        self._shards: dict[str, list[tuple[Store, Entry]]] = {}
        for store, entry in entries:
            self._shards.setdefault(entry.key, []).append((store, entry))
        status.expect(entry for _, entry in entries)
        self._quick = quick
        self._sole = sole
        self._status = status
        self._stop = stop
        self._ended = False
        self._guard = threading.Lock()  # guards `VerifyStatus.passed`
        self._digests: dict[tuple[str, int, int], str] = {}  # by key, device and inode

    def findings(self) -> Generator[Finding, None, None]:
        """Check the entries, and yield the result for each in no particular order."""
        pool = ThreadPoolExecutor(_THREADS, "shardcache-verify")
        try:
            shards = self._shards.values()
            for copies, results in zip(shards, pool.map(self._shard, shards), strict=True):
                self._status.add(shards=len(copies))
                yield from results
        finally:
            self._ended = True
            pool.shutdown(cancel_futures=True)

    def _check_stopped(self) -> None:
        if self._ended or self._stop.is_set():
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
            return self._damaged(Finding(entry, url, State.DAMAGED, str(exn)), before)
        finally:
            with self._guard:
                self._status.add(size=entry.size)
        return Finding(entry, url, State.MALFORMED if problem else State.OK, problem)

    def _check_data(self, store: Store, entry: Entry, metadata: Metadata) -> str:
        """Open the data file and, unless ``quick``, hash it; return what is wrong inside it."""
        path = f"{entry.directory}/{metadata.basename}"
        opened = open_data(entry.directory, path, entry.size, store.layout.grace)
        if opened is None:
            raise DamagedError("its data file is missing")
        with opened.file:
            if self._quick:
                return ""
            if self._digest(entry.key, opened.fd) != metadata.digest:
                raise DamagedError("its bytes changed since they were downloaded")
            return archive_problem(opened.fd, metadata.basename, entry.size)

    def _digest(self, key: str, fd: int) -> str:
        status = os.fstat(fd)
        file = key, status.st_dev, status.st_ino
        if file not in self._digests:
            digests = []
            for block in read_blocks(fd):
                self._check_stopped()
                digests.append(block_digest(block))
            self._digests[file] = tree_digest(digests)
        return self._digests[file]

    def _damaged(self, finding: Finding, before: os.stat_result) -> Finding:
        """Set a damaged entry aside, unless a new entry has replaced it since it was read."""
        path = finding.entry.path
        if not os.path.samestat(path.lstat(), before):
            raise FileNotFoundError(errno.ENOENT, "it is gone", str(path))
        try:
            with self._sole(path) if self._sole else contextlib.nullcontext(False) as alone:
                # Publishing takes this lock, so no process can replace the entry now.
                if alone and os.path.samestat(path.lstat(), before):
                    set_aside(path, f"found by verify: {finding.reason}")
                    return replace(finding, set_aside=True)
        except os_error() as exn:
            reason = f"{finding.reason}; not set aside: {exn.strerror or exn}"
            return replace(finding, reason=reason)
        return finding
