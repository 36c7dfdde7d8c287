"""How full a cache is, without a look at every entry: never too little while locks work."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from shardcache.clock import SYSTEM_CLOCK
from shardcache.config import Config
from shardcache.errors import CacheFullError
from shardcache.files import PRIVATE
from shardcache.locks.sessions import Session
from shardcache.space import ledger as ledger_module
from shardcache.space.budget import Space
from shardcache.space.ledger import Ledger, Refusal, State
from shardcache.store.root import make_root
from shardcache.store.store import Store
from shardcache.store.sweeping import in_flight
from tests.support.fakes import FakeClock, MemoryOrigin
from tests.support.storetools import Parent, begin, crowd, fill, metadata_for, publish
from tests.support.tars import make_tar

MIB = 1 << 20


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def ledger(tmp_path: Path, clock: FakeClock) -> Ledger:
    return Ledger(tmp_path / "ledger.lock", PRIVATE, clock)


# -- the file ------------------------------------------------------------------


@pytest.mark.parametrize(
    "state",
    [
        State(100, 5000),
        State(100, math.inf),
        State(100, 5000, Refusal(40, 7, 0, "terms")),
        State(100, math.inf, Refusal(40, 0, 3, "[] \\ é")),
    ],
)
def test_what_was_noted_is_read_by_others(
    ledger: Ledger, tmp_path: Path, clock: FakeClock, state: State
) -> None:
    ledger.looked(state)
    assert Ledger(tmp_path / "ledger.lock", PRIVATE, clock).read() == state


def test_nothing_is_known_at_first(ledger: Ledger, tmp_path: Path) -> None:
    assert ledger.read() is None
    ledger.admitted(5)
    ledger.forget()
    assert ledger.read() is None
    assert list(tmp_path.iterdir()) == []


def test_admissions_add_up_and_a_refusal_stays(ledger: Ledger) -> None:
    refusal = Refusal(40, 7, 0, "terms")
    ledger.looked(State(100, 5000, refusal))
    ledger.admitted(10)
    ledger.admitted(20)
    assert ledger.read() == State(100, 5030, refusal)
    ledger.looked(State(100, math.inf))
    ledger.admitted(10)
    assert ledger.read() == State(100, math.inf)


def test_a_look_is_believed_in_proportion_to_what_it_cost(ledger: Ledger, clock: FakeClock) -> None:
    ledger.looked(State(1000, 5))
    clock.sleep(0.5)
    ledger.admitted(1)  # that is no look
    clock.sleep(0.29)
    assert ledger.read() == State(1000, 6)
    clock.sleep(0.02)
    assert ledger.read() is None
    ledger.admitted(1)
    assert ledger.read() is None
    ledger.looked(State(63, 5))  # to look again costs next to nothing
    assert ledger.read() is None


def test_what_was_forgotten_is_not_known(ledger: Ledger) -> None:
    ledger.looked(State(1000, 5))
    ledger.forget()
    assert ledger.read() is None


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"{}",
        b"5",
        b'["BOOT"]',
        b'["BOOT", 0.0]',
        b'["BOOT", 0.0, 1000]',
        b'["BOOT", 0.0, 1000, "x"]',
        b'["BOOT", 0.0, 1e999, 5]',
        b'["BOOT", null, 1000, 5]',
        b'["BOOT", 0.0, 1000, 5, 1]',
        b'["BOOT", 0.0, 1000, 5, 1, 2, 3]',
        b'["BOOT", 0.0, 1000, 5, 1, 2, 3, "terms", 5]',
        b'["BOOT", 0.0, 1000, 5, [], 2, 3, "terms"]',
        b'["another", 0.0, 1000, 5]',
        b'["BOOT", 0.1, 1000, 5]',  # later than now
        b"[" * 5000,
    ],
)
def test_a_note_that_says_nothing_is_none(ledger: Ledger, tmp_path: Path, note: bytes) -> None:
    ledger.looked(State(1000, 5))
    path = tmp_path / "ledger.lock"
    boot = path.read_bytes().split(b'"')[1]
    path.write_bytes(note.replace(b"BOOT", boot))
    assert ledger.read() is None
    ledger.admitted(5)
    assert ledger.read() is None


@pytest.mark.parametrize(
    ("need", "terms", "covered"),
    [(40, "a", True), (41, "a", True), (39, "a", False), (40, "b", False)],
)
def test_a_refusal_covers_what_needs_as_much(need: int, terms: str, covered: bool) -> None:
    assert Refusal(40, 7, 0, "a").covers(need, terms) is covered


def test_what_is_missing_for_more() -> None:
    assert Refusal(40, 7, 0, "a").missing_for(50) == 17
    assert Refusal(40, 0, 3, "a").missing_for(50) == 0


# -- in the budget -------------------------------------------------------------


class Bench:
    """A root that counts how often all its entries are looked at."""

    def __init__(self, path: Path, grace: float | None = None, **options: object) -> None:
        self.root = path / "cache"
        self.layout = make_root(self.root, "test")
        self.store = Store(self.layout)
        self.clock = FakeClock(now=10_000.0)
        self.looks = 0
        options.setdefault("min_free", 0)
        self.config = Config(self.root, **options)
        self.space = Space(self.layout, lambda: [self.store], self.config, self.clock, self._look)

    def _look(self, entries):
        self.looks += 1
        return entries

    def fetch(self, number: int, size: int = 1000) -> None:
        """Admit a shard and publish it."""
        url, data = f"s3://lab/{number:04d}.tar", bytes(size)
        metadata = metadata_for(url, data)
        partial = self.space.admit(url, size, lambda: begin(self.layout, metadata))
        fill(partial, data)
        path = self.store.publish(partial, metadata)
        os.utime(path / "meta.json", (self.clock.time(), self.clock.time()))
        partial.close()

    def full(self) -> int:
        return sum(entry.size for entry in self.store.entries())


@pytest.fixture
def filled(tmp_path: Path) -> Bench:
    """200 entries of 1,000 bytes, in a cache for 210."""
    bench = Bench(tmp_path, max_size=210_000)
    for number in range(200):
        publish(bench.store, f"s3://lab/{number:04d}.tar", bytes(1000), used=number + 1.0)
    return bench


@pytest.mark.locks_work("flock")
def test_what_is_known_to_fit_costs_no_look_and_the_budget_holds(filled: Bench) -> None:
    for number in range(200, 210):
        filled.fetch(number)
    assert filled.looks == 1
    assert filled.full() == 210_000
    filled.fetch(210)
    assert filled.looks == 2
    assert filled.full() == 207_000  # one made room for this one, three more are one in a hundred
    for number in range(211, 214):
        filled.fetch(number)
    assert (filled.looks, filled.full()) == (2, 210_000)


@pytest.mark.locks_work("flock")
def test_of_a_small_cache_no_more_goes_than_must(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_size=20_000)
    for number in range(30):
        bench.fetch(number)
        assert bench.full() == min(20, number + 1) * 1000


@pytest.mark.locks_work("flock")
def test_what_must_not_go_does_not_go_along(filled: Bench) -> None:
    session = Session(filled.layout, 2.0)  # all but the first one are used by a job
    filled.fetch(200, 11_000)
    assert filled.full() == 210_000 and filled.looks == 1
    session.close()


@pytest.mark.locks_work("flock")
def test_what_others_publish_without_asking_is_seen_at_the_next_look(filled: Bench) -> None:
    filled.fetch(200)
    for number in range(300, 309):
        publish(filled.store, f"s3://lab/{number:04d}.tar", bytes(1000), used=1.0)
    filled.clock.sleep(0.17)  # 0.8 ms for each entry
    filled.fetch(201)
    assert filled.looks == 2
    assert filled.full() <= 210_000


@pytest.mark.locks_work("flock")
def test_what_was_refused_is_refused_without_a_look_for_a_while(filled: Bench) -> None:
    session = Session(filled.layout, 0.5)
    for _ in range(3):
        with pytest.raises(CacheFullError, match=r"1.0 KB more would have to go"):
            filled.fetch(400, 11_000)
    with pytest.raises(CacheFullError, match=r"3.0 KB more would have to go"):
        filled.fetch(400, 13_000)
    assert filled.looks == 1
    assert filled.space.refuses("s3://lab/x.tar", 11_000)
    assert not filled.space.refuses("s3://lab/x.tar", 10_999)
    filled.fetch(401, 10_000)  # less than was refused: that is there
    assert filled.looks == 1
    with pytest.raises(CacheFullError):
        filled.fetch(402, 1000)
    session.close()
    filled.clock.sleep(1.0)
    filled.fetch(400, 11_000)
    assert filled.full() <= 210_000


@pytest.mark.locks_work("flock")
def test_other_limits_are_asked_for_anew(filled: Bench) -> None:
    session = Session(filled.layout, 0.5)
    with pytest.raises(CacheFullError):
        filled.fetch(400, 11_000)
    filled.config = filled.config.replace(max_size=230_000)
    space = Space(filled.layout, lambda: [filled.store], filled.config, filled.clock)
    assert not space.refuses("s3://lab/x.tar", 11_000)
    filled.space = space
    filled.fetch(400, 11_000)
    session.close()


@pytest.mark.locks_work("flock")
def test_what_went_lets_the_next_one_ask_again(filled: Bench) -> None:
    session = Session(filled.layout, 0.5)
    with pytest.raises(CacheFullError):
        filled.fetch(400, 11_000)
    for entry in filled.store.entries_of(next(iter(filled.store.entries())).key):
        assert filled.store.evict(entry)
    filled.space.something_went()
    filled.fetch(400, 11_000)
    session.close()


@pytest.mark.locks_work("flock")
def test_shards_of_unknown_size_are_never_taken_for_known(filled: Bench) -> None:
    filled.fetch(200)
    metadata = metadata_for("s3://lab/unknown.tar", b"", size=None)
    partial = filled.space.admit(
        "s3://lab/unknown.tar", None, lambda: begin(filled.layout, metadata)
    )
    for number, size in ((201, 5000), (202, 9000)):
        partial.write(0, memoryview(bytes(size)))
        filled.fetch(number)  # looks again, and makes room
        assert filled.full() + size <= 210_000
    assert filled.looks == 4
    partial.discard()


@pytest.mark.locks_work("flock")
def test_a_resumed_partial_counts_from_then_on(filled: Bench) -> None:
    filled.fetch(200)  # looked
    metadata = metadata_for("s3://lab/resumed.tar", b"", size=9000)
    partial = begin(filled.layout, metadata)  # as if claimed of a dead process
    filled.space.admit("s3://lab/resumed.tar", 9000, lambda: partial, reserved=True)
    filled.fetch(201)  # one too many: somebody goes
    assert filled.full() + 9000 <= 210_000
    partial.discard()


def test_nodes_that_share_a_directory_look_each_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_size=250_000)
    for number in range(200):
        publish(bench.store, f"s3://lab/{number:04d}.tar", bytes(1000), used=number + 1.0)
    bench.fetch(200)
    note = bench.layout.named_lock("ledger").read_bytes()
    bench.space = Space(
        replace(bench.layout, grace=3600.0),
        lambda: [bench.store],
        bench.config,
        bench.clock,
        bench._look,
    )
    for number in range(201, 205):
        bench.fetch(number)
    assert bench.looks == 5
    assert bench.layout.named_lock("ledger").read_bytes() == note


@pytest.mark.locks_work
def test_many_processes_keep_the_budget_between_looks(tmp_path: Path) -> None:
    layout = make_root(tmp_path / "cache", "test")
    config = Config(tmp_path / "cache", max_size=150_000, min_free=0)
    done = tmp_path / "done"

    def work(parent: Parent, number: int) -> None:
        store = Store(layout)
        looks = 0

        def look(entries):
            nonlocal looks
            looks += 1
            return entries

        space = Space(layout, lambda: [store], config, SYSTEM_CLOCK, look)
        parent.hear()
        for n in range(150):
            url, data = f"s3://lab/{number}-{n}.tar", bytes(1000)
            metadata = metadata_for(url, data)
            partial = space.admit(url, 1000, lambda m=metadata: begin(layout, m))
            fill(partial, data)
            store.publish(partial, metadata)
            partial.close()
        parent.say(looks)

    def watch(parent: Parent, number: int) -> None:
        store = Store(layout)
        most = 0
        parent.hear()
        parent.say("begun")
        while not done.exists():
            # Entries first: what is published in between is missed, never counted twice.
            entries = list(store.entries())
            flying = sum(f.reserved for f in in_flight(layout) if f.key)
            most = max(most, sum(e.size for e in entries if e.path.exists()) + flying)
        parent.say(most)

    with crowd(4, work) as workers, crowd(1, watch) as (watcher,):
        for child in (watcher, *workers):
            child.tell()
        assert watcher.hear() == "begun"
        looks = sum(worker.hear() for worker in workers)
        done.touch()
        most = watcher.hear()
    assert 100_000 < most <= 150_000
    assert looks < 400  # of 600 admissions, most of them into a full cache


@pytest.mark.locks_work("flock")
def test_what_is_refused_is_asked_of_the_origin_once(
    make_cache, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "_PER_ENTRY", 1000.0)
    monkeypatch.setattr(ledger_module, "_FEWEST", 1)
    cache = make_cache(max_size=30_000)
    urls = [f"s3://lab/all/{number:02d}.tar" for number in range(15)]
    for url in urls:
        origin.objects[url] = make_tar(1, members=4, size=500)
    for url in urls:
        with cache.open(url) as stream:
            assert stream.read() == origin.objects[url]
    stored = [url for url in urls if url in cache]
    assert 1 < len(stored) < 10
    opened = [url for url, _, _ in origin.requests]
    first, *others = urls[len(stored) :]
    assert opened.count(first) == 2  # it was refused when its size was known
    assert [opened.count(url) for url in (*stored, *others)] == [1] * 14
    with pytest.raises(CacheFullError, match="more would have to go"):
        cache.fetch(urls[-1])
    assert len(origin.requests) == len(opened)
    cache.remove(stored[0])
    cache.fetch(urls[-1])
    with pytest.raises(CacheFullError):
        cache.fetch(urls[-2])
    cache.clean(everything=True)
    cache.fetch(urls[-2])


@pytest.mark.locks_work("flock")
def test_what_is_unpinned_makes_room_at_once(
    make_cache, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "_PER_ENTRY", 1000.0)
    monkeypatch.setattr(ledger_module, "_FEWEST", 1)
    cache = make_cache(max_size=15_000, policy="lru")
    for name in ("a", "b"):
        origin.objects[f"s3://lab/{name}.tar"] = make_tar(1, members=4, size=500)
    cache.fetch("s3://lab/a.tar")
    cache.pin("s3://lab/a.tar")
    with pytest.raises(CacheFullError):
        cache.fetch("s3://lab/b.tar")
    cache.unpin("s3://lab/a.tar")
    cache.fetch("s3://lab/b.tar")
    assert "s3://lab/a.tar" not in cache


@pytest.mark.locks_work("flock")
def test_what_is_resumed_is_noted_with_all_its_bytes(
    make_cache, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "_PER_ENTRY", 1000.0)
    monkeypatch.setattr(ledger_module, "_FEWEST", 1)
    cache = make_cache(max_size=10 * MIB)
    for name, size in (("a", 500), ("b", 500_000)):
        origin.objects[f"s3://lab/{name}.tar"] = make_tar(1, members=4, size=size)
    cache.fetch("s3://lab/a.tar")
    layout = cache._here().home.namespaces.own.layout
    ledger = Ledger(layout.named_lock("ledger"), layout.modes, SYSTEM_CLOCK)
    data = origin.objects["s3://lab/b.tar"]
    etag = origin.info(cache.parse("s3://lab/b.tar")).etag
    left = begin(layout, metadata_for("s3://lab/b.tar", data, etag=etag))
    fill(left, data, range(1))
    left.close()
    for name in ("look", "b"):
        origin.objects["s3://lab/look.tar"] = make_tar(2, members=4, size=500)
        cache.fetch(f"s3://lab/{name}.tar")
    sizes = [len(origin.objects[f"s3://lab/{name}.tar"]) for name in ("a", "look", "b")]
    assert any(start > 0 for url, start, _ in origin.requests if url == "s3://lab/b.tar")
    state = ledger.read()
    assert state is not None and state.full >= sum(sizes)
