"""What is at a path now, for those who will not take an old answer.

A client of a network filesystem remembers that a name was absent (a negative dentry: 3 to
60 s on NFS, acdirmin and acdirmax of nfs(5)), so `os.path.exists` may say no for long after
another node has made it. `look` asks again:

* the directory is opened, upon which an NFS client revalidates it, and with it what it
  remembers of absent names (close-to-open consistency);
* ``/proc`` is linked to the name. No directory can be linked, nor anything of another mount, so
  that always fails and makes nothing; but the kernel first looks the name up as one that is about
  to be made, for which a remembered absence does not count (FUSE: ``fuse_dentry_revalidate``). Of
  another mount, because it is refused without an entry in the audit log.

Nothing here writes, and everything may run in any number of processes.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import sys
import time
from pathlib import Path

from shardcache.locks.mounts import mount_of
from shardcache.units import format_bytes, format_duration

__all__ = ["describe", "look"]

logger = logging.getLogger(__name__)

#: What says that a name is not there, or not any more: ESTALE is what NFS says of a
#: directory that another node has removed.
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
#: It is there; it is not, and cannot be made by a link; there is no /proc, or no directory.
_EXPECTED = _ABSENT | {errno.EEXIST, errno.EXDEV, errno.EPERM}
#: Names of a directory that an error shows, and of how many it is told how old they are.
_SHOWN = 4
_DATED = 1000


def look(path: Path | str) -> os.stat_result | None:
    """What is there, links followed; None if nothing is.

    Raises:
        OSError: it cannot be told: no permission, a failing disk.
    """
    path = os.fspath(path)
    found = _stat(path)
    if found is None:
        _refresh(path)
        found = _stat(path)
    return found


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)  # noqa: PTH116 - no Path needed
    except OSError as exn:
        if exn.errno in _ABSENT:
            return None
        raise


def _refresh(path: str) -> None:
    """Have the kernel ask for ``path`` again."""
    parent = os.path.dirname(path) or "."  # noqa: PTH120
    if parent == path or look(parent) is None:
        return
    try:
        os.close(os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        if sys.platform == "linux":  # elsewhere directories may be linked
            # With the dot it is a directory, whatever else may have that name.
            os.link("/proc/.", path)
    except OSError as exn:  # EEXIST or EXDEV, as a rule
        if exn.errno not in _EXPECTED:
            logger.debug("%s: not asked for again: %s", path, exn)


def describe(path: Path | str) -> str:
    """A sentence or two for an error: what is there, in what directory, on what mount."""
    path = os.fspath(Path(path).absolute())
    try:
        found = look(path)
        if found is not None:
            return f"{path} is {_kind(found)}, {_mounted(path)}"
        nearest = path
        while look(nearest) is None and nearest != "/":
            nearest = os.path.dirname(nearest)  # noqa: PTH120
        return f"{path} is not there; {_contents(nearest)}, {_mounted(nearest)}"
    except OSError as exn:
        return f"{path} cannot be looked at ({exn.strerror}), {_mounted(path)}"


def _kind(found: os.stat_result) -> str:
    age = _age(found)
    if stat.S_ISDIR(found.st_mode):
        return f"a directory changed {age} ago"
    if stat.S_ISREG(found.st_mode):
        return f"a file of {format_bytes(found.st_size)} changed {age} ago"
    return f"neither a file nor a directory, changed {age} ago"


def _age(found: os.stat_result) -> str:
    return format_duration(round(max(0.0, time.time() - found.st_mtime), 1))


def _contents(directory: str) -> str:
    """What is in the nearest directory that exists; the latest first."""
    found = look(directory)
    if found is None or not stat.S_ISDIR(found.st_mode):
        return f"{directory} is {_kind(found) if found else 'gone'}"
    dated: list[tuple[float, str]] = []
    count = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            count += 1
            if count <= _DATED:
                dated.append(_dated(entry))
    if not count:
        return f"the nearest directory that exists is {directory}, which is empty"
    names = ", ".join(text for _, text in sorted(dated, reverse=True)[:_SHOWN])
    more = ", ..." if count > _SHOWN else ""
    return (
        f"the nearest directory that exists is {directory}, "
        f"with {count} name{'s' if count > 1 else ''} ({names}{more})"
    )


def _dated(entry: os.DirEntry[str]) -> tuple[float, str]:
    name = "".join(c if c.isprintable() else "?" for c in entry.name)
    try:
        found = entry.stat(follow_symlinks=False)
    except OSError:  # removed since it was listed
        return 0.0, name
    return found.st_mtime, f"{name} {_age(found)} ago"


def _mounted(path: str) -> str:
    mount = mount_of(path)
    if mount is None:
        return "on a mount that the kernel does not tell"
    origin = f" from {mount.source}" if mount.source not in ("none", mount.type) else ""
    return f"on {mount.type} mounted at {mount.point}{origin}"
