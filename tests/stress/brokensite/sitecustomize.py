"""Breaks flock, by ``BROKEN_FLOCK``, in Python processes with this directory on PYTHONPATH.

See `tests.stress.brokenflock`. This module runs before other modules can be imported.
"""

import errno
import fcntl
import os


def refused(fd: object, operation: int) -> None:
    """Fail, as on NFS without a lock daemon."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def lying(fd: object, operation: int) -> None:
    """Grant every lock."""
    os.fstat(fd if isinstance(fd, int) else fd.fileno())  # EBADF stays EBADF


fcntl.flock = {"refused": refused, "lying": lying}.get(os.environ.get("BROKEN_FLOCK"), fcntl.flock)
