"""The clocks of the library, which tests replace here, and the boot id of the machine.

Durations and timeouts use ``monotonic``. ``time``, the wall clock, dates what people read, and last
uses. Whether a process is alive is decided by its locks, not by a clock.
"""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, sleep, time

__all__ = ["boot_id", "monotonic", "sleep", "time", "utc"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LAST_SECOND = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


def utc(seconds: float) -> datetime:
    """Convert seconds since the epoch to a datetime, the nearest one if they are out of range."""
    # A damaged filesystem may state any time. datetime ends with the year 9999.
    return datetime.fromtimestamp(min(max(seconds, 0.0), _LAST_SECOND), UTC)


@functools.cache
def boot_id() -> str:
    """Return the kernel's id of this boot. If it is empty, all boots count as one."""
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""
