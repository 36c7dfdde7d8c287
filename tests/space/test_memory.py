"""What a filesystem has left, and of a RAM disk what the cgroups of the process leave."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardcache.config import Config
from shardcache.locks import mounts
from shardcache.locks.mounts import Mount
from shardcache.space import memory as module
from shardcache.space.memory import (
    Headroom,
    Volume,
    cpu_quota,
    memory_headroom,
)

GIB = 1 << 30
NONE = 9223372036854771712  # as v1 states it


def write_v1(directory: Path, limit: object, used: int, cache: int = 0) -> None:
    """The files of one level of memory, as the kernel writes them."""
    rows = f"inactive_file 0\nactive_file 0\ntotal_inactive_file {cache // 4}\n"
    write(directory, "memory.limit_in_bytes", limit)
    write(directory, "memory.usage_in_bytes", used)
    write(directory, "memory.stat", f"{rows}total_active_file {cache - cache // 4}")


def write_v2(directory: Path, limit: object, used: int, cache: int = 0) -> None:
    write(directory, "memory.max", limit)
    write(directory, "memory.current", used)
    write(
        directory,
        "memory.stat",
        f"anon 5\ninactive_file {cache // 4}\nactive_file {cache * 3 // 4}",
    )


def write(directory: Path, name: str, value: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(f"{value}\n")


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """The kernel states such a cgroup, and v1 and v2 at such directories."""
    files = tmp_path / "proc-cgroup", tmp_path / "proc-mountinfo"
    monkeypatch.setattr(module, "_MEMBERSHIP", files[0])
    monkeypatch.setattr(mounts, "_MOUNTINFO", files[1])

    def tell(membership: str, root: str = "/") -> None:
        files[0].write_text(membership)
        lines = ["22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw"]
        v1, v2 = tmp_path / "v1", tmp_path / "v2"
        if v2.exists():
            lines.append(f"30 22 0:26 / {v2} rw,nosuid shared:9 - cgroup2 cgroup rw")
        if v1.exists():
            lines.append(f"31 22 0:27 {root} {v1} rw,nosuid - cgroup cgroup rw,cpu,cpuacct,memory")
        files[1].write_text("\n".join(lines) + "\n")
        module._levels.cache_clear()

    yield tell
    module._levels.cache_clear()


@pytest.mark.parametrize(
    ("levels", "membership", "free"),
    [
        ({"v2/job": ("max", 5), "v2/job/task": (8, 3)}, "0::/job/task", (8, 5)),
        # the tightest level counts
        ({"v2/job": (16, 12), "v2/job/task": (8, 3)}, "0::/job/task", (16, 4)),
        # the page cache is free
        ({"v2/job": (8, 7, 4)}, "0::/job", (8, 5)),
        ({"v1/job": (8, 7, 4)}, "5:memory:/job\n0::/", (8, 5)),
        # no limit
        ({"v2/job": ("max", 1)}, "0::/job", None),
        ({"v1": (NONE / GIB, 1), "v1/job": (NONE / GIB, 1)}, "4:cpu,memory:/job", None),
        # beside v1 the other hierarchy has no memory
        ({"v1/job": (2, 1), "v2/job": (9, 1)}, "5:memory:/job\n1:name=systemd:/x\n0::/job", (2, 1)),
        # Docker with v1: the path is the host's, and only the container's own part is mounted
        ({"v1": (4, 1)}, "5:memory:/docker/abc", (4, 3)),
        ({"v1": (4, 1), "v1/step": (2, 1)}, "5:memory:/docker/abc/step", (2, 1)),
        # a namespace of its own: what is above is `..` to it
        ({"v2": (4, 1)}, "0::/", (4, 3)),
        ({"v2": (4, 1)}, "0::/../sibling", (4, 3)),
        # the kernel does not tell
        *(({"v2": ("max", 1)}, text, None) for text in ("", "nonsense", "5:memory:/x", "a:b:c:d")),
        ({}, "0::/", None),
    ],
)
def test_what_the_cgroups_leave(tmp_path: Path, tell, levels, membership, free) -> None:
    for name, (limit, *used) in levels.items():
        stated = limit if limit == "max" else int(limit * GIB)
        writes = write_v1 if name.startswith("v1") else write_v2
        writes(tmp_path / name, stated, *(GIB * n for n in used))
    tell(membership + "\n", "/docker/abc" if "docker" in membership else "/")
    assert memory_headroom() == (free and Headroom(free[0] * GIB, free[1] * GIB))


@pytest.mark.parametrize(
    ("levels", "membership", "cpus"),
    [
        ({"v2/job/task": "max 100000"}, "0::/job/task", None),
        ({"v2/job/task": "max 100000", "v2/job": "250000 100000"}, "0::/job/task", 2.5),
        ({"v1/job": "400000", "v1": "-1"}, "5:cpu,cpuacct:/job\n4:memory:/", 4.0),
    ],
)
def test_the_tightest_quota_of_cpus_counts(tmp_path: Path, tell, levels, membership, cpus) -> None:
    for name, quota in levels.items():
        write(tmp_path / name, "cpu.max" if name.startswith("v2") else "cpu.cfs_quota_us", quota)
        write(tmp_path / name, "cpu.cfs_period_us", 100_000)
    tell(membership + "\n")
    assert cpu_quota() == cpus


# -- volumes ---------------------------------------------------------------------


def test_a_cache_keeps_to_the_tighter_of_its_limits(tmp_path: Path) -> None:
    """What Kubernetes allows a pod is not all for the cache."""
    cases = ((None, None, None), ("10%", None, 100), ("100GB", "50GB", 45), ("40GB", "50GB", 40))
    for max_size, ephemeral, budget in cases:
        config = Config(tmp_path, max_size=max_size, ephemeral_limit=ephemeral)
        assert Volume(10**12, 10**11).budget(config) == (budget and budget * 10**9)


@pytest.mark.parametrize(
    ("kind", "memory", "size", "free"),
    [
        ("ext4", Headroom(100, 10), 8000, 6000),
        ("tmpfs", None, 8000, 6000),
        ("tmpfs", Headroom(10_000, 9000), 8000, 6000),
        ("tmpfs", Headroom(5000, 1000), 5000, 1000),
        ("tmpfs", Headroom(10_000, 1000), 8000, 1000),
    ],
)
def test_a_ram_disk_has_no_more_than_its_cgroup_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind, memory, size, free
) -> None:
    module._is_memory.cache_clear()
    module._asked.clear()
    monkeypatch.setattr(module, "mount_of", lambda path: Mount("/", kind, "x", frozenset()))
    monkeypatch.setattr(module, "memory_headroom", lambda: memory)
    found = SimpleNamespace(f_frsize=10, f_blocks=800, f_bavail=600)
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    assert Volume.of(tmp_path) == Volume(size, free)
