"""How many connections there are, and that no more are used."""

from __future__ import annotations

import threading

import pytest

from shardcache.lanes import Lanes
from tests.storetools import PATIENCE, wait_until

MIB = 1 << 20


@pytest.mark.parametrize(
    ("rate", "lanes"),
    [(1e3, 32), (50e6, 32), (80e6, 32), (100e6, 25), (240e6, 11), (2.4e9, 4), (9e9, 4)],
)
def test_connections_of_that_speed_fill_the_link(rate: float, lanes: int) -> None:
    found = Lanes(32)
    found.saw(MIB, MIB / rate)
    assert found.limit == lanes


def test_before_anything_is_known_there_are_a_few() -> None:
    assert Lanes(32).limit == 8


@pytest.mark.parametrize("most", [1, 3])
def test_there_are_never_more_than_allowed(most: int) -> None:
    found = Lanes(most)
    assert found.limit == most
    for rate in (1e6, 9e9):
        found.saw(MIB, MIB / rate)
        assert found.limit == most


def test_an_answer_in_no_time_is_a_fast_one() -> None:
    found = Lanes(32)
    found.saw(MIB, 0.0)
    assert found.limit == 4


def test_the_latest_shards_count_most() -> None:
    found = Lanes(32)
    found.saw(MIB, MIB / 2.5e9)
    found.saw(MIB, MIB / 80e6)
    assert found.limit == 4
    for _ in range(4):
        found.saw(MIB, MIB / 80e6)
    assert found.limit > 10


def test_who_comes_too_many_waits() -> None:
    lanes = Lanes(2)
    with lanes, lanes:
        assert not lanes.acquire(timeout=0)
        got = threading.Event()
        thread = threading.Thread(target=lambda: (lanes.acquire(), got.set()))
        thread.start()
        assert not got.wait(0.05)
    assert got.wait(PATIENCE)
    thread.join()
    assert lanes.acquire(timeout=0)
    assert not lanes.acquire(timeout=0)


def test_new_lanes_are_taken_at_once() -> None:
    lanes = Lanes(32)
    for _ in range(8):
        assert lanes.acquire(timeout=0)
    got: list[bool] = []
    threads = [threading.Thread(target=lambda: got.append(lanes.acquire(30))) for _ in range(3)]
    for thread in threads:
        thread.start()
    lanes.saw(MIB, MIB / 80e6)
    wait_until(lambda: got == [True] * 3)
    for thread in threads:
        thread.join()
