"""The room that a filesystem and the cgroups of this process leave, and the room a shard takes.

What is written to a tmpfs is memory of its writer's cgroup. At the cgroup's limit nobody is told
ENOSPC: the kernel kills, and in a container all of it goes. The limits of every level up to the
root count. The page cache of files on disks counts as free, for the kernel takes that back first.

Sources: the kernel's admin-guide/cgroup-v2.rst (memory.max, memory.current, memory.stat, cpu.max)
and cgroup-v1/memory.rst (the ``total_`` rows include the levels below), scheduler/sched-bwc.rst.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardcache import clock
from shardcache.config import Config
from shardcache.locks.mounts import MEMORY_TYPES, mount_of, read_mounts
from shardcache.store.partial import record_size

__all__ = ["Volume", "allocation", "cpu_quota", "is_memory", "memory_headroom"]

_MEMBERSHIP = Path("/proc/self/cgroup")
#: v1 states "no limit" as the largest multiple of a page in a signed 64-bit number.
_UNLIMITED = 1 << 60
#: What a pod may write locally includes its logs and all else that its containers write.
_EPHEMERAL_SHARE = 0.9
#: Seconds for which an answer of the cgroups is used, and what part of what they left may be
#: written meanwhile. With small shards, asking for each took 13 % of the time of a prewarm; without
#: the second bound, a job that grew as it began to write was killed within the first second.
_ASKED_EVERY = 1.0
_WRITTEN = 1 / 16
#: Bytes of the largest block of a local filesystem, and of the usual one. NFS and Ceph state how
#: much they transfer at once instead, 1 MiB and more.
_LARGEST_BLOCK, _USUAL_BLOCK = 64 << 10, 4096
#: device -> when the cgroups were asked, what they left, and what the disk had free then.
_asked: dict[int, tuple[float, Volume | None, int]] = {}


@dataclass(frozen=True, slots=True)
class Volume:
    """A filesystem, or the memory of a cgroup, as it is now."""

    size: int  #: bytes; of a RAM disk no more than the cgroup of this process may have
    free: int  #: bytes that may still be written; likewise

    @classmethod
    def of(cls, path: Path) -> Volume:
        """The filesystem under ``path``."""
        found = os.statvfs(path)
        size, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
        if is_memory(path) and (memory := _headroom_beside(path, free)) is not None:
            # A ramfs states nothing: its size is 0.
            free = min(free, memory.free) if size else memory.free
            size = min(size or memory.size, memory.size)
        return cls(size, free)

    def budget(self, config: Config) -> int | None:
        """Most bytes that a cache on it may hold; None where only free space limits it."""
        limits = []
        if config.max_size is not None:
            limits.append(config.max_size.of(self.size))
        if config.ephemeral_limit is not None:
            limits.append(int(config.ephemeral_limit * _EPHEMERAL_SHARE))
        return min(limits, default=None)


def allocation(root: Path) -> Callable[[int], int]:
    """Return a function that computes the bytes on disk of a shard from its size.

    It counts whole blocks for the data and for the sidecar or journal, and the two directories of
    an entry. Only this call queries the filesystem.

    Args:
        root: a directory of the cache. It need not exist yet.
    """
    path = next(path for path in (root, *root.parents) if path.exists())
    block = os.statvfs(path).f_frsize
    block = block if 0 < block <= _LARGEST_BLOCK else _USUAL_BLOCK
    directory = min(block, path.stat().st_blocks * 512)  # ext4: a block; tmpfs, xfs, btrfs: none

    def allocated(size: int) -> int:
        blocks = -(-size // block) + -(-record_size(size) // block)
        return blocks * block + 2 * directory

    return allocated


def is_memory(path: Path) -> bool:
    """Whether the filesystem of ``path`` is a RAM disk."""
    return _is_memory(str(path), path.stat().st_dev)


@functools.cache  # other mounts under one path are other devices
def _is_memory(path: str, device: int) -> bool:
    mount = mount_of(path)
    return mount is not None and mount.type in MEMORY_TYPES


def _headroom_beside(disk: Path, free: int) -> Volume | None:
    """What the cgroups leave beside a disk that has so many bytes free; asked now and then.

    What was written to the disk since then is subtracted; what the job takes itself is not.
    """
    now, device = clock.monotonic(), disk.stat().st_dev
    then, memory, free_then = _asked.get(device, (-_ASKED_EVERY, None, free))
    written = free_then - free
    if now - then >= _ASKED_EVERY or (memory and written > memory.free * _WRITTEN):
        memory, written = memory_headroom(), 0
        _asked[device] = now, memory, free
    return memory and Volume(memory.size, memory.free - written)


def memory_headroom() -> Volume | None:
    """What the tightest level leaves; None without a limit, or where the kernel does not tell."""
    found = []
    with contextlib.suppress(OSError, ValueError):  # there are none, or it makes no sense
        for level, v1 in _levels("memory"):
            stated = _read(level, "memory.limit_in_bytes" if v1 else "memory.max")
            if stated == "max" or int(stated) >= _UNLIMITED:
                continue
            used = int(_read(level, "memory.usage_in_bytes" if v1 else "memory.current"))
            rows = dict(row.split() for row in _read(level, "memory.stat").splitlines())
            names = (f"{'total_' if v1 else ''}{name}_file" for name in ("inactive", "active"))
            cache = sum(int(rows.get(name, 0)) for name in names)
            found.append(Volume(int(stated), max(0, int(stated) - max(0, used - cache))))
    return min(found, key=lambda volume: volume.free, default=None)


def cpu_quota() -> float | None:
    """How many CPUs' time the tightest level allows; otherwise as `memory_headroom`."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for level, v1 in _levels("cpu"):
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if v1 else ("cpu.max",)
            quota, period = " ".join(_read(level, name) for name in names).split()
            if quota not in ("max", "-1"):
                found.append(int(quota) / int(period))
    return min(found, default=None)


def _read(level: Path, name: str) -> str:
    return (level / name).read_text("ascii").strip()


@functools.cache  # where a process is does not change; what a level leaves is asked each time
def _levels(controller: str) -> tuple[tuple[Path, bool], ...]:
    """The directories of our cgroup and of all above it, each with whether it is of v1."""
    paths: dict[str, str] = {}
    for line in _MEMBERSHIP.read_text("utf-8", "surrogateescape").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    v1 = controller in paths  # then the v2 hierarchy beside it does not control it
    for mount in read_mounts():
        ours = mount.type == "cgroup" and controller in mount.options
        if ours if v1 else mount.type == "cgroup2":
            top, path = Path(mount.point), paths[controller] if v1 else paths.get("", "/")
            # A container may see the host's path, and only its own part mounted.
            relative = os.path.relpath(path, mount.root)
            is_outside = ".." in f"{path}/{relative}".split("/")  # of our cgroup namespace
            inside = top if is_outside else top / relative
            above = (level for level in inside.parents if level.is_relative_to(top))
            return tuple((level, v1) for level in (inside, *above))
    return ()
