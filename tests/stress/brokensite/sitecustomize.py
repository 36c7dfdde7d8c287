"""Breaks flock, by ``BROKEN_FLOCK``, in Python processes with this directory on PYTHONPATH.

    BROKEN_FLOCK=lying PYTHONPATH=$PWD/tests/stress/brokensite python -m pytest tests/test_cache.py

Locks only save bandwidth, so all other claims must hold without them. In the files that `make
stress` runs so, a test that depends on locks has the marker ``@pytest.mark.locks_work(...)`` with
one of these claims, or none to claim both:

    flock     no other process can take a lock that is held
    answers   flock reports whether a lock is held, so that locks and leftovers of dead processes
              can be taken at once

This module runs before other modules can be imported.
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
