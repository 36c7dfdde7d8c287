"""Who runs a piece of work, and whether they still do.

A runner posts a claim that says who it is. Claims are numbered: the next number may be claimed
only when the holder of the last one is dead, and of several that claim a number one gets it.
So nothing is ever taken from anybody, and nothing has to be removed after a death.

Whether the holder is dead:

* on a local disk flock tells, at once (`fileboard`);
* elsewhere the runner posts a beat every few seconds, and who has not seen a new one for
  `lease` seconds of its own monotonic clock takes it for dead. A process of the same boot and
  the same pid namespace is looked up, which tells sooner; no clock and no pid of another
  machine is believed.

A runner that was stopped for longer than its lease and wakes up goes on: `turns` lets the
first result count.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import asdict, dataclass

from shardcache import threads
from shardcache.clock import SYSTEM_CLOCK, Clock
from shardcache.errors import ConfigError, ShardCacheError
from shardcache.locks.flock import Holder
from shardcache.locks.lease import LEASE_SECONDS
from shardcache.modes import random_token
from shardcache.store.metadata import boot_id
from shardcache.sync.noticeboards import Board, Grip
from shardcache.sync.standing import rank, start_of
from shardcache.units import format_duration

__all__ = ["LEASE_SECONDS", "Claim", "Identity", "Watch"]

logger = logging.getLogger(__name__)

#: Beats within a lease: one may be lost, and one late.
_BEATS = 5
#: In place of a beat, of a runner that was interrupted.
_OVER = b"over"
#: Seconds for which a process of this machine must have been gone. Its result may be there and
#: not be seen yet, where this mount of a network filesystem is another one than its own.
_GONE = 5.0
#: Seconds that count between two looks, at most. After a pause of the whole machine (a virtual
#: one that was moved) the runner has had no more time to beat than we had to look.
_LONGEST_LOOK = 2.0


@dataclass(frozen=True, slots=True)
class Identity:
    """A process, so that it can be told from all others.

    Attributes:
        pid, host, rank: for people.
        begun: when it posted this, in seconds since the epoch: for people.
        boot: of its machine.
        pids: its pid namespace.
        started: when it started, in the kernel's ticks.
        token: random: two claims are never the same.
    """

    pid: int
    host: str
    rank: int | None
    begun: float
    boot: str
    pids: str
    started: int | None
    token: str

    @classmethod
    def this(cls, clock: Clock = SYSTEM_CLOCK) -> Identity:
        """That of the calling process."""
        try:
            number: int | None = rank()
        except ConfigError:  # told by whoever needs it
            number = None
        holder = Holder.this_process(rank=number, job=None, now=clock.time())
        pid = holder.pid
        return cls(
            pid, holder.host, number, holder.started, *_place(), start_of(pid), random_token()
        )

    @classmethod
    def parse(cls, data: bytes | None) -> Identity | None:
        """What `encode` wrote; None for anything else."""
        try:
            found = cls(**json.loads(data or b""))
            # Numbers of whatever else is in the file: they are calculated with.
            known = type(found.pid) is int and type(found.begun) in (int, float)
        except (ValueError, TypeError, RecursionError):
            return None
        return found if known else None

    def encode(self) -> bytes:
        """As `parse` reads it."""
        return json.dumps(asdict(self)).encode()

    def is_gone(self) -> bool:
        """Whether it is a process of this machine that has ended; False of all others."""
        if not self.boot or (self.boot, self.pids) != _place():
            return False
        return self.started is not None and start_of(self.pid) != self.started

    def is_this_process(self) -> bool:
        """Whether it is the calling process."""
        place = self.boot, self.pids, self.pid, self.started
        return place == (*_place(), os.getpid(), start_of(os.getpid()))

    def __str__(self) -> str:
        who = f"process {self.pid} on {self.host}"
        return who if self.rank is None else f"rank {self.rank} ({who})"


def _place() -> tuple[str, str]:
    try:
        return boot_id(), os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    except OSError:
        return "", ""


class Claim:
    """The right to run, in this process's hand, until `release` or its death.

    Args:
        board: where.
        room: which work.
        number: which claim on it.
        lease: seconds without a beat after which others may take over.
    """

    def __init__(self, board: Board, room: str, number: int, grip: Grip, lease: float) -> None:
        self._board = board
        self._name = f"{room}/claim.{number}"
        self._grip = grip
        self._every = lease / _BEATS
        self._done = threading.Event()
        self._thread = None
        if not board.exact:
            self._thread = threads.start(self._beat, "shardcache-beat")

    @classmethod
    def make(cls, board: Board, room: str, number: int, lease: float) -> Claim | None:
        """Claim a number; None if somebody else has it."""
        grip = board.hold(f"{room}/claim.{number}", Identity.this().encode())
        return None if grip is None else cls(board, room, number, grip, lease)

    def _beat(self) -> None:
        count = 0
        while not self._done.wait(self._every):
            count += 1
            try:
                self._board.put(f"{self._name}.beat", b"%d" % count)
            except (OSError, ShardCacheError) as exn:  # the next one may come through
                logger.warning("%s: cannot say that this process lives: %s", self._name, exn)

    def release(self) -> None:
        """Let go; harmless twice."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        self._grip.release()

    def give_up(self) -> None:
        """Let go, and say that nothing will come of it here: others need not wait for silence."""
        self.release()
        if not self._board.exact:
            try:
                self._board.put(f"{self._name}.beat", _OVER)
            except (OSError, ShardCacheError) as exn:  # then they wait
                logger.warning("%s: cannot say that this process gave up: %s", self._name, exn)


class Watch:
    """One waiter's view of who runs; for one thread."""

    def __init__(self, board: Board, room: str, lease: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self.number = 0
        self._board = board
        self._room = room
        self._lease = lease
        self._clock = clock
        self._holder: Identity | None = None
        self._seen: tuple[bytes | None, bytes | None] | None = None
        self._looked = clock.monotonic()
        self._silent = self._gone = 0.0

    def next_is_free(self) -> bool:
        """Whether the holder of the claim `number` is dead; then `number` is the next one."""
        name = f"{self._room}/claim.{self.number}"
        held = self._board.held(name)
        if held is None:
            held = not self._has_expired(name)
        elif held:
            self._holder = Identity.parse(self._board.get(name))
        if held:
            return False
        logger.warning("%s has ended in the midst of %s; taking over", self._who(), self._room)
        self.number += 1
        self._holder = self._seen = None
        self._silent = self._gone = 0.0
        return True

    def _has_expired(self, name: str) -> bool:
        now = self._clock.monotonic()
        passed, self._looked = min(now - self._looked, _LONGEST_LOOK), now
        seen = self._board.get(name), self._board.get(f"{name}.beat")
        if seen != self._seen:
            self._seen, self._silent, passed = seen, 0.0, 0.0
            self._holder = Identity.parse(seen[0])
        is_gone = self._holder is not None and self._holder.is_gone()
        if seen[1] == _OVER:
            return True
        self._silent += passed
        self._gone = self._gone + passed if is_gone else 0.0
        return self._silent >= self._lease or self._gone >= _GONE

    def _who(self) -> str:
        return str(self._holder) if self._holder else "a process that did not say who it is"

    def __str__(self) -> str:
        if self._holder is None:
            return self._who()
        age = format_duration(round(max(0.0, self._clock.time() - self._holder.begun), 1))
        return f"{self._holder} has been at it for {age}"
