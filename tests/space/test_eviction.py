"""Eviction: the plan is pure and exact, and what is in use or protected stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.locks.flock import Holder, KeyLock
from shardcache.locks.sessions import Session
from shardcache.space.eviction import Limits, Reason, Victim, apply, plan, sweep
from shardcache.space.policy import SKEW, Policy
from shardcache.store.store import Entry, Store
from tests.support.storetools import begin, make_store, metadata_for, publish

NOW = 10_000.0


@st.composite
def shelves(draw: st.DrawFn) -> list[Entry]:
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["one", "two"]),
                st.integers(0, 6),
                st.integers(0, 100),
                st.sampled_from([0.0, 5000.0, 9000.0, 9999.0, NOW, 20_000.0]),
            ),
            max_size=10,
            unique_by=lambda row: row[:2],
        )
    )
    return [
        Entry(f"/{base}/{key:032x}/{'0' * 24}-{size:x}", f"{key:032x}", "0" * 24, size, used)
        for base, key, size, used in rows
    ]


limits_ = st.builds(
    Limits,
    max_size=st.none() | st.integers(0, 500),
    free_needed=st.integers(0, 300),
    max_age=st.none() | st.sampled_from([0.0, 500.0, 6000.0]),
    everything=st.booleans(),
)


def ahead(date: float) -> bool:
    return date > NOW + SKEW


def turn(entry: Entry) -> tuple[bool, float]:
    """Its place in the queue: what was last used in the future goes first."""
    return not ahead(entry.used), entry.used


def protected(entry: Entry, since: float | None) -> bool:
    if since is None:
        return False
    if ahead(entry.used):
        return ahead(since) and entry.used >= since
    return entry.used >= (NOW - 86_400 if ahead(since) else since)


@given(shelves(), limits_, st.integers(0, 300), st.none() | st.floats(0, 2 * NOW), st.data())
def test_a_plan_meets_the_limits_or_says_exactly_what_is_missing(
    entries, limits, reserved, protect_since, data
) -> None:
    busy = set(data.draw(st.lists(st.sampled_from(entries), unique=True)) if entries else [])
    asked: list[Entry] = []

    def in_use(entry: Entry) -> bool:
        asked.append(entry)
        return entry in busy

    found = plan(
        entries, limits, NOW, reserved=reserved, policy=Policy(since=protect_since), in_use=in_use
    )
    gone = [entry for victim in found.victims for entry in victim.entries]
    kept = [entry for entry in entries if entry not in gone]

    # What stays is what is left over, to the byte.
    assert len(set(gone)) == len(gone) and found.kept == len(kept)
    assert found.kept_bytes == sum(entry.size for entry in kept)
    assert found.freed == sum(entry.size for entry in gone)

    # In use and protected are never chosen, and nobody is asked in vain.
    assert not busy & set(gone)
    assert set(asked) == set(gone) | (busy & set(asked))
    assert not any(protected(entry, protect_since) for entry in [*gone, *asked])

    # The limits hold, or all that may go has gone and the rest is told.
    over = 0
    if limits.max_size is not None:
        over = found.kept_bytes + reserved - limits.max_size
    short = limits.free_needed - found.freed
    assert found.missing == max(0, over, short)
    free_to_go = [
        entry for entry in kept if entry not in busy and not protected(entry, protect_since)
    ]
    if found.missing or limits.everything:
        assert free_to_go == []
    if limits.max_age is not None:
        assert all(NOW - entry.used <= limits.max_age for entry in free_to_go)

    # Nothing goes that need not, and the least recently used goes first.
    for victim in found.victims:
        old = limits.max_age is not None and NOW - victim.entries[0].used > limits.max_age
        assert (victim.reason is Reason.ALL) == limits.everything
        if not limits.everything:
            assert (victim.reason is Reason.MAX_AGE) == old
    needless = [v for v in found.victims if v.reason in (Reason.MAX_SIZE, Reason.MIN_FREE)]
    if needless:
        last = needless[-1].entries[0]
        without_last = found.freed - last.size
        later = sum(v.size for v in found.victims if turn(v.entries[0]) > turn(last))
        total = sum(entry.size for entry in entries)
        still = limits.free_needed - (without_last - later)
        if limits.max_size is not None:
            still = max(still, total - (without_last - later) + reserved - limits.max_size)
        assert still > 0
    assert [turn(e) for e in gone] == sorted(turn(e) for e in gone)
    if needless and free_to_go:
        assert max(turn(v.entries[0]) for v in needless) <= min(turn(entry) for entry in free_to_go)


def test_a_plan_over_nothing_is_empty_and_says_what_is_missing() -> None:
    assert plan([], Limits(), NOW).victims == ()
    assert plan([], Limits(max_size=10), NOW, reserved=25).missing == 15
    assert plan([], Limits(free_needed=7), NOW).missing == 7


# -- carrying it out -----------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path / "cache")


@pytest.mark.locks_work("flock")
def test_what_really_went_is_reported(store: Store) -> None:
    entries = [publish(store, f"s3://lab/{n}.tar", bytes(10 + n), used=n) for n in range(4)]
    fd = os.open(entries[1].data, os.O_RDONLY)
    import fcntl

    fcntl.flock(fd, fcntl.LOCK_SH)
    gone = entries[2]
    store.evict(gone)
    chosen = [Victim((entry,), Reason.MAX_SIZE) for entry in entries]
    assert [v.entries for v in apply(store, chosen)] == [(entries[0],), (entries[3],)]
    assert [e.key for e in store.entries()] == [entries[1].key]
    os.close(fd)


@pytest.mark.locks_work
def test_a_sweep_removes_what_the_dead_left_and_says_so(store: Store) -> None:
    publish(store)
    partial = begin(store.layout, metadata_for(data=b"x" * 5000))
    partial.write(0, memoryview(b"x" * 5000))
    partial.close()
    live = begin(store.layout, metadata_for(data=b"y"))
    os.truncate(publish(store, "s3://lab/b.tar", b"damaged").data, 1)
    store.quarantine(next(store.entries_of(_key("s3://lab/b.tar"))).key, "test")
    lock = KeyLock(store.layout.key_lock("ab" * 16))
    lock.try_acquire(Holder.this_process(rank=None, job=None, now=1.0))
    lock.release()
    dead = store.layout.sessions / f"{'0' * 32}.session"
    dead.touch()
    session = Session(store.layout, 1.0)

    dry = list(sweep(store, dry_run=True))
    assert lock.path.exists() and dead.exists()
    assert list(sweep(store)) == dry
    assert (dry[0].reason, dry[0].name) == (Reason.ORPHAN, str(partial.path))
    assert [r.reason for r in dry] == [Reason.ORPHAN, Reason.QUARANTINED]
    assert dry[0].size >= 5000
    assert not lock.path.exists() and not dead.exists()
    assert session.path.exists() and live.path.exists()
    assert list(sweep(store)) == []
    live.discard()
    session.close()


def test_a_partial_claimed_during_a_sweep_is_not_reported(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store.layout, metadata_for(data=b"x")).close()
    monkeypatch.setattr("shardcache.space.eviction.remove_leftover", lambda layout, path: False)
    assert list(sweep(store)) == []


def _key(url: str) -> str:
    return metadata_for(url).key
