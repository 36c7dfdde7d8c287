"""Time as the library sees it, which tests replace here; and which boot of the machine this is.

Durations and time-outs use ``monotonic``. ``time``, the wall clock, is for people and for the
order of last uses. No decision about who is alive rests on either.
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
    """Seconds since the epoch as a time; those that have no date get the nearest one."""
    # A damaged filesystem may state any time; datetime ends with the year 9999.
    return datetime.fromtimestamp(min(max(seconds, 0.0), _LAST_SECOND), UTC)


@functools.cache
def boot_id() -> str:
    """The kernel's id of this boot; empty where there is none (then boots are not told apart).

    No process outlives a boot.
    """
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""
