"""Which filesystem a path is on, and so which kind of lock is used there.

On a local filesystem flock(2) tells the truth. On any other (NFS, Lustre, GPFS, FUSE, unknown) it
may be refused, granted to everybody, or hang, so no file of the cache is locked with it there:
leases say who fetches, ages say what is in use (`Layout.grace`), and sessions and the budget's lock
are in a directory of this node (`Layout.local`). `os.statvfs` and even `os.stat` may hang on a dead
server, so the type comes from ``/proc/self/mountinfo`` (proc(5)) and the text of the path, of which
symbolic links are followed.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from shardcache.files import PRIVATE, Modes
from shardcache.layout import IDLE_GRACE, Layout, read_manifest

logger = logging.getLogger(__name__)

#: Where sessions may be on this node, in the order in which every process tries them. Not TMPDIR
#: or XDG_RUNTIME_DIR: they differ between the jobs of one node.
# A directory found there is used only if nobody else could have made it (`node_directory`).
_NODE_DIRECTORIES = ("/dev/shm", "/run/lock", "/tmp", "/var/tmp")  # noqa: S108
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
    """One line of mountinfo."""

    point: str  #: where it is mounted
    type: str  #: such as ``ext4``, ``nfs4``, ``fuse.juicefs``
    options: frozenset[str] = frozenset()  #: of the mount and of the filesystem
    root: str = "/"  #: which directory of the filesystem is mounted there

    @property
    def is_local(self) -> bool:
        """Whether this machine alone has the filesystem."""
        return self.type in LOCAL_TYPES


def read_mounts() -> list[Mount]:
    """Every mount that this process sees; none where the kernel does not tell (no /proc)."""
    try:
        # surrogateescape: a mount point may have any bytes in its name.
        table = _MOUNTINFO.read_text("utf-8", "surrogateescape")
    except OSError:
        return []
    mounts = []
    for line in table.splitlines():
        before, _, after = line.partition(" - ")  # spaces within a field are escaped
        _, _, _, root, point, options, *_ = before.split(" ")
        kind, _, more = after.split(" ", 2)
        both = frozenset(f"{options},{more}".split(","))
        mounts.append(Mount(_unescape(point), kind, both, _unescape(root)))
    return mounts


def _unescape(text: str) -> str:
    """Undo the kernel's escapes of space, tab, newline and backslash."""
    return _OCTAL.sub(lambda match: chr(int(match.group(1), 8)), text)


def mount_of(path: Path | str) -> Mount | None:
    """The mount of a path, whether or not it exists; None where the kernel does not tell."""
    real = os.path.realpath(path)
    best: Mount | None = None
    for mount in read_mounts():
        inside = mount.point == "/" or real == mount.point or real.startswith(f"{mount.point}/")
        # Of two on one point the later one hides the other.
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def is_local(path: Path | str) -> bool:
    """Whether this machine alone has the filesystem of a path; False if that is unknown."""
    mount = mount_of(path)
    return mount is not None and mount.is_local


def node_namespace(root: Path, locks: str, touch_interval: float, modes: Modes = PRIVATE) -> Layout:
    """The node's namespace in ``root``, which may not exist yet; it says how to lock there.

    Args:
        root: of the cache.
        locks: the option: ``auto``, ``flock`` or ``lease``.
        touch_interval: seconds between touches of an entry in use; the grace is twice that or more.
        modes: the permissions of what is made.
    """
    if locks == "flock" or (locks == "auto" and is_local(root)):
        return Layout.of_root(root, modes)
    # Without a manifest its name is not known yet, and nothing is locked.
    local, cache = None, read_manifest(root).get("id")
    if cache is not None:
        name = blake2b(str(cache).encode(), digest_size=8).hexdigest()
        local = node_directory(name, modes)
    return Layout(root / "v1", local, max(IDLE_GRACE, 2 * touch_interval), modes)


def node_directory(identity: str, modes: Modes = PRIVATE) -> Path | None:
    """A directory of ours on this node, the same for all who say ``identity``; None without one."""
    owner = os.geteuid() if modes.group is None else f"g{modes.group}"
    for parent in _NODE_DIRECTORIES:
        mount = mount_of(parent)
        if mount is not None and not mount.is_local:
            continue
        directory = Path(parent, f"shardcache-{owner}-{identity}")
        try:
            modes.make_directory(directory, levels=0)
            found = directory.lstat()
        except OSError:
            continue
        # Whoever made the name before us in a directory that all may write must be us.
        closed = not found.st_mode & 0o777 & ~modes.directory
        if closed and modes.objection(directory, found) is None:
            return directory
        logger.warning("%s is not ours alone; sessions go elsewhere", directory)
    return None
