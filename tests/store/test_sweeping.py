"""Sweeping: the dead go, the living and the strangers stay."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from shardcache.layout import META, Layout
from shardcache.locks.flock import Holder, KeyLock, remove_locks
from shardcache.store.digest import BLOCK
from shardcache.store.partial import LostError, Partial, in_flight, remove_leftover, remove_unnamed
from shardcache.store.root import make_root
from tests.support.storetools import (
    Parent,
    age,
    begin,
    crowd,
    fill,
    metadata_for,
    no_descriptor_left,
    payload,
    refusing,
    tree,
)

DATA = payload(BLOCK + 5000)
KEY = metadata_for(data=DATA).key
ME = Holder.this_process(rank=None, job=None, now=1.0)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return make_root(tmp_path / "cache", "test")


def left_behind(layout: Layout) -> Path:
    partial = begin(layout, metadata_for(data=DATA))
    fill(partial, DATA)
    partial.close()
    return partial.path


def half_evicted(layout: Layout) -> Path:
    path = layout.new_evicted(KEY)
    path.mkdir()
    (path / "a.tar").write_bytes(DATA)
    (path / META).write_bytes(b"{}")
    return path


def sweep(layout: Layout) -> int:
    return sum(remove_leftover(layout, found.path) for found in in_flight(layout) if not found.live)


@pytest.mark.locks_work
def test_the_living_are_told_from_the_dead_and_stay(layout: Layout) -> None:
    dead, doomed = left_behind(layout), half_evicted(layout)
    live = begin(layout, metadata_for(data=DATA))
    before = tree(layout.base)
    with no_descriptor_left():
        found = {f.path: f for f in in_flight(layout)}
    assert tree(layout.base) == before
    assert {f.path: (f.live, f.key) for f in found.values()} == {
        dead: (False, KEY),
        doomed: (False, ""),
        live.path: (True, KEY),
    }
    assert sweep(layout) == 2 and not remove_leftover(layout, live.path)
    fill(live, DATA)
    live.seal(metadata_for(data=DATA), layout.modes, sync=False)
    assert not remove_leftover(layout, live.path)
    live.discard()


@pytest.mark.locks_work("answers")
def test_the_dead_are_removed_whatever_state_they_were_left_in(layout: Layout) -> None:
    left_behind(layout)
    half_evicted(layout)
    layout.new_evicted(KEY).mkdir()  # killed before the last rmdir
    only_meta = left_behind(layout)
    (only_meta / "a.tar").rename(only_meta / META)
    layout.new_partial(KEY, "0" * 24, 1).mkdir()  # killed before it made its file
    with no_descriptor_left():
        assert sweep(layout) == 5
    assert list(layout.partial.iterdir()) == []


@pytest.mark.locks_work("answers")
def test_a_writer_that_is_swept_before_it_has_its_lock_starts_over(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def late(path: object, *args: object) -> int:
        if str(path).endswith("a.tar"):
            monkeypatch.setattr(os, "open", real)
            assert sweep(layout) == 1
        return real(path, *args)

    monkeypatch.setattr(os, "open", late)
    with no_descriptor_left(), pytest.raises(LostError):
        begin(layout, metadata_for(data=DATA))
    assert list(layout.partial.iterdir()) == []


def test_what_is_not_ours_stays(layout: Layout, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.tar").write_bytes(DATA)
    (layout.partial / "model.ckpt").write_bytes(DATA)
    (layout.partial / "run-7").mkdir()
    (layout.partial / "run-7" / "model.ckpt").write_bytes(DATA)
    # Even names of ours, where they are not what we make under them.
    layout.new_partial(KEY, "0" * 24, 1).symlink_to(outside)
    layout.new_evicted(KEY).symlink_to(outside)
    layout.new_partial(KEY, "1" * 24, 1).write_bytes(DATA)
    before = tree(tmp_path)
    for path in layout.partial.iterdir():
        assert not remove_leftover(layout, path)
    assert list(in_flight(layout)) == []
    assert tree(tmp_path) == before


# -- other processes -----------------------------------------------------------


@pytest.mark.locks_work("answers")
def test_of_a_sweeper_and_a_claimer_one_wins(layout: Layout) -> None:
    def run_sweeper(parent: Parent, number: int) -> None:
        while (path := parent.hear()) is not None:
            parent.say(remove_leftover(layout, path))

    def run_claimer(parent: Parent, number: int) -> None:
        kept = []
        while (path := parent.hear()) is not None:
            partial = Partial.claim(layout, path, "a.tar")
            kept.append(partial)
            parent.say(partial is not None and partial.data.read_bytes() == DATA)

    with crowd(2, run_sweeper) as sweepers, crowd(2, run_claimer) as claimers:
        for _ in range(40):
            path = left_behind(layout)
            for child in (*sweepers, *claimers):
                child.tell(path)
            assert sum(child.hear() for child in (*sweepers, *claimers)) <= 1
            assert not path.exists() or sweep(layout) == 1


def test_without_flock_only_what_is_long_idle_counts_as_dead(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, idle, doomed = left_behind(layout), left_behind(layout), half_evicted(layout)
    age(idle)
    age(doomed)
    os.utime(live / "a.tar", (1, 1))  # but its progress is fresh
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOSYS, real=fcntl.flock))
    assert {f.path: f.live for f in in_flight(layout)} == {
        live: True,
        idle: False,
        doomed: False,
    }
    assert not remove_leftover(layout, live)
    assert sweep(layout) == 2
    assert [p.name for p in layout.partial.iterdir()] == [live.name]


# -- lock files ----------------------------------------------------------------


@pytest.mark.locks_work
def test_lock_files_nobody_holds_go_and_their_directories(layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "victim").touch()
    layout.named_lock("budget").touch()
    for name in ("ab", "zz"):
        (layout.locks / name).mkdir()
        (layout.locks / name / "notes").touch()
    (layout.locks / "ab" / f"{'cd' * 16}.lock").touch()  # in another key's place
    (layout.locks / "ab" / f"{'ab' * 16}.lock").symlink_to(tmp_path / "victim")
    (layout.locks / "ef").symlink_to(layout.locks / "ab")
    before = tree(tmp_path)
    keys = [f"{n:02x}" * 16 for n in range(20)]
    for key in keys:
        lock = KeyLock(layout.key_lock(key))
        assert lock.try_acquire(ME)
        lock.release()
    held = KeyLock(layout.key_lock(keys[3]))
    assert held.try_acquire(ME)
    with no_descriptor_left():
        remove_locks(layout)
    assert not KeyLock(layout.key_lock(keys[3])).try_acquire(ME)
    assert [key for key in keys if layout.key_lock(key).exists()] == [keys[3]]
    held.release()
    remove_locks(layout)
    assert tree(tmp_path) == before


@pytest.mark.locks_work("answers")
def test_files_whose_writers_died_before_naming_them_go(layout: Layout) -> None:
    left = layout.partial / f".{META}.{KEY}"
    left.write_bytes(DATA)
    (layout.partial / ".notes").write_bytes(DATA)
    remove_unnamed(layout)
    assert left.exists()  # its writer may live
    age(layout.partial)
    remove_unnamed(layout)
    assert os.listdir(layout.partial) == [".notes"]
