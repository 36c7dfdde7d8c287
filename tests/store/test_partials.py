"""Partials: what is recorded is there, the living keep theirs, the dead are resumed or swept."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcache.layout import META, PROGRESS, Layout, parse_partial_name
from shardcache.locks.flock import Holder, KeyLock, remove_locks
from shardcache.store import partial as module
from shardcache.store.digest import BLOCK, block_digest
from shardcache.store.entry import LostError, Metadata
from shardcache.store.partial import (
    Partial,
    PartialSource,
    in_flight,
    read_progress,
    remove_leftover,
    remove_unnamed,
)
from tests.support.storetools import (
    Parent,
    age,
    begin,
    fill,
    forked,
    make_store,
    metadata_for,
    no_descriptor_left,
    payload,
    refusing,
    tree,
)

SIZE = 3 * BLOCK + 777
DATA = payload(SIZE)
NAME = "a.tar"
KEY = metadata_for(data=DATA).key
ME = Holder.this_process(rank=None, job=None, now=1.0)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return make_store(tmp_path).layout


def left_behind(layout: Layout, blocks: Iterable[int] = range(4)) -> Path:
    """What a process leaves that fetched some blocks and was killed."""
    partial = begin(layout, metadata_for(data=DATA))
    fill(partial, DATA, iter(blocks))
    partial.close()
    return partial.path


def progress(path: Path) -> tuple[int | None, int] | None:
    found = read_progress(path)
    return found and (found.total, found.written)


def remains(layout: Layout) -> list[str]:
    return os.listdir(layout.partial)


def length_of(index: int) -> int:
    return min(BLOCK, SIZE - index * BLOCK)


# -- writing -------------------------------------------------------------------


def test_a_new_partial_is_empty_private_and_says_what_it_will_be(layout: Layout) -> None:
    metadata = metadata_for(data=DATA)
    with no_descriptor_left():
        partial = begin(layout, metadata)
        assert sorted(os.listdir(partial.path)) == [NAME, PROGRESS]
        assert parse_partial_name(partial.path.name) == (metadata.key, metadata.info.version, SIZE)
        assert progress(partial.path) == (SIZE, 0)
        assert read_progress(partial.path).metadata == metadata
        assert stat.S_IMODE(partial.path.stat().st_mode) == 0o700
        assert stat.S_IMODE(partial.data.stat().st_mode) == 0o600
        assert list(partial.missing()) == [(0, SIZE)]
        partial.close()
        partial.close()
    assert partial.path.exists()


@settings(deadline=None, max_examples=30)
@given(order=st.permutations(range(4)), count=st.integers(1, 4))
def test_progress_says_exactly_what_is_there(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], count: int
) -> None:
    partial = begin(make_store(tmp_path_factory.mktemp("x")).layout, metadata_for(data=DATA))
    seen = PartialSource(partial.path, NAME)
    there = set(order[:count])
    fill(partial, DATA, iter(order[:count]))
    fill(partial, DATA, iter(order[:1]))  # the same again counts once
    prefix = next((i for i in range(5) if i not in there), 4)
    written = sum(map(length_of, there))
    assert progress(partial.path) == (SIZE, written)
    assert partial.written == written
    assert seen.limit() == min(prefix, 3) * BLOCK
    assert partial.digests == [
        block_digest(DATA[i * BLOCK : (i + 1) * BLOCK]) for i in range(prefix)
    ]
    absent = {i for start, stop in partial.missing() for i in range(start, stop, BLOCK)}
    assert absent == {i * BLOCK for i in range(4) if i not in there}
    assert all(stop <= SIZE for _, stop in partial.missing())
    seen.close()
    partial.discard()


def test_blocks_from_many_threads_are_all_recorded_and_a_fresh_start_forgets_them(
    layout: Layout,
) -> None:
    data = payload(16 * BLOCK)
    partial = begin(layout, metadata_for(data=data, size=None))

    def work(index: int) -> None:
        with partial.handle() as file:
            block = memoryview(data)[index * BLOCK : (index + 1) * BLOCK]
            partial.write(index * BLOCK, block, file.fileno())
            partial.record(index, block_digest(block), BLOCK)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(16)))
    assert progress(partial.path) == (None, 16 * BLOCK)
    assert partial.data.read_bytes() == data
    partial.restart()
    assert progress(partial.path) == (None, 0)
    assert partial.digests == [] and partial.data.stat().st_size == 0
    partial.discard()


def test_a_short_write_is_carried_on_and_an_empty_one_ends(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = begin(layout, metadata_for(data=DATA))
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:1000], offset))
    partial.write(5, memoryview(DATA)[:5000])
    assert os.pread(partial.fd, 5000, 5) == DATA[:5000]
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 0)
    with pytest.raises(OSError):
        partial.write(0, memoryview(b"x"))
    monkeypatch.undo()
    partial.discard()


@pytest.mark.locks_work("flock")
def test_a_partial_counts_as_live_until_its_last_worker_let_go(layout: Layout) -> None:
    partial = begin(layout, metadata_for(data=DATA))
    fill(partial, DATA, iter([0]))
    file = partial.handle()
    partial.close()
    before = (partial.path / PROGRESS).read_bytes()
    for late in (
        lambda: partial.record(1, b"x" * 16, BLOCK),
        lambda: partial.show(5),
        partial.confirm,
        partial.restart,
        partial.close,
    ):
        late()
    assert (partial.path / PROGRESS).read_bytes() == before
    with pytest.raises(OSError):
        partial.handle()
    assert Partial.claim(layout, partial.path, NAME) is None
    file.close()
    claimed = Partial.claim(layout, partial.path, NAME)
    assert claimed is not None
    claimed.discard()
    assert remains(layout) == []


# -- reading while it grows ----------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("size", [BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_the_last_block_is_never_shown(layout: Layout, size: int, known: bool) -> None:
    data = payload(size)
    made = begin(layout, metadata_for(data=data, size=size if known else None))
    seen = PartialSource(made.path, NAME)
    assert seen.limit() == 0
    for index in range(-(-size // BLOCK)):
        fill(made, data, iter([index]))
        blocks = min(index + 1, (size - 1) // BLOCK) if known else index
        assert seen.limit() == blocks * BLOCK
    assert not seen.sealed
    made.seal(metadata_for(data=data), layout.modes, sync=False)
    assert seen.sealed
    seen.close()
    made.discard()


@pytest.mark.parametrize("size", [0, 1, BLOCK])
@pytest.mark.locks_work("answers")
def test_a_shard_of_one_block_has_no_journal_and_is_not_resumed(layout: Layout, size: int) -> None:
    data = payload(size)
    made = begin(layout, metadata_for(data=data))
    fill(made, data)
    assert os.listdir(made.path) == [NAME] and len(made.digests) == (size > 0)
    [found] = in_flight(layout)
    assert (found.size, found.is_measured, found.reserved) == (size, True, size)
    made.close()
    assert Partial.claim(layout, made.path, NAME) is None
    assert remains(layout) == []


def test_the_first_bytes_are_shown_early_and_many_blocks_at_once(layout: Layout) -> None:
    count = 2 * module._AHEAD + 7
    metadata = metadata_for()
    info = replace(metadata.info, size=(count + 1) * BLOCK)
    made = begin(layout, replace(metadata, info=info))
    seen = PartialSource(made.path, NAME)
    made.show(1000)
    assert seen.limit() == 1000
    made.record(1, bytes(16), BLOCK)
    assert seen.limit() == 1000
    for index in range(count):
        made.record(index, bytes(16), BLOCK)
    made.show(5)  # too late
    assert seen.limit() == count * BLOCK
    seen.close()
    made.discard()


# -- sealing -------------------------------------------------------------------


def test_a_partial_that_was_taken_away_cannot_be_sealed(layout: Layout) -> None:
    partial = begin(layout, metadata_for(data=DATA))
    partial.path.rename(layout.new_partial(*parse_partial_name(partial.path.name)))
    with no_descriptor_left(), pytest.raises(LostError, match="taken over"):
        partial.seal(metadata_for(data=DATA), layout.modes, sync=False)
    partial.discard()
    assert len(remains(layout)) == 1  # the one that took it has it


# -- taking over ---------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(data=st.data())
@pytest.mark.locks_work("answers")
def test_only_blocks_whose_bytes_are_proven_are_believed(
    tmp_path_factory: pytest.TempPathFactory, data
) -> None:
    layout = make_store(tmp_path_factory.mktemp("proof")).layout
    path = left_behind(layout, [0, 1, 3])
    target = path / data.draw(st.sampled_from([NAME, PROGRESS]))
    raw = bytearray(target.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    if data.draw(st.booleans()):
        raw += bytes(data.draw(st.integers(1, 100)))
    target.write_bytes(raw)
    partial = Partial.claim(layout, path, NAME)
    if partial is None:
        assert remains(layout) == []  # useless, so removed
        return
    try:
        found = partial.data.read_bytes()
        absent = [(a, b) for a, b in partial.missing()]
        for index in range(4):
            start, stop = index * BLOCK, min((index + 1) * BLOCK, SIZE)
            if not any(a <= start < b for a, b in absent):
                assert found[start:stop] == DATA[start:stop]
        # Nothing of it is shown before the origin was asked whether it has this version.
        seen = PartialSource(partial.path, NAME)
        assert seen.limit() == 0 and not partial.confirmed
        partial.confirm()
        assert seen.limit() == min(len(partial.digests), 3) * BLOCK
        assert progress(partial.path) == (SIZE, partial.written)
        seen.close()
    finally:
        partial.discard()


def of_another(path: Path, **other: object) -> None:
    """Give a partial the progress of another shard or version."""
    made = begin(Layout(path.parents[1]), metadata_for(**{"data": DATA, **other}))
    (made.path / PROGRESS).replace(path / PROGRESS)
    made.discard()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / PROGRESS).unlink(),
        lambda path: (path / PROGRESS).write_bytes(b"SHCPROG1" + bytes(99)),
        lambda path: of_another(path, url="s3://lab/b.tar"),
        lambda path: of_another(path, etag="other"),
        lambda path: of_another(path, size=None),
        lambda path: ((path / PROGRESS).unlink(), (path / PROGRESS).symlink_to(path / NAME)),
    ],
)
@pytest.mark.locks_work("answers")
def test_useless_remains_are_removed(layout: Layout, damage) -> None:
    path = left_behind(layout, [0])
    damage(path)
    with no_descriptor_left():
        assert Partial.claim(layout, path, NAME) is None
    assert remains(layout) == []


@pytest.mark.locks_work("answers")
def test_what_a_killed_writer_had_half_sealed_is_sealed_anew(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed partial becomes an entry as it is: nothing else may be in it."""

    def write(parent: Parent) -> None:
        partial = begin(layout, metadata_for(data=DATA))
        fill(partial, DATA)
        monkeypatch.setattr(os, "unlink", lambda *a: os.kill(os.getpid(), signal.SIGKILL))
        partial.seal(replace(metadata_for(data=DATA), library="killed"), layout.modes, sync=False)

    with forked(write) as child:
        assert child.wait() == -signal.SIGKILL
    [directory] = layout.partial.iterdir()
    assert sorted(os.listdir(directory)) == [NAME, META, PROGRESS]
    partial = Partial.claim(layout, directory, NAME)
    assert partial is not None and list(partial.missing()) == []
    partial.seal(metadata_for(data=DATA), layout.modes, sync=False)
    assert sorted(os.listdir(partial.path)) == [NAME, META]
    assert Metadata.decode((partial.path / META).read_bytes()).library == "test"
    partial.discard()


# -- other processes -----------------------------------------------------------


@pytest.mark.locks_work("flock")
def test_a_live_writers_partial_cannot_be_claimed_and_a_killed_ones_can_at_once(
    layout: Layout,
) -> None:
    def write(parent: Parent) -> None:
        partial = begin(layout, metadata_for(data=DATA))
        fill(partial, DATA, iter([0, 1]))
        parent.say(str(partial.path))
        parent.hear()

    with forked(write) as child:
        path = Path(child.hear())
        assert Partial.claim(layout, path, NAME) is None
        child.kill(signal.SIGSTOP)  # not running is not dead
        assert Partial.claim(layout, path, NAME) is None
        assert [found.live for found in in_flight(layout)] == [True]
        child.kill()
        assert [found.live for found in in_flight(layout)] == [False]
        with no_descriptor_left():
            partial = Partial.claim(layout, path, NAME)
            assert partial is not None and partial.path != path and not path.exists()
            assert parse_partial_name(partial.path.name) == parse_partial_name(path.name)
            assert partial.written == 2 * BLOCK
            fill(partial, DATA, iter([3, 2]))
            assert partial.data.read_bytes() == DATA and list(partial.missing()) == []
            partial.discard()


def test_a_child_that_unwinds_takes_nothing_from_its_parent(layout: Layout) -> None:
    partial = begin(layout, metadata_for(data=DATA))
    fill(partial, DATA, iter([0]))

    def unwind(parent: Parent) -> None:
        reused = os.open("/dev/null", os.O_RDONLY)  # one of the parent's numbers
        partial.discard()
        partial.close()
        os.fstat(reused)
        parent.say(True)

    with forked(unwind) as child:
        assert child.hear()
    fill(partial, DATA)
    partial.seal(metadata_for(data=DATA), layout.modes, sync=False)
    assert partial.data.read_bytes() == DATA
    partial.discard()


# -- sweeping ------------------------------------------------------------------


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
def test_the_dead_are_removed_whatever_state_they_were_left_in_and_links_are_not_followed(
    layout: Layout, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.tar").write_bytes(DATA)
    layout.new_partial(KEY, "2" * 24, 1).symlink_to(outside)
    layout.new_evicted(KEY).symlink_to(outside)
    before = tree(tmp_path)
    left_behind(layout)
    half_evicted(layout)
    layout.new_evicted(KEY).mkdir()  # killed before the last rmdir
    only_meta = left_behind(layout)
    (only_meta / "a.tar").rename(only_meta / META)
    layout.new_partial(KEY, "0" * 24, 1).mkdir()  # killed before it made its file
    with no_descriptor_left():
        assert sweep(layout) == 5
    assert tree(tmp_path) == before


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
