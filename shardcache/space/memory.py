"""What a filesystem has left, and for a RAM disk what the cgroups of this process leave it.

What is written to a tmpfs is memory of the cgroup that its writer is in. At the cgroup's limit
nobody is told ENOSPC: the kernel kills, and in a container all of it goes. The limits of every
level up to the root count, each with what is used at that level. The page cache of files on
disks counts as free, for the kernel takes that back first; what is in a tmpfs does not.

Sources: the kernel's Documentation/admin-guide/cgroup-v2.rst (memory.max, memory.current,
memory.stat) and cgroup-v1/memory.rst (memory.limit_in_bytes, memory.usage_in_bytes, and the
``total_`` rows of memory.stat, which include the levels below); cpu.max, and cpu.cfs_quota_us of
scheduler/sched-bwc.rst; cgroups(7) for ``/proc/self/cgroup``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from shardcache.config import Config
from shardcache.locks.mounts import MEMORY_TYPES, mount_of, read_mounts

__all__ = ["Headroom", "Volume", "cpu_quota", "headroom", "is_memory", "limited_levels"]
__all__ += ["memory_headroom"]

logger = logging.getLogger(__name__)

_MEMBERSHIP = Path("/proc/self/cgroup")
#: v1 states "no limit" as the largest multiple of a page in a signed 64-bit number.
_UNLIMITED = 1 << 60
_FILE_CACHE = ("inactive_file", "active_file")
#: Seconds for which it holds which levels have a limit: containers are given theirs before they
#: begin, and to look at all levels costs more than a small shard.
_LIMITED = 5.0
_limited: tuple[float, list[tuple[Path, _Version]]] | None = None
#: What a pod may write locally includes its logs and all else that its containers write.
_EPHEMERAL_SHARE = 0.9
#: (path, device) -> whether it is a RAM disk. Other mounts under one path are other devices.
_memory: dict[tuple[str, int], bool] = {}


@dataclass(frozen=True, slots=True)
class Volume:
    """A filesystem, as it is now.

    Attributes:
        size: bytes; of a RAM disk no more than the cgroup of this process may have.
        free: bytes that this user may still write; of a RAM disk no more than what that
            cgroup leaves.
        inodes: how many there are; 0 where the filesystem makes them as it needs them.
        free_inodes: how many this user may still make.
    """

    size: int
    free: int
    inodes: int
    free_inodes: int

    @classmethod
    def of(cls, path: Path) -> Volume:
        """The filesystem under ``path``.

        Raises:
            OSError: it does not answer.
        """
        found = os.statvfs(path)
        size, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
        if is_memory(path) and (memory := memory_headroom()) is not None:
            if size == 0:  # ramfs, which states nothing
                size, free = memory.limit, memory.free
            size, free = min(size, memory.limit), min(free, memory.free)
        return cls(size, free, found.f_files, found.f_favail)

    def budget(self, config: Config) -> int | None:
        """Most bytes that a cache on it may hold; None where only free space limits it."""
        limits = []
        if config.max_size is not None:
            limits.append(config.max_size.of(self.size))
        if config.ephemeral_limit is not None:
            limits.append(int(config.ephemeral_limit * _EPHEMERAL_SHARE))
        return min(limits, default=None)

    def lacks_inodes(self, wanted: int) -> int:
        """How many of ``wanted`` inodes there are too few."""
        return max(0, wanted - self.free_inodes) if self.inodes else 0


def is_memory(path: Path) -> bool:
    """Whether what is written there is memory.

    Raises:
        OSError: it cannot be looked at.
    """
    # Asked with every admission, and seldom new.
    key = str(path), path.stat().st_dev
    found = _memory.get(key)
    if found is None:
        mount = mount_of(path)
        found = _memory[key] = mount is not None and mount.type in MEMORY_TYPES
    return found


@dataclass(frozen=True, slots=True)
class Headroom:
    """The tightest limit.

    Attributes:
        limit: bytes that the cgroup may have.
        free: bytes of those that may still be taken.
    """

    limit: int
    free: int


@dataclass(frozen=True, slots=True)
class _Version:
    """Names of the files, and what the rows of ``memory.stat`` begin with."""

    limit: str
    used: str
    prefix: str


_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = _Version("memory.max", "memory.current", "")


def memory_headroom() -> Headroom | None:
    """What the cgroups leave; None without a limit, or where the kernel does not tell.

    Cheap to ask often: which levels have a limit is looked up every few seconds, what they
    leave each time.
    """
    global _limited
    known = _limited
    if known is None or not 0 <= time.monotonic() - known[0] < _LIMITED:
        known = _limited = time.monotonic(), limited_levels()
    return headroom(known[1])


def limited_levels(
    membership: str | None = None, mountinfo: str | None = None
) -> list[tuple[Path, _Version]]:
    """The levels that have a limit.

    Args:
        membership: text to read instead of ``/proc/self/cgroup``.
        mountinfo: likewise of ``/proc/self/mountinfo``.
    """
    try:
        if membership is None:
            membership = _MEMBERSHIP.read_text("utf-8", "surrogateescape")
        found = _levels("memory", membership, mountinfo)
        levels = [(directory, _V1 if old else _V2) for directory, old in found]
        return [level for level in levels if _headroom(*level) is not None]
    except (OSError, ValueError) as exn:
        logger.debug("the memory that cgroups leave is not known: %s", exn)
        return []


def headroom(levels: Iterable[tuple[Path, _Version]]) -> Headroom | None:
    """What the tightest of some levels leaves; None where none has a limit."""
    try:
        found = [_headroom(*level) for level in levels]
    except (OSError, ValueError) as exn:
        logger.debug("the memory that cgroups leave is not known: %s", exn)
        return None
    return min((one for one in found if one is not None), key=lambda one: one.free, default=None)


def cpu_quota(membership: str | None = None, mountinfo: str | None = None) -> float | None:
    """How many CPUs' time the tightest level allows; None without a limit, or where nobody tells.

    Args:
        membership: text to read instead of ``/proc/self/cgroup``.
        mountinfo: likewise of ``/proc/self/mountinfo``.
    """
    try:
        if membership is None:
            membership = _MEMBERSHIP.read_text("utf-8", "surrogateescape")
        found = [_cpus(*level) for level in _levels("cpu", membership, mountinfo)]
    except (OSError, ValueError) as exn:
        logger.debug("the CPUs that cgroups leave are not known: %s", exn)
        return None
    return min((cpus for cpus in found if cpus is not None), default=None)


def _cpus(directory: Path, old: bool) -> float | None:
    """What one level allows; None where it has no limit."""
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if old else ("cpu.max",)
    try:
        words = " ".join((directory / name).read_text("ascii") for name in names).split()
    except FileNotFoundError:  # the root of v2 has none
        return None
    quota, period = words
    if quota in ("max", "-1") or int(period) <= 0:
        return None
    return int(quota) / int(period)


def _levels(controller: str, membership: str, mountinfo: str | None) -> Iterator[tuple[Path, bool]]:
    """The directories of our cgroup and of all above it, each with whether it is of v1."""
    paths = {}
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            paths[name] = path
    # What v1 controls, the v2 hierarchy beside it does not.
    old = controller in paths
    path = paths[controller] if old else paths.get("", "/")
    for mount in read_mounts(mountinfo):
        ours = mount.type == "cgroup" and controller in mount.options
        if not (ours if old else mount.type == "cgroup2"):
            continue
        top = Path(mount.point)
        inside = PurePosixPath(path)
        # A container may see the host's path, and only its own part mounted.
        if mount.root != "/" and inside.is_relative_to(mount.root):
            inside = PurePosixPath("/", inside.relative_to(mount.root))
        if ".." in inside.parts:  # outside of our cgroup namespace
            inside = PurePosixPath("/")
        directory = top / inside.relative_to("/")
        while directory != top:
            yield directory, old
            directory = directory.parent
        yield top, old
        return


def _headroom(directory: Path, version: _Version) -> Headroom | None:
    """What one level leaves; None where it has no limit."""
    try:
        stated = (directory / version.limit).read_text("ascii").strip()
        if stated == "max" or int(stated) >= _UNLIMITED:
            return None
        used = int((directory / version.used).read_text("ascii"))
        rows = (directory / "memory.stat").read_text("ascii").splitlines()
    except FileNotFoundError:  # the root of v2 has none of these
        return None
    limit = int(stated)
    named = dict(row.split(" ", 1) for row in rows)
    cache = sum(int(named.get(f"{version.prefix}{name}", 0)) for name in _FILE_CACHE)
    return Headroom(limit, max(0, limit - max(0, used - cache)))
