"""Verify that the bytes of entries are intact.

A verification may run while jobs use the cache. One thread checks all copies of a shard, in all
tiers and namespaces. So a file with several hard links is read once, and all links of a damaged
file are set aside together; otherwise the next reader would make a new link to one that was left.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from shardcache import threads
from shardcache.archive import archive_problem
from shardcache.faults import system_error
from shardcache.files import GONE
from shardcache.store.digest import file_digest
from shardcache.store.directory import DamagedError, readable
from shardcache.store.entry import Entry, Store, open_data, set_aside


class EntryState(StrEnum):
    """The result for one entry."""

    OK = "ok"
    DAMAGED = "damaged"
    MALFORMED = "malformed"  #: the shard is as at the origin, but readers miss a part of it
    UNCHECKED = "unchecked"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of `Cache.verify` for one entry."""

    entry: Entry
    url: str | None  #: the URL of the entry's shard; None if the sidecar is damaged
    state: EntryState
    reason: str = ""  #: why the state is not ``ok``
    set_aside: bool = False  #: whether it was set aside, so that the next reader downloads it


@dataclass(slots=True)
class VerifyStatus:
    """The progress of a verification."""

    shards: int = 0  #: entries to check
    bytes: int = 0  #: bytes of the entries to check
    done: int = 0  #: entries that were checked
    passed: int = 0  #: bytes of the entries that were checked

    def add_planned(self, entry: Entry) -> None:
        self.shards += 1
        self.bytes += entry.size

    def add_checked(self, entry: Entry) -> None:
        self.done += 1
        self.passed += entry.size


#: Number of shards to check at once. Flash disks serve a few reads as fast as one, but more would
#: slow down the jobs that read from the same disk.
_THREADS = 4
#: Holds the lock of an entry's key, if it is free (`Directories.key_locked`).
_Locked = Callable[[Path], AbstractContextManager[bool]]


def verify(
    entries: Sequence[tuple[Store, Entry]],
    *,
    quick: bool,
    locked: _Locked | None,
    status: VerifyStatus,
    stop: threading.Event,
) -> Generator[Finding, None, None]:
    """Check entries, and yield the finding for each, with the options of `Cache.verify`.

    Damaged entries are set aside under the lock of their key, unless ``locked`` is None.
    """
    shards: dict[str, list[tuple[Store, Entry]]] = {}
    for store, entry in entries:
        shards.setdefault(entry.key, []).append((store, entry))
        status.add_planned(entry)
    is_closed = False

    def check_stopped() -> None:
        if is_closed or stop.is_set():
            raise CancelledError

    def check(copies: list[tuple[Store, Entry]]) -> list[Finding]:
        digests: dict[tuple[int, int], str] = {}  # by device and inode, because some are links

        def digest(fd: int) -> str:
            file = os.fstat(fd)
            if (inode := (file.st_dev, file.st_ino)) not in digests:
                digests[inode] = file_digest(fd, check_stopped)
            return digests[inode]

        findings: list[Finding] = []
        with contextlib.suppress(CancelledError):
            for store, entry in copies:
                check_stopped()
                findings += _check(store, entry, None if quick else digest, locked)
        return findings

    every = list(shards.values())
    try:
        for number, findings in threads.each(check, every, _THREADS, "shardcache-verify"):
            for _, entry in every[number]:
                status.add_checked(entry)
            yield from findings
    finally:
        is_closed = True


def _check(
    store: Store, entry: Entry, digest: Callable[[int], str] | None, locked: _Locked | None
) -> list[Finding]:
    """Check one entry, and set it aside if it is damaged; return no finding if it is gone.

    ``digest`` computes the digest of an open file; None compares only sizes.
    """
    url = None
    try:
        before = os.lstat(entry.directory)
        try:
            with readable():
                metadata = entry.metadata()
                url, path, problem = metadata.url, entry.path / metadata.basename, ""
                opened = open_data(entry.directory, str(path), entry.size, store.layout.grace)
                if opened is None:
                    raise DamagedError("its data file is missing")
                with opened.file as file:
                    if digest is not None:
                        if digest(file.fileno()) != metadata.digest:
                            raise DamagedError("its bytes changed since they were downloaded")
                        problem = archive_problem(file.fileno(), path.name, entry.size)
        except DamagedError as exn:
            if not os.path.samestat(os.lstat(entry.directory), before):
                return []  # a new entry has replaced it
            finding = Finding(entry, url, EntryState.DAMAGED, str(exn))
            return [_set_aside(finding, before, locked) if locked else finding]
    except system_error() as exn:
        if exn.errno in GONE:
            return []
        return [Finding(entry, None, EntryState.UNCHECKED, exn.strerror or str(exn))]
    return [Finding(entry, url, EntryState.MALFORMED if problem else EntryState.OK, problem)]


def _set_aside(finding: Finding, before: os.stat_result, locked: _Locked) -> Finding:
    """Set a damaged entry aside, unless a new entry has replaced it since it was read."""
    path = finding.entry.path
    try:
        with locked(path) as is_locked:
            # Publishing takes this lock, so no process can replace the entry now.
            if is_locked and os.path.samestat(path.lstat(), before):
                set_aside(path, f"found by verify: {finding.reason}")
                return replace(finding, set_aside=True)
    except system_error() as exn:
        return replace(finding, reason=f"{finding.reason}; not set aside: {exn.strerror or exn}")
    return finding
