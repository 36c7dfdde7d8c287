"""How full a cache is at most, without a look at every entry.

Such a look costs 40 us per entry, under a lock that all fetches of the node want: with 100,000
shards, four seconds for every newcomer. But nothing makes a cache fuller than an admission, and
all admissions are made under that lock. So what was found, plus all that was admitted since, is
never too little; what went since makes it too much, and the next look comes the sooner.

Likewise, where nothing could go to make room, nothing will in the next moment.

Neither is believed for long, for there are exceptions: locks that lie, processes that were told
no ``max_size``, jobs that end. It is a time in proportion to what a look costs, so that looking
takes a twentieth of the time at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from shardcache.clock import Clock
from shardcache.files import Modes
from shardcache.space.notes import Note

__all__ = ["Ledger", "Refusal", "State"]

#: Seconds per entry for which a look at all of them is believed: 20 times what it takes.
_PER_ENTRY = 0.0008
#: Of fewer entries nothing is believed: the look takes 3 ms.
_FEWEST = 64


@dataclass(frozen=True, slots=True)
class Refusal:
    """There was no room for a shard, and nothing to evict for it.

    Attributes:
        need: bytes that were asked for.
        missing: bytes that could not be found.
        missing_inodes: likewise inodes.
        terms: under which limits and policy.
    """

    need: int
    missing: int
    missing_inodes: int
    terms: str

    def covers(self, need: int, terms: str) -> bool:
        """Whether ``need`` bytes have no room either."""
        return need >= self.need and terms == self.terms

    def missing_for(self, need: int) -> int:
        """Bytes that could not be found for so many."""
        return self.missing + (need - self.need if self.missing else 0)


@dataclass(frozen=True, slots=True)
class State:
    """What is known of a cache.

    Attributes:
        entries: how many there were at the last look.
        full: bytes that are published or will be, at most; `math.inf` where that is not known.
        refusal: the latest, since the last look that found room.
    """

    entries: int
    full: float
    refusal: Refusal | None = None


class Ledger:
    """What all processes of a node know of one cache. Called under its budget lock.

    Args:
        path: of the file.
        modes: its permissions.
        clock: time; the monotonic one, which all processes of a boot share.
    """

    def __init__(self, path: Path, modes: Modes, clock: Clock) -> None:
        self._note = Note(path, modes)
        self._clock = clock

    def read(self) -> State | None:
        """What is known; None where the next one has to look."""
        try:
            at, entries, full, *refused = self._note.read()
            refusal = None
            if refused:
                need, missing, inodes, terms = refused
                refusal = Refusal(int(need), int(missing), int(inodes), str(terms))
            state = State(int(entries), math.inf if full is None else int(full), refusal)
            age = self._clock.monotonic() - float(at)
        except (ValueError, TypeError, OverflowError):
            return None
        patience = _PER_ENTRY * state.entries if state.entries >= _FEWEST else 0.0
        return state if 0 <= age < patience else None

    def looked(self, state: State) -> None:
        """Note what a look at all entries found."""
        self._write(self._clock.monotonic(), state)

    def admitted(self, size: int) -> None:
        """Note, before it is begun, that so many bytes come."""
        values = self._note.read()
        if values and (state := self.read()) is not None:
            self._write(values[0], State(state.entries, state.full + size, state.refusal))

    def forget(self) -> None:
        """Let the next one look: something went, or comes that nobody can count."""
        self._note.forget()

    def _write(self, at: float, state: State) -> None:
        full = None if state.full == math.inf else state.full
        refused = state.refusal
        if refused is None:
            self._note.write(at, state.entries, full)
        else:
            missing = refused.missing, refused.missing_inodes
            self._note.write(at, state.entries, full, refused.need, *missing, refused.terms)
