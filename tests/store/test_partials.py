"""Partials: recorded blocks are complete, live ones are kept, dead ones are resumed or removed."""

import errno
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardcache.layout import JOURNAL, META, Layout
from shardcache.store.directory import Metadata, remove_free
from shardcache.store.partial import OpenPartial, Partial, in_flight, read_journal
from tests.support.storetools import (
    BLOCK,
    age,
    begin,
    fill,
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


def started(layout, blocks: Iterable[int] = range(4)) -> Partial:
    """Make a partial with these blocks."""
    partial = begin(layout, metadata_for(data=DATA))
    fill(partial, DATA, iter(blocks))
    return partial


def dead_partial(layout, blocks: Iterable[int] = range(4)) -> Path:
    """Make the partial of a killed process that had downloaded these blocks."""
    partial = started(layout, blocks)
    partial.close()
    return partial.path


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from([NAME, JOURNAL]),
    flips=st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 255)), max_size=3),
    cut=st.none() | st.integers(0, 1 << 30),
    more=st.integers(0, 100),
)
@example(NAME, [(0, 1)], None, 5)
@pytest.mark.locks_work("answers")
def test_only_proven_blocks_are_resumed(tmp_path_factory, name, flips, cut, more):
    layout = make_store(tmp_path_factory.mktemp("proof")).layout
    path = dead_partial(layout, [0, 1, 3])
    target = path / name
    raw = bytearray(target.read_bytes())
    for position, bits in flips:
        raw[position % len(raw)] ^= bits
    raw = raw[: len(raw) if cut is None else cut % len(raw)] + bytes(more)
    target.write_bytes(raw)
    partial = Partial.claim(layout, path, NAME)
    if partial is None:
        assert os.listdir(layout.partials) == []  # useless, so removed
        return
    try:
        partial.prove()
        found = partial.data.read_bytes()
        assert len(found) <= SIZE
        absent = list(partial.gaps())
        for index in range(4):
            start, stop = index * BLOCK, min((index + 1) * BLOCK, SIZE)
            if not any(a <= start < b for a, b in absent):
                assert found[start:stop] == DATA[start:stop]
        # Readers see nothing until the origin has confirmed the version.
        seen = OpenPartial(partial.path, NAME)
        assert seen.watermark() == 0 and not partial.confirmed
        partial.confirm()
        if partial.digests:
            partial.show(5)  # no effect: the blocks are longer
        assert seen.watermark() == min(len(partial.digests), 3) * BLOCK
        found = read_journal(partial.path)
        assert (found.metadata.info.size, found.written) == (SIZE, partial.written)
        seen.close()
    finally:
        partial.discard()


def of_another(path: Path, **other: object) -> None:
    """Give a partial the progress of another shard or version."""
    made = begin(Layout(path.parents[1]), metadata_for(**{"data": DATA, **other}))
    (made.path / JOURNAL).replace(path / JOURNAL)
    made.discard()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / JOURNAL).unlink(),
        lambda path: (path / JOURNAL).write_bytes(b"SHCPROG1" + bytes(99)),
        lambda path: of_another(path, url="s3://lab/b.tar"),
        lambda path: of_another(path, etag="other"),
        lambda path: of_another(path, size=None),
        lambda path: ((path / JOURNAL).unlink(), (path / JOURNAL).symlink_to(path / NAME)),
    ],
)
@pytest.mark.locks_work("answers")
def test_partials_that_cannot_be_resumed_are_removed(layout, damage) -> None:
    path = dead_partial(layout, [0])
    damage(path)
    with no_descriptor_left():
        assert Partial.claim(layout, path, NAME) is None
    assert os.listdir(layout.partials) == []


@pytest.mark.locks_work
def test_a_partial_is_resumed_after_its_last_thread_has_closed_it(layout):
    partial = started(layout, [0, 1])
    half_sealed = partial.path / META
    half_sealed.write_bytes(partial.metadata._replace(library="killed").encode())
    worker = partial.handle()
    partial.close()
    before = (partial.path / JOURNAL).read_bytes()
    partial.record(2, b"x" * 16, BLOCK)  # no effect after `close`
    partial.restart()
    partial.close()
    assert (partial.path / JOURNAL).read_bytes() == before
    assert Partial.claim(layout, partial.path, NAME) is None
    assert [found.live for found in in_flight(layout)] == [True]
    worker.close()
    assert [found.live for found in in_flight(layout)] == [False]
    with no_descriptor_left():
        heir = Partial.claim(layout, partial.path, NAME)
        heir.prove()
        assert heir.written == 2 * BLOCK and os.listdir(layout.partials) == [heir.path.name]
        fill(heir, DATA, iter([3, 2, 2]))  # a repeated block counts once
        assert heir.data.read_bytes() == DATA and heir.written == SIZE
        heir.restart()
        assert list(heir.gaps()) == [(0, SIZE)] and read_journal(heir.path).written == 0
        fill(heir, DATA)
        heir.seal(metadata_for(data=DATA), layout.modes, sync=False)
        assert Metadata.decode((heir.path / META).read_bytes()).library == "test"
        heir.discard()


def half_evicted(layout) -> Path:
    path = layout.new_hidden(KEY)
    path.mkdir()
    (path / "a.tar").write_bytes(DATA)
    (path / META).write_bytes(b"{}")
    return path


def sweep(layout) -> int:
    return sum(remove_free(found.path, None) for found in in_flight(layout) if not found.live)


@pytest.mark.locks_work
def test_dead_partials_in_any_state_are_removed(layout, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.tar").write_bytes(DATA)
    layout.new_partial(KEY, "2" * 24, 1).symlink_to(outside)
    layout.new_hidden(KEY).symlink_to(outside)
    live = begin(layout, metadata_for(data=DATA))
    before = tree(tmp_path)
    dead_partial(layout)
    half_evicted(layout)
    (dead_partial(layout) / "a.tar").unlink()
    layout.new_hidden(KEY).mkdir()  # killed before the last rmdir
    layout.new_partial(KEY, "0" * 24, 1).mkdir()  # killed before it made its file
    with no_descriptor_left():
        assert [flight.path for flight in in_flight(layout) if flight.live] == [live.path]
        assert sweep(layout) == 5
    assert tree(tmp_path) == before
    live.seal(metadata_for(data=DATA), layout.modes, sync=False)
    assert not remove_free(live.path, None)
    live.discard()


def test_without_flock_only_idle_partials_count_as_dead(layout, monkeypatch):
    live, idle, doomed = dead_partial(layout), dead_partial(layout), half_evicted(layout)
    age(idle)
    age(doomed)
    os.utime(live / "a.tar", (1, 1))  # but its progress is fresh
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOSYS, real=fcntl.flock))
    assert {f.path: f.live for f in in_flight(layout)} == {live: True, idle: False, doomed: False}
    assert not remove_free(live, None)
    assert sweep(layout) == 2
    assert os.listdir(layout.partials) == [live.name]
