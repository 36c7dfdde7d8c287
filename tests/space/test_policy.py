"""What goes first, and what not at all: policies, the maps of what jobs used, pins."""

from __future__ import annotations

import json
import math
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from shardcache.config import Config
from shardcache.layout import Layout
from shardcache.locks.sessions import LiveSession, Session, live_sessions
from shardcache.space.pins import Pin, pin, pinned_keys, pins, remove_expired, unpin
from shardcache.space.policy import Policy
from shardcache.space.uses import SLOTS, job_name, note_use, released, remove_stale_maps
from shardcache.store.entry import Entry
from shardcache.store.root import make_root
from shardcache.store.store import Store
from shardcache.urls import parse_url
from tests.support.storetools import Parent, forked, no_descriptor_left, publish, refusing

NOW = 1_800_000_000.0  # 2027
DAY = 86_400.0
KEYS = [f"{n:05x}{'0' * 27}" for n in range(8)]
A, B, C = (job_name(name, 0.0) for name in ("a", "b", "c"))


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return make_root(tmp_path / "cache", "test")


def entry(key: str = KEYS[0], used: float = NOW - 60) -> Entry:
    return Entry(f"/objects/{key}/v", key, "v", 10, used)


def config(layout: Layout, **options: Any) -> Config:
    return Config(layout.base.parent, **options)


# -- which policy ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "used", "since", "protect_for", "gone", "stays"),
    [
        ("working-set", NOW - 60, NOW - 100, DAY, False, True),
        ("working-set", NOW - 60, NOW - 60, DAY, False, True),
        ("working-set", NOW - 61, NOW - 60, DAY, False, False),  # before the oldest job began
        ("working-set", NOW - 60, None, DAY, False, False),  # no job runs
        ("working-set", NOW - 60, NOW - 100, DAY, True, False),  # only ended jobs used it
        ("working-set", NOW - DAY, NOW - 2 * DAY, DAY, False, False),  # nobody for so long
        ("working-set", NOW - DAY + 1, NOW - 2 * DAY, DAY, False, True),
        ("lru", NOW - 60, NOW - 100, DAY, False, False),
        ("fifo", NOW - 60, NOW - 100, DAY, False, False),
    ],
)
def test_what_a_policy_keeps(kind, used, since, protect_for, gone, stays) -> None:
    policy = Policy(kind, since, NOW - protect_for, lambda key, used: gone)
    assert policy.keeps(entry(used=used), NOW) is stays


@pytest.mark.parametrize("kind", ["working-set", "lru", "fifo"])
def test_what_is_pinned_stays_under_every_policy(kind) -> None:
    policy = Policy(kind, pinned=frozenset({KEYS[1]}))
    assert [policy.keeps(entry(key, used=0.0), NOW) for key in KEYS[:3]] == [False, True, False]


def test_fifo_goes_by_the_fetch_and_the_others_by_the_last_use(layout: Layout) -> None:
    store = Store(layout)
    entries = [publish(store, f"s3://lab/{n}.tar", used=NOW - n) for n in range(3)]
    for number, each in enumerate(entries):
        os.utime(each.path, (1000.0 * number, 1000.0 * number))
    lru, fifo = Policy("lru"), Policy("fifo")
    assert sorted(entries, key=lru.order) == entries[::-1]
    assert sorted(entries, key=fifo.order) == entries
    store.evict(entries[2])
    assert fifo.order(entries[2]) == 0.0


@pytest.mark.locks_work("flock")
def test_the_policy_of_the_moment_is_of_the_jobs_that_run_and_of_what_is_pinned(
    layout: Layout,
) -> None:
    pin(layout, parse_url("s3://lab/a.tar"), None)
    for kind in ("working-set", "lru", "fifo"):
        options = config(layout, policy=kind, protect_for="2h")
        before = Policy.now(options, layout, NOW)
        session = Session(layout, NOW - 100, A)
        during = Policy.now(options, layout, NOW)
        session.close()
        assert before.kind == during.kind == kind
        assert len(before.pinned) == 1 and before.since is None
        assert during.since == (NOW - 100 if kind == "working-set" else None)
        assert during.recent == (NOW - 7200 if kind == "working-set" else -math.inf)
        assert Policy.now(options, layout, NOW, jobs=False).pinned == before.pinned
        assert Policy.now(options, layout, NOW, jobs=False).since is None


@pytest.mark.locks_work("flock")
def test_a_clock_that_leaps_ahead_makes_nothing_forgotten(layout: Layout) -> None:
    options, year = config(layout), 365 * DAY
    session = Session(layout, NOW - 100)
    ahead = Policy.now(options, layout, NOW + year, steady=NOW)
    behind = Policy.now(options, layout, NOW - 50, steady=NOW)
    session.close()
    assert ahead.keeps(entry(used=NOW - 60), NOW + year)
    assert not ahead.keeps(entry(used=NOW - 2 * DAY), NOW + year)
    assert behind.recent == NOW - 50 - DAY


# -- maps of uses ----------------------------------------------------------------


def live(*jobs: str | None, started: float = 0.0) -> list[LiveSession]:
    return [LiveSession(started, job) for job in jobs]


def test_what_only_ended_jobs_used_is_released(layout: Layout) -> None:
    with no_descriptor_left():
        for job, keys in ((A, KEYS[:3]), (B, KEYS[2:4]), (C, KEYS[1:2])):
            for key in keys:
                note_use(layout, job, key)
        told = {
            name: [released(layout, live(*jobs))(key, 0.0) for key in KEYS[:5]]
            for name, jobs in {"": (), "b": (B,), "bc": (B, C), "abc": (A, B, C)}.items()
        }
    assert told["b"] == [True, True, False, False, False]
    assert told["bc"] == [True, False, False, False, False]
    assert told["abc"] == [False] * 5
    assert told[""] == [True, True, True, True, False]


def test_what_was_used_after_a_job_ended_was_for_another(layout: Layout) -> None:
    note_use(layout, A, KEYS[0])
    os.utime(layout.uses(A), (5000.0, 5000.0))
    is_released = released(layout, live(B))
    assert [is_released(KEYS[0], used) for used in (4000.0, 5000.0, 5002.0)] == [True, True, False]


def test_a_session_that_keeps_no_map_may_use_anything(layout: Layout) -> None:
    note_use(layout, A, KEYS[0])
    assert released(layout, live(B))(KEYS[0], 0.0)
    assert not released(layout, live(B, None))(KEYS[0], 0.0)


def test_a_map_that_is_lost_or_none_of_ours_releases_nothing(
    layout: Layout, tmp_path: Path
) -> None:
    note_use(layout, A, KEYS[0])
    is_released = released(layout, live(B))
    assert is_released(KEYS[0], 0.0)
    path = layout.uses(A)
    path.unlink()
    assert is_released(KEYS[0], 0.0)  # decided by what was there
    assert not released(layout, live(B))(KEYS[0], 0.0)
    os.mkfifo(path)
    assert not released(layout, live(B))(KEYS[0], 0.0)
    path.unlink()
    (tmp_path / "mine").write_bytes(b"\1" * 10)
    path.symlink_to(tmp_path / "mine")
    assert not released(layout, live(B))(KEYS[0], 0.0)
    note_use(layout, A, KEYS[5])
    assert (tmp_path / "mine").read_bytes() == b"\1" * 10
    path.unlink()
    os.link(tmp_path / "mine", path)
    note_use(layout, A, KEYS[5])
    assert (tmp_path / "mine").read_bytes() == b"\1" * 10


def test_keys_that_share_a_byte_are_kept_together(layout: Layout) -> None:
    twin = KEYS[0][:5] + "f" * 27
    note_use(layout, A, KEYS[0])
    assert released(layout, live(B))(twin, 0.0)
    note_use(layout, B, twin)
    assert not released(layout, live(B))(KEYS[0], 0.0)


def test_a_map_is_small_whatever_is_in_it(layout: Layout) -> None:
    for key in ("0" * 32, "f" * 32, "80000" + "0" * 27):
        note_use(layout, A, key)
    found = layout.uses(A).stat()
    assert found.st_size <= SLOTS and found.st_blocks * 512 < 64 * 1024
    assert stat.S_IMODE(found.st_mode) == layout.modes.file


def test_where_no_map_can_be_written_nothing_is_said(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refusing(28, real=os.pwrite))
        note_use(layout, A, KEYS[0])
        patch.setattr(os, "open", refusing(30, real=os.open))
        note_use(layout, A, KEYS[0])
    assert not released(layout, live(B))(KEYS[0], 0.0)


def test_maps_that_release_nothing_any_more_are_removed(layout: Layout) -> None:
    for job, date in ((A, 1000.0), (B, 3000.0), (C, 5000.0)):
        note_use(layout, job, KEYS[0])
        os.utime(layout.uses(job), (date, date))
    stranger = layout.sessions / "notes.uses"
    stranger.touch()
    # A ended before the job began that runs: dates say all. C ended after that.
    assert remove_stale_maps(layout, [LiveSession(2000.0, B)]) == 1
    assert not layout.uses(A).exists() and layout.uses(C).exists()
    assert remove_stale_maps(layout, [LiveSession(4000.0, B)]) == 0  # its own stays, old or not
    assert remove_stale_maps(layout, []) == 2
    assert list(layout.sessions.iterdir()) == [stranger]


def test_a_job_is_known_by_its_launchers_name_or_by_its_start() -> None:
    assert job_name("17", 1.0) == job_name("17", 2.0) != job_name("18", 1.0)
    assert job_name(None, 1.0) == job_name(None, 1.0) != job_name(None, 2.0)
    assert job_name("1.0", 1.0) != job_name(None, 1.0)


@pytest.mark.locks_work("flock")
def test_a_session_says_which_map_is_its_jobs(layout: Layout) -> None:
    first, second = Session(layout, 5.0, A), Session(layout, 7.0)
    assert sorted(live_sessions(layout)) == [(5.0, A), (7.0, None)]
    first.path.write_text("another text")
    assert {session.job for session in live_sessions(layout)} == {None}
    first.close()
    second.close()


@pytest.mark.locks_work("flock")
def test_a_job_that_was_killed_is_an_ended_one(layout: Layout) -> None:
    def work(parent: Parent) -> None:
        session = Session(layout, NOW - 100, A)
        note_use(layout, A, KEYS[0])
        parent.say(session.path.name)
        parent.hear()

    mine = Session(layout, NOW - 50, B)
    options = config(layout)
    with forked(work) as child:
        child.hear()
        os.utime(layout.uses(A), (NOW - 40, NOW - 40))
        used, fresh = entry(used=NOW - 40), entry(KEYS[1], NOW - 40)
        assert Policy.now(options, layout, NOW).keeps(used, NOW)
        child.kill(signal.SIGKILL)
        assert not Policy.now(options, layout, NOW).keeps(used, NOW)
        assert Policy.now(options, layout, NOW).keeps(fresh, NOW)  # nobody has used it yet
    mine.close()


# -- pins ------------------------------------------------------------------------

URL = parse_url("s3://lab/a.tar")


def test_a_pin_holds_until_its_time_is_over_or_it_is_taken_back(layout: Layout) -> None:
    with no_descriptor_left():
        assert pins(layout) == [] and unpin(layout, URL.key) is False
        pin(layout, URL, NOW)
        assert pins(layout) == [Pin(URL.key, "s3://lab/a.tar", NOW)]
        assert pinned_keys(layout, NOW - 1) == {URL.key} and pinned_keys(layout, NOW) == set()
        pin(layout, URL, None)
        assert pinned_keys(layout, 100 * NOW) == {URL.key}
        assert unpin(layout, URL.key) is True
        assert pinned_keys(layout, 0.0) == set()
        assert list(layout.partial.iterdir()) == []


def test_pins_whose_time_is_over_are_swept_and_nothing_else(layout: Layout) -> None:
    for number, until in enumerate((NOW - 1, NOW + 1, None)):
        pin(layout, parse_url(f"s3://lab/{number}.tar"), until)
    (layout.pins / "notes.txt").touch()
    assert remove_expired(layout, NOW) == 1
    assert remove_expired(layout, NOW) == 0
    assert sorted(p.until or 0.0 for p in pins(layout)) == [0.0, NOW + 1]
    assert (layout.pins / "notes.txt").exists()


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"[]", b"null", b'{"url": "x"}', b'{"url": "x", "until": "soon"}'),
        *(b'{"url": "x", "until": NaN}', b"[" * 5000, b"\xff" * 99),
    ],
)
def test_a_pin_that_makes_no_sense_keeps_its_shard(layout: Layout, text: bytes) -> None:
    pin(layout, URL, NOW)
    layout.pin(URL.key).write_bytes(text)
    assert pinned_keys(layout, NOW + 1) == {URL.key}
    assert remove_expired(layout, NOW + 1) == 0


def test_a_pin_holds_no_secret(layout: Layout) -> None:
    signed = "https://host/a.tar?X-Amz-Signature=abc&X-Amz-Credential=me&part=1"
    pin(layout, parse_url(signed), None)
    [path] = layout.pins.iterdir()
    assert "abc" not in path.read_text() and "part=1" in json.loads(path.read_text())["url"]


def test_a_pin_on_a_disk_that_is_full_is_an_error_and_leaves_nothing(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shardcache.layout.io.BufferedWriter", refusing(28, real=None))
        with pytest.raises(OSError, match="ENOSPC"):
            pin(layout, URL, None)
    assert pins(layout) == [] and list(layout.partial.iterdir()) == []


def test_a_directory_of_pins_that_is_a_link_is_not_followed(layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    layout.pins.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        pin(layout, URL, None)
    assert list((tmp_path / "elsewhere").iterdir()) == []
