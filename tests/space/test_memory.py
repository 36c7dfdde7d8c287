"""What a filesystem has left, and of a RAM disk what the cgroups of the process leave."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardcache.config import Config
from shardcache.locks.mounts import Mount, parse_mountinfo
from shardcache.space import memory as module
from shardcache.space.memory import (
    Headroom,
    Volume,
    cpu_quota,
    headroom,
    limited_levels,
    memory_headroom,
)
from tests.support.disktools import disk, limited_group, needs_mounts

GIB = 1 << 30
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
V2 = ("memory.max", "memory.current", "")


def level(
    directory: Path, version: tuple[str, str, str], limit: object, used: int, cache: int = 0
) -> None:
    """The files of one level, as the kernel writes them."""
    limit_name, used_name, prefix = version
    directory.mkdir(parents=True, exist_ok=True)
    (directory / limit_name).write_text(f"{limit}\n")
    (directory / used_name).write_text(f"{used}\n")
    rows = [f"anon {used - cache}", "shmem 4096"]
    rows += [f"{prefix}inactive_file {cache // 2}", f"{prefix}active_file {cache - cache // 2}"]
    if prefix:  # v1 states the level alone, too
        rows += ["inactive_file 0", "active_file 0"]
    (directory / "memory.stat").write_text("\n".join(rows) + "\n")


def mountinfo(point: Path, kind: str, options: str = "rw", root: str = "/") -> str:
    lines = [
        "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw",
        f"30 22 0:26 {root} {point} rw,nosuid shared:9 - {kind} cgroup {options}",
    ]
    return "\n".join(lines) + "\n"


def told(membership: str, mounts: str) -> Headroom | None:
    return headroom(limited_levels(membership, mounts))


def test_v2_the_limit_of_the_own_cgroup(tmp_path: Path) -> None:
    level(tmp_path / "job/task", V2, 8 * GIB, 3 * GIB)
    level(tmp_path / "job", V2, "max", 5 * GIB)
    found = told("0::/job/task\n", mountinfo(tmp_path, "cgroup2"))
    assert found == Headroom(8 * GIB, 5 * GIB)


def test_v2_the_tightest_level_counts(tmp_path: Path) -> None:
    level(tmp_path / "job/task", V2, 8 * GIB, 3 * GIB)
    level(tmp_path / "job", V2, 16 * GIB, 12 * GIB)
    found = told("0::/job/task\n", mountinfo(tmp_path, "cgroup2"))
    assert found == Headroom(16 * GIB, 4 * GIB)


def test_the_page_cache_counts_as_free(tmp_path: Path) -> None:
    for version, name, options in ((V2, "cgroup2", "rw"), (V1, "cgroup", "rw,memory")):
        point = tmp_path / name
        level(point / "job", version, 8 * GIB, 7 * GIB, cache=4 * GIB)
        member = "0::/job\n" if version is V2 else "5:memory:/job\n0::/\n"
        found = told(member, mountinfo(point, name, options))
        assert found == Headroom(8 * GIB, 5 * GIB), name


def test_without_a_limit_there_is_none(tmp_path: Path) -> None:
    level(tmp_path / "v2/job", V2, "max", GIB)
    (tmp_path / "v2/memory.stat").write_text("anon 0\n")  # the root has no limit to state
    assert told("0::/job\n", mountinfo(tmp_path / "v2", "cgroup2")) is None
    level(tmp_path / "v1/job", V1, 9223372036854771712, GIB)
    level(tmp_path / "v1", V1, 9223372036854771712, GIB)
    text = mountinfo(tmp_path / "v1", "cgroup", "rw,memory")
    assert told("4:cpu,memory:/job\n", text) is None


def test_beside_v1_the_other_hierarchy_has_no_memory(tmp_path: Path) -> None:
    level(tmp_path / "v1/job", V1, 2 * GIB, GIB)
    level(tmp_path / "v2/job", V2, 9 * GIB, GIB)
    member = "5:memory:/job\n1:name=systemd:/x\n0::/job\n"
    both = mountinfo(tmp_path / "v2", "cgroup2") + mountinfo(tmp_path / "v1", "cgroup", "rw,memory")
    assert told(member, both) == Headroom(2 * GIB, GIB)


def test_a_container_that_sees_the_hosts_path(tmp_path: Path) -> None:
    """Docker with v1: the path is the host's, and only the container's own part is mounted."""
    level(tmp_path, V1, 4 * GIB, GIB)
    text = mountinfo(tmp_path, "cgroup", "rw,memory", root="/docker/abc")
    assert told("5:memory:/docker/abc\n", text) == Headroom(4 * GIB, 3 * GIB)
    level(tmp_path / "step", V1, 2 * GIB, GIB)
    assert told("5:memory:/docker/abc/step\n", text) == Headroom(2 * GIB, GIB)


def test_a_container_with_a_namespace_of_its_own(tmp_path: Path) -> None:
    """Its cgroup is the top of what it sees; what is above is `..` to it."""
    level(tmp_path, V2, 4 * GIB, GIB)
    text = mountinfo(tmp_path, "cgroup2")
    assert told("0::/\n", text) == Headroom(4 * GIB, 3 * GIB)
    assert told("0::/../sibling\n", text) == Headroom(4 * GIB, 3 * GIB)


@pytest.mark.parametrize("text", ["", "0::/\n", "nonsense\n", "5:memory:/gone\n", "a:b:c:d\n"])
def test_where_the_kernel_does_not_tell_there_is_no_limit(tmp_path: Path, text: str) -> None:
    assert told(text, mountinfo(tmp_path, "cgroup2")) is None
    assert told(text, "") is None


def test_what_is_left_is_asked_each_time_and_where_a_limit_is_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    level(tmp_path, V2, "max", 0)
    level(tmp_path / "job", V2, 2 * GIB, GIB)
    membership = tmp_path / "membership"
    membership.write_text("0::/job\n")
    mounts = parse_mountinfo(mountinfo(tmp_path, "cgroup2"))
    asked: list[None] = []
    monkeypatch.setattr(module, "_MEMBERSHIP", membership)
    monkeypatch.setattr(module, "read_mounts", lambda text: asked.append(text) or mounts)
    monkeypatch.setattr(module, "_limited", None)
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    assert memory_headroom() == Headroom(2 * GIB, GIB)
    level(tmp_path / "job", V2, GIB, GIB // 4)
    level(tmp_path, V2, GIB // 2, GIB // 4)
    assert memory_headroom() == Headroom(GIB, GIB - GIB // 4)
    assert len(asked) == 1
    now[0] += 5
    assert memory_headroom() == Headroom(GIB // 2, GIB // 4)
    assert len(asked) == 2


# -- CPUs --------------------------------------------------------------------------


def quota(directory: Path, text: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "cpu.max").write_text(f"{text}\n")


def test_v2_the_tightest_quota_of_cpus_counts(tmp_path: Path) -> None:
    quota(tmp_path / "job/task", "max 100000")
    table = mountinfo(tmp_path, "cgroup2")
    assert cpu_quota("0::/job/task\n", table) is None
    quota(tmp_path / "job", "250000 100000")
    assert cpu_quota("0::/job/task\n", table) == 2.5
    quota(tmp_path / "job/task", "50000 100000")
    assert cpu_quota("0::/job/task\n", table) == 0.5


def test_v1_a_quota_of_cpus_counts(tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    for directory, text in ((job, "400000"), (tmp_path, "-1")):
        (directory / "cpu.cfs_quota_us").write_text(f"{text}\n")
        (directory / "cpu.cfs_period_us").write_text("100000\n")
    table = mountinfo(tmp_path, "cgroup", "rw,cpu,cpuacct")
    assert cpu_quota("5:cpu,cpuacct:/job\n4:memory:/\n", table) == 4.0
    assert cpu_quota("5:cpu,cpuacct:/\n4:memory:/\n", table) is None


# -- the kernel's own -------------------------------------------------------------

_MEMBER = """
import os, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
from shardcache.space.memory import memory_headroom
found = memory_headroom()
block = open(sys.argv[2] + "/block", "wb")
block.write(bytes(32 << 20))
block.flush()
later = memory_headroom()
print(found.limit, found.free, later.free)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    yield from limited_group()


@needs_mounts
def test_a_process_in_a_cgroup_sees_what_its_ram_disk_takes(group: Path, tmp_path: Path) -> None:
    with disk(tmp_path / "ram", "size=64m") as ram:  # or its memory would stay the cgroup's
        done = subprocess.run(
            [sys.executable, "-c", _MEMBER, group, ram],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        )
    limit, free, later = map(int, done.stdout.split())
    assert limit == 256 << 20 and 0 < free < limit
    assert 24 << 20 < free - later < 64 << 20


# -- volumes ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_size", "ephemeral", "budget"),
    [
        (None, None, None),
        ("100GB", None, 100 * 10**9),
        ("10%", None, 100 * 10**9),
        (None, "50GB", 45 * 10**9),
        ("100GB", "50GB", 45 * 10**9),
        ("40GB", "50GB", 40 * 10**9),
    ],
)
def test_a_cache_keeps_to_the_tighter_of_its_limits(
    tmp_path: Path, max_size: str | None, ephemeral: str | None, budget: int | None
) -> None:
    """What Kubernetes allows a pod is not all for the cache."""
    config = Config(tmp_path, max_size=max_size, ephemeral_limit=ephemeral)
    assert Volume(10**12, 10**11, 0, 0).budget(config) == budget


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
    monkeypatch.setattr(module, "_memory", {})
    monkeypatch.setattr(module, "mount_of", lambda path: Mount("/", kind, "x", frozenset()))
    monkeypatch.setattr(module, "memory_headroom", lambda: memory)
    found = SimpleNamespace(f_frsize=10, f_blocks=800, f_bavail=600, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    assert Volume.of(tmp_path) == Volume(size, free, 0, 0)
