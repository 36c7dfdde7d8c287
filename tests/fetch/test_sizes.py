"""How long a shard probably is."""

from __future__ import annotations

from shardcache.fetch import sizes
from shardcache.fetch.sizes import Sizes
from shardcache.urls import ShardURL, parse_url


def url(name: str) -> ShardURL:
    return parse_url(f"s3://lab/{name}")


def test_the_latest_beside_it_tells() -> None:
    known = Sizes()
    assert known.guess(url("train/0.tar")) is None
    known.learn(url("train/0.tar"), 10)
    known.learn(url("train/1.tar"), 12)
    known.learn(url("val/0.tar"), 99)
    assert known.guess(url("train/2.tar")) == 12
    assert known.guess(url("val/1.tar")) == 99
    assert known.guess(url("train/more/0.tar")) is None
    assert known.guess(url("0.tar")) is None


def test_what_nobody_knows_is_forgotten() -> None:
    known = Sizes()
    known.learn(url("0.tar"), 10)
    known.learn(url("1.tar"), None)
    assert known.guess(url("2.tar")) is None


def test_a_folder_that_deceived_twice_is_not_believed_again() -> None:
    known = Sizes()
    for _ in range(2):
        known.learn(url("odd/0.tar"), 10)
        assert known.guess(url("odd/1.tar")) == 10
        known.missed(url("odd/1.tar"))
        assert known.guess(url("odd/1.tar")) is None
    known.learn(url("odd/2.tar"), 10)
    known.learn(url("even/0.tar"), 10)
    assert known.guess(url("odd/3.tar")) is None
    assert known.guess(url("even/1.tar")) == 10


def test_memory_is_bounded() -> None:
    known = Sizes()
    for number in range(3 * sizes._MOST):
        known.learn(url(f"{number}/0.tar"), number)
        known.missed(url(f"{number}-odd/0.tar"))
    assert len(known._latest) == sizes._MOST
    assert len(known._misses) <= sizes._MOST
    assert known.guess(url(f"{3 * sizes._MOST - 1}/1.tar")) is not None
    assert known.guess(url("0/1.tar")) is None
