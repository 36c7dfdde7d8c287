"""Cleaning on request and beside a job: a dry run tells the truth, what is in use stays."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardcache import clock
from shardcache.cache import Cache
from shardcache.config import Config
from shardcache.errors import LockTimeoutError
from shardcache.layout import Layout
from shardcache.locks.flock import Holder, KeyLock
from shardcache.space import clean as module
from shardcache.space.budget import Space
from shardcache.space.clean import CleanReport, clean
from shardcache.space.eviction import Limits, Reason
from shardcache.store.entry import Store, set_aside
from shardcache.store.root import make_root
from shardcache.urls import parse_url
from tests.support.shop import Shop
from tests.support.storetools import (
    begin,
    fill,
    metadata_for,
    payload,
    publish,
    tree,
    wait_until,
)

MIB = 1 << 20


class Bench:
    """A root with a rank's namespace in it."""

    def __init__(self, path: Path) -> None:
        self.root = path / "cache"
        self.layout = make_root(self.root, "test")
        self.store = Store(self.layout)
        self.rank = Store(self.layout.rank("job-0"))
        self.rank.layout.make()
        self.stores = [self.store, self.rank]
        self.space = Space(self.layout, lambda: self.stores, Config(self.root, min_free=0))

    def leave(self) -> Path:
        """A partial of a dead process."""
        data = payload(MIB)
        partial = begin(self.layout, metadata_for("s3://lab/orphan.tar", data))
        fill(partial, data)
        partial.close()
        return partial.path


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def reasons(report: CleanReport) -> list[Reason]:
    return [removal.reason for removal in report.removed]


CASES: dict[str, Callable[[], Limits]] = {
    "nothing": Limits,
    "max_size that orphans would break": lambda: Limits(max_size=4600),
    "free, more than leftovers have": lambda: Limits(free_needed=MIB + 100_000),
    "age": lambda: Limits(max_age=clock.time() - 3.5),
    "all": lambda: Limits(everything=True),
    "impossible": lambda: Limits(free_needed=10 * MIB),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.locks_work
def test_a_dry_run_touches_nothing_and_says_what_the_run_will_do(bench: Bench, case: str) -> None:
    for n in range(4):
        publish(bench.store, f"s3://lab/{n}.tar", bytes(1000), used=n + 1.0)
    publish(bench.rank, "s3://lab/r.tar", bytes(500), used=2.5)
    bench.leave()
    damaged = publish(bench.store, "s3://lab/bad.tar", bytes(100))
    assert set_aside(damaged.path, "test")
    opened = bench.store.open(parse_url("s3://lab/1.tar").key, "1.tar")
    live = begin(bench.layout, metadata_for("s3://lab/live.tar", b"x"))
    limits = CASES[case]()
    before = tree(bench.root)
    dry = clean(bench.space, limits, orphans=True, dry_run=True)
    assert tree(bench.root) == before
    real = clean(bench.space, limits, orphans=True)
    assert replace(real, dry_run=True) == dry
    assert not any(Path(removal.name).exists() for removal in real.removed)
    left = [*bench.store.entries(), *bench.rank.entries()]
    assert (real.kept, real.kept_bytes) == (len(left), sum(entry.size for entry in left))
    assert reasons(real).count(Reason.ORPHAN) == 2
    if case == "all":
        assert (real.kept, reasons(real).count(Reason.ALL)) == (1, 4)
    assert live.path.exists() and Path(opened.path).exists()
    opened.close()
    live.discard()


def test_a_dead_process_s_partial_stays_an_hour_to_be_resumed(bench: Bench) -> None:
    partial = bench.leave()
    for age, removed in ((0.0, 0), (3500.0, 0), (3700.0, 1)):
        then = clock.time() - age
        for path in partial.iterdir():
            os.utime(path, (then, then))
        assert reasons(clean(bench.space, Limits())) == [Reason.ORPHAN] * removed
    assert not partial.exists()


@pytest.mark.locks_work
def test_cleaners_take_turns_or_say_who_is_at_it(tmp_path: Path) -> None:
    with Cache(tmp_path / "cache", min_free=0, lock_timeout="0.3s") as cache:
        cache.pin("s3://lab/a.tar")  # makes the directory
        lock = KeyLock(Layout.of_root(cache.dir).named_lock("clean"))
        assert lock.try_acquire(Holder.this_process(rank=3, job="17", now=1.0))
        for wait in (False, True):
            with pytest.raises(LockTimeoutError, match=f"process {os.getpid()}"):
                cache.clean(wait=wait)
        assert cache.clean(dry_run=True).removed == ()
        lock.release()
        assert cache.clean(wait=False).removed == ()


@pytest.mark.locks_work
def test_one_of_a_nodes_processes_cleans_beside_its_job(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, rounds, real = Shop(tmp_path, count=5), [], module.clean
    with Cache(shop.path, cache_local=True, min_free=0) as earlier:
        for number, url in enumerate(shop.urls):
            earlier.fetch(url)
            shop.use(url, 1000.0 + number)
    orphan = bench.leave()
    for path in orphan.iterdir():
        os.utime(path, (1000.0, 1000.0))

    def clean(*arguments: Any, **options: Any) -> CleanReport:
        rounds.append(threading.current_thread().name)
        return real(*arguments, **options)

    def read() -> None:
        with Cache(shop.path, cache_local=True, min_free=0, max_size=4 * shop.size) as cache:
            with cache.open(shop.urls[0]) as stream:
                stream.read()
            wait_until(lambda: "shardcache-clean" not in {t.name for t in threading.enumerate()})

    monkeypatch.setattr(module, "_FIRST", -1.0)
    monkeypatch.setattr(module, "clean", clean)
    read()
    assert not orphan.exists()
    assert set(shop.entries()) == {shop.urls[n] for n in (0, 2, 3, 4)}
    read()
    assert rounds == ["shardcache-clean"]
    os.utime(Layout.of_root(shop.path).named_lock("clean"), (1000.0, 1000.0))
    read()
    assert rounds == ["shardcache-clean"] * 2
