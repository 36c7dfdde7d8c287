"""Wall clocks that are wrong, differ and are set: right bytes, bounded waits, sane evictions.

Nothing but the order of evictions, and ages that people ask for, may depend on them.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.errors import TransferError
from shardcache.layout import Layout, is_idle
from shardcache.locks.flock import Holder, KeyLock
from shardcache.locks.sessions import Session
from shardcache.origins.base import TransientError
from shardcache.space.eviction import Limits, Reason, plan
from shardcache.space.policy import SKEW, Policy
from shardcache.store.digest import BLOCK
from shardcache.store.store import Entry
from tests.support.fakes import Fault, MemoryOrigin
from tests.support.shop import Shop
from tests.support.tars import make_tar
from tests.support.workers import LIBFAKETIME, YEAR, Clock

needs_libfaketime = pytest.mark.skipif(LIBFAKETIME is None, reason="libfaketime is not installed")
AHEAD, BEHIND = 10 * YEAR, -10 * YEAR
jumps = pytest.mark.parametrize("offset", [AHEAD, BEHIND], ids=["2036", "2016"])


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


# -- real processes -------------------------------------------------------------------


def in_another_decade(shop: Shop, clock: Clock, offset: int) -> None:
    """Fetch and hit with a wrong clock from the start, beside a right one, and while it is set."""
    clock.set(offset)
    a, b, c = shop.urls[:3]
    with shop.worker(clock) as wrong, shop.worker() as right:
        assert abs(wrong.ask("time") - (time.time() + offset)) < 60
        shop.expect(wrong, a)
        inode = shop.entries()[a].data.stat().st_ino
        shop.expect(right, a)
        shop.expect(right, b)
        shop.expect(wrong, b)
        for away in (-offset, 0, offset):
            clock.set(away)
            shop.expect(wrong, a)
            shop.expect(wrong, c)
            shop.expect(right, c)
        assert len(shop.entries()) == 3
        assert shop.entries()[a].data.stat().st_ino == inode  # nobody fetched it again


@jumps
def test_a_process_in_another_decade_shares_the_cache(
    shop: Shop, tmp_path: Path, offset: int
) -> None:
    in_another_decade(shop, Clock(tmp_path / "clock"), offset)


@needs_libfaketime
@pytest.mark.parametrize(
    ("offset", "monotonic"), [(AHEAD, True), (BEHIND, False)], ids=["2036, monotonic too", "2016"]
)
def test_and_so_it_does_when_all_of_libc_is_wrong(
    shop: Shop, tmp_path: Path, offset: int, monotonic: bool
) -> None:
    in_another_decade(shop, Clock(tmp_path / "clock", "libfaketime", monotonic=monotonic), offset)


def wait_through_a_jump(shop: Shop, clock: Clock, offset: int) -> None:
    """The clock is set in the middle of a wait for a holder that never ends."""
    url = shop.urls[0]
    with Cache(shop.path, cache_local=True, min_free=0) as cache:
        cache._here().coordinator()
        key = cache.parse(url).key
        lock = KeyLock(Layout.of_root(shop.path).key_lock(key))
        assert lock.try_acquire(Holder(4711, "node-7", None, None, time.time()))
        with shop.worker(clock, lock_timeout=1.5, stale_after=60) as waiter:
            waiter.tell("fetch", url)
            time.sleep(0.5)
            clock.set(offset)
            answer, seconds = waiter.hear()
        lock.release()
    assert answer["error"] == "LockTimeoutError"
    assert "process 4711 on node-7" in answer["message"]
    assert 1.5 <= seconds < 30


@jumps
def test_a_wait_lasts_as_long_as_it_should_when_the_clock_is_set(
    shop: Shop, tmp_path: Path, offset: int
) -> None:
    wait_through_a_jump(shop, Clock(tmp_path / "clock"), offset)


@needs_libfaketime
def test_and_so_it_does_when_the_clock_of_libc_is_set(shop: Shop, tmp_path: Path) -> None:
    wait_through_a_jump(shop, Clock(tmp_path / "clock", "libfaketime"), AHEAD)


# -- what is evicted --------------------------------------------------------------------


def test_what_was_used_in_the_future_goes_first_and_makes_room(shop: Shop, tmp_path: Path) -> None:
    """A node was ten years ahead for an hour. What it used then must not stay for ten years."""
    budget = 4 * shop.size
    clock = Clock(tmp_path / "clock")
    clock.set(AHEAD)
    with shop.worker(clock, max_size=budget) as wrong:
        for url in shop.urls[:3]:
            shop.expect(wrong, url)
    with shop.worker(max_size=budget) as right:
        shop.expect(right, shop.urls[3])
        assert len(shop.entries()) == 4  # nothing goes that need not
        for count, url in enumerate(shop.urls[4:7], 1):
            shop.expect(right, url)
            kept = shop.entries()
            assert len(kept) == 4
            assert set(kept) == {*shop.urls[count:3], *shop.urls[3 : 4 + count]}
        # The rest was used by a running job: as ever, the next is streamed.
        shop.expect(right, shop.urls[7], stored=False)


def test_a_clock_set_back_in_mid_run_leaves_the_running_jobs_shards(
    shop: Shop, tmp_path: Path
) -> None:
    budget = 4 * shop.size
    clock = Clock(tmp_path / "clock")
    clock.set(AHEAD)
    with shop.worker(clock, max_size=budget) as job:
        for url in shop.urls[:3]:
            shop.expect(job, url)
        clock.set(0)
        shop.expect(job, shop.urls[3])
        shop.expect(job, shop.urls[4], stored=False)
        assert set(shop.entries()) == set(shop.urls[:4])
        # When the next job starts nobody can tell whose they are: they go, one at a time.
        with shop.worker(max_size=budget) as other:
            shop.expect(other, shop.urls[5])
            assert set(shop.entries()) == {*shop.urls[1:4], shop.urls[5]}


def test_a_clock_set_forward_in_mid_run_leaves_the_running_jobs_shards(
    shop: Shop, tmp_path: Path
) -> None:
    budget = 4 * shop.size
    clock = Clock(tmp_path / "clock")
    with shop.worker(clock, max_size=budget) as job:
        for url in shop.urls[:3]:
            shop.expect(job, url)
        clock.set(AHEAD)
        shop.expect(job, shop.urls[3])
        shop.expect(job, shop.urls[4], stored=False)
        assert set(shop.entries()) == set(shop.urls[:4])
        assert job.ask("clean", {"max_age": "30d"}) == []


def test_a_job_that_began_before_the_clock_was_right_keeps_no_shard_for_ever(
    shop: Shop, tmp_path: Path
) -> None:
    """The battery was empty: the machine believes in 1970 until the network is up."""
    budget = 3 * shop.size
    with shop.worker(max_size=budget) as earlier:
        for url in shop.urls[:3]:
            shop.expect(earlier, url)
    for url in shop.urls[:3]:
        shop.use(url, time.time() - 7 * 86400)
    clock = Clock(tmp_path / "clock")
    clock.set(-int(time.time()) + 60)
    with shop.worker(clock, max_size=budget) as job:
        assert job.ask("time") < 1e6
        shop.expect(job, shop.urls[3])  # its session says 1970
        clock.set(0)
        for url in shop.urls[4:6]:
            shop.expect(job, url)
        assert set(shop.urls[4:6]) < set(shop.entries())


def test_ages_count_from_when_the_clock_was_right_again(shop: Shop, tmp_path: Path) -> None:
    with shop.worker() as worker:
        for url in shop.urls[:3]:
            shop.expect(worker, url)
    future = time.time() + AHEAD
    shop.use(shop.urls[0], future)
    shop.use(shop.urls[1], time.time() - 40 * 86400)
    # A dry run touches nothing, and so does one that believes in 1970.
    clock = Clock(tmp_path / "clock")
    clock.set(-int(time.time()) + 60)
    with shop.worker(clock) as lost:
        assert lost.ask("clean", {"max_age": "30d"}) == []
    with shop.worker() as cron:
        assert len(cron.ask("clean", {"max_age": "30d", "dry_run": True})) == 1
        assert shop.entries()[shop.urls[0]].used == pytest.approx(future)
        ((name, reason),) = cron.ask("clean", {"max_age": "30d"})
        assert (Path(name).name, reason) == (Path(name).name, "max_age")
    kept = shop.entries()
    assert set(kept) == {shop.urls[0], shop.urls[2]}
    assert abs(kept[shop.urls[0]].used - time.time()) < 600
    clock.set(31 * 86400)
    with shop.worker(clock) as later:
        assert len(later.ask("clean", {"max_age": "30d"})) == 2
    assert shop.entries() == {}


def test_nothing_in_use_goes_whatever_the_clock_says(shop: Shop, tmp_path: Path) -> None:
    clock = Clock(tmp_path / "clock")
    with shop.worker() as reader, shop.worker(clock, max_size=2 * shop.size) as other:
        name = reader.ask("hold", shop.urls[0])
        for offset in (AHEAD, BEHIND, -int(time.time())):
            clock.set(offset)
            assert other.ask("clean", {"max_age": "1s"}) in (
                [],
                [[str(Path(name).parent), "max_age"]],
            )
            other.ask("clean", {"everything": True})
            for url in shop.urls[1:4]:
                other.ask("read", url)
            assert Path(name).exists()


# -- the same as pure logic -----------------------------------------------------------

NOW = 1_800_000_000.0  # 2027
DAY = 86_400.0


def shelf(**used: float) -> list[Entry]:
    return [Entry(f"/{name}", name, "0" * 24, 10, when) for name, when in used.items()]


def victims(
    entries: list[Entry], limits: Limits, since: float | None, now: float = NOW
) -> list[str]:
    return [v.entry.key for v in plan(entries, limits, now, policy=Policy(since=since)).victims]


@pytest.mark.parametrize(
    ("since", "gone"),
    [
        (None, ["y2037", "y1970", "old", "day", "soon"]),
        (NOW - 7 * DAY, ["y2037", "y1970", "old"]),
        (NOW + 10 * YEAR - DAY, ["y1970", "old"]),  # began in the future: so did its shards
        (NOW + 30 * YEAR, ["y2037", "y1970", "old"]),  # and with others: the last day stays
        (60.0, ["y2037", "y1970", "old"]),  # began in 1970: likewise
        (NOW + SKEW / 2, ["y2037", "y1970", "old", "day"]),  # clocks differ by minutes
    ],
)
def test_what_goes_by_when_the_oldest_session_says_it_began(
    since: float | None, gone: list[str]
) -> None:
    entries = shelf(
        soon=NOW + SKEW / 2,
        day=NOW - DAY / 2,
        old=NOW - 30 * DAY,
        y1970=60.0,
        y2037=NOW + 10 * YEAR,
    )
    assert victims(entries, Limits(max_size=0), since) == gone
    for need in range(len(gone)):
        limits = Limits(max_size=50 - 10 * need)
        assert victims(entries, limits, since) == gone[:need]


def test_in_1970_a_running_job_keeps_what_it_used(caplog: pytest.LogCaptureFixture) -> None:
    entries = shelf(mine=NOW - 100, fresh=120.0, theirs=NOW - 9 * DAY)
    assert victims(entries, Limits(max_size=0), NOW - 7 * DAY, now=200.0) == ["theirs"]
    assert victims(entries, Limits(max_size=0), 60.0, now=200.0) == ["theirs", "mine"]
    assert victims(entries, Limits(max_age=DAY), None, now=200.0) == []
    assert plan(entries, Limits(), 200.0).undated == ()  # no date that is as wrong


def test_what_has_no_true_date_is_named_unless_it_goes() -> None:
    entries = shelf(a=NOW + DAY, b=NOW + 2 * DAY, c=NOW - DAY)
    found = plan(entries, Limits(max_size=20), NOW)
    assert [v.entry.key for v in found.victims] == ["a"]
    assert [entry.key for entry in found.undated] == ["b"]


# -- a clock that means nothing at all ------------------------------------------------


class MadClock:
    """Any wall-clock time whatsoever, and a right monotonic clock."""

    def __init__(self) -> None:
        self.random = random.Random(7)
        self.asked = 0

    def time(self) -> float:
        self.asked += 1
        return self.random.choice([0.0, 1.0, 1e6, NOW, NOW + 1e9, 2e9, 4e9]) + self.random.random()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.fixture
def mad(monkeypatch: pytest.MonkeyPatch) -> Iterator[MadClock]:
    """For the library, and for the libraries that it uses to lock and to retry."""
    clock = MadClock()
    monkeypatch.setattr(time, "time", clock.time)
    yield clock
    monkeypatch.undo()


def test_locks_retries_and_deadlines_do_not_look_at_the_wall(
    tmp_path: Path, origin: MemoryOrigin, mad: MadClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcache.origins.retry.BASE", 0.01)
    config = Cache(tmp_path / "cache", min_free=0, attempts=4, deadline=60, connections=2).config
    cache = Cache.from_config(config, clock=mad)
    cache._here().coordinator()
    cache._here().origins.add("s3", origin)
    data = make_tar(1, members=3, size=BLOCK)
    for number in range(20):
        origin.objects[f"s3://lab/{number}.tar"] = data
        origin.faults.append(
            Fault(after=BLOCK + 5, error=TransientError("reset", retry_after=0.01))
        )
        origin.faults.append(Fault(after=None))
        with cache.open(f"s3://lab/{number}.tar") as stream:
            assert stream.read() == data
    assert mad.asked > 20
    assert len(list(cache.entries())) == 20
    origin.faults.extend(Fault(after=None) for _ in range(20))
    origin.objects["s3://lab/x.tar"] = data
    with pytest.raises(TransferError, match="4 attempts failed"):
        cache.fetch("s3://lab/x.tar")
    cache.clean(max_age="30d")
    cache.close()


def test_a_session_counts_whatever_its_date(
    tmp_path: Path, make_cache: Callable[..., Cache]
) -> None:
    """Live is who holds the lock; the date only tells since when."""
    layout = Layout.of_root(make_cache().dir)
    for started in (0.0, 1.0, -5e8, NOW + 1e9, 4e9):
        session = Session(layout, started)
        with Cache(layout.base.parent) as cleaner:
            cleaner.clean()
        assert session.path.exists()
        session.close()


@pytest.mark.parametrize("when", [2.0**42, -(2.0**40), 5e9, 0.0])
def test_dates_that_cannot_be_break_nothing(
    make_cache: Callable[..., Cache], origin: MemoryOrigin, when: float
) -> None:
    origin.objects["s3://lab/a.tar"] = make_tar(1)
    cache = make_cache()
    entry = cache.fetch("s3://lab/a.tar")
    try:
        os.utime(entry.path / "meta.json", (when, when))
        os.utime(entry.path, (when, when))
    except (OSError, OverflowError):
        pytest.skip(f"this filesystem cannot say {when:g}")
    with cache.open("s3://lab/a.tar") as stream:
        assert stream.read() == make_tar(1)
    assert [r.reason for r in cache.clean(everything=True, dry_run=True).removed] == [Reason.ALL]
    assert cache.clean(max_age="1d").count(Reason.ORPHAN) == 0
    with make_cache().open("s3://lab/a.tar") as stream:
        assert stream.read() == make_tar(1)


def test_where_flock_does_not_tell_a_use_in_the_future_counts_from_when_it_was_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel, or the server, dates the statement; nobody can date that."""
    file = tmp_path / "meta.json"
    file.touch()
    os.utime(file, (time.time() + AHEAD, time.time() + AHEAD))
    assert not is_idle(tmp_path, grace=3600)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3700)
    assert is_idle(tmp_path, grace=3600)
