"""A process that removes lock files all the time; told on stdin below which directory.

    DIRECTORY\\n    from now on there; answered with a line
    \\n             nowhere; answered with a line, after the last raid

A process of its own, because tests count descriptors and threads.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
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
            elif depth and child.name not in ("objects", "partial", "quarantine"):
                yield from lock_directories(child.path, depth - 1)


def main() -> None:
    directory = ""
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], _PAUSE if directory else None)
        if ready:
            line = sys.stdin.readline()
            if not line:
                return
            directory = line.rstrip("\n")
            print(flush=True)
        for locks in list(lock_directories(directory)) if directory else ():
            shutil.rmtree(locks, ignore_errors=True)


if __name__ == "__main__":
    main()
