"""Partials: what is recorded is there, the living keep theirs, the dead are resumed."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import stat
import struct
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcache.layout import META, PROGRESS, Layout, parse_partial_name
from shardcache.store import partial as module
from shardcache.store.digest import BLOCK, block_digest
from shardcache.store.entry import Metadata
from shardcache.store.partial import (
    LostError,
    Partial,
    Progress,
    read_progress,
    read_records,
)
from tests.support.storetools import (
    Parent,
    begin,
    crowd,
    fill,
    forked,
    metadata_for,
    no_descriptor_left,
    payload,
    refusing,
    wait_until,
)

SIZE = 3 * BLOCK + 777
DATA = payload(SIZE)
NAME = "a.tar"


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "v1")
    layout.make()
    return layout


def left_behind(layout: Layout, blocks: list[int], data: bytes = DATA) -> Path:
    """What a process leaves that fetched some blocks and was killed."""
    partial = begin(layout, metadata_for(data=data))
    fill(partial, data, iter(blocks))
    partial.close()
    return partial.path


def remains(layout: Layout) -> list[str]:
    return os.listdir(layout.partial)


# -- writing -------------------------------------------------------------------


def test_a_new_partial_is_empty_private_and_says_what_it_will_be(layout: Layout) -> None:
    metadata = metadata_for(data=DATA)
    with no_descriptor_left():
        partial = begin(layout, metadata)
        assert parse_partial_name(partial.path.name) == (metadata.key, metadata.info.version)
        assert read_progress(partial.path) == Progress(SIZE, 0, 0)
        assert Metadata.decode((partial.path / META).read_bytes()) == metadata
        assert stat.S_IMODE(partial.path.stat().st_mode) == 0o700
        assert stat.S_IMODE(partial.data.stat().st_mode) == 0o600
        assert list(partial.missing()) == [(0, SIZE)]
        partial.close()
        partial.close()
    assert partial.path.exists()


@settings(deadline=None, max_examples=30)
@given(order=st.permutations(range(4)), count=st.integers(0, 4))
def test_progress_says_exactly_what_is_there(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], count: int
) -> None:
    layout = Layout(tmp_path_factory.mktemp("progress") / "v1")
    layout.make()
    partial = begin(layout, metadata_for(data=DATA))
    there = set(order[:count])
    fill(partial, DATA, iter(order[:count]))
    fill(partial, DATA, iter(order[:1]))  # the same again counts once
    there |= {order[0]}
    prefix = next((i for i in range(5) if i not in there), 4)
    written = sum(min(BLOCK, SIZE - i * BLOCK) for i in there)
    watermark = min(prefix * BLOCK, SIZE)
    assert read_progress(partial.path) == Progress(SIZE, watermark, written)
    assert (partial.watermark, partial.written) == (watermark, written)
    assert partial.digests == [
        block_digest(DATA[i * BLOCK : (i + 1) * BLOCK]) for i in range(prefix)
    ]
    absent = {i for start, stop in partial.missing() for i in range(start, stop, BLOCK)}
    assert absent == {i * BLOCK for i in range(4) if i not in there}
    assert all(stop <= SIZE for _, stop in partial.missing())
    partial.discard()


def test_blocks_from_many_threads_are_all_recorded(layout: Layout) -> None:
    data = payload(16 * BLOCK)
    partial = begin(layout, metadata_for(data=data))

    def work(number: int) -> None:
        with partial.handle() as file:
            for index in range(number, 16, 4):
                block = memoryview(data)[index * BLOCK : (index + 1) * BLOCK]
                partial.write(index * BLOCK, block, file.fileno())
                partial.record(index, block_digest(block), BLOCK)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_progress(partial.path) == Progress(16 * BLOCK, 16 * BLOCK, 16 * BLOCK)
    assert partial.data.read_bytes() == data
    assert list(partial.missing()) == []
    partial.discard()


def test_a_fetch_that_starts_over_forgets_every_block(layout: Layout) -> None:
    partial = begin(layout, metadata_for(data=DATA, size=None))
    fill(partial, DATA, iter([0, 1, 3]))
    partial.restart()
    assert read_progress(partial.path) == Progress(None, 0, 0)
    assert partial.digests == [] and partial.data.stat().st_size == 0
    with open(partial.path / PROGRESS, "rb") as file:
        assert list(read_records(file.fileno(), len(DATA))) == []
    other = payload(BLOCK, seed=2)
    fill(partial, other)
    partial.set_total(BLOCK)
    assert read_progress(partial.path) == Progress(BLOCK, BLOCK, BLOCK)
    assert partial.data.read_bytes() == other
    partial.close()
    partial.restart()
    partial.discard()  # it may be somebody else's by now
    assert partial.path.exists()
    shutil.rmtree(partial.path)


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_write_that_fails_is_an_error_and_nothing_is_recorded(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    partial = begin(layout, metadata_for(data=DATA))
    real = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", refusing(number, when=lambda fd, *_: fd == partial.fd, real=real)
    )
    with pytest.raises(OSError) as caught:
        fill(partial, DATA)
    assert caught.value.errno == number
    monkeypatch.setattr(os, "pwrite", real)
    assert (partial.watermark, partial.written) == (0, 0)
    partial.discard()


def test_workers_that_come_late_write_nowhere(layout: Layout) -> None:
    partial = begin(layout, metadata_for(data=DATA, size=None))
    file = partial.handle()
    partial.close()
    before = (partial.path / PROGRESS).read_bytes()
    partial.record(0, b"x" * 16, BLOCK)
    partial.set_total(1)
    assert (partial.path / PROGRESS).read_bytes() == before
    with pytest.raises(OSError):
        partial.handle()
    file.close()


@pytest.mark.locks_work("flock")
def test_a_partial_counts_as_live_until_its_last_worker_let_go(layout: Layout) -> None:
    partial = begin(layout, metadata_for(data=DATA))
    file = partial.handle()
    partial.close()
    assert Partial.claim(layout, partial.path, NAME) is None
    file.close()
    claimed = Partial.claim(layout, partial.path, NAME)
    assert claimed is not None
    claimed.discard()
    assert remains(layout) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("call", ["open", "pwrite", "mkdir"])
@pytest.mark.parametrize("name", [NAME, META, PROGRESS])
def test_a_disk_that_fails_leaves_nothing(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, number: int, call: str, name: str
) -> None:
    def concerns(path: object, *args: object, **kw: object) -> bool:
        return call != "open" or name in os.path.basename(str(path))

    monkeypatch.setattr(os, call, refusing(number, when=concerns, real=getattr(os, call)))
    with no_descriptor_left(), pytest.raises(OSError) as caught:
        begin(layout, metadata_for(data=DATA))
    assert caught.value.errno == number
    monkeypatch.undo()
    assert remains(layout) == []


@pytest.mark.parametrize("step", ["mkdir", "lock", "meta"])
def test_a_new_partial_that_is_swept_is_made_again(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    swept = 0

    def sweep(path: Path) -> None:
        nonlocal swept
        if swept < 2:
            swept += 1
            shutil.rmtree(path)

    if step == "mkdir":
        real_open = module.open_exclusive
        monkeypatch.setattr(
            module,
            "open_exclusive",
            lambda path, *args: (sweep(path.parent), real_open(path, *args))[1],
        )
    elif step == "lock":
        real_lock = module.is_free
        monkeypatch.setattr(
            module,
            "is_free",
            lambda fd: (sweep(Path(os.readlink(f"/proc/self/fd/{fd}")).parent), real_lock(fd))[1],
        )
    else:
        real_replace = module.replace_file
        monkeypatch.setattr(
            module,
            "replace_file",
            lambda path, *args, **kw: (sweep(path.parent), real_replace(path, *args, **kw))[1],
        )
    with no_descriptor_left():
        partial = begin(layout, metadata_for(data=DATA))
        fill(partial, DATA)
        assert partial.data.read_bytes() == DATA
        assert swept == 2
        assert remains(layout) == [partial.path.name]
        partial.close()


# -- sealing -------------------------------------------------------------------


@pytest.mark.parametrize("sync", [False, True])
def test_a_sealed_partial_is_what_an_entry_must_be(layout: Layout, sync: bool) -> None:
    metadata = metadata_for(data=DATA)
    partial = begin(layout, replace(metadata, digest=""))
    fill(partial, DATA)
    partial.seal(metadata, sync=sync)
    assert sorted(os.listdir(partial.path)) == [NAME, META]
    assert Metadata.decode((partial.path / META).read_bytes()) == metadata == partial.metadata
    assert stat.S_IMODE(partial.data.stat().st_mode) == 0o400
    partial.discard()


def test_sealing_with_sync_puts_all_of_it_on_the_disk(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = begin(layout, metadata_for(data=DATA))
    synced: list[str] = []
    real = os.fsync

    def note(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        real(fd)

    monkeypatch.setattr(os, "fsync", note)
    partial.seal(metadata_for(data=DATA), sync=True)
    assert synced[0].startswith(f".{META}.")
    assert synced[1:] == [NAME, partial.path.name]
    partial.discard()


def test_a_partial_that_was_taken_away_cannot_be_sealed(layout: Layout) -> None:
    partial = begin(layout, metadata_for(data=DATA))
    partial.path.rename(layout.new_partial(partial.metadata.key, partial.metadata.info.version))
    with no_descriptor_left(), pytest.raises(LostError, match="taken over"):
        partial.seal(metadata_for(data=DATA), sync=False)
    partial.discard()
    assert len(remains(layout)) == 1  # the one that took it has it


# -- taking over ---------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(blocks=st.lists(st.integers(0, 3), unique=True), seed=st.integers(0, 99))
@pytest.mark.locks_work("answers")
def test_what_a_dead_process_fetched_is_taken_over_whole(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[int], seed: int
) -> None:
    layout = Layout(tmp_path_factory.mktemp("claim") / "v1")
    layout.make()
    path = left_behind(layout, blocks)
    with no_descriptor_left():
        partial = Partial.claim(layout, path, NAME)
        assert partial is not None
        assert partial.path != path and not path.exists()
        assert parse_partial_name(partial.path.name) == parse_partial_name(path.name)
        assert partial.written == sum(min(BLOCK, SIZE - i * BLOCK) for i in blocks)
        rest = [i for i in range(4) if i not in blocks]
        random.Random(seed).shuffle(rest)
        fill(partial, DATA, iter(rest))
        assert partial.data.read_bytes() == DATA
        assert partial.watermark == SIZE and list(partial.missing()) == []
        partial.discard()


@settings(deadline=None, max_examples=40)
@given(data=st.data())
@pytest.mark.locks_work("answers")
def test_only_blocks_whose_bytes_are_proven_are_believed(
    tmp_path_factory: pytest.TempPathFactory, data
) -> None:
    layout = Layout(tmp_path_factory.mktemp("proof") / "v1")
    layout.make()
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
        assert read_progress(partial.path) == Progress(SIZE, 0, partial.written)
        partial.confirm()
        assert read_progress(partial.path) == Progress(SIZE, partial.watermark, partial.written)
    finally:
        partial.discard()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / META).unlink(),
        lambda path: (path / PROGRESS).unlink(),
        lambda path: (path / META).write_bytes(b"{}"),
        lambda path: (path / META).write_bytes(metadata_for("s3://lab/b.tar", DATA).encode()),
        lambda path: (path / META).write_bytes(metadata_for(data=DATA, etag="other").encode()),
        lambda path: (path / PROGRESS).write_bytes(b"short"),
        lambda path: (path / PROGRESS).write_bytes(struct.pack("<8sQQQQ", b"WRONG", 1, 2, 3, 4)),
        lambda path: ((path / PROGRESS).unlink(), (path / PROGRESS).symlink_to(path / META)),
        lambda path: ((path / PROGRESS).unlink(), (path / PROGRESS).mkdir()),
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
def test_a_disk_that_fails_while_claiming_is_an_error_and_keeps_the_bytes(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = left_behind(layout, [0, 1])
    monkeypatch.setattr(os, "preadv", refusing(errno.EIO, real=os.preadv))
    with no_descriptor_left(), pytest.raises(OSError) as caught:
        Partial.claim(layout, path, NAME)
    assert caught.value.errno == errno.EIO
    monkeypatch.undo()
    [name] = remains(layout)
    partial = Partial.claim(layout, layout.partial / name, NAME)
    assert partial is not None and partial.written == 2 * BLOCK
    partial.discard()


@pytest.mark.parametrize("step", ["begin", "seal"])
@pytest.mark.locks_work("answers")
def test_what_a_killed_writer_had_half_written_is_not_published(layout: Layout, step: str) -> None:
    """A resumed partial becomes an entry as it is: nothing else may be in it."""

    def write(parent: Parent) -> None:
        die = lambda *a: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        with pytest.MonkeyPatch.context() as patch:
            if step == "begin":
                patch.setattr(Path, "replace", die)
            partial = begin(layout, metadata_for(data=DATA))
            fill(partial, DATA)
            patch.setattr(Path, "replace", die)
            partial.seal(metadata_for(data=DATA), sync=False)

    with forked(write) as child:
        assert child.wait() == -signal.SIGKILL
    [directory] = [path for path in layout.partial.iterdir() if path.is_dir()]
    left = set(os.listdir(directory))
    assert left <= {NAME, META, PROGRESS} and NAME in left
    partial = Partial.claim(layout, directory, NAME)
    assert (partial is None) == (step == "begin")
    if partial is not None:
        partial.seal(metadata_for(data=DATA), sync=False)
        assert sorted(os.listdir(partial.path)) == [NAME, META]
        partial.discard()


@pytest.mark.locks_work("answers")
def test_want_of_descriptors_is_an_error_and_removes_nothing(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = left_behind(layout, [0])
    monkeypatch.setattr(module, "open_exclusive", refusing(errno.EMFILE, real=None))
    with pytest.raises(OSError):
        Partial.claim(layout, path, NAME)
    (left,) = remains(layout)  # perhaps with the name of who wanted to claim it
    assert sorted(os.listdir(layout.partial / left)) == [NAME, META, PROGRESS]


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
        child.kill()
        partial = Partial.claim(layout, path, NAME)
    assert partial is not None and partial.written == 2 * BLOCK
    partial.discard()


@pytest.mark.locks_work("flock")
def test_a_writers_child_does_not_keep_its_partial_alive(layout: Layout) -> None:
    def write(parent: Parent) -> None:
        partial = begin(layout, metadata_for(data=DATA))
        worker = partial.handle()
        pid = os.fork()
        if pid == 0:
            worker.close()
            partial.close()
            parent.say(str(partial.path))
            signal.alarm(120)
            signal.pause()
        parent.hear()
        parent.say(pid)
        parent.hear()

    with forked(write) as child:
        path = Path(child.hear())
        grandchild = child.ask()
        try:
            assert Partial.claim(layout, path, NAME) is None
            child.kill()
            partial = Partial.claim(layout, path, NAME)
            os.kill(grandchild, 0)
        finally:
            os.kill(grandchild, signal.SIGKILL)
    assert partial is not None
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
    partial.seal(metadata_for(data=DATA), sync=False)
    assert partial.data.read_bytes() == DATA
    partial.discard()


@pytest.mark.locks_work("answers")
def test_of_many_claimers_one_wins(layout: Layout) -> None:
    def claim(parent: Parent, number: int) -> None:
        kept = []  # as a fetch would, until its end
        while (path := parent.hear()) is not None:
            partial = Partial.claim(layout, path, NAME)
            kept.append(partial)
            parent.say(None if partial is None else str(partial.path))

    with crowd(4, claim) as children:
        for _ in range(12):
            path = left_behind(layout, [0])
            for child in children:
                child.tell(path)
            winners = [name for child in children if (name := child.hear()) is not None]
            assert len(winners) == 1
            assert not path.exists()


@pytest.mark.locks_work("answers")
def test_a_killed_writer_never_leaves_more_than_it_wrote(layout: Layout) -> None:
    # Killed at whatever instant: what is believed afterwards is what is there.
    data = payload(8 * BLOCK)

    def write(parent: Parent) -> None:
        partial = begin(layout, metadata_for(data=data))
        parent.say(str(partial.path))
        while True:
            fill(partial, data)

    for delay in range(6):
        with forked(write) as child:
            path = Path(child.hear())
            wait_until(
                lambda p=path, n=delay: (read_progress(p) or Progress(0, 0, 0)).written >= n * BLOCK
            )
            child.kill()
        partial = Partial.claim(layout, path, NAME)
        assert partial is not None and partial.written >= delay * BLOCK
        found = partial.data.read_bytes()
        for index in range(8):
            start = index * BLOCK
            if not any(a <= start < b for a, b in partial.missing()):
                assert found[start : start + BLOCK] == data[start : start + BLOCK]
        partial.discard()
