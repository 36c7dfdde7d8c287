"""What a process counts: exact, kept over its death, and of no weight."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shardcache.layout import Layout
from shardcache.stats import counters as module
from shardcache.stats import history
from shardcache.stats.counters import SUFFIX, Counters
from shardcache.stats.history import compact, forget, samples
from shardcache.stats.statfile import (
    BUCKETS,
    COUNTERS,
    ROWS,
    WAITS,
    StatFile,
    blank,
    bucket_of,
    bucket_range,
    read_segment,
    wait_index,
)
from shardcache.stats.summary import Stats, Waits, by_hour, by_rank, summed
from shardcache.store.root import make_root
from tests.support.fakes import FakeClock
from tests.support.storetools import Parent, crowd, forked, no_descriptor_left

HOUR = 3600.0
#: The beginning of a minute and of an hour.
NOON = 1_795_348_800.0


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return make_root(tmp_path / "cache", "test")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(now=NOON)


Make = Callable[..., Counters]


@pytest.fixture
def make(layout: Layout, clock: FakeClock) -> Make:
    return lambda **owner: Counters(lambda: layout, clock, owner)


def total(layout: Layout, **options: object) -> Stats:
    return summed(samples(layout, **options))


def files(layout: Layout, suffix: str = SUFFIX) -> list[Path]:
    return sorted(path for path in layout.stats.iterdir() if path.name.endswith(suffix))


# -- histograms ----------------------------------------------------------------


@pytest.mark.parametrize("microseconds", [0, 1, 2, 3, 4, 5, 6, 7, 8, 100, 12_345, 10**6, 10**9])
def test_a_wait_is_in_the_range_of_its_bucket(microseconds: int) -> None:
    low, high = bucket_range(bucket_of(microseconds / 1e6 + 1e-9))
    assert low <= microseconds / 1e6 + 1e-9 < high
    assert high <= max(2e-6, 1.5 * low)


def test_buckets_follow_each_other_without_a_gap() -> None:
    ranges = [bucket_range(bucket) for bucket in range(BUCKETS)]
    assert ranges[0][0] == 0.0
    assert all(one[1] == two[0] for one, two in itertools.pairwise(ranges))
    assert bucket_of(1e9) == BUCKETS - 1  # thirty years


def test_percentiles_are_of_what_was_waited() -> None:
    waits = Waits({bucket_of(0.001): 98, bucket_of(1.0): 2})
    assert waits.count == 100
    assert 0.001 < waits.percentile(0.98) <= 0.0015
    assert 1.0 < waits.percentile(0.99) <= 1.5
    assert Waits({}).percentile(0.5) is None
    assert Waits({3: 0}).percentile(0.5) is None


# -- the file ------------------------------------------------------------------


def test_rows_are_read_as_they_were_written(layout: Layout, tmp_path: Path) -> None:
    path = tmp_path / "a.counts"
    with no_descriptor_left():
        file = StatFile(path, layout.modes, {"rank": 3, "job": "7"})
        for minute in (100, 101):
            assert file.begin_row()
            row = blank()
            row[COUNTERS.index("hits")] = minute
            row[wait_index("lock") + 5] = 2
            file.write(minute, row)
    segment = read_segment(path)
    assert segment is not None and segment.owner == {"rank": 3, "job": "7"}
    assert [(row.minute, row.counters, row.waits) for row in segment.rows] == [
        (100, {"hits": 100}, {"lock": {5: 2}}),
        (101, {"hits": 101}, {"lock": {5: 2}}),
    ]


def test_a_file_has_an_hour_of_rows_and_none_once_it_was_removed(
    layout: Layout, tmp_path: Path
) -> None:
    file = StatFile(tmp_path / "a.counts", layout.modes, {})
    assert all(file.begin_row() for _ in range(ROWS))
    assert not file.begin_row()
    file = StatFile(tmp_path / "b.counts", layout.modes, {})
    assert file.begin_row()
    (tmp_path / "b.counts").unlink()
    assert not file.begin_row()


def test_a_file_of_another_version_is_read_by_the_names_it_states(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an older version lacks a counter, one of a newer has more, in another order."""
    layout.stats.mkdir()
    for names in (COUNTERS[:-1], ("new", *COUNTERS[::-1], "newer")):
        monkeypatch.setattr("shardcache.stats.statfile.COUNTERS", names)
        file = StatFile(layout.stats / f"{len(names):032x}{SUFFIX}", layout.modes, {})
        file.begin_row()
        row = blank()
        for number, name in enumerate(names):
            row[number] = {"hits": 3, "bytes_stored": 5}.get(name, 1)
        file.write(int(NOON // 60), row)
    monkeypatch.undo()
    found = total(layout)
    assert (found.hits, found.bytes_stored, found.misses) == (6, 5, 2)


@pytest.mark.parametrize("cut", [0, 1, 4095, 4096, 5000, 6143])
def test_a_file_that_was_cut_short_has_its_whole_rows(
    layout: Layout, tmp_path: Path, cut: int
) -> None:
    path = tmp_path / "a.counts"
    file = StatFile(path, layout.modes, {})
    file.begin_row()
    file.write(100, blank())
    os.truncate(path, cut)
    segment = read_segment(path)
    assert segment is None if cut < 4000 else segment is not None and not segment.rows


@pytest.mark.parametrize(
    "spoil",
    [
        {"schema": 2},
        {"buckets": 71},
        {"names": [str(n) for n in range(40)]},
        {"names": 5},
        {"waits": ["disk"]},
    ],
)
def test_what_another_version_wrote_is_not_guessed_at(
    layout: Layout, tmp_path: Path, spoil: dict[str, object]
) -> None:
    path = tmp_path / "a.counts"
    StatFile(path, layout.modes, {})
    header = json.loads(path.read_bytes())
    path.write_bytes(json.dumps({**header, **spoil}).encode().ljust(4096))
    assert read_segment(path) is None


def test_names_that_are_not_known_here_are_kept_apart(layout: Layout, tmp_path: Path) -> None:
    """A file of a version that counts more: what both know is right."""
    layout.stats.mkdir()
    path = layout.stats / f"{'0' * 32}{SUFFIX}"
    file = StatFile(path, layout.modes, {})
    file.begin_row()
    row = blank()
    row[0], row[1] = 5, 7
    file.write(int(NOON // 60), row)
    data = path.read_bytes()
    header = json.loads(data[:4096])
    header["names"] = ["novelties", "hits"]
    path.write_bytes(json.dumps(header).encode().ljust(4096) + data[4096:])
    assert total(layout).hits == 7


# -- counting ------------------------------------------------------------------


def test_what_is_counted_is_read(make: Make, layout: Layout, clock: FakeClock) -> None:
    counters = make(rank=2, job="17")
    with no_descriptor_left():
        counters.hit(1000, 0.00005, clock.monotonic())
        counters.hit(500, 0.00005, clock.monotonic(), tier=1)
        counters.add({"misses": 1, "bytes_opened": 200}, "network", 1.5)
        counters.close()
    found = total(layout)
    assert (found.opens, found.hits, found.misses, found.bytes_opened) == (3, 2, 1, 1700)
    assert (found.hits_tier_1, found.hits_tier_2) == (0, 1)
    assert found.waits["disk"].count == 2 and found.waits["network"].count == 1
    assert found.counters["wait_us_network"] == 1_500_000
    assert found.counters["wait_us_disk"] == 100
    assert 1.5 <= found.all_waits.percentile(0.99) <= 2.3
    assert list(by_rank(samples(layout))) == ["2"]
    assert found.since == NOON and found.until == NOON + 60


def test_hits_are_written_once_a_second_and_all_else_at_once(
    make: Make, layout: Layout, clock: FakeClock
) -> None:
    counters = make()
    counters.hit(1, 0.0, clock.monotonic())  # the first, after nothing for long
    assert total(layout).hits == 1
    for _ in range(5):
        clock.sleep(0.15)
        counters.hit(1, 0.0, clock.monotonic())
    assert total(layout).hits == 1
    clock.sleep(0.3)
    counters.hit(1, 0.0, clock.monotonic())
    assert total(layout).hits == 7
    counters.hit(1, 0.0, clock.monotonic())
    counters.add({"retries": 1})
    assert total(layout).hits == 8
    counters.hit(1, 0.0, clock.monotonic())
    counters.flush()
    assert total(layout).hits == 9
    counters.close()


def test_each_minute_has_its_row_and_each_hour_its_file(
    make: Make, layout: Layout, clock: FakeClock
) -> None:
    counters = make()
    for _ in range(130):
        counters.hit(1, 0.0, clock.monotonic())
        clock.sleep(60)
    counters.close()
    assert len(files(layout)) == 3
    minutes = sorted(sample.start for sample in samples(layout))
    assert minutes == [NOON + 60 * n for n in range(130)]
    assert total(layout).hits == 130
    assert total(layout, since=NOON + 600).hits == 120
    hours = by_hour(samples(layout))
    assert [found.hits for found in hours.values()] == [60, 60, 10]


def test_the_end_of_a_minute_is_not_lost(make: Make, layout: Layout, clock: FakeClock) -> None:
    counters = make()
    clock.sleep(59.2)
    for _ in range(5):
        counters.hit(1, 0.0, clock.monotonic())
        clock.sleep(0.1)
    clock.sleep(1.0)
    counters.hit(1, 0.0, clock.monotonic())
    assert sorted((sample.start, sample.counters["hits"]) for sample in samples(layout)) == [
        (NOON, 5),
        (NOON + 60, 1),
    ]
    counters.close()


def test_after_a_long_time_or_when_the_clock_is_set_another_file_begins(
    make: Make, layout: Layout, clock: FakeClock
) -> None:
    counters = make()
    for leap in (61 * 60, -500, 60):
        counters.hit(1, 0.0, clock.monotonic())
        clock.sleep(2)
        clock.now += leap
    counters.hit(1, 0.0, clock.monotonic())
    counters.close()
    assert len(files(layout)) == 3
    assert total(layout).hits == 4


def test_a_directory_that_was_emptied_is_begun_anew(
    make: Make, layout: Layout, clock: FakeClock
) -> None:
    counters = make()
    counters.hit(1, 0.0, clock.monotonic())
    files(layout)[0].unlink()
    clock.sleep(60)
    counters.hit(1, 0.0, clock.monotonic())
    assert total(layout).hits == 1
    counters.close()


def test_threads_lose_nothing(make: Make, layout: Layout, clock: FakeClock) -> None:
    counters = make()

    def count() -> None:
        for _ in range(5000):
            counters.hit(3, 0.0, 0.0)
            counters.add({"retries": 1})

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counters.close()
    found = total(layout)
    assert (found.hits, found.retries, found.bytes_opened) == (20_000, 20_000, 60_000)


@pytest.mark.parametrize("how", ["full", "read-only", "gone", "nothing to count for"])
def test_without_a_disk_nothing_is_kept_and_nothing_fails(
    layout: Layout, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    where = None if how == "nothing to count for" else lambda: layout
    if how == "full":
        monkeypatch.setattr(StatFile, "write", _fails)
    elif how == "read-only":
        monkeypatch.setattr(module, "StatFile", _fails)
    elif how == "gone":
        for path in sorted(layout.base.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        layout.base.rmdir()
    counters = Counters(where, clock)
    with no_descriptor_left():
        for _ in range(3):
            counters.hit(1, 0.0, clock.monotonic())
            counters.add({"retries": 1})
            clock.sleep(60)
        counters.close()
    if how == "gone":
        assert not layout.base.exists()
    else:
        assert total(layout).hits == 0


def _fails(*args: object, **kw: object) -> None:
    raise OSError(28, "no space left")


def test_a_disk_that_is_left_alone_is_not_written_and_nothing_is_lost(
    layout: Layout, clock: FakeClock
) -> None:
    well = [True]
    counters = Counters(lambda: layout, clock, {}, lambda: well[0])
    counters.add({"retries": 1})
    well[0] = False
    for _ in range(3):
        counters.add({"retries": 1})
        counters.hit(1, 0.0, clock.monotonic())
        clock.sleep(60)
        counters.flush()
    assert (total(layout).retries, total(layout).hits) == (1, 0)
    well[0] = True
    counters.add({"retries": 1})
    counters.close()
    assert (total(layout).retries, total(layout).hits) == (5, 3)


def test_nothing_is_left_in_the_cache_of_another_user(
    layout: Layout, make: Make, clock: FakeClock
) -> None:
    if os.geteuid() != 0:
        pytest.skip("somebody else's cache needs root")
    os.chown(layout.base, 12345, 12345)
    counters = make()
    counters.add({"evicted_asked": 1})
    counters.close()
    assert not layout.stats.exists()


def test_a_process_that_is_killed_has_lost_one_second_at_most(layout: Layout) -> None:
    """And of what is no hit, nothing."""

    def work(parent: Parent, number: int) -> None:
        counters = Counters(lambda: layout, FakeClock(now=NOON), {"rank": number})
        counters.hit(1, 0.0, 0.0)
        for _ in range(100):
            counters.add({"misses": 1})
            counters.hit(1, 0.0, 0.5)
        parent.say()
        os.kill(os.getpid(), signal.SIGKILL)

    with crowd(4, work) as children:
        for child in children:
            child.hear()
    found = total(layout)
    assert found.misses == 400
    assert 4 * 100 <= found.hits <= 4 * 101


def test_a_child_counts_for_itself(layout: Layout, make: Make, clock: FakeClock) -> None:
    mine = make(rank=0)
    mine.hit(1, 0.0, 0.0)
    mine.hit(1, 0.0, 0.0)

    def work(parent: Parent) -> None:
        own = Counters(lambda: layout, clock, {"rank": 1})
        own.hit(1, 0.0, 0.0)
        own.close()
        parent.say()

    with forked(work) as child:
        child.hear()
    mine.close()
    assert {rank: found.hits for rank, found in by_rank(samples(layout)).items()} == {
        "0": 2,
        "1": 1,
    }


# -- history -------------------------------------------------------------------


def aged(layout: Layout, when: float) -> None:
    """As if every file had been written then."""
    for path in layout.stats.iterdir():
        os.utime(path, (when, when))


@pytest.fixture
def day(make: Make, layout: Layout, clock: FakeClock) -> Stats:
    """Two ranks, three hours, a file for each hour; written long ago."""
    for rank in (0, 1):
        counters = make(rank=rank, job="9")
        clock.now = NOON - clock.elapsed
        for number in range(180):
            counters.hit(10, 0.001, clock.monotonic())
            counters.add({"misses": 1, "bytes_opened": number}, "network", 0.5)
            clock.sleep(60)
        counters.close()
    aged(layout, NOON)
    return total(layout)


def test_files_of_ended_processes_become_hours(layout: Layout, day: Stats) -> None:
    before = {rank: found.as_dict() for rank, found in by_rank(samples(layout)).items()}
    hours = {hour: found.as_dict() for hour, found in by_hour(samples(layout)).items()}
    assert len(files(layout)) == 6
    assert compact(layout, NOON + 3 * HOUR) == 6
    assert len(list(layout.stats.iterdir())) == 1
    assert total(layout) == day
    assert {rank: found.as_dict() for rank, found in by_rank(samples(layout)).items()} == before
    assert {hour: found.as_dict() for hour, found in by_hour(samples(layout)).items()} == hours
    assert compact(layout, NOON + 3 * HOUR) == 0


def test_what_is_written_to_is_left_alone(layout: Layout, day: Stats) -> None:
    live = files(layout)[0]
    os.utime(live, (NOON + 2 * HOUR, NOON + 2 * HOUR))
    assert compact(layout, NOON + 3 * HOUR) == 5
    assert files(layout) == [live]
    assert total(layout).counters == day.counters


def test_who_is_killed_while_compacting_counts_nothing_twice(
    layout: Layout, day: Stats, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", _fails)
        with pytest.raises(OSError, match="no space"):
            compact(layout, NOON + 3 * HOUR)
    assert len(files(layout)) == 6 and len(files(layout, ".hours")) == 1
    assert total(layout) == day
    assert compact(layout, NOON + 3 * HOUR) == 6
    assert total(layout) == day and len(list(layout.stats.iterdir())) == 1


def test_many_documents_become_one_and_that_counts_nothing_twice(
    make: Make, layout: Layout, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_MANY", 3)
    for number in range(6):
        counters = make(rank=0)
        counters.add({"misses": 1})
        counters.close()
        aged(layout, NOON)
        with monkeypatch.context() as patch:
            if number == 4:
                patch.setattr(Path, "unlink", _fails)
                with pytest.raises(OSError, match="no space"):
                    compact(layout, NOON + 3 * HOUR)
            else:
                compact(layout, NOON + 3 * HOUR)
        assert total(layout).misses == number + 1
        clock.sleep(HOUR)
    assert len(files(layout, ".hours")) <= 3


def test_what_is_too_old_is_in_one_row_and_in_no_window(layout: Layout, day: Stats) -> None:
    compact(layout, NOON + 3 * HOUR)
    later = NOON + 31 * 24 * HOUR
    compact(layout, later)
    assert samples(layout) == []
    assert total(layout, ever=True).counters == day.counters
    compact(layout, later + 31 * 24 * HOUR)
    assert total(layout, ever=True).counters == day.counters


def test_one_can_begin_anew_in_the_midst_of_a_minute(
    make: Make, layout: Layout, clock: FakeClock, day: Stats
) -> None:
    compact(layout, NOON + 3 * HOUR)
    clock.now = NOON + 5 * HOUR - clock.elapsed
    counters = make()
    counters.add({"misses": 5}, "network", 0.5)
    forget(layout, clock.time())
    assert not total(layout).opens and not total(layout, ever=True).opens
    assert total(layout).all_waits.percentile(0.5) is None
    counters.add({"misses": 1}, "network", 0.5)
    assert total(layout).misses == 1 and total(layout).waits["network"].count == 1
    clock.sleep(60)
    counters.add({"misses": 1})
    counters.close()
    assert total(layout).misses == 2
    aged(layout, NOON)
    compact(layout, NOON + 9 * HOUR)
    assert total(layout).misses == 2


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"5", b"\xff", b'{"schema": 9}', b"[" * 9000])
def test_files_that_make_no_sense_are_passed_over_and_kept(
    layout: Layout, day: Stats, text: bytes
) -> None:
    others = [layout.stats / f"{'f' * 32}{suffix}" for suffix in (SUFFIX, ".hours")]
    for path in (*others, layout.stats / "begin"):
        path.write_bytes(text)
    assert total(layout) == day
    compact(layout, NOON + 3 * HOUR)
    assert total(layout) == day
    assert others[1].exists()  # of a newer version, perhaps


def test_who_reads_while_others_compact_misses_nothing(layout: Layout, day: Stats) -> None:
    """Files go, and a document comes, between the two looks of a reader."""
    real, done = history._names, []

    def names(where: Layout, suffix: str) -> list[str]:
        found = real(where, suffix)
        if suffix == SUFFIX and not done:
            done.append("begun")  # what follows asks for names, too
            compact(layout, NOON + 3 * HOUR)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "_names", names)
        found = summed(samples(layout))
    assert done and found == day


def test_all_waits_are_known_by_name() -> None:
    assert set(WAITS) == set(summed([]).waits)
    with pytest.raises(AttributeError):
        summed([]).nonsense  # noqa: B018
