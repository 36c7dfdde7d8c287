"""Prewarm: plans, and runs that end in every way a run can end."""

from __future__ import annotations

import errno
import os
import pickle
import threading
import time

import pytest

from shardcache.cache import Cache
from shardcache.errors import (
    AccessDeniedError,
    CacheFullError,
    ConfigError,
    ShardNotFoundError,
    TransferError,
)
from shardcache.origins.listing import Listing
from shardcache.prewarm.plan import make_plan, wanted_shards
from shardcache.prewarm.run import prewarm
from shardcache.results import Finished, Outcome, Planned, Started, Stopped
from shardcache.store.partial import Partial, in_flight
from shardcache.streams.opener import Opener
from tests.support.fakes import Fault
from tests.support.tars import make_tar


def names(count: int, bucket: str = "b") -> list[str]:
    return [f"s3://{bucket}/train-{n:04d}.tar" for n in range(count)]


@pytest.fixture
def listed(monkeypatch, origin):
    """Sizes as a listing of the in-memory origin would tell them."""

    def sizes(self, shards):
        return {s.key: len(origin.objects[str(s)]) for s in shards if str(s) in origin.objects}

    monkeypatch.setattr(Listing, "sizes", sizes)


@pytest.fixture
def unlisted(monkeypatch):
    """An origin that may not be listed."""
    monkeypatch.setattr(Listing, "sizes", lambda self, shards: {})


def fill(origin, urls, members=4):
    for number, url in enumerate(urls):
        origin.objects[url] = make_tar(number, members)
    return urls


def planned(cache, urls):
    listing = Listing(cache.config)
    return make_plan(cache, wanted_shards(cache, urls, listing), listing)


# -- plans ---------------------------------------------------------------------


@pytest.mark.locks_work("answers")
def test_what_is_in_flight_already_is_not_counted_twice(make_cache, origin, listed):
    """An interrupted prewarm that filled most of the budget can be taken up again."""
    (url,) = fill(origin, names(1), members=3000)
    size = len(origin.objects[url])
    cache = make_cache(max_size=size + 100_000, part_size="64MiB")
    origin.faults.append(Fault(after=size - 200_000, wait=threading.Event()))
    stop = threading.Event()
    cut = prewarm(cache, [url], stop=stop, on_event=stop_when_written(stop.set, size // 2))
    assert cut.stopped is Stopped.REQUESTED
    partial = next(in_flight(cache._here().namespaces.own.layout))
    assert partial.occupied > size // 2
    plan = planned(cache, [url])
    assert plan.missing == 0
    assert prewarm(cache, [url]).fetched == 1


def test_local_paths_are_refused_unless_they_are_cached(make_cache, tmp_path):
    shard = tmp_path / "x.tar"
    shard.write_bytes(make_tar(1))
    with pytest.raises(ConfigError, match="cache_local"):
        prewarm(make_cache(), [str(shard)])
    report = prewarm(make_cache(cache_local=True), [str(shard)])
    assert report.fetched == 1
    assert report.plan.sizes  # a local size costs a stat


def test_too_much_is_refused_before_anything_is_fetched(make_cache, origin, listed):
    cache = make_cache(max_size=25_000)
    urls = fill(origin, names(3))
    with pytest.raises(CacheFullError, match="best-effort") as caught:
        prewarm(cache, urls)
    assert caught.value.needed == sum(map(len, origin.objects.values()))
    assert caught.value.missing == caught.value.needed - 25_000
    assert origin.requests == []
    assert pickle.loads(pickle.dumps(caught.value)).missing == caught.value.missing


def test_best_effort_takes_what_fits(make_cache, origin, listed):
    cache = make_cache(max_size=45_000)
    urls = fill(origin, names(4))
    report = prewarm(cache, urls, best_effort=True)
    assert len(report.plan.left_out) == 2 and len({url for url, *_ in origin.requests}) == 2
    assert [r.outcome for r in report.results] == [Outcome.FETCHED] * 2 + [Outcome.LEFT_OUT] * 2
    assert not report.full


def test_dry_run_and_check_plan_and_fetch_and_touch_nothing(make_cache, origin, listed):
    cache = make_cache()
    urls = fill(origin, names(3))
    entry = cache.fetch(urls[0])
    os.utime(entry.path / "meta.json", (1000, 1000))
    origin.requests.clear()
    sizes = [len(origin.objects[url]) for url in urls]
    for mode in ({"check": True}, {"dry_run": True}):
        report = prewarm(cache, [*urls, "s3://b/absent.tar"], **mode)
        assert (report.cached, report.missing) == (1, 3)
        assert report.plan.cached_bytes == sizes[0] and len(report.plan.to_fetch) == 3
    assert (report.plan.fetch_bytes, report.plan.unknown) == (sum(sizes[1:]), 1)
    assert origin.requests == []
    assert (entry.path / "meta.json").stat().st_mtime == 1000


def test_a_specification_is_expanded_once_and_each_object_is_one_shard(make_cache, origin, listed):
    cache = make_cache()
    urls = fill(origin, names(4))
    spec = "s3://b/train-{0000..0003}.tar"
    for wanted in (spec, [spec, f"{urls[0]}?X-Amz-Signature=abc", urls[1].replace("s3:", "s3a:")]):
        assert [result.url for result in cache.prewarm(wanted).results] == urls
    # A name that a listing found may hold braces itself.
    (url,) = fill(origin, ["s3://b/odd-{0..1}.tar"])
    assert cache.prewarm([cache.parse(url)]).fetched == 1
    assert cache.prewarm([r"s3://b/odd-\{0..1\}.tar"]).cached == 1


# -- runs ----------------------------------------------------------------------


def stop_when_written(stop, amount):
    """An event handler that calls ``stop`` once a fetch has got so far."""

    def watch(status):
        while status.written < amount:
            time.sleep(0.005)
        stop()

    def on_event(event):
        if isinstance(event, Started):
            threading.Thread(target=watch, args=(event.status,), daemon=True).start()

    return on_event


def test_everything_is_fetched_once_and_told_in_order(make_cache, origin, listed):
    cache = make_cache()
    urls = fill(origin, names(6))
    cache.fetch(urls[2])
    damaged = cache.fetch(urls[3])
    os.chmod(damaged.data, 0o600)
    os.truncate(damaged.data, 10)
    origin.requests.clear()
    events = []
    report = prewarm(cache, urls, jobs=3, on_event=events.append)
    assert [r.url for r in report.results] == urls
    assert (report.fetched, report.cached, report.failed, report.not_started) == (5, 1, 0, 0)
    assert (
        report.bytes == report.received == sum(len(origin.objects[u]) for u in urls if u != urls[2])
    )
    assert sorted(url for url, *_ in origin.requests) == sorted(set(urls) - {urls[2]})
    assert isinstance(events[0], Planned)
    for url in urls:
        mine = [e for e in events[1:] if str(e.shard) == url]
        assert [type(e) for e in mine] == [Started, Finished]
    assert report.stopped is None
    again = prewarm(cache, urls)
    assert again.cached == 6
    assert again.received == 0


def test_one_failure_does_not_stop_the_others(make_cache, origin, listed, monkeypatch):
    urls = names(5)
    fill(origin, [u for n, u in enumerate(urls) if n != 2])
    fetch_shard = Opener.fetch

    def sometimes(self, shard, status=None):
        if str(shard) == urls[1]:
            raise ZeroDivisionError("odd")
        return fetch_shard(self, shard, status)

    monkeypatch.setattr(Opener, "fetch", sometimes)
    report = prewarm(make_cache(), urls, jobs=2)
    assert report.fetched == 3 and report.stopped is None
    assert [r.outcome for r in report.results[1:3]] == [Outcome.FAILED] * 2
    assert isinstance(report.results[1].error, ZeroDivisionError)
    assert isinstance(report.results[2].error, ShardNotFoundError)
    assert [u for u, *_ in origin.requests].count(urls[2]) == 1
    with pytest.raises(ConfigError, match="jobs"):
        prewarm(make_cache(), [], jobs=0)


DENIED, MISTAKEN = AccessDeniedError("no"), ConfigError("no")


@pytest.mark.parametrize(
    ("errors", "buckets", "outcomes", "stopped"),
    [
        ([DENIED] * 50, ["b"], "FFF" + 47 * "-", Stopped.REFUSED),
        ([TransferError("silent")] * 50, ["b"], "FFF" + 17 * "-", Stopped.REFUSED),
        # To credentials without s3:ListBucket, a missing object looks like a refusal.
        ([DENIED, None, DENIED, DENIED, None, *[DENIED] * 5], ["b"], "F.FF.FFFFF..", None),
        ([MISTAKEN] * 3, ["bad", "good"], "FFF---......", Stopped.REFUSED),
    ],
)
def test_refusals_that_all_shards_of_a_bucket_will_meet_end_it(
    make_cache, origin, unlisted, errors, buckets, outcomes, stopped
):
    urls = [url for b in buckets for url in fill(origin, names(len(outcomes) // len(buckets), b))]
    for error in errors:
        origin.faults.append(Fault(after=None if error else 10**9, error=error))
    report = prewarm(make_cache(), urls, jobs=1)
    marks = {Outcome.FAILED: "F", Outcome.NOT_STARTED: "-", Outcome.FETCHED: "."}
    assert "".join(marks[result.outcome] for result in report.results) == outcomes
    assert report.stopped is stopped
    assert len({url for url, *_ in origin.requests}) == len(outcomes.replace("-", ""))


def test_failures_beyond_the_limit_end_the_run(make_cache, origin, listed):
    urls = [*fill(origin, names(2)), *names(20, "gone")]
    report = prewarm(make_cache(), urls, jobs=1, max_failures=2)
    assert (report.fetched, report.failed, report.not_started) == (2, 3, 17)
    assert report.stopped is Stopped.FAILURES


@pytest.mark.locks_work("answers")
def test_interrupt_is_passed_on_after_the_fetches_have_let_go(make_cache, origin, listed):
    cache = make_cache()
    urls = fill(origin, names(3))
    for _ in urls:
        origin.faults.append(Fault(after=100, wait=threading.Event()))

    def on_event(event):
        if isinstance(event, Started):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prewarm(cache, urls, jobs=2, on_event=on_event)
    assert not [t for t in threading.enumerate() if t.name.startswith("shardcache-prewarm")]
    assert not any(f.live for f in in_flight(cache._here().namespaces.own.layout))


def test_a_fetch_that_does_not_end_is_not_waited_for(make_cache, origin, listed, monkeypatch):
    monkeypatch.setattr("shardcache.prewarm.pool._FAREWELL", 0.2)
    cache = make_cache()
    urls = fill(origin, names(2))
    release = threading.Event()
    stop = threading.Event()
    fetch_shard = Opener.fetch

    def stuck(self, shard, status=None):
        stop.set()
        release.wait(30)
        return fetch_shard(self, shard, status)

    monkeypatch.setattr(Opener, "fetch", stuck)
    report = prewarm(cache, urls, jobs=1, stop=stop)
    release.set()
    assert report.not_started == 2 and report.stopped is Stopped.REQUESTED


@pytest.mark.locks_work("flock")
def test_no_room_during_the_run_ends_it(make_cache, origin, unlisted):
    urls = fill(origin, names(10))
    cache = make_cache(max_size=25_000)
    report = prewarm(cache, urls, jobs=1)
    assert report.full
    assert report.stopped is Stopped.FULL
    assert (report.fetched, report.failed, report.not_started) == (1, 1, 8)
    assert isinstance(report.results[1].error, CacheFullError)
    origin.requests.clear()
    report = prewarm(cache, urls, jobs=1, best_effort=True)
    assert not report.full
    assert (report.cached, report.failed, report.count(Outcome.LEFT_OUT)) == (1, 0, 9)
    assert len({url for url, *_ in origin.requests}) <= 3  # then it is believed


def test_broken_disk_is_believed_after_some_shards(make_cache, origin, listed, monkeypatch):
    cache = make_cache()
    urls = fill(origin, names(9))

    def broken(self, *args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Partial, "write", broken)
    report = prewarm(cache, urls, jobs=1)
    assert (report.failed, report.not_started) == (3, 6)
    assert report.stopped is Stopped.REFUSED


@pytest.mark.locks_work("answers")
def test_shards_that_are_wanted_do_not_make_room_for_each_other(make_cache, origin, listed):
    urls = fill(origin, names(4))
    size = len(origin.objects[urls[0]])
    first = make_cache(max_size=3 * size)
    for used, url in zip((1000, 3000, 2000), urls[:3], strict=True):
        entry = first.fetch(url)
        os.utime(entry.path / "meta.json", (used, used))
    first.close()
    (new,) = fill(origin, ["s3://b/new.tar"])
    cache = make_cache(max_size=3 * size)
    report = prewarm(cache, [new, urls[0], urls[2]], jobs=1)
    assert report.plan.evict == size
    assert [r.outcome for r in report.results] == [
        Outcome.FETCHED,
        Outcome.CACHED,
        Outcome.CACHED,
    ]
    assert urls[1] not in cache  # though it was used last


def test_ranks_link_what_a_sibling_has(make_cache, origin, listed, monkeypatch):
    urls = fill(origin, names(2))
    prewarm(make_cache(), urls)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    report = prewarm(make_cache(isolation="rank"), urls)
    assert report.linked == 2
    assert report.received == 0


def test_s3_shards_cost_one_fetch_each_and_few_listings(
    s3, bucket, s3_environment, proxy, tmp_path
):
    data = {f"x-{n:02d}.tar": make_tar(n) for n in range(12)}
    for name, content in data.items():
        s3.put(bucket, name, content)
    with Cache(tmp_path / "cache", min_free=0) as cache:
        report = prewarm(cache, f"s3://{bucket}/x-{{00..11}}.tar", jobs=4)
        assert report.fetched == 12
        assert report.plan.unknown == 0
        summed = proxy.summary()
        assert all(summed[f"{bucket}/{name}"].object_fetches == 1 for name in data)
        listings = [r for r in proxy.requests() if not r.reads_object]
        assert len(listings) == 1
        proxy.reset()
        found = prewarm(cache, f"s3://{bucket}/x-0*.tar", dry_run=True, refresh=False)
        assert (found.cached, len(proxy.requests())) == (10, 1)
    with Cache(tmp_path / "other", min_free=0) as other:
        proxy.reset()
        found = prewarm(other, f"s3://{bucket}/x-*.tar", dry_run=True)
        # What was listed to find the shards tells their sizes, too.
        assert found.plan.fetch_bytes == sum(map(len, data.values()))
        assert len(proxy.requests()) == 1
