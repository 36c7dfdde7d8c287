"""What `verify` is told to do, how far it is, and what it finds."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import StrEnum

from shardcache.errors import ConfigError
from shardcache.store.entry import Entry

__all__ = ["Checks", "Finding", "State", "VerifyStatus"]


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
        repair: set damaged entries aside.
        sample: share of the shards to look at, above 0 and up to 1; at least one is.

    Raises:
        ConfigError: ``sample`` is no such share.
    """

    quick: bool = False
    remote: bool = False
    repair: bool = False
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
