"""Find the filesystem of a path, and decide which kind of lock to use on it.

On filesystems that are not local, flock(2) may be refused, be granted to several processes, or
hang. `os.statvfs` may hang, too, so the type is looked up in ``/proc/self/mountinfo`` (proc(5)).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from shardcache.config import Config
from shardcache.faults import system_error
from shardcache.files import IDLE_GRACE, PRIVATE, Modes
from shardcache.layout import Layout

logger = logging.getLogger(__name__)

#: Parents of the node's directory, in the order in which every process tries them. TMPDIR and
#: XDG_RUNTIME_DIR are not among them, because they differ between the jobs of one node.
_NODE_DIRECTORIES = ("/dev/shm", "/run/lock", "/tmp", "/var/tmp")  # noqa: S108
_MOUNTINFO = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")

#: Types of filesystems whose files and locks belong to this machine alone. Any other type counts as
#: a network filesystem, which is the safe choice: fuse.* may be anything, virtual machines share 9p
#: and virtiofs, and fuseblk has flock but is rare.
LOCAL_TYPES = frozenset(
    {
        "aufs", "bcachefs", "btrfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "iso9660", "jfs",
        "nilfs2", "overlay", "ramfs", "reiserfs", "rootfs", "squashfs", "tmpfs", "vfat", "xfs",
        "zfs",
    }
)  # fmt: skip
#: Types of filesystems that keep files in memory.
MEMORY_TYPES = frozenset({"ramfs", "tmpfs"})


class Mount(NamedTuple):
    """A mounted filesystem, as described by one line of mountinfo."""

    point: str  #: the directory where the filesystem is mounted
    type: str  #: the filesystem's type, such as ``ext4``, ``nfs4``, ``fuse.juicefs``
    options: frozenset[str] = frozenset()  #: options of the mount and of the filesystem
    root: str = "/"  #: the directory inside the filesystem that is mounted at ``point``


def read_mounts() -> list[Mount]:
    """Return the mounts that this process sees, or an empty list without /proc."""
    try:
        # The name of a mount point may contain any bytes, also those of other line ends.
        table = _MOUNTINFO.read_bytes().decode("utf-8", "surrogateescape")
    except system_error():
        return []
    mounts = []
    for line in filter(None, table.split("\n")):
        before, _, after = line.partition(" - ")  # unambiguous: spaces in a field are escaped
        _, _, _, root, point, options, *_ = before.split(" ")
        kind, _, more = after.split(" ", 2)
        all_options = frozenset(f"{options},{more}".split(","))
        # The kernel escapes space, tab, newline and backslash.
        point, root = (_OCTAL.sub(lambda octal: chr(int(octal[1], 8)), p) for p in (point, root))
        mounts.append(Mount(point, kind, all_options, root))
    return mounts


def mount_of(path: Path | str) -> Mount | None:
    """Return the mount that contains a path, or None without /proc. The path need not exist."""
    real = os.path.realpath(path)
    inside = [m for m in read_mounts() if f"{real}/".startswith(f"{m.point.rstrip('/')}/")]
    # If two mounts have the same point, the later one hides the earlier one.
    return max(reversed(inside), key=lambda mount: len(mount.point), default=None)


def lock_kind(config: Config, manifest: Mapping[str, object]) -> str:
    """Return the kind of lock for a cache, ``flock`` or ``lease``, given its manifest."""
    if config.locks != "auto":
        return config.locks
    # A machine with a local disk uses leases, too, if one that mounts it made the cache.
    if manifest.get("locks") == "lease" or (mount := mount_of(config.dir)) is None:
        return "lease"
    return "flock" if mount.type in LOCAL_TYPES else "lease"


def node_namespace(config: Config, manifest: Mapping[str, object]) -> Layout:
    """Return the node's namespace of a cache, with its kind of lock. The cache need not exist."""
    modes = Modes.of(config.shared_group)
    node = Layout.of_root(config.dir, modes)
    if lock_kind(config, manifest) == "flock":
        return node
    # The id in the manifest names the node's directory. Without a manifest, there are no locks yet.
    local, cache = None, manifest.get("id")
    if cache is not None:
        name = blake2b(str(cache).encode(), digest_size=8).hexdigest()
        local = node_directory(name, modes)
    return replace(node, local=local, grace=IDLE_GRACE)


def node_directory(identity: str, modes: Modes = PRIVATE) -> Path | None:
    """Return a directory of this node and user for one ``identity``; None if it cannot be made."""
    owner = os.geteuid() if modes.group is None else f"g{modes.group}"
    for parent in _NODE_DIRECTORIES:
        mount = mount_of(parent)
        if mount is not None and mount.type not in LOCAL_TYPES:
            continue
        directory = Path(parent, f"shardcache-{owner}-{identity}")
        try:
            modes.make_directory(directory, levels=0)
            status = directory.lstat()
        except system_error():
            continue
        # Every user may write to the parent, so another user may have created the directory.
        closed = not status.st_mode & 0o777 & ~modes.directory
        if closed and modes.objection(directory, status) is None:
            return directory
        text = "%s can be used by other users, so sessions are not kept there. Remove it"
        logger.warning(text, directory)
    return None
