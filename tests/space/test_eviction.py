"""Eviction: the plan, the policies and the pins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.locks.sessions import Session
from shardcache.space.eviction import POLICIES, Limits, Reason, pin, pinned, plan, remove_expired
from shardcache.store.entry import Entry
from shardcache.urls import parse_url

NOW = 10_000.0
KEY = parse_url("s3://lab/a.tar").key


@st.composite
def shelves(draw: st.DrawFn) -> list[Entry]:
    used = st.sampled_from([0.0, 5000.0, 9000.0, 9999.0, NOW, 20_000.0])
    row = st.tuples(st.sampled_from(["one", "two"]), st.integers(0, 6), st.integers(0, 100), used)
    rows = draw(st.lists(row, max_size=10, unique_by=lambda row: row[:2]))
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


@given(shelves(), limits_, st.integers(0, 300), st.floats(0), st.data())
def test_a_plan_evicts_the_least_recently_used(entries, limits, reserved, since, data):
    busy = data.draw(st.sets(st.sampled_from(entries))) if entries else set()
    checked: list[Entry] = []

    def used(entry: Entry) -> float:
        return 0.0 if entry.used > NOW else entry.used  # an impossible date

    def old(entry: Entry) -> bool:
        return limits.max_age is not None and NOW - used(entry) > limits.max_age

    options = {"since": since, "reserved": reserved}
    options["in_use"] = lambda entry: checked.append(entry) or entry in busy
    found = plan(entries, limits, POLICIES["lru"], NOW, **options)
    gone = [entry for removal in found.removed for entry in removal.entries]
    kept = [entry for entry in entries if entry not in gone]

    # The reported numbers are exact.
    assert len(set(gone)) == len(gone) and found.kept == len(kept)
    assert found.kept_bytes == sum(entry.size for entry in kept)
    over = -1 if limits.max_size is None else found.kept_bytes + reserved - limits.max_size
    short = limits.free_needed - found.freed
    assert found.missing == max(0, over, short)

    # Entries in use or protected are never chosen, and no entry is checked in vain.
    free = [e for e in entries if e not in busy and used(e) < since]
    assert set(gone) <= set(free) and set(checked) <= set(gone) | busy

    # Entries are evicted in order, and the last one was needed.
    assert [used(entry) for entry in gone] == sorted(map(used, gone))
    stated = Reason.MAX_SIZE, Reason.MIN_FREE
    needed = [one.entries[0] for one in found.removed if one.reason in stated]
    if limits.everything or found.missing:
        assert set(gone) == set(free)
    elif needed:
        assert max(over, short) + needed[-1].size > 0
        later = [entry for entry in free if entry not in gone]
        assert all(used(entry) >= used(needed[-1]) for entry in later)
    for victim in found.removed:
        assert (victim.reason is Reason.ALL) == limits.everything
        if not limits.everything:
            assert (victim.reason is Reason.MAX_AGE) == old(victim.entries[0])
    assert limits.everything or not any(map(old, set(free) - set(gone)))


DAY = 86_400.0


@pytest.mark.parametrize(
    ("used", "started", "stays"),
    [
        (-60, [-50, -100], True),
        (-61, [-60], False),  # used before the oldest job
        (-60, [], False),  # no running job
        (-DAY - 1, [-2 * DAY], False),  # longer than a day
        (-DAY + 1, [-2 * DAY], True),
        (-DAY + 1, [2 * DAY], True),  # a wrong clock
        (DAY, [-100], False),
    ],
)
def test_running_jobs_protect_recently_used_shards(layout, used, started, stays):
    now = 1_800_000_000.0
    sessions = [Session(layout, now + date) for date in started]
    entry = Entry("/objects/key/v", "key", "v", 10, now + used)
    for name, keeps in ("working-set", stays), ("lru", False):
        since = POLICIES[name].kept_since(layout, now)
        found = plan([entry], Limits(everything=True), POLICIES[name], now, since=since)
        assert found.kept == keeps
    for session in sessions:
        session.close()


def test_a_policy_may_evict_the_largest_first():
    policy = POLICIES["lru"]._replace(rank=lambda links, last_used: -links[0].size)
    entries = [Entry(f"/{size}/v", f"{size}", "v", size, NOW - size) for size in (1, 3, 2)]
    found = plan(entries, Limits(max_size=1), policy, NOW)
    assert [removal.size for removal in found.removed] == [3, 2]


def test_an_invalid_pin_keeps_its_shard(layout):
    url = parse_url("s3://lab/a.tar")
    for text in (b"", b"{", b"[]", b"null", b'{"url": "x", "until": "soon"}', b"\xff" * 99):
        pin(layout, url, 1.0)
        layout.pin(url.key).write_bytes(text)
        assert pinned([layout], 2.0) == {url.key: ""} and remove_expired(layout, 2.0) == 0


@pytest.mark.parametrize("damaged", ["first", "second"])
def test_a_damaged_version_leaves_before_the_intact_one(tmp_path, damaged):
    entries = []
    for version, name in enumerate(("first", "second"), 1):
        directory = tmp_path / f"{KEY}/{str(version) * 24}-64"
        directory.mkdir(parents=True)
        if name != damaged:
            (directory / "a.tar").write_bytes(bytes(100))
        entries.append(Entry(str(directory), KEY, str(version) * 24, 100, NOW))
    found = plan(entries, Limits(max_size=100), POLICIES["lru"], NOW)
    (removal,) = found.removed
    assert removal.entries == (entries[damaged == "second"],)
