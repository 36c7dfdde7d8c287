"""How many connections there are, that no more are used, and how much each asks for."""

from __future__ import annotations

import math
import threading
import time

import pytest

from shardcache.fetch.connections import MIB, Lane, Lanes
from tests.support.storetools import PATIENCE, wait_until


class Link:
    """Lanes on a clock of the test's own."""

    def __init__(self, most: int = 32, part_size: int | None = None) -> None:
        self.now = 100.0
        self.held: list[Lane] = []
        self.lanes = Lanes(most, part_size, lambda: self.now)

    def fill(self) -> int:
        """Take every spare lane there is; how many."""
        count = len(self.held)
        while (lane := self.lanes.spare()) is not None:
            self.held.append(lane)
        return len(self.held) - count

    def give_back(self, count: int) -> None:
        for _ in range(count):
            self.held.pop().give_back()

    def bring(self, rate: float, seconds: float, *, wanting: bool = True) -> int:
        """Let bytes come, in steps of a millisecond; ``wanting``, each takes what is spare.

        Returns:
            How many lanes were taken.
        """
        count = len(self.held)
        for _ in range(round(seconds * 1000)):
            self.now += 0.001
            self.lanes.received(round(rate / 1000))
            if wanting and (lane := self.lanes.spare()) is not None:
                self.held.append(lane)
        return len(self.held) - count


def take(lanes: Lanes, timeout: float | None = 0) -> Lane | None:
    lane = Lane(lanes)
    return lane if lanes.wait(lane, timeout) else None


# -- how many ------------------------------------------------------------------


def test_before_anything_is_known_there_are_a_few() -> None:
    assert Lanes(32).limit == 8
    assert Lanes(3).limit == 3


@pytest.mark.parametrize(
    ("seconds", "limit"), [(0.0, 4), (0.002, 4), (0.0041, 5), (0.0099, 10), (0.03, 16), (2.0, 16)]
)
def test_the_distance_of_the_origin_tells_where_to_begin(seconds: float, limit: int) -> None:
    lanes = Lanes(32)
    lanes.answered(seconds)
    assert lanes.limit == limit
    few = Lanes(2)
    few.answered(seconds)
    assert few.limit == 2


def test_the_quickest_answer_tells_how_far_it_is() -> None:
    lanes = Lanes(32)
    for seconds in (0.5, 0.009, 0.2):  # the first made a connection, the last met a queue
        lanes.answered(seconds)
    assert lanes.limit == 9


def test_what_was_measured_counts_more_than_the_distance() -> None:
    link = Link()
    link.lanes.answered(0.03)
    link.fill()
    link.bring(16 * 80e6, 0.11)
    assert link.lanes.limit == 32
    link.lanes.answered(0.001)
    assert link.lanes.limit == 32


def test_a_link_that_has_more_to_give_gets_more_connections() -> None:
    link = Link()
    link.lanes.answered(0.03)
    assert link.fill() == 16
    assert link.bring(16 * 80e6, 0.12) == 16 - link.fill()
    link.bring(32 * 80e6, 0.2)
    assert link.lanes.limit == 32


def test_a_link_that_is_full_does_not() -> None:
    link = Link()
    link.lanes.answered(0.002)
    assert link.fill() == 4
    assert link.bring(1e9, 0.2) == 4
    assert link.lanes.limit == 4
    assert link.lanes.crowded
    link.give_back(4)
    assert not link.lanes.crowded
    assert link.bring(1e9, 0.5) == 0  # it rests
    assert link.lanes.limit == 4


def test_after_a_rest_it_is_tried_again() -> None:
    link = Link()
    link.lanes.answered(0.002)
    link.fill()
    link.bring(1e9, 0.2)
    link.give_back(4)
    assert link.bring(1e9, 0.9) == 0
    assert link.bring(1e9, 0.2) == 4


def test_fewer_are_tried_once_some_were_given_back() -> None:
    link = Link()
    link.lanes.answered(0.03)
    link.fill()
    link.bring(16 * 80e6, 0.12)
    link.fill()
    link.bring(32 * 80e6, 0.2)  # kept, and a rest of a second
    link.bring(1e9, 1.2)
    assert link.lanes.limit == 16
    link.give_back(15)
    link.bring(1e9, 0.3)
    assert link.lanes.crowded  # one is still to be given back: nothing was measured
    link.give_back(1)
    link.bring(1e9, 0.2, wanting=False)
    assert (link.lanes.limit, link.lanes.crowded) == (16, False)


def test_connections_that_nobody_takes_are_not_kept() -> None:
    link = Link()
    link.lanes.answered(0.002)
    link.fill()
    while link.lanes.limit == 4:
        assert link.bring(1e9, 0.001) <= 1
    link.bring(1e9, 0.19, wanting=False)
    assert link.lanes.limit == 8
    link.bring(1e9, 0.02, wanting=False)
    assert link.lanes.limit == 4


def test_where_nobody_asks_for_more_nothing_is_tried() -> None:
    link = Link()
    link.lanes.answered(0.002)
    lanes = [link.lanes.spare() for _ in range(4)]
    assert None not in lanes
    link.bring(1e9, 1.0, wanting=False)
    assert link.lanes.limit == 4


def test_what_comes_while_lanes_are_free_tells_nothing() -> None:
    link = Link()
    link.lanes.answered(0.002)
    link.fill()
    link.give_back(1)
    link.bring(1e9, 1.0, wanting=False)
    assert link.lanes.limit == 4
    assert link.bring(1e9, 0.08) > 1
    assert link.lanes.limit == 8


# -- taking and giving back ----------------------------------------------------


def test_who_comes_too_many_waits() -> None:
    lanes = Lanes(2)
    with Lane(lanes), Lane(lanes):
        assert take(lanes) is None
        got: list[Lane | None] = []
        thread = threading.Thread(target=lambda: got.append(take(lanes, None)))
        thread.start()
        time.sleep(0.05)
        assert got == []
        assert lanes.crowded
    thread.join(PATIENCE)
    assert got != [None]
    assert not lanes.crowded
    another = take(lanes)
    assert another is not None
    assert take(lanes) is None


def test_what_is_given_back_twice_is_one_lane() -> None:
    lanes = Lanes(1)
    with Lane(lanes) as lane:
        lane.give_back()
        another = take(lanes)
        assert another is not None
    assert take(lanes) is None


def test_a_lane_that_is_lost_is_given_back() -> None:
    lanes = Lanes(1)
    assert take(lanes) is not None
    assert lanes.spare() is not None
    assert take(lanes) is not None


def test_new_lanes_are_taken_at_once() -> None:
    lanes = Lanes(32)
    held = [take(lanes) for _ in range(8)]
    assert None not in held
    threads = [threading.Thread(target=lambda: held.append(take(lanes, 30))) for _ in range(3)]
    for thread in threads:
        thread.start()
    lanes.answered(0.03)
    wait_until(lambda: len(held) == 11)
    assert None not in held
    for thread in threads:
        thread.join()


def test_a_shard_that_waits_comes_before_the_helpers_of_others() -> None:
    lanes = Lanes(2)
    first, second = take(lanes), take(lanes)
    assert first is not None and second is not None
    got: list[Lane | None] = []
    thread = threading.Thread(target=lambda: got.append(take(lanes, 30)))
    thread.start()
    wait_until(lambda: lanes.crowded)
    first.give_back()
    thread.join(PATIENCE)
    assert got[0] is not None
    assert lanes.spare() is None
    second.give_back()
    assert lanes.spare() is not None


# -- how much ------------------------------------------------------------------


def test_a_size_that_was_given_is_asked_for() -> None:
    lanes = Lanes(32, 3 * MIB)
    lanes.answered(0.001)
    lanes.part_done(64 * MIB, 0.01)
    assert lanes.part() == lanes.part(1) == lanes.part(1 << 40) == 3 * MIB


def test_before_anything_is_known_parts_are_small() -> None:
    assert Lanes(32).part() == 8 * MIB


@pytest.mark.parametrize(
    ("distance", "rate", "first", "further"),
    [
        (0.002, None, 64, 64),
        (0.002, 500e6, 64, 64),
        (0.002, 250e6, 48, 48),
        (0.002, 80e6, 16, 16),
        (0.03, None, 8, 16),
        (0.03, 80e6, 8, 16),
        (0.03, 250e6, 8, 48),
        (0.03, 1e3, 8, 16),
    ],
)
def test_a_request_takes_long_enough_to_be_worth_it(distance, rate, first, further) -> None:
    lanes = Lanes(32)
    lanes.answered(distance)
    if rate is not None:
        lanes.part_done(MIB, MIB / rate)
    assert (lanes.part() // MIB, lanes.part(1 << 40) // MIB) == (first, further)


def test_the_best_request_counts_until_it_has_faded() -> None:
    lanes = Lanes(32)
    lanes.answered(0.03)
    lanes.part_done(MIB, MIB / 400e6)
    lanes.part_done(MIB, MIB / 10e6)
    assert lanes.part(1 << 40) == 64 * MIB
    for _ in range(60):
        lanes.part_done(MIB, MIB / 10e6)
    assert lanes.part(1 << 40) == 16 * MIB


@pytest.mark.parametrize(("distance", "least"), [(0.002, 16), (0.03, 8)])
def test_what_is_left_is_shared_out_among_the_lanes(distance: float, least: int) -> None:
    lanes = Lanes(32)
    lanes.answered(distance)
    lanes.part_done(MIB, MIB / 1e9)
    left = 40 * MIB * lanes.limit
    assert lanes.part(left) == 40 * MIB
    assert lanes.part(left - 1) == 40 * MIB
    assert lanes.part(5 * MIB) == least * MIB


def test_while_other_shards_wait_nothing_is_shared_out() -> None:
    lanes = Lanes(1)
    lanes.answered(0.03)
    lanes.part_done(MIB, MIB / 1e9)
    with Lane(lanes):
        assert lanes.part(20 * MIB) == 20 * MIB
        thread = threading.Thread(target=take, args=(lanes, 30))
        thread.start()
        wait_until(lambda: lanes.crowded)
        assert lanes.part(20 * MIB) == 64 * MIB
    thread.join(PATIENCE)


def test_an_answer_in_no_time_is_a_fast_one() -> None:
    lanes = Lanes(32)
    lanes.answered(0.0)
    lanes.part_done(MIB, 0.0)
    assert math.isfinite(lanes.part(1 << 40))
