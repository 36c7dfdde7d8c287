"""Breaks flock in every Python process that finds this directory on PYTHONPATH.

``BROKEN_FLOCK`` says how. Set by `tests.stress.brokenflock`; stands alone, because it runs
before a process has any other path.
"""

from __future__ import annotations

import errno
import fcntl
import os


def break_flock(how: str) -> None:
    """Replace `fcntl.flock` of this process.

    Args:
        how: "refused": every call fails with ENOLCK, as on NFS without a lock
            daemon; "lying": every call succeeds, and nobody is ever kept out.
    """

    def refused(fd: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def lying(fd: object, operation: int) -> None:
        os.fstat(fd if isinstance(fd, int) else fd.fileno())  # EBADF stays EBADF

    fcntl.flock = {"refused": refused, "lying": lying}[how]


if (how := os.environ.get("BROKEN_FLOCK")) in ("refused", "lying"):
    break_flock(how)
