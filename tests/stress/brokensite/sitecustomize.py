"""Breaks flock in every Python process that finds this directory on PYTHONPATH.

``BROKEN_FLOCK`` says how; see `tests.stress.brokenflock`. Stands alone, because it runs before a
process has any other path.
"""

from __future__ import annotations

import errno
import fcntl
import os


def refused(fd: object, operation: int) -> None:
    """As on NFS without a lock daemon."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def lying(fd: object, operation: int) -> None:
    """Nobody is ever kept out."""
    os.fstat(fd if isinstance(fd, int) else fd.fileno())  # EBADF stays EBADF


if (how := os.environ.get("BROKEN_FLOCK")) in ("refused", "lying"):
    fcntl.flock = {"refused": refused, "lying": lying}[how]
