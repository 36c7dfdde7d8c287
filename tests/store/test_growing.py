"""A partial as those see it who read it while it grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcache.layout import PROGRESS, Layout
from shardcache.origins.base import ObjectInfo
from shardcache.store.digest import BLOCK, block_digest
from shardcache.store.entry import Metadata
from shardcache.store.partial import Growing, Partial
from shardcache.urls import parse_url
from tests.support.storetools import no_descriptor_left

URL = parse_url("s3://lab/train-0000.tar")


def partial(tmp_path: Path, size: int | None) -> Partial:
    layout = Layout(tmp_path / "v1")
    layout.make()
    info = ObjectInfo(size, '"etag"')
    metadata = Metadata(str(URL), URL.key, info, size or 0, "", None, 0.0, "boot", "test")
    return Partial.create(layout, metadata, URL.basename)


def put(made: Partial, index: int, length: int = BLOCK) -> None:
    block = memoryview(bytes([index]) * length)
    made.write(index * BLOCK, block)
    made.record(index, block_digest(block), length)


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_the_last_block_is_never_shown(tmp_path: Path, size: int) -> None:
    made = partial(tmp_path, size)
    seen = Growing(made.path, URL.basename)
    assert seen.limit() == 0
    for index in range(-(-size // BLOCK)):
        put(made, index, min(BLOCK, size - index * BLOCK))
        assert seen.limit() == min(index + 1, (size - 1) // BLOCK) * BLOCK
    seen.close()
    made.discard()


def test_of_a_shard_of_unknown_size_the_newest_block_is_held_back(tmp_path: Path) -> None:
    made = partial(tmp_path, None)
    seen = Growing(made.path, URL.basename)
    for index in range(3):
        put(made, index)
        assert seen.limit() == index * BLOCK
    seen.close()
    made.discard()


def test_what_comes_out_of_turn_is_shown_when_the_gap_is_filled(tmp_path: Path) -> None:
    made = partial(tmp_path, 4 * BLOCK)
    seen = Growing(made.path, URL.basename)
    put(made, 1)
    put(made, 2)
    assert seen.limit() == 0
    put(made, 0)
    assert seen.limit() == 3 * BLOCK
    seen.close()
    made.discard()


def test_a_partial_that_is_being_published_leaves_no_descriptor_open(tmp_path: Path) -> None:
    made = partial(tmp_path, 10)
    (made.path / PROGRESS).unlink()
    # What was caught holds on to the frame, and to all that was begun in it.
    with no_descriptor_left(), pytest.raises(FileNotFoundError) as caught:
        Growing(made.path, URL.basename)
    assert caught.value.filename.endswith(PROGRESS)
    made.discard()
