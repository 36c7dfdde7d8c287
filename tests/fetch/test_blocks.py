"""Blocks, one by one: what is received, passed over, and too slow."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardcache.errors import TransferTimeoutError
from shardcache.fetch.blocks import Blocks, FetchStatus, Pace, skip
from shardcache.origins.base import ObjectInfo, TransientError
from shardcache.origins.retry import Attempts, RetryPolicy
from shardcache.store.digest import BLOCK, block_digest
from tests.support.fakes import FakeClock
from tests.support.storetools import payload

KIB = 1024
#: As the module has it: slower than this counts as stalled.
MIN_RATE = 8 * 1024


class Drip:
    """A body that gives ``data`` in pieces of at most ``size`` bytes."""

    stop = None

    def __init__(self, data: bytes, *, start: int = 0, size: int = BLOCK) -> None:
        self.info = ObjectInfo(size=len(data))
        self.start = start
        self._left = memoryview(data)
        self._size = size

    def readinto(self, buffer: memoryview) -> int:
        piece = self._left[: min(len(buffer), self._size)]
        buffer[: len(piece)] = piece
        self._left = self._left[len(piece) :]
        return len(piece)


class Shelf:
    """A sink that keeps what it is given."""

    def __init__(self, crc: Callable[[memoryview], int] | None = None) -> None:
        self.blocks: list[tuple[int, bytes]] = []
        self.checks: list[int | None] = []
        self.ended: list[int] = []
        self.begun: list[bytes] = []
        self._crc = crc

    def crc(self) -> Callable[[memoryview], int] | None:
        return self._crc

    def put(self, offset: int, block: memoryview, digest: bytes, crc: int | None, fd: int) -> None:
        assert digest == block_digest(block)
        assert fd == 7
        self.blocks.append((offset, bytes(block)))
        self.checks.append(crc)

    def early(self, begun: memoryview, fd: int) -> None:
        assert fd == 7
        self.begun.append(bytes(begun))

    def end(self, total: int) -> None:
        self.ended.append(total)


def drain(blocks: Blocks, body: Drip) -> list[int]:
    counts = []
    while not blocks.complete:
        counts.append(blocks.receive(body))
        assert len(counts) < 5000, "it never ends"
    return counts


def test_a_status_begins_with_nothing() -> None:
    status = FetchStatus()
    assert (status.size, status.written, status.received, status.retries) == (None, 0, 0, 0)


# -- receiving -----------------------------------------------------------------


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
@pytest.mark.parametrize("piece", [1000, BLOCK])
def test_a_part_is_handed_on_in_whole_blocks(size: int, piece: int) -> None:
    data, shelf = payload(size), Shelf(crc=len)
    blocks = Blocks(shelf, BLOCK, BLOCK + size, 7, None)
    assert sum(drain(blocks, Drip(data + b"beyond", size=piece))) == size
    assert [at for at, _ in shelf.blocks] == list(range(BLOCK, BLOCK + size, BLOCK))
    assert b"".join(block for _, block in shelf.blocks) == data
    assert shelf.checks == [len(block) for _, block in shelf.blocks]
    assert blocks.position == BLOCK + size
    assert shelf.ended == []  # that is for objects whose size only their end tells


@pytest.mark.parametrize("size", [0, 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_an_object_of_unknown_size_ends_where_it_ends(size: int) -> None:
    data, shelf = payload(size), Shelf()
    blocks = Blocks(shelf, 0, None, 7, None)
    assert drain(blocks, Drip(data))[-1] == 0
    assert b"".join(block for _, block in shelf.blocks) == data
    assert all(block for _, block in shelf.blocks)  # an empty one would change the digest
    assert shelf.checks == [None] * len(shelf.blocks)
    assert shelf.ended == [size]


@pytest.mark.parametrize(
    ("piece", "early"),
    [(BLOCK, []), (100 * KIB, [200, 600]), (128 * KIB, [128, 384, 896]), (BLOCK - 1, [1023])],
)
def test_the_first_block_can_be_read_before_it_is_whole(piece: int, early: list[int]) -> None:
    shelf, data = Shelf(), payload(2 * BLOCK)
    drain(Blocks(shelf, 0, len(data), 7, None), Drip(data, size=piece))
    assert [len(begun) // KIB for begun in shelf.begun] == early
    assert all(data.startswith(begun) for begun in shelf.begun)
    assert b"".join(block for _, block in shelf.blocks) == data


def test_of_other_blocks_nothing_is_told_before_they_are_whole() -> None:
    shelf, data = Shelf(), payload(2 * BLOCK)
    drain(Blocks(shelf, BLOCK, 3 * BLOCK, 7, None), Drip(data, start=BLOCK, size=128 * KIB))
    assert shelf.begun == []


def test_after_a_new_beginning_the_first_bytes_are_told_again() -> None:
    shelf, data = Shelf(), payload(BLOCK)
    blocks = Blocks(shelf, 0, BLOCK, 7, None)
    for _ in range(2):
        blocks.receive(Drip(data, size=128 * KIB))
        blocks.rewind()
    assert len(shelf.begun) == 2


def test_a_part_without_bytes_needs_no_answer() -> None:
    assert Blocks(Shelf(), 5, 5, 7, None).complete
    assert not Blocks(Shelf(), 5, 6, 7, None).complete
    assert not Blocks(Shelf(), 5, None, 7, None).complete


def test_a_response_is_taken_once() -> None:
    body = Drip(b"")
    blocks = Blocks(Shelf(), 0, 10, 7, body)
    assert blocks.take_body() is body
    assert blocks.take_body() is None


def test_a_rewound_part_begins_at_the_first_byte() -> None:
    shelf = Shelf()
    blocks = Blocks(shelf, 0, None, 7, None)
    blocks.receive(Drip(b"half", size=4))
    assert blocks.position == 4
    blocks.rewind()
    assert blocks.position == 0
    drain(blocks, Drip(b"all of it"))
    assert shelf.blocks == [(0, b"all of it")]


# -- passing over --------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 3, BLOCK])
def test_what_comes_before_the_range_is_passed_over(piece: int) -> None:
    body = Drip(b"0123456789", size=piece)
    skip(body, 4)
    rest = bytearray(20)
    assert rest[: body.readinto(memoryview(rest))] == b"456789"[:piece]


def test_more_than_a_block_is_passed_over() -> None:
    data = payload(2 * BLOCK + 10)
    body = Drip(data)
    skip(body, 2 * BLOCK + 5)
    rest = bytearray(20)
    assert rest[: body.readinto(memoryview(rest))] == data[-5:]


def test_an_answer_that_begins_where_it_should_is_left_alone() -> None:
    body = Drip(b"456", start=4)
    skip(body, 4)
    assert body.readinto(memoryview(bytearray(9))) == 3


@pytest.mark.parametrize("start", [1, 3, 5])
def test_an_answer_that_begins_elsewhere_is_refused(start: int) -> None:
    with pytest.raises(TransientError, match=f"asked for byte 4, the origin began at {start}"):
        skip(Drip(b"0123456789", start=start), 4)


def test_an_answer_that_ends_before_the_range_is_refused() -> None:
    with pytest.raises(TransientError, match="ended early"):
        skip(Drip(b"012"), 4)


# -- pace ----------------------------------------------------------------------


def pace(clock: FakeClock, deadline: float | None = None) -> tuple[Pace, Attempts]:
    attempts = RetryPolicy(3, deadline, clock).started("s3://lab/a.tar")
    return Pace(clock, 10.0, attempts), attempts


def test_a_connection_is_kept_while_it_delivers_enough_in_every_window() -> None:
    clock = FakeClock()
    watch, _ = pace(clock)
    for _ in range(5):
        clock.sleep(10.0)
        watch.check(10 * MIN_RATE)


def test_one_byte_too_few_in_a_window_is_too_slow() -> None:
    clock = FakeClock()
    watch, _ = pace(clock)
    clock.sleep(9.0)
    watch.check(0)  # not yet: the window is not over
    clock.sleep(1.0)
    with pytest.raises(TransientError, match=f"only {10 * MIN_RATE - 1} bytes in 10 s") as caught:
        watch.check(10 * MIN_RATE - 1)
    assert caught.value.timed_out


def test_a_good_window_does_not_excuse_the_next() -> None:
    clock = FakeClock()
    watch, _ = pace(clock)
    clock.sleep(10.0)
    watch.check(100 * MIN_RATE)
    clock.sleep(10.0)
    with pytest.raises(TransientError):
        watch.check(10 * MIN_RATE - 1)


def test_bytes_of_a_window_add_up() -> None:
    clock = FakeClock()
    watch, _ = pace(clock)
    for _ in range(10):
        clock.sleep(1.0)
        watch.check(MIN_RATE)


def test_a_readers_break_counts_neither_as_silence_nor_towards_the_deadline() -> None:
    clock = FakeClock()
    watch, attempts = pace(clock, deadline=15.0)
    for _ in range(3):
        clock.sleep(4.0)
        watch.check(4 * MIN_RATE)
        clock.sleep(1000.0)  # the reader is busy
        watch.wake()
    assert attempts.end == pytest.approx(3 * 1000.0 + 15.0)
    clock.sleep(2.9)
    watch.check(10 * MIN_RATE)


def test_two_breaks_in_a_row_count_once_each() -> None:
    clock = FakeClock()
    watch, attempts = pace(clock, deadline=15.0)
    for seconds in (100.0, 50.0):
        clock.sleep(seconds)
        watch.wake()
    assert attempts.end == pytest.approx(150.0 + 15.0)
    clock.sleep(10.0)
    watch.check(10 * MIN_RATE)


def test_a_break_without_a_deadline_sets_none() -> None:
    clock = FakeClock()
    watch, attempts = pace(clock)
    clock.sleep(1000.0)
    watch.wake()
    assert attempts.end is None


def test_the_deadline_ends_a_fetch_that_is_late_and_no_sooner() -> None:
    clock = FakeClock()
    watch, _ = pace(clock, deadline=15.0)
    clock.sleep(15.0)
    watch.check(1000 * MIN_RATE)
    clock.sleep(0.5)
    with pytest.raises(TransferTimeoutError, match="deadline of 15 s") as caught:
        watch.check(1000 * MIN_RATE)
    assert caught.value.url == "s3://lab/a.tar"
