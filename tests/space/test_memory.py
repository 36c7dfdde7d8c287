"""Free space of a filesystem, and memory that the cgroups of the process allow."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardcache.config import Config
from shardcache.locks import mounts
from shardcache.locks.mounts import Mount
from shardcache.space import memory as module
from shardcache.space.memory import Volume, memory_headroom

GIB = 1 << 30
NONE = 9223372036854771712 / GIB  # the value of v1 without a limit


@pytest.fixture
def set_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that sets the cgroup and its files below ``v1`` or ``v2``."""
    files = tmp_path / "proc-cgroup", tmp_path / "proc-mountinfo"
    monkeypatch.setattr(module, "_MEMBERSHIP", files[0])
    monkeypatch.setattr(mounts, "_MOUNTINFO", files[1])
    monkeypatch.setattr(module, "_levels", module._levels.__wrapped__)

    def set_cgroup(membership: str, levels: dict[str, dict[str, object]]) -> None:
        files[0].write_text(f"{membership}\n")
        for level, values in levels.items():
            (tmp_path / level).mkdir(parents=True, exist_ok=True)
            for name, value in values.items():
                (tmp_path / level / name).write_text(f"{value}\n")
        lines = ["22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw"]
        root = "/docker/abc" if "docker" in membership else "/"
        if (v2 := tmp_path / "v2").exists():
            lines.append(f"30 22 0:26 / {v2} rw,nosuid shared:9 - cgroup2 cgroup rw")
        if (v1 := tmp_path / "v1").exists():
            lines.append(f"31 22 0:27 {root} {v1} rw,nosuid - cgroup cgroup rw,cpu,cpuacct,memory")
        files[1].write_text("\n".join(lines) + "\n")

    return set_cgroup


def memory(v1: bool, limit: float | str, used: int, cache: int = 0) -> dict[str, object]:
    """Return the files of one level; the arguments are in GiB."""
    stated = limit if isinstance(limit, str) else int(limit * GIB)
    rows = {"inactive_file": GIB * cache // 4, "active_file": GIB * cache * 3 // 4}
    if v1:
        rows = dict.fromkeys(rows, 0) | {f"total_{name}": n for name, n in rows.items()}
    return {
        "memory.limit_in_bytes" if v1 else "memory.max": stated,
        "memory.usage_in_bytes" if v1 else "memory.current": GIB * used,
        "memory.stat": "\n".join(f"{name} {n}" for name, n in rows.items()),
    }


@pytest.mark.parametrize(
    ("membership", "levels", "free"),
    [
        ("0::/job/task", {"v2/job": ("max", 5), "v2/job/task": (8, 3)}, (8, 5)),
        ("0::/job/task", {"v2/job": (16, 12), "v2/job/task": (8, 3)}, (16, 4)),  # the lowest limit
        ("0::/job/task", {"v2/job": (8, 3)}, (8, 5)),  # a group without the controller
        ("0::/job", {"v2/job": (8, 7, 4)}, (8, 5)),  # the page cache is free
        ("5:memory:/job\n0::/", {"v1/job": (8, 7, 4)}, (8, 5)),
        ("0::/job", {"v2/job": ("max", 1)}, None),  # no limit
        ("4:cpu,memory:/job", {"v1": (NONE, 1), "v1/job": (NONE, 1)}, None),
        # with v1, the other hierarchy has no memory controller
        ("5:memory:/job\n1:name=systemd:/x\n0::/job", {"v1/job": (2, 1), "v2/job": (9, 1)}, (2, 1)),
        # Docker with v1: a path of the host, but only the part of the container is mounted
        ("5:memory:/docker/abc", {"v1": (4, 1)}, (4, 3)),
        ("5:memory:/docker/abc/step", {"v1": (4, 1), "v1/step": (2, 1)}, (2, 1)),
        ("0::/../sibling", {"v2": (4, 1)}, (4, 3)),  # a cgroup namespace
        # unknown
        *((text, {"v2": ("max", 1)}, None) for text in ("", "nonsense", "5:memory:/x", "a:b:c:d")),
        ("0::/", {}, None),
    ],
)
def test_the_headroom_is_that_of_the_tightest_cgroup(set_cgroup, membership, levels, free) -> None:
    set_cgroup(membership, {name: memory(name[:2] == "v1", *each) for name, each in levels.items()})
    assert memory_headroom() == (free and Volume(free[0] * GIB, free[1] * GIB))


def test_the_budget_is_the_lower_limit(tmp_path: Path) -> None:
    """A cache uses 90 % of the ephemeral storage of a pod."""
    cases = ((None, None, None), ("10%", None, 100), ("100GB", "50GB", 45), ("40GB", "50GB", 40))
    for max_size, ephemeral, budget in cases:
        config = Config(tmp_path, max_size=max_size, ephemeral_limit=ephemeral)
        assert Volume(10**12, 10**11).budget(config) == (budget and budget * 10**9)


@pytest.mark.parametrize(
    ("kind", "memory", "found"),
    [
        ("ext4", Volume(100, 10), Volume(8000, 6000)),
        ("tmpfs", None, Volume(8000, 6000)),
        ("tmpfs", Volume(10_000, 9000), Volume(8000, 6000)),
        ("tmpfs", Volume(5000, 1000), Volume(5000, 1000)),
    ],
)
def test_a_ram_disk_has_no_more_room_than_its_cgroup(tmp_path, monkeypatch, kind, memory, found):
    module._ram_disk.cache_clear()
    module._last_read.clear()
    monkeypatch.setattr(module, "mount_of", lambda path: Mount("/", kind))
    monkeypatch.setattr(module, "memory_headroom", lambda: memory)
    stated = SimpleNamespace(f_frsize=10, f_blocks=800, f_bavail=600)
    monkeypatch.setattr(os, "statvfs", lambda path: stated)
    assert Volume.of(tmp_path) == found
    if kind == "tmpfs" and memory:  # read once a second; later writes are subtracted
        stated.f_bavail -= 5
        assert Volume.of(tmp_path).free == min(5950, memory.free - 50)
