"""What `make test` has no time for: many processes, many faults, many moments, real waits.

`make stress` runs it in a quarter of an hour, `make stress-full` for as long as you like.
"""

from __future__ import annotations

import os
import platform


def machine() -> str:
    """The machine in one line, printed with what was found on it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}"
    )
