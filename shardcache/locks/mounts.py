"""Which filesystem a path is on, as the kernel tells it; nothing on that filesystem is touched.

`os.statvfs` and even `os.stat` may hang on a dead server, so the answer comes from
``/proc/self/mountinfo`` (proc(5)) and the text of the path. Symbolic links in
the path are followed, which asks the filesystems that hold the links.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LOCAL_TYPES", "MEMORY_TYPES", "Mount", "mount_of", "parse_mountinfo", "read_mounts"]

_MOUNTINFO = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")

#: Types whose files and locks belong to this machine alone. What is not here counts as
#: a network filesystem, for that is the safe way to be wrong: fuse.* may be anything,
#: 9p and virtiofs are shared by virtual machines, fuseblk has flock but is rare.
LOCAL_TYPES = frozenset(
    {
        "aufs", "bcachefs", "btrfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "iso9660", "jfs",
        "nilfs2", "overlay", "ramfs", "reiserfs", "rootfs", "squashfs", "tmpfs", "vfat", "xfs",
        "zfs",
    }
)  # fmt: skip
#: Types whose files are memory.
MEMORY_TYPES = frozenset({"ramfs", "tmpfs"})


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo.

    Attributes:
        point: where it is mounted.
        type: such as ``ext4``, ``nfs4``, ``fuse.juicefs``.
        source: device or server.
        options: of the mount and of the filesystem.
        root: which directory of the filesystem is mounted there.
    """

    point: str
    type: str
    source: str
    options: frozenset[str]
    root: str = "/"

    @property
    def is_local(self) -> bool:
        """Whether this machine alone has the filesystem."""
        return self.type in LOCAL_TYPES


def parse_mountinfo(text: str) -> list[Mount]:
    """The mounts in the text of a mountinfo file, in its order; lines of another kind are none."""
    mounts = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if not separator or len(left) < 6 or len(right) < 3:
            continue
        options = frozenset(left[5].split(",")) | frozenset(right[2].split(","))
        point, root, source = map(_unescape, (left[4], left[3], right[1]))
        mounts.append(Mount(point, right[0], source, options, root))
    return mounts


def read_mounts(mountinfo: str | None = None) -> list[Mount]:
    """Every mount that this process sees; none where the kernel does not tell (no Linux, no /proc).

    Args:
        mountinfo: text to look in instead of the kernel's.
    """
    if mountinfo is None:
        try:
            # surrogateescape: a mount point may have any bytes in its name.
            mountinfo = _MOUNTINFO.read_text("utf-8", "surrogateescape")
        except OSError:
            return []
    return parse_mountinfo(mountinfo)


def _unescape(text: str) -> str:
    """Undo the kernel's escapes of space, tab, newline and backslash."""
    return _OCTAL.sub(lambda match: chr(int(match.group(1), 8)), text)


def mount_of(path: Path | str, mountinfo: str | None = None) -> Mount | None:
    """The mount that ``path`` is on, whether or not it exists.

    Args:
        path: any path.
        mountinfo: text to look in instead of the kernel's.

    Returns:
        None where the kernel does not tell (no Linux, no /proc).
    """
    mounts = read_mounts(mountinfo)
    real = os.path.realpath(path)
    best: Mount | None = None
    for mount in mounts:
        inside = mount.point == "/" or real == mount.point or real.startswith(f"{mount.point}/")
        # Of two on one point the later one hides the other.
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best
