"""A rate that several connections keep together, in whatever thread or forked process they are.

    with Throttle(50_000_000) as throttle:
        ...  # forks, threads
        seconds = throttle.take(count)  # how long to wait before more is received

One number is shared: when all that was taken will have been paid for. It is changed under a lock
that the kernel takes back from a process that dies. Whoever takes waits afterwards, by itself, so
nobody waits while the lock is held.
"""

from __future__ import annotations

import fcntl
import mmap
import struct
import tempfile
import threading
import time

from shardcache.errors import ConfigError
from shardcache.units import format_rate, parse_bytes

__all__ = ["LEAST", "Throttle", "parse_rate"]

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
