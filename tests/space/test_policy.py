"""What goes first, and what not at all: policies and pins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardcache.config import Config
from shardcache.layout import Layout
from shardcache.locks.sessions import Session
from shardcache.space.eviction import Policy
from shardcache.space.pins import pin, pinned_keys, remove_expired
from shardcache.store.entry import Entry
from shardcache.store.root import make_root
from shardcache.urls import parse_url

NOW = 1_800_000_000.0  # 2027
DAY = 86_400.0
URL = parse_url("s3://lab/a.tar")
KEYS = [f"{n:05x}{'0' * 27}" for n in range(8)]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return make_root(tmp_path / "cache", "test")


def entry(key: str = KEYS[0], used: float = NOW - 60) -> Entry:
    return Entry(f"/objects/{key}/v", key, "v", 10, used)


def config(layout: Layout, **options: Any) -> Config:
    return Config(layout.base.parent, **options)


# -- which policy ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "used", "began", "stays"),
    [
        ("working-set", NOW - 60, [NOW - 50, NOW - 100], True),
        ("working-set", NOW - 60, [NOW - 60], True),
        ("working-set", NOW - 61, [NOW - 60], False),  # before the oldest job began
        ("working-set", NOW - 60, [], False),  # no job runs
        ("working-set", NOW - DAY - 1, [NOW - 2 * DAY], False),  # nobody for so long
        ("working-set", NOW - DAY + 1, [NOW - 2 * DAY], True),
        ("working-set", NOW - DAY + 1, [NOW + 2 * DAY], True),  # its clock was wrong
        ("working-set", NOW + 60, [NOW - 100], True),  # a little ahead
        ("working-set", NOW + DAY, [NOW - 100], False),
        ("lru", NOW - 60, [NOW - 100], False),
        ("fifo", NOW - 60, [NOW - 100], False),
    ],
)
def test_what_a_policy_keeps(layout: Layout, kind, used, began, stays) -> None:
    sessions = [Session(layout, date) for date in began]
    policy = Policy.of(config(layout, policy=kind, protect_for="24h"), layout, NOW)
    assert policy.keeps(entry(used=used)) is stays
    assert not Policy.of(config(layout, policy=kind), layout, NOW, jobs=False).keeps(entry())
    for session in sessions:
        session.close()


# -- pins ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"[]", b"null", b'{"url": "x"}', b'{"url": "x", "until": "soon"}'),
        b"\xff" * 99,
    ],
)
def test_a_pin_that_makes_no_sense_keeps_its_shard(layout: Layout, text: bytes) -> None:
    pin(layout, URL, NOW)
    layout.pin(URL.key).write_bytes(text)
    assert pinned_keys(layout, NOW + 1) == {URL.key}
    assert remove_expired(layout, NOW + 1) == 0
