"""Whether what is cached is still what was fetched, and what the origin still has.

Made to run beside jobs: an entry is pinned while it is read, no time of last use changes,
and entries that are evicted meanwhile are left out. One thread checks all copies of a shard, in
whichever tier or namespace: its origin is asked once, a file that has several names is read once,
and all of a damaged file's names go together, or the next reader would link the one that was left.
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
from dataclasses import dataclass, field, replace
from enum import StrEnum

from shardcache.errors import ConfigError, ShardCacheError, ShardNotFoundError, TransferError
from shardcache.origins.base import ObjectInfo
from shardcache.origins.resolve import Origins
from shardcache.origins.retry import RetryPolicy
from shardcache.store.digest import block_digest, read_blocks, tree_digest
from shardcache.store.directory import GONE, DamagedError, Metadata, readable
from shardcache.store.entry import Entry, Store, open_data, set_aside
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
class Finding:
    """What `Cache.verify` found of one entry.

    Attributes:
        entry: the entry.
        url: the URL of its shard; None if the sidecar does not tell.
        state: the finding.
        reason: why it is not ok.
        set_aside: whether the entry was set aside, so that the next reader fetches the shard anew.
    """

    entry: Entry
    url: str | None
    state: State
    reason: str = ""
    set_aside: bool = False


@dataclass(slots=True)
class VerifyStatus:
    """How far it is."""

    shards: int = 0  #: entries to check
    bytes: int = 0  #: of them
    done: int = 0  #: entries that were checked
    passed: int = 0  #: bytes of them


def differs(then: ObjectInfo, now: ObjectInfo) -> str | None:
    """How the origin's version differs from the one that was fetched; None if it does not.

    Raises:
        ValueError: they have nothing in common that tells versions apart.
    """
    if then.version_id and now.version_id and "null" not in (then.version_id, now.version_id):
        return _change("version", then.version_id, now.version_id)
    if then.size is not None and now.size is not None and then.size != now.size:
        return f"{now.size} bytes instead of {then.size}"
    if then.etag and now.etag:
        # What a gateway compresses on its way gets a weak validator, and is the same object.
        return _change("ETag", then.etag.removeprefix("W/"), now.etag.removeprefix("W/"))
    if then.modified and now.modified:
        return _change("modification time", then.modified, now.modified)
    raise ValueError("the origin states nothing that tells versions apart")


def _change(what: str, then: str, now: str) -> str | None:
    return None if then == now else f"{what} {now} instead of {then}"


#: Shards checked side by side: a flash disk and an origin answer several as soon as one,
#: and more would keep a disk from the jobs that it is for.
_AT_ONCE = 4
#: Shards of one bucket or host in a row, each with all its attempts, that get no answer
#: before the others are not asked for: thousands would take days and tell nothing more.
_SILENT = 3


class _StoppedError(Exception):
    """Nobody wants the result any more."""


@dataclass(slots=True, kw_only=True, eq=False)
class Verifier:
    """Checks entries, with the options of `Cache.verify`; use `findings` once.

    Attributes:
        sole: damaged entries are set aside while it holds the lock of their key (False if
            somebody else has it); None to leave them.
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
    _ended: bool = field(default=False, init=False)
    _guard: threading.Lock = field(default_factory=threading.Lock, init=False)  #: of `status`
    #: By key, device and inode.
    _digests: dict[tuple[str, int, int], str] = field(default_factory=dict, init=False)
    #: By key and version.
    _answers: dict[tuple[str, str], tuple[State, str]] = field(default_factory=dict, init=False)
    _silent: Counter[str] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.sample <= 1:
            raise ConfigError(f"sample={self.sample!r} is no share: give one above 0 and up to 1")

    def findings(self) -> Generator[Finding, None, None]:
        """Check the entries; yields what was found of each, in no order."""
        by_key: dict[str, list[tuple[Store, Entry]]] = {}
        for store, entry in self.entries:
            by_key.setdefault(entry.key, []).append((store, entry))
        shards = list(by_key.values())
        if self.sample < 1:
            shards = random.SystemRandom().sample(shards, math.ceil(len(shards) * self.sample))
        self.status.shards = sum(map(len, shards))
        self.status.bytes = sum(entry.size for copies in shards for _, entry in copies)
        pool = ThreadPoolExecutor(_AT_ONCE, "shardcache-verify")
        try:
            for copies, found in zip(shards, pool.map(self._shard, shards), strict=True):
                self.status.done += len(copies)
                yield from found
        finally:
            self._ended = True
            pool.shutdown(cancel_futures=True)

    def _go_on(self) -> None:
        if self._ended or self.stop.is_set():
            raise _StoppedError

    def _sleep(self, seconds: float) -> None:
        self.stop.wait(seconds)
        self._go_on()

    def _shard(self, copies: Iterable[tuple[Store, Entry]]) -> list[Finding]:
        """What is found of the entries of one shard, until it is stopped."""
        found: list[Finding] = []
        with contextlib.suppress(_StoppedError):
            for store, entry in copies:
                self._go_on()
                try:
                    found.append(self._entry(store, entry))
                except OSError as exn:
                    if exn.errno not in GONE:  # else it was evicted
                        reason = exn.strerror or str(exn)
                        found.append(Finding(entry, None, State.UNCHECKED, reason))
        return found

    def _entry(self, store: Store, entry: Entry) -> Finding:
        """What is found of one entry; OSError: it went meanwhile, or the disk does not tell."""
        url = None
        try:
            before = os.lstat(entry.directory)
            with readable():
                metadata = entry.metadata()
                url = metadata.url
                self._check_data(store, entry, metadata)
        except DamagedError as exn:
            if not _is_same(entry, before):  # another one is in its place
                raise FileNotFoundError(errno.ENOENT, "it is gone", entry.directory) from exn
            finding = Finding(entry, url, State.DAMAGED, str(exn))
            return finding if self.sole is None else self._set_aside(store, finding, before)
        finally:
            with self._guard:
                self.status.passed += entry.size
        # Of several versions readers are given the newest.
        newest = next(store.entries_of(entry.key), entry)
        if not self.remote or newest.directory != entry.directory:
            return Finding(entry, url, State.OK)
        asked = entry.key, entry.version
        if asked not in self._answers:
            self._answers[asked] = self._ask(metadata)
        return Finding(entry, url, *self._answers[asked])

    def _check_data(self, store: Store, entry: Entry, metadata: Metadata) -> None:
        """Open the data as a reader would, and read it."""
        path, grace = f"{entry.directory}/{metadata.basename}", store.layout.grace
        opened = open_data(entry.directory, path, entry.size, grace)
        if opened is None:
            raise DamagedError("its data file is missing")
        with opened.file:
            if not self.quick and self._digest(entry.key, opened.fd) != metadata.digest:
                raise DamagedError("its bytes changed since they were fetched")

    def _digest(self, key: str, fd: int) -> str:
        found = os.fstat(fd)
        file = key, found.st_dev, found.st_ino
        if file not in self._digests:
            digests = []
            for block in read_blocks(fd):
                self._go_on()
                digests.append(block_digest(block))
            self._digests[file] = tree_digest(digests)
        return self._digests[file]

    def _set_aside(self, store: Store, finding: Finding, before: os.stat_result) -> Finding:
        """Set a damaged entry aside, if it is still the one that was read."""
        entry = finding.entry
        assert self.sole is not None
        try:
            with self.sole(store, entry.key) as alone:
                # Publishing takes this lock, so an entry that replaced it meanwhile stays.
                if alone and _is_same(entry, before):
                    set_aside(entry.path, f"found by verify: {finding.reason}")
                    return replace(finding, set_aside=True)
        except OSError as exn:
            reason = f"{finding.reason}; not set aside: {exn.strerror or exn}"
            return replace(finding, reason=reason)
        return finding

    def _ask(self, metadata: Metadata) -> tuple[State, str]:
        """Ask the origin of a shard which version it has; of the shard nothing is fetched."""
        if metadata.url.startswith("pipe:"):
            return State.UNREACHABLE, "it is what a command wrote, which states no version"
        try:
            shard = self.parse(metadata.url)
            if shard.key != metadata.key:
                text = "it came from another endpoint or partition than the one configured"
                return State.UNREACHABLE, text
            place = f"{shard.scheme} {'/'.join(str(shard).split('/')[:3])}"
            if self._silent[place] >= _SILENT:
                return State.UNREACHABLE, f"not asked: {_SILENT} shards before it got no answer"
            origin = self.origins.of(shard)
            attempts = self.policy.started(str(shard))
            found = attempts.call(lambda: origin.stat(shard), sleep=self._sleep)
            self._silent[place] = 0
            difference = differs(metadata.info, found)
        except ShardNotFoundError:
            return State.GONE, "the origin has it no longer"
        except TransferError as exn:
            self._silent[place] += 1
            return State.UNREACHABLE, redact(str(exn.__cause__ or exn))
        except ShardCacheError as exn:  # ConfigError is one
            return State.UNREACHABLE, exn.message
        except ValueError as exn:
            return State.UNREACHABLE, str(exn)
        if difference is None:
            return State.OK, ""
        return State.CHANGED, f"the origin has another version ({difference})"


def _is_same(entry: Entry, before: os.stat_result) -> bool:
    return os.path.samestat(os.lstat(entry.directory), before)
