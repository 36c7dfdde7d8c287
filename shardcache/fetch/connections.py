"""How many connections a process uses at once, and how much one request asks for.

S3 gives one connection some 50 to 100 MB/s, whatever the link can take; on a fast LAN a few
connections take nearly all there is, and more of them cost processor time (figures:
docs/design.md, "Connections"). What a single connection brings tells neither: beside others it
is slow on a full link, too, and its first megabytes are a burst. So the number begins with
the distance, a connection for each millisecond that the first byte takes, and what all of them
bring together decides about more (`climb`).

A lane is what lets one request go. Safe between threads; what an interrupt makes somebody
lose is given back.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import struct
import tempfile
import threading
import time
from collections.abc import Callable

from shardcache.errors import ConfigError
from shardcache.units import format_rate, parse_bytes

__all__ = ["LEAST", "MIB", "Climb", "Lane", "Lanes", "Throttle", "parse_rate"]


MIB = 1 << 20
#: Before any answer.
_UNKNOWN = 8
#: Of a near origin: one connection would wait whenever its thread hashes and writes.
_LEAST = 4
#: Connections for each second to the first byte, to begin with; and how many at most that
#: can make: a slow server is no reason for a crowd.
_PER_SECOND = 1000.0
_BEGIN_MOST = 16
#: Seconds that a rate is measured for, and that new connections have beside the time to
#: their first byte before they count.
_WINDOW = 0.06
_SETTLE = 0.01
#: Seconds in which more connections have to be made use of.
_TAKEN = 0.2
#: Bytes and seconds of a request: long enough to make its own cost small, and so many
#: bytes that S3's multipart uploads have no smaller parts.
_PART = 16 * MIB
_LONGEST_PART = 64 * MIB
_PART_SECONDS = 0.2
#: The best rate of a request counts: others were slow because the processor was busy, and
#: smaller parts would make it busier. With each request it fades a little: links change.
_FADES = 0.95
#: Seconds to the first byte of an origin that is near.
_NEAR = 0.008
_NEVER = math.inf


class Lane:
    """The right to one connection: to wait for by ``with``, or from `Lanes.spare`.

    It is given back when its object goes, at the latest.

    Args:
        lanes: whose.

    Attributes:
        held: whether it is taken.
    """

    __slots__ = ("_lanes", "held")

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self.held = False

    def give_back(self) -> None:
        """Let somebody else have it; harmless when that was done."""
        self._lanes.release(self)

    def __enter__(self) -> Lane:
        self._lanes.wait(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self.give_back()

    def __del__(self) -> None:
        if self.held:
            self.give_back()


class Lanes:
    """The connections of one process.

    Args:
        most: never more.
        part_size: bytes per request; None for what suits the link.
        now: seconds, monotonic.
    """

    def __init__(
        self,
        most: int,
        part_size: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most = most
        self._part_size = part_size
        self._now = now
        self._climb = Climb(most)
        self._climb.limit = min(most, _UNKNOWN)
        self._distance: float | None = None  # seconds to the first byte, the least seen
        self._measured = False
        self._rate: float | None = None  # of one request
        self._taken = 0
        self._waiting = 0
        self._wanted = False  # in this window, somebody would have taken one more
        self._seen = 0
        self._window: tuple[float, int] | None = None  # when it began, and `_seen` then
        self._look_at = _NEVER
        self._changed = threading.Condition()

    @property
    def limit(self) -> int:
        """How many there are now."""
        return self._climb.limit

    # -- taking and giving back --------------------------------------------------

    def wait(self, lane: Lane, timeout: float | None = None) -> bool:
        """Take ``lane`` for a shard; False if none was free for ``timeout`` seconds."""
        with self._changed:
            if self._taken >= self.limit:
                self._wanted = True
            self._waiting += 1
            try:
                free = self._changed.wait_for(lambda: self._taken < self.limit, timeout)
            finally:
                self._waiting -= 1
            if free:
                self._take(lane)
            return free

    def spare(self) -> Lane | None:
        """One more lane for a shard that has one, if there is one and nobody waits."""
        if self._taken >= self.limit and self._wanted:
            return None  # asked for each block; nothing would change
        lane = Lane(self)
        with self._changed:
            if self._taken >= self.limit or self._waiting:
                self._wanted = True
                return None
            self._take(lane)
        return lane

    @property
    def crowded(self) -> bool:
        """Whether a shard that has several lanes is to give one back."""
        return self._waiting > 0 or self._taken > self.limit

    def release(self, lane: Lane) -> None:
        """Take a lane back."""
        with self._changed:
            if not lane.held:
                return
            # One step: an interrupt strikes where something is called, and nothing is.
            lane.held = False
            self._taken -= 1
            if self._taken == self.limit:
                self._settle()
            elif self._taken < self.limit and not self._waiting and not self._climb.trying:
                self._window, self._look_at = None, _NEVER
            self._changed.notify()

    def _take(self, lane: Lane) -> None:
        lane.held = True  # one step with the next line; see `release`
        self._taken += 1
        if self._taken == self.limit and self._window is None:
            self._settle()

    # -- measuring ---------------------------------------------------------------

    def answered(self, seconds: float) -> None:
        """Note how long an answer's first byte took."""
        with self._changed:
            if self._distance is not None and seconds >= self._distance:
                return
            self._distance = seconds
            if not self._measured:
                wanted = math.ceil(seconds * _PER_SECOND)
                self._climb.start(
                    max(_LEAST, min(_BEGIN_MOST, wanted)), doubtful=wanted < _BEGIN_MOST
                )
                self._changed.notify_all()

    def received(self, count: int) -> None:
        """Note bytes that came, over whichever lane."""
        self._seen += count
        if self._look_at is not _NEVER and (now := self._now()) >= self._look_at:
            with self._changed:
                self._look(now)

    def part_done(self, count: int, seconds: float) -> None:
        """Note how long the bytes of one request took."""
        rate = count / max(seconds, 1e-6)
        self._rate = max(rate, _FADES * (self._rate or 0.0))

    def part(self, left: int | None = None) -> int:
        """How many bytes the next request should ask for.

        Args:
            left: bytes of the shard that nobody has asked for; None where that is not known.
        """
        if self._part_size is not None:
            return self._part_size
        near = self._distance is not None and self._distance < _NEAR
        least = _PART if near else _PART // 2
        if left is None and not near:
            return least  # of a shard that others can help with, once its size is known
        if self._rate is not None:
            size = round(self._rate * _PART_SECONDS / _PART) * _PART
        else:
            size = _LONGEST_PART if near else _PART
        size = min(_LONGEST_PART, max(_PART, size))
        if left is not None and not self._waiting:  # no lane is to be the last one busy for long
            size = min(size, max(least, math.ceil(left / self.limit / MIB) * MIB))
        return size

    def _settle(self) -> None:
        """All lanes are busy: measure, once the new ones bring something."""
        now = self._now()
        self._window = None
        self._look_at = max(now + (self._distance or 0.0) + _SETTLE, self._climb.rest_until)

    def _look(self, now: float) -> None:
        if now < self._look_at:
            return  # another thread was here
        if self._climb.trying and self._taken < self.limit:  # nobody needs so many
            self._conclude(0.0, now)
            return
        if self._window is None:
            self._window = (now, self._seen)
            self._wanted = self._waiting > 0
            self._look_at = now + _WINDOW
            return
        begun, before = self._window
        self._measured = True
        self._conclude((self._seen - before) / (now - begun), now)

    def _conclude(self, rate: float, now: float) -> None:
        limit = self.limit
        self._climb.told(rate, now, wanted=self._wanted)
        self._window = None
        if self.limit > limit:
            self._look_at = now + _TAKEN  # or earlier, when all are taken
            self._wanted = False
            self._changed.notify_all()
        elif self.limit < limit:
            self._look_at = _NEVER  # until they are given back
        else:
            self._settle()


#: How much of the gain in proportion more connections must bring. S3 gives nearly all of it, a
#: link or a processor that is full gives none.
_WORTH = 0.5
#: What fewer connections must keep of the rate.
_AS_GOOD = 0.95
#: Seconds of rest after all has been tried; doubled each time that nothing came of it.
_REST = 1.0
_LONGEST_REST = 32.0


class Climb:
    """See the module.

    Args:
        most: never more.

    Attributes:
        limit: how many connections to have now.
        least: no fewer.
        doubtful: whether a rise has to be confirmed.
        rest_until: until then `told` need not be called.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.limit = most
        self.least = 1
        self.doubtful = True
        self.rest_until = 0.0
        self._rest = _REST
        self._base: tuple[int, float] | None = None  # the best so far, in this climb
        self._risen: tuple[int, float] | None = None  # what is to be confirmed

    def start(self, limit: int, *, doubtful: bool = True) -> None:
        """Begin anew, with so many."""
        self.limit = self.least = max(1, min(self.most, limit))
        self.doubtful = doubtful
        self._base = self._risen = None

    @property
    def trying(self) -> bool:
        """Whether there are more connections than known to be good."""
        return self._base is not None and self.limit > self._base[0]

    def told(self, rate: float, now: float, *, wanted: bool) -> None:
        """Draw conclusions from what all ``limit`` connections brought together.

        Args:
            rate: bytes per second; 0 if there was not enough to do for so many.
            now: seconds.
            wanted: whether more would have found something to do.
        """
        if self._base is None:
            self._base = (self.limit, rate)
            self._go(now, up=wanted, down=True)
        elif self._risen is not None:
            risen, self._risen = self._risen, None
            if self._is_worth(risen, (self.limit, rate)):
                self._keep(risen)
                self._go(now, up=wanted, down=False)
            else:
                self._go(now, up=False, down=True)
        elif self.limit > self._base[0]:
            self._judge_more((self.limit, rate), now, wanted)
        elif rate >= self._base[1] * _AS_GOOD:
            self._keep((self.limit, rate))
            self._go(now, up=False, down=True)
        else:
            self.limit = self._base[0]
            self._go(now, up=False, down=False)

    def _judge_more(self, found: tuple[int, float], now: float, wanted: bool) -> None:
        assert self._base is not None
        if not self._is_worth(found, self._base):
            self.limit = self._base[0]
            self._go(now, up=False, down=True)
        elif self.doubtful:
            self._risen = found
            self.limit = self._base[0]
        else:
            self._keep(found)
            self._go(now, up=wanted, down=False)

    @staticmethod
    def _is_worth(more: tuple[int, float], fewer: tuple[int, float]) -> bool:
        return more[1] > fewer[1] * (1 + _WORTH * (more[0] / fewer[0] - 1))

    def _keep(self, found: tuple[int, float]) -> None:
        self._base = found
        self.limit = found[0]
        self._rest = _REST

    def _go(self, now: float, *, up: bool, down: bool) -> None:
        """To the next trial, or to rest."""
        if up and self.limit < self.most:
            self.limit = min(self.most, 2 * self.limit)
        elif down and self.limit > self.least:
            self.limit = max(self.least, self.limit // 2)
        else:
            self._base = None
            self.rest_until = now + self._rest
            self._rest = min(_LONGEST_REST, 2 * self._rest)


#: Bytes per second. With less, a fetch would look as if it were stuck.
LEAST = 64_000
#: Seconds' worth that may come at once after a while of less.
_BURST = 0.1
_TIME = struct.Struct("=d")


def parse_rate(value: str | int | float) -> int:
    """Bytes per second from a number or from text such as ``50MB`` or ``50MB/s``.

    Raises:
        ConfigError: not a rate, or less than `LEAST`.
    """
    text = value.strip().removesuffix("/s") if isinstance(value, str) else value
    rate = parse_bytes(text)
    if rate < LEAST:
        raise ConfigError(f"{value!r} is too slow: the least rate is {format_rate(LEAST)}")
    return rate


class Throttle:
    """See the module; made before the forks that share it.

    Args:
        rate: bytes per second.
    """

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this
        self._file.write(bytes(_TIME.size))
        self._file.flush()
        self._paid = mmap.mmap(self._file.fileno(), _TIME.size)
        self._threads = threading.Lock()  # the file's lock is between processes only

    def __enter__(self) -> Throttle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def take(self, count: int) -> float:
        """Note bytes that were received; for how many seconds no more should be.

        Safe between threads and processes. After `close` nothing is limited.
        """
        with self._threads:
            if self._file.closed:
                return 0.0
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                # CLOCK_MONOTONIC is the same in all processes.
                now = time.monotonic()
                before: float = _TIME.unpack_from(self._paid)[0]
                paid = max(before, now - _BURST) + count / self.rate
                _TIME.pack_into(self._paid, 0, paid)
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)
        return max(0.0, paid - now)

    def close(self) -> None:
        """Limit nothing any more."""
        with self._threads:
            self._paid.close()
            self._file.close()
