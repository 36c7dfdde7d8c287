"""The clocks of the library, which tests replace in this module, and the machine's boot id.

Durations and timeouts use ``monotonic``. The wall clock, ``time``, is used for dates that people
read and for the last use of a shard. Locks, not clocks, decide whether a process is alive.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, sleep, time

__all__ = ["boot_id", "monotonic", "nap", "randomness", "sleep", "time", "utc"]

#: For the jitter of pauses. The program may have seeded the shared generator of `random`.
randomness = random.SystemRandom()

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LAST_SECOND = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


def utc(seconds: float) -> datetime:
    """Convert seconds since the epoch to a datetime, clamped to the years 1970 to 9999."""
    # A damaged filesystem may report any timestamp, and datetime supports no year after 9999.
    return datetime.fromtimestamp(min(max(seconds, 0.0), _LAST_SECOND), UTC)


def nap(seconds: float, check: Callable[[], None]) -> None:
    """Sleep for ``seconds``, and call ``check``, which may raise, every tenth of a second."""
    end = monotonic() + seconds
    check()
    while (left := end - monotonic()) > 0:
        sleep(min(left, 0.1))
        check()


@functools.cache
def boot_id() -> str:
    """Return the kernel's id of this boot, or "" if it is unknown; then all boots look alike."""
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""
