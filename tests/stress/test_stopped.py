"""SIGSTOP at every step: others go on, within bounds; who wakes late does no harm.

A process stops itself at a chosen call, so that it has exactly the locks and files that
belong to that step. Others wait for it, pass it by, and then it is continued.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.cli.demo import S3Server
from shardcache.errors import LockTimeoutError
from shardcache.fetch.coordinator import _PRIVATE_FETCHES
from shardcache.layout import Layout
from shardcache.locks.flock import lock_exclusive, read_holder
from tests.support.fakes import FakeClock
from tests.support.proxy import Proxy
from tests.support.storetools import PATIENCE, wait_until
from tests.support.tars import make_tar
from tests.support.workers import Worker

pytestmark = pytest.mark.usefixtures("s3_environment")

OLD, NEW = make_tar(1, 20, 2000), make_tar(2, 30, 2000)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Lab:
    """One shard in a bucket, and a cache."""

    def __init__(self, s3: S3Server, bucket: str, path: Path) -> None:
        self.s3, self.bucket, self.path = s3, bucket, path
        self.layout = Layout.of_root(path)
        self.url = f"s3://{bucket}/a.tar"
        self.put(OLD)

    def put(self, data: bytes, name: str = "a.tar") -> str:
        self.s3.put(self.bucket, name, data)
        return f"s3://{self.bucket}/{name}"

    def worker(self, stop_at: str = "", **options: object) -> Worker:
        options.setdefault("max_size", BUDGET)
        return Worker(dir=self.path, stop_at=stop_at, **options)  # type: ignore[arg-type]

    def entries(self) -> list[tuple[str, int]]:
        """(digest, inode) of what is published."""
        found = []
        for data in self.path.glob("v1/objects/*/*/*/*.tar"):
            found.append((digest(data.read_bytes()), data.stat().st_ino))
        return found

    def quiet(self) -> None:
        """Nothing is in flight, and nothing is locked."""
        assert os.listdir(self.layout.partial) == []
        for path in [*self.path.rglob("*.lock"), *self.path.glob("v1/objects/*/*/*/*.tar")]:
            fd = os.open(path, os.O_RDONLY)
            assert lock_exclusive(fd), path
            os.close(fd)


@pytest.fixture
def lab(s3: S3Server, bucket: str, tmp_path: Path) -> Lab:
    return Lab(s3, bucket, tmp_path / "cache")


#: More than there is: without one nobody asks for the budget lock while there is ample room.
BUDGET = "100TB"
#: Where a fetch is stopped.
STEPS = {
    "with its lock": "after shardcache.locks.flock:KeyLock.try_acquire",
    "asking the origin": "before shardcache.fetch.transfer:Fetcher._first",
    "with the budget lock": "after shardcache.space.budget:Space._find_room",
    "with an empty partial": "after shardcache.space.budget:Space.admit",
    "before its bytes are checked": "before shardcache.fetch.job:Job._finish",
    "before it looks for others": "before shardcache.store.store:Store._other_than",
    "before it publishes": "after shardcache.store.store:Store._other_than",
    "published": "after shardcache.store.store:Store.publish",
}
#: In children only: the real ones are a minute and two.
QUICK = {"shardcache.space.spacelocks:_BUDGET_SECONDS": 1.0}


@pytest.mark.parametrize("step", [s for s in STEPS if s != "before it looks for others"])
def test_a_fetch_stopped_at_any_step_is_passed_by_and_finds_the_same_version_there(
    lab: Lab, step: str
) -> None:
    with lab.worker(STEPS[step]) as holder, lab.worker(stale_after=0.5, constants=QUICK) as other:
        holder.tell("read", lab.url)
        holder.stopped()
        assert other.ask("read", lab.url) == [digest(OLD), True]
        published = lab.entries()
        assert [d for d, _ in published] == [digest(OLD)]
        holder.process.send_signal(signal.SIGCONT)
        assert holder.hear()[0] == [digest(OLD), True]
        assert lab.entries() == published  # the same inode: never overwritten
        assert other.ask("read", lab.url) == [digest(OLD), True]
    lab.quiet()


@pytest.mark.parametrize(
    "step", ["before its bytes are checked", "before it looks for others", "before it publishes"]
)
def test_who_wakes_with_an_older_version_does_not_bring_it_back(lab: Lab, step: str) -> None:
    with (
        lab.worker(STEPS[step], fill="complete") as holder,  # else some of the old one is read
        lab.worker(stale_after=0.5, constants=QUICK) as other,
    ):
        holder.tell("read", lab.url)
        holder.stopped()
        lab.put(NEW)
        assert other.ask("read", lab.url) == [digest(NEW), True]
        ((_, inode),) = lab.entries()
        holder.process.send_signal(signal.SIGCONT)
        assert holder.hear()[0] == [digest(NEW), True]
        assert (digest(NEW), inode) in lab.entries()
        if step != "before it publishes":  # there both lie side by side, and the newer counts
            assert len(lab.entries()) == 1
        for reader in (other, holder):
            assert reader.ask("read", lab.url) == [digest(NEW), True]
    with lab.worker() as fresh:
        assert fresh.ask("read", lab.url) == [digest(NEW), True]
    lab.quiet()


@pytest.mark.parametrize(
    "place",
    ["after shardcache.store.entry:seize", "after shardcache.store.store:Store._hide"],
    ids=["with the entry in its hand", "with the entry out of sight"],
)
def test_a_stopped_evictor_stops_nobody(lab: Lab, proxy: Proxy, place: str) -> None:
    with lab.worker() as reader:
        assert reader.ask("read", lab.url) == [digest(OLD), True]
        proxy.reset()
        with lab.worker(place) as evictor:
            evictor.tell("clean", {"everything": True})
            evictor.stopped()
            for _ in range(3):
                assert reader.ask("read", lab.url) == [digest(OLD), True]
            fetches = proxy.summary()
            assert sum(t.object_fetches for t in fetches.values()) == ("_hide" in place)
            evictor.process.send_signal(signal.SIGCONT)
            (removed, _), *more = evictor.hear()[0]
            assert removed and not more
        assert reader.ask("read", lab.url) == [digest(OLD), True]
    lab.quiet()


def test_a_path_is_not_handed_out_while_a_stopped_evictor_may_take_it(lab: Lab) -> None:
    with (
        lab.worker("after shardcache.store.entry:seize") as evictor,
        Cache(lab.path, min_free=0, lock_timeout=1.0) as cache,
    ):
        cache.fetch(lab.url)
        evictor.tell("clean", {"everything": True})
        evictor.stopped()
        with (
            pytest.raises(LockTimeoutError, match="being evicted by a process"),
            cache.pinned(lab.url),
        ):
            pass
        evictor.process.send_signal(signal.SIGCONT)
        evictor.hear()
        with cache.pinned(lab.url) as path:
            assert path.read_bytes() == OLD


def test_two_pass_a_stopped_holder_by_and_the_third_waits_its_time(lab: Lab, proxy: Proxy) -> None:
    url = lab.put(make_tar(3, 600, 2000))
    with (
        lab.worker("before shardcache.fetch.job:Job._finish") as holder,
        lab.worker(stale_after=0.5) as first,
        lab.worker(stale_after=0.5) as second,
        lab.worker(stale_after=0.5, lock_timeout=4, strict=True) as third,
    ):
        holder.tell("read", url)
        holder.stopped()
        proxy.reset()
        proxy.pause(after=100_000)
        for worker in (first, second):
            worker.tell("read", url)
        wait_until(lambda: sum(r.method == "GET" for r in proxy.requests()) >= _PRIVATE_FETCHES)
        answer, seconds = third.time("read", url)
        assert answer["error"] == "LockTimeoutError"
        assert f"process {holder.process.pid} on " in answer["message"]
        assert 4 <= seconds < PATIENCE
        begun = [r for r in proxy.requests() if r.method == "GET"]
        assert len(begun) == _PRIVATE_FETCHES  # the third asked the origin nothing
        proxy.resume()
        for worker in (first, second):
            assert worker.hear()[0] == [digest(make_tar(3, 600, 2000)), True]
        assert third.ask("read", url) == [digest(make_tar(3, 600, 2000)), True]
        holder.process.send_signal(signal.SIGCONT)
        assert holder.hear()[0] == [digest(make_tar(3, 600, 2000)), True]
    lab.quiet()


# -- what is said ----------------------------------------------------------------------

BIG = make_tar(5, 3000, 2000)


@pytest.fixture
def half_way(lab: Lab, proxy: Proxy) -> Iterator[Worker]:
    """A process that was stopped half-way through a fetch."""
    lab.put(BIG)
    proxy.pause(after=len(BIG) // 2)
    with lab.worker(connections=1) as holder:
        holder.tell("read", lab.url)
        wait_until(lambda: any(p.stat().st_size for p in lab.path.glob("v1/partial/*/*.tar")))
        time.sleep(0.3)  # what is on its way arrives
        holder.process.send_signal(signal.SIGSTOP)
        holder.stopped()
        proxy.resume()
        yield holder
        holder.process.send_signal(signal.SIGCONT)
        assert holder.hear()[0] == [digest(BIG), True]


def waiter(lab: Lab, **options: object) -> tuple[Cache, FakeClock]:
    """A cache whose time passes as fast as it can wait, and began with the holder's fetch."""
    (record,) = lab.layout.locks.glob("*/*.lock")
    holder = read_holder(record)
    assert holder is not None
    clock = FakeClock(holder.started)
    config = Cache(lab.path, min_free=0, max_size=BUDGET, **options).config
    return Cache.from_config(config, clock=clock), clock


def normal(text: str, holder: Worker, lab: Lab) -> str:
    """What differs from run to run: bucket, process, host, and how far exactly half-way is."""
    text = text.replace(lab.url, "s3://lab/a.tar").replace(str(holder.process.pid), "4711")
    text = text.replace(f"on {os.uname().nodename}", "on node-7")
    return re.sub(r"\b(2\d|3\d|4\d|5\d)% of", "50% of", text)


def test_what_a_waiter_says_whose_holder_is_stopped(
    lab: Lab, half_way: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    """The three lines as they are; also in docs/reliability.md."""
    cache, clock = waiter(lab)
    with caplog.at_level(logging.WARNING, "shardcache"), cache.open(lab.url) as stream:
        assert stream.read() == BIG
    said = [normal(r.getMessage(), half_way, lab) for r in caplog.records]
    assert said[0] == (
        "s3://lab/a.tar: waiting for 10 s, process 4711 on node-7 has been fetching it for 10 s, "
        "50% of 15.4 MB done, nothing new for 10 s"
    )
    assert said[-1] == (
        "s3://lab/a.tar: process 4711 on node-7 has been fetching it for 2m, "
        "50% of 15.4 MB done, nothing new for 2m; fetching it here too"
    )
    assert len(said) == 12  # every ten seconds of the 120
    assert 120 <= clock.elapsed < 125
    cache.close()


def test_what_is_raised_when_the_time_to_wait_is_over(lab: Lab, half_way: Worker) -> None:
    cache, clock = waiter(lab, stale_after="2h", lock_timeout="30m")
    with pytest.raises(LockTimeoutError) as caught:
        cache.fetch(lab.url)
    assert normal(str(caught.value), half_way, lab) == (
        "s3://lab/a.tar was not there after 30m: process 4711 on node-7 has been fetching it for "
        "30m, 50% of 15.4 MB done, nothing new for 30m. Look at that process, or raise "
        "lock_timeout."
    )
    assert caught.value.holder.pid == half_way.process.pid
    assert 1800 <= clock.elapsed < 1801
    cache.close()


def test_a_wait_for_the_budget_lock_is_announced_and_bounded(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    with lab.worker("after shardcache.space.budget:Space._find_room") as holder:
        holder.tell("read", lab.url)
        holder.stopped()
        other = lab.put(NEW, "b.tar")
        cache, clock = waiter(lab)
        with caplog.at_level(logging.WARNING, "shardcache"), cache.open(other) as stream:
            assert stream.read() == NEW
        said = [normal(r.getMessage(), holder, lab) for r in caplog.records]
        assert said == [
            *(
                f"waiting for {seconds} s: process 4711 on node-7 holds the budget lock"
                for seconds in (10, 20, 30, 40, 50)
            ),
            "waiting for 1m: process 4711 on node-7 holds the budget lock; going on without it",
        ]
        assert 60 <= clock.elapsed < 62
        cache.close()
        holder.process.send_signal(signal.SIGCONT)
        assert holder.hear()[0] == [digest(OLD), True]
