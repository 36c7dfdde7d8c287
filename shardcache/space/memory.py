"""Measure the space that a filesystem and this process's cgroups leave, and that a shard takes.

Files on a tmpfs are memory of the cgroup of the process that wrote them. The page cache of files on
disks counts as free memory, because the kernel reclaims it first. Sources: the kernel's
admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shardcache import clock
from shardcache.config import Config
from shardcache.faults import ignoring
from shardcache.files import existing
from shardcache.locks.mounts import MEMORY_TYPES, mount_of, read_mounts
from shardcache.store.partial import record_size

_MEMBERSHIP = Path("/proc/self/cgroup")
#: Limits of this size or more mean "no limit": cgroup v1 states that as the largest multiple of a
#: page in a signed 64-bit number.
_UNLIMITED = 1 << 60
#: The headroom (free memory) of the cgroups is read again after this many seconds, because reading
#: it for each small shard slows a prewarm; or after this share of it is written, because the kernel
#: would kill a job that grows while it writes.
_BELIEVED = 1.0
_WRITTEN = 1 / 16
#: Bytes of the largest block of local filesystems, and of the usual one. NFS and Ceph state their
#: transfer size instead, 1 MiB and more, so the usual size replaces anything above the largest.
_LARGEST_BLOCK, _USUAL_BLOCK = 64 << 10, 4096
#: PyTorch's workers pass batches through this RAM disk. Docker's has 64 MB.
_SHARED = "/dev/shm"  # noqa: S108
#: Bytes that stay free there, but at most half of it. A batch of 256 images has 154 MB.
_TENSORS = 1 << 30
#: device -> when the headroom was read, the headroom, and the RAM disk's free bytes at that time.
_last_read: dict[int, tuple[float, Volume | None, int]] = {}


class Volume(NamedTuple):
    """The size and the free bytes of a filesystem, or of the memory of a cgroup."""

    size: int
    free: int
    batches: int = 0  # bytes that stay free for PyTorch's workers, in addition

    @classmethod
    def of(cls, path: Path) -> Volume:
        """Return the volume of ``path``. The limits of the cgroups apply to a RAM disk."""
        disk = os.statvfs(path)
        size, free = disk.f_frsize * disk.f_blocks, disk.f_frsize * disk.f_bavail
        device = path.stat().st_dev
        mount = _ram_disk(str(path), device)
        batches = min(size // 2, _TENSORS) if mount == _SHARED else 0
        if mount is not None and (memory := _recent_headroom(device, free)) is not None:
            # A ramfs states a size of 0, so only the cgroups limit it.
            free = min(free, memory.free) if size else memory.free
            size = min(size or memory.size, memory.size)
        return cls(size, max(0, free - batches), batches)

    def budget(self, config: Config) -> int | None:
        """Return the bytes that a cache on this volume may hold; None if only free space counts."""
        limit = None if config.max_size is None else config.max_size.of(self.size)
        if config.ephemeral_limit is None:
            return limit
        # Leave a tenth: the kubelet also counts the pod's logs and its containers' other files.
        pod = config.ephemeral_limit * 9 // 10
        return pod if limit is None else min(limit, pod)


def allocation(root: Path) -> Callable[[int], int]:
    """Return a function that computes the bytes on disk of a shard from its size.

    It counts whole blocks for the data and for the sidecar or journal, and an entry's two
    directories. Only this call queries the filesystem. ``root`` need not exist yet.
    """
    path = existing(root)
    block = os.statvfs(path).f_frsize
    block = block if 0 < block <= _LARGEST_BLOCK else _USUAL_BLOCK
    directory = min(block, path.stat().st_blocks * 512)  # 0 on tmpfs, xfs, btrfs; a block on ext4

    def allocated(size: int) -> int:
        blocks = -(-size // block) + -(-record_size(size) // block)
        return blocks * block + 2 * directory

    return allocated


def ram_disk(path: Path) -> str | None:
    """Return the mount point of the RAM disk that ``path`` is on, or None for another disk."""
    return _ram_disk(str(path), path.stat().st_dev)


@functools.cache  # by device, too, because another mount may be at the same path later
def _ram_disk(path: str, device: int) -> str | None:
    mount = mount_of(path)
    return mount.point if mount is not None and mount.type in MEMORY_TYPES else None


def _recent_headroom(device: int, free: int) -> Volume | None:
    """Return `memory_headroom`, read within the last second, less the bytes written since then."""
    now = clock.monotonic()
    then, memory, free_then = _last_read.get(device, (-_BELIEVED, None, free))
    written = free_then - free
    if now - then >= _BELIEVED or (memory and written > memory.free * _WRITTEN):
        memory, written = memory_headroom(), 0
        _last_read[device] = now, memory, free
    return memory and Volume(memory.size, memory.free - written)


def memory_headroom() -> Volume | None:
    """Return the volume of the cgroup with the least free memory, or None if none has a limit."""
    headrooms, levels = list[Volume](), tuple[tuple[Path, bool], ...]()
    with ignoring(OSError, ValueError):  # no cgroups
        levels = _levels()
    for level, v1 in levels:
        with ignoring(OSError, ValueError):  # unknown files, or a group without the controller
            limit = _read(level, "memory.limit_in_bytes" if v1 else "memory.max")
            if limit == "max" or int(limit) >= _UNLIMITED:
                continue
            used = int(_read(level, "memory.usage_in_bytes" if v1 else "memory.current"))
            rows = dict(row.split() for row in _read(level, "memory.stat").splitlines())
            names = (f"{'total_' if v1 else ''}{name}_file" for name in ("inactive", "active"))
            cache = sum(int(rows.get(name, 0)) for name in names)
            headrooms.append(Volume(int(limit), max(0, int(limit) - max(0, used - cache))))
    return min(headrooms, key=lambda volume: volume.free, default=None)


def _read(level: Path, name: str) -> str:
    return (level / name).read_text("ascii").strip()


@functools.cache  # because a process stays in its cgroup
def _levels() -> tuple[tuple[Path, bool], ...]:
    """Return the directories of this process's cgroup and its parents, and whether each is v1."""
    paths: dict[str, str] = {}
    for line in _MEMBERSHIP.read_text("utf-8", "surrogateescape").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    v1 = "memory" in paths  # a controller is either in a v1 hierarchy or in the v2 hierarchy
    path = paths.get("memory" if v1 else "", "/")
    for mount in read_mounts():
        if mount.type == ("cgroup" if v1 else "cgroup2") and (not v1 or "memory" in mount.options):
            # A container may see its path on the host, but only its own part of the tree. The top
            # of that part is then its cgroup.
            relative = os.path.relpath(path, mount.root)
            is_outside = ".." in f"{path}/{relative}".split("/")  # outside this cgroup namespace
            top = Path(mount.point)
            inside = top if is_outside else top / relative
            return tuple((x, v1) for x in (inside, *inside.parents) if x.is_relative_to(top))
    return ()
