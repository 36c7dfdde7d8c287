"""Whether a cached version is still the current one: asking the origin, and remembering.

One request for a description, to the origin itself and not to an upstream. What it said is
remembered for all processes of the node in one sparse file: a slot of 16 bytes for each
millionth of all keys, with a date and a digest of key, version and date. A slot that another
shard has taken, or that was half written, says nothing; then the origin is asked once more.
Nothing that was published is touched.

An origin that gives no answer is left alone for a minute, then for longer (`breaker`).

Safe between the threads of the process that made it.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from shardcache.breaker import Breaker
from shardcache.clock import Clock
from shardcache.errors import TransferError
from shardcache.files import disown, is_alone, open_file, open_owned
from shardcache.layout import Layout
from shardcache.modes import settle
from shardcache.origins.base import ObjectInfo
from shardcache.origins.resolve import Origins
from shardcache.origins.retry import RetryPolicy
from shardcache.store.drift import differs
from shardcache.store.entry import Entry
from shardcache.store.metadata import DamagedError
from shardcache.units import format_duration
from shardcache.urls import ShardURL

__all__ = ["Currency", "UnnamedError"]

logger = logging.getLogger(__name__)

#: Of a key's hexadecimal digits so many choose its slot, as in `uses`.
_DIGITS = 5
#: A digest, and seconds since the epoch: negative where the version was found outdated then.
_SLOT = struct.Struct("<8sd")
#: Attempts for a description. More would keep a reader waiting who has a shard on disk.
_ATTEMPTS = 3
#: Dates so far in the future are of a clock that was wrong.
_SKEW = 3600.0


class UnnamedError(Exception):
    """The origin states nothing by which versions can be told apart."""


class Currency:
    """See the module.

    Args:
        where: the node's namespace.
        origins: where shards come from.
        policy: how often an origin is asked at most, and for how long.
        timeout: seconds after which an answer is not waited for by another attempt.
        clock: time.
    """

    def __init__(
        self,
        where: Callable[[], Layout],
        origins: Origins,
        policy: RetryPolicy,
        timeout: float,
        clock: Clock,
    ) -> None:
        self._where = where
        self._origins = origins
        self._policy = replace(policy, attempts=min(policy.attempts, _ATTEMPTS), deadline=timeout)
        self._clock = clock
        self._guard = threading.Lock()
        self._breakers: dict[str, Breaker] = {}

    def current(self, shard: ShardURL, found: Sequence[Entry]) -> Entry | None:
        """Ask the origin which of these entries it has; None if it has another version.

        Raises:
            UnnamedError: it does not say.
            ShardNotFoundError, AccessDeniedError, ConfigError, TransferError: it cannot be asked.
        """
        now = self._ask(shard)
        unnamed = False
        for entry in found:
            with suppress(DamagedError, FileNotFoundError):
                try:
                    if differs(entry.metadata().info, now) is None:
                        self._remember(entry, current=True)
                        return entry
                except ValueError:
                    unnamed = True
        if unnamed:
            raise UnnamedError
        for entry in found[:1]:
            self._remember(entry, current=False)
        return None

    def _ask(self, shard: ShardURL) -> ObjectInfo:
        place = "/".join(str(shard).split("/")[:3])
        with self._guard:
            breaker = self._breakers.setdefault(place, Breaker(self._clock))
        if not breaker.allows():
            raise TransferError(
                f"{shard}: {place} gave no answer lately and is asked again in "
                f"{format_duration(breaker.left)}.",
                url=str(shard),
            )
        try:
            origin = self._origins.of(shard)
            attempts = self._policy.started(str(shard))
            now = attempts.call(lambda: origin.stat(shard), sleep=self._clock.sleep)
        except TransferError:
            breaker.failed(at_once=True)
            raise
        except BaseException:
            breaker.undecided()  # an answer, or an interrupt
            raise
        breaker.succeeded()
        return now

    # -- remembering ---------------------------------------------------------------

    def known(self, entry: Entry, since: float) -> bool | None:
        """Whether an entry was found current since then; None where it was not asked."""
        said = self._said(entry)
        if abs(said) < since or abs(said) > self._clock.time() + _SKEW:
            return None
        return said > 0

    def _said(self, entry: Entry) -> float:
        try:
            with open_file(self._where().confirmed, io.FileIO) as file:
                found = os.pread(file.fileno(), _SLOT.size, _offset(entry))
            digest, date = _SLOT.unpack(found)
        except (OSError, struct.error):  # not there yet, or not that long
            return 0.0
        return date if digest == _digest(entry, date) else 0.0

    def _remember(self, entry: Entry, *, current: bool) -> None:
        layout, date = self._where(), self._clock.time() * (1 if current else -1)
        try:
            fd = open_owned(layout.confirmed, os.O_RDWR | os.O_CREAT, layout.modes)
            try:
                if is_alone(fd):
                    settle(fd, layout.modes.file)
                    os.pwrite(fd, _SLOT.pack(_digest(entry, date), date), _offset(entry))
            finally:
                disown(fd)
        except OSError as exn:
            logger.debug("cannot note what the origin said of %s: %s", entry.key, exn)


def _offset(entry: Entry) -> int:
    return int(entry.key[:_DIGITS], 16) * _SLOT.size


def _digest(entry: Entry, date: float) -> bytes:
    text = f"{entry.key} {entry.version} {date!r}".encode()
    return hashlib.blake2b(text, digest_size=8, usedforsecurity=False).digest()
