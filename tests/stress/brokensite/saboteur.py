"""Removes lock files below a directory, which it is given, until it is killed; says when it begins.

A process of its own, because tests count descriptors and threads.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator

#: Seconds between two raids: a fetch sees dozens of them.
_PAUSE = 0.002
#: Directories between a test's own and the locks of a rank's namespace in it.
_DEPTH = 6


def lock_directories(directory: str, depth: int = _DEPTH) -> Iterator[str]:
    """Every ``locks`` below a directory, outside entries and partials."""
    with contextlib.suppress(OSError), os.scandir(directory) as children:
        for child in children:
            if not child.is_dir(follow_symlinks=False):
                continue
            if child.name == "locks":
                yield child.path
            elif depth and child.name not in ("objects", "partial"):
                yield from lock_directories(child.path, depth - 1)


if __name__ == "__main__":
    print(flush=True)
    while True:
        for locks in lock_directories(sys.argv[1]):
            shutil.rmtree(locks, ignore_errors=True)
        time.sleep(_PAUSE)
