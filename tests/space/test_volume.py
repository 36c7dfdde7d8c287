"""Evicted bytes that have not come back: how many are still hoped for, and how long."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardcache.config import Config
from shardcache.files import PRIVATE
from shardcache.locks.mounts import Mount
from shardcache.space import volume as module
from shardcache.space.memory import Headroom
from shardcache.space.volume import Pending, Volume
from tests.support.fakes import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def pending(tmp_path: Path, clock: FakeClock) -> Pending:
    return Pending(tmp_path / "pending.lock", PRIVATE, clock)


def test_what_came_back_is_not_pending(pending: Pending) -> None:
    pending.note(100, before=1000, after=1100)
    assert pending.left(1100) == 0
    pending.note(100, before=1000, after=1060)  # others write a little meanwhile
    assert pending.left(1060) == 0
    pending.note(0, before=1000, after=1000)
    assert pending.left(1000) == 0


def test_what_did_not_come_back_is_pending_until_it_does(pending: Pending) -> None:
    pending.note(100, before=1000, after=1000)
    assert pending.left(1000) == 100
    assert pending.left(1030) == 70
    assert pending.left(1030) == 70
    assert pending.left(1100) == 0


def test_what_others_write_meanwhile_is_no_return(pending: Pending) -> None:
    pending.note(100, before=1000, after=1000)
    assert pending.left(400) == 100  # a newcomer was written
    assert pending.left(500) == 0  # and now it came back
    pending.note(100, before=500, after=500)
    pending.note(50, before=500, after=500)
    assert pending.left(500) == 150


def test_nobody_hopes_for_ever(pending: Pending, clock: FakeClock) -> None:
    pending.note(100, before=1000, after=1000)
    clock.sleep(59)
    assert pending.left(1000) == 100
    clock.sleep(2)
    assert pending.left(1000) == 0
    pending.note(30, before=1000, after=1000)
    assert pending.left(1000) == 30


def test_processes_tell_each_other(pending: Pending, tmp_path: Path, clock: FakeClock) -> None:
    other = Pending(tmp_path / "pending.lock", PRIVATE, clock)
    pending.note(100, before=1000, after=1000)
    assert other.left(1040) == 60
    assert pending.left(1040) == 60
    other.note(10, before=1040, after=1040)
    assert pending.left(1040) == 70


def test_a_process_knows_its_own_where_nothing_can_be_noted(
    tmp_path: Path, clock: FakeClock
) -> None:
    pending = Pending(tmp_path / "missing" / "pending.lock", PRIVATE, clock)
    pending.note(100, before=1000, after=1000)
    assert pending.left(1000) == 100
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"{}",
        b"[1, 2]",
        b'["x", 1e999, 0, 0]',
        b"[" * 3000,
        b'["boot", "a", "b", "c"]',
        b"\xff",
    ],
)
def test_a_damaged_note_is_none(tmp_path: Path, clock: FakeClock, note: bytes) -> None:
    path = tmp_path / "pending.lock"
    path.write_bytes(note)
    pending = Pending(path, PRIVATE, clock)
    assert pending.left(1000) == 0
    pending.note(100, before=1000, after=1000)
    assert pending.left(1000) == 100


def test_a_note_of_another_boot_or_of_the_future_says_nothing(
    pending: Pending, tmp_path: Path, clock: FakeClock
) -> None:
    pending.note(100, before=1000, after=1000)
    path = tmp_path / "pending.lock"
    boot, *rest = json.loads(path.read_bytes())
    fresh = Pending(path, PRIVATE, clock)
    path.write_text(json.dumps(["another", *rest]))
    assert fresh.left(1000) == 0
    path.write_text(json.dumps([boot, 100, 1000, clock.monotonic() + 5]))
    assert fresh.left(1000) == 0
    path.write_text(json.dumps([boot, *rest]))
    assert fresh.left(1000) == 100


def test_the_note_is_written_through_no_link(pending: Pending, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "pending.lock").symlink_to(tmp_path / "victim")
    pending.note(100, before=1000, after=1000)
    assert (tmp_path / "victim").read_text() == "precious"
    assert pending.left(1000) == 100


def test_a_volume_is_what_the_kernel_says(tmp_path: Path) -> None:
    found = Volume.of(tmp_path)
    real = os.statvfs(tmp_path)
    assert found.size == real.f_frsize * real.f_blocks
    assert found.inodes == real.f_files
    assert 0 <= found.free <= found.size
    with pytest.raises(FileNotFoundError):
        Volume.of(tmp_path / "none")


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


def test_a_ramfs_states_nothing_and_has_what_its_cgroup_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_memory", {})
    monkeypatch.setattr(module, "mount_of", lambda path: Mount("/", "ramfs", "x", frozenset()))
    monkeypatch.setattr(module, "memory_headroom", lambda: Headroom(5000, 1000))
    found = SimpleNamespace(f_frsize=10, f_blocks=0, f_bavail=0, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    assert Volume.of(tmp_path) == Volume(5000, 1000, 0, 0)
