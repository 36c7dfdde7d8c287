"""How the number of connections is found, on links of several kinds."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from shardcache.fetch.climb import Climb

MOST = 32


def until_rest(climb: Climb, link: Callable[[int], float], now: float = 0.0) -> list[int]:
    """Tell the climb what a link brings until it rests; the numbers that were tried."""
    tried = []
    for _ in range(50):
        tried.append(climb.limit)
        climb.told(link(climb.limit), now, wanted=True)
        if climb.rest_until > now:
            return tried
    raise AssertionError(f"no end: {tried}")


def begun(limit: int, *, doubtful: bool = False) -> Climb:
    climb = Climb(MOST)
    climb.start(limit, doubtful=doubtful)
    return climb


def s3(count: int) -> float:
    return count * 80e6


def full(count: int) -> float:
    return 1e9


@pytest.mark.parametrize(
    ("link", "start", "doubtful", "tried", "end"),
    [
        (s3, 16, False, [16, 32], 32),
        (s3, 16, True, [16, 32, 16], 32),
        (s3, 4, False, [4, 8, 16, 32], 32),
        (s3, 5, False, [5, 10, 20, 32], 32),
        (full, 4, False, [4, 8], 4),
        (full, 4, True, [4, 8], 4),
        (lambda count: min(s3(count), 640e6), 4, False, [4, 8, 16, 4], 8),
        (lambda count: 1e9 / count, 4, False, [4, 8], 4),
    ],
)
def test_more_are_kept_while_they_add(link, start, doubtful, tried, end) -> None:
    climb = begun(start, doubtful=doubtful)
    assert until_rest(climb, link) == tried
    assert climb.limit == end


def test_more_must_bring_half_of_what_they_could() -> None:
    for gain, end in ((1.49, 4), (1.51, 8)):
        climb = begun(4)
        rates = itertools.chain([1e9, gain * 1e9], itertools.repeat(1e6))
        until_rest(climb, lambda _, rates=rates: next(rates))
        assert climb.limit == end


def test_fewer_are_kept_where_they_are_as_fast() -> None:
    climb = begun(4)
    until_rest(climb, s3)
    assert climb.limit == 32
    assert until_rest(climb, full, now=climb.rest_until) == [32, 16, 8, 4]
    assert climb.limit == 4


def test_fewer_are_not_kept_where_they_are_slower() -> None:
    climb = begun(4)
    until_rest(climb, s3)
    assert until_rest(climb, s3, now=climb.rest_until) == [32, 16]
    assert climb.limit == 32


def test_there_are_never_fewer_than_it_began_with() -> None:
    climb = begun(6)
    until_rest(climb, full)
    assert (climb.limit, climb.least) == (6, 6)


def test_a_rise_that_stays_when_the_connections_go_was_none_of_theirs() -> None:
    climb = begun(4, doubtful=True)
    climb.told(1e8, 0.0, wanted=True)
    assert climb.limit == 8
    climb.told(3e8, 0.0, wanted=True)
    assert climb.limit == 4
    climb.told(3e8, 0.0, wanted=True)
    assert (climb.limit, climb.rest_until) == (4, 1.0)


def test_where_nobody_wants_more_none_are_tried() -> None:
    climb = begun(4)
    climb.told(1e8, 0.0, wanted=False)
    assert (climb.limit, climb.rest_until) == (4, 1.0)


def test_what_was_not_made_use_of_is_taken_back() -> None:
    climb = begun(4)
    climb.told(1e8, 0.0, wanted=True)
    assert climb.trying
    climb.told(0.0, 0.0, wanted=False)
    assert (climb.limit, climb.trying) == (4, False)


def test_from_a_link_that_is_down_nothing_is_learnt() -> None:
    climb = begun(4)
    assert until_rest(climb, lambda count: 0.0) == [4, 8]
    assert climb.limit == 4


def test_rests_grow_while_nothing_comes_of_it() -> None:
    climb = begun(4)
    now, rests = 0.0, []
    for _ in range(8):
        until_rest(climb, full, now)
        rests.append(climb.rest_until - now)
        now = climb.rest_until
    assert rests == [1, 2, 4, 8, 16, 32, 32, 32]
    until_rest(climb, s3, now)
    assert climb.rest_until - now == 1


@pytest.mark.parametrize(("most", "start"), [(1, 16), (3, 16), (3, 0)])
def test_there_are_never_more_than_allowed(most: int, start: int) -> None:
    climb = Climb(most)
    climb.start(start)
    seen = []
    until_rest(climb, lambda count: seen.append(count) or s3(count))
    assert 1 <= min(seen) <= max(seen) <= most
