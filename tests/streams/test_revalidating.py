"""Which version of a shard a job reads when its object is replaced: `docs/versions.md`."""

from __future__ import annotations

import json
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds

from shardcache.cache import Cache
from shardcache.cli.demo import S3Server
from shardcache.config import Config
from shardcache.errors import (
    AccessDeniedError,
    ShardNotFoundError,
    TransferError,
)
from shardcache.layout import Layout
from shardcache.origins.base import TransientError
from shardcache.space.choices import Choices
from shardcache.streams.opener import Opener
from tests.support.clitools import data, run, spec, warm
from tests.support.fakes import Fault, MemoryOrigin
from tests.support.proxy import Proxy, traffic
from tests.support.storetools import PATIENCE, Parent, crowd, forked
from tests.support.tars import make_tar

__all__ = ["data", "run", "spec", "warm"]

Make = Callable[..., Cache]
URL = "s3://lab/a.tar"
OLD, NEW = make_tar(1), make_tar(2)


@pytest.fixture(autouse=True)
def _object(origin: MemoryOrigin) -> None:
    origin.objects[URL] = OLD
    origin.states_checksums = False  # so that fetching describes nothing


def read(cache: Cache, url: str = URL) -> bytes:
    with cache.open(url) as stream:
        return stream.read()


def worker(make_cache: Make, cache: Cache, origin: MemoryOrigin) -> Cache:
    """Another process of a job, as far as the cache can tell: a copy that came in a pickle."""
    other = pickle.loads(pickle.dumps(cache))
    process = other._here()
    process.coordinator()
    process.origins.add("s3", origin)
    return other


def versions_on_disk(cache: Cache) -> int:
    return len({(entry.key, entry.version) for entry in cache.entries()})


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


class Shifted:
    """The system's clock, with a date that can be set."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self.monotonic = time.monotonic
        self.sleep = time.sleep

    def time(self) -> float:
        return time.time() + self.ahead


# -- never -----------------------------------------------------------------------------


def test_never_asks_nothing_and_serves_what_is_cached(
    make_cache: Make, origin: MemoryOrigin
) -> None:
    assert read(make_cache()) == OLD
    origin.objects[URL] = NEW
    cache = make_cache()
    assert [read(cache), read(cache)] == [OLD, OLD]
    assert type(cache._opener) is Opener  # the path of a hit is that of before
    assert (len(origin.requests), origin.stats) == (1, [])


# -- always ----------------------------------------------------------------------------


@pytest.mark.locks_work("flock")
def test_always_asks_once_for_each_job_and_not_for_what_was_just_fetched(
    make_cache: Make, origin: MemoryOrigin
) -> None:
    first = make_cache(revalidate="always")
    assert [read(first) for _ in range(3)] == [OLD] * 3
    assert origin.stats == []
    job = make_cache(revalidate="always")
    assert [read(job) for _ in range(3)] == [OLD] * 3
    assert origin.stats == [URL]
    with job.pinned(URL) as path:
        assert path.read_bytes() == OLD
    assert read(worker(make_cache, job, origin)) == OLD
    assert (len(origin.requests), origin.stats) == (1, [URL])


@pytest.mark.locks_work("flock")
@pytest.mark.parametrize("fill", ["follow", "complete"])
def test_a_running_job_keeps_its_version_and_one_that_starts_later_gets_the_new_one(
    make_cache: Make, origin: MemoryOrigin, fill: str
) -> None:
    running = make_cache(revalidate="always", fill=fill)
    assert read(running) == OLD
    origin.objects[URL] = NEW
    later = make_cache(revalidate="always", fill=fill)
    assert read(later) == NEW
    assert versions_on_disk(later) == 2
    for _ in range(2):
        assert (read(running), read(later)) == (OLD, NEW)
        # Workers of another epoch are other processes.
        assert read(worker(make_cache, running, origin)) == OLD
        assert read(worker(make_cache, later, origin)) == NEW
    with running.pinned(URL) as path:
        assert path.read_bytes() == OLD
    assert (len(origin.requests), origin.stats) == (2, [URL])


@pytest.mark.locks_work("flock")
def test_a_job_that_never_asks_keeps_its_version_beside_one_that_does(
    make_cache: Make, origin: MemoryOrigin
) -> None:
    running = make_cache()
    assert read(running) == OLD
    origin.objects[URL] = NEW
    assert read(make_cache(revalidate="always")) == NEW
    assert read(running) == OLD
    assert read(worker(make_cache, running, origin)) == OLD
    assert read(make_cache()) == NEW  # a new one takes the newest that is there


@pytest.mark.locks_work("flock")
def test_a_job_that_is_started_again_begins_anew(
    make_cache: Make, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDCACHE_JOB", "4711")

    def half_an_epoch(parent: Parent) -> None:
        cache = make_cache(revalidate="always")
        parent.say(read(cache))
        parent.hear()

    with forked(half_an_epoch) as job:
        assert job.hear() == OLD
        origin.objects[URL] = NEW
        # A rank of the running job that is started again is still that job.
        rank = make_cache(revalidate="always")
        assert (read(rank), origin.stats) == (OLD, [])
        rank.close()
        job.kill()  # and leaves everything behind
    again = make_cache(revalidate="always")
    assert (read(again), origin.stats) == (NEW, [URL])


@pytest.mark.locks_work("flock")
def test_an_evicted_version_that_the_origin_still_has_is_fetched_again(
    make_cache: Make, origin: MemoryOrigin, caplog: pytest.LogCaptureFixture
) -> None:
    for options in ({}, {"revalidate": "always"}):
        cache = make_cache(**options)
        assert read(cache) == OLD
        assert cache.remove(URL)[0]
        assert [read(cache), read(cache)] == [OLD, OLD]
    assert warnings(caplog) == []


@pytest.mark.locks_work("flock")
@pytest.mark.parametrize("revalidate", ["never", "always", "1h"])
def test_an_evicted_version_that_the_origin_replaced_costs_one_warning(
    make_cache: Make, origin: MemoryOrigin, caplog: pytest.LogCaptureFixture, revalidate: str
) -> None:
    urls = [f"s3://lab/{n}.tar" for n in range(3)]
    origin.objects.update(dict.fromkeys(urls, OLD))
    cache = make_cache(revalidate=revalidate)
    assert {read(cache, url) for url in urls} == {OLD}
    origin.objects.update(dict.fromkeys(urls, NEW))
    for url in urls:
        assert cache.remove(url)[0]
    assert {read(cache, url) for url in urls} == {NEW}
    assert {read(cache, url) for url in urls} == {NEW}
    [said] = warnings(caplog)
    assert "0.tar: the version that this job read was evicted" in said
    assert len(origin.requests) == 6


@pytest.mark.locks_work("flock")
def test_what_the_origin_took_back_is_not_fetched_again(
    make_cache: Make, origin: MemoryOrigin
) -> None:
    assert read(make_cache(revalidate="always")) == OLD
    origin.objects[URL] = NEW
    assert read(make_cache(revalidate="always")) == NEW
    origin.objects[URL] = OLD
    job = make_cache(revalidate="always")
    assert [read(job), read(job)] == [OLD, OLD]
    assert len(origin.requests) == 2


def test_an_object_that_is_replaced_while_it_is_followed_is_read_anew_by_the_next_open(
    make_cache: Make, origin: MemoryOrigin
) -> None:
    """The bytes of two versions never meet."""
    old, new = make_tar(1, 200, 20_000), make_tar(2, 200, 20_000)
    origin.objects[URL] = old
    go_on = threading.Event()
    origin.faults.append(Fault(after=1 << 20, wait=go_on))
    cache = make_cache(revalidate="always", connections=1, part_size="4MiB")
    with cache.open(URL) as stream:
        begun = stream.read(1 << 19)
        assert begun == old[: 1 << 19]
        origin.objects[URL] = new
        go_on.set()
        with pytest.raises(TransferError, match="was replaced while it was read"):
            stream.read()
    assert read(cache) == new
    assert read(cache) == new


@pytest.mark.locks_work("flock")
def test_with_never_a_job_that_starts_takes_the_newest_that_is_there(
    make_cache: Make, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDCACHE_JOB", "4711")
    ranks = [make_cache(), make_cache()]
    assert read(ranks[0]) == OLD
    origin.objects[URL] = NEW
    with make_cache() as warmer:  # of the same job, which reads on what it read
        assert warmer.prewarm([URL], refresh=True).refreshed == 1
    assert read(ranks[1]) == OLD
    for rank in ranks:
        rank.close()
    origin.objects[URL] = OLD  # taken back: nobody asks
    assert read(make_cache()) == NEW
    assert len(origin.requests) == 2


# -- an origin that gives no answer ------------------------------------------------------


class Silent:
    """`MemoryOrigin.stat` that fails, and how often it was asked."""

    def __init__(self, origin: MemoryOrigin, error: Exception) -> None:
        self.asked = 0
        self.error = error
        origin.stat = self  # type: ignore[method-assign]

    def __call__(self, url: object) -> Any:
        self.asked += 1
        raise self.error


def test_where_the_origin_is_down_what_is_cached_is_read_with_one_warning(
    make_cache: Make, origin: MemoryOrigin, caplog: pytest.LogCaptureFixture
) -> None:
    urls = [f"s3://lab/{n}.tar" for n in range(5)]
    origin.objects.update(dict.fromkeys(urls, OLD))
    earlier = make_cache()
    assert {read(earlier, url) for url in urls} == {OLD}
    silent = Silent(origin, TransientError("503 Slow Down"))
    cache = make_cache(revalidate="always", attempts=1)
    assert {read(cache, url) for url in urls} == {OLD}
    assert {read(cache, url) for url in urls} == {OLD}
    assert silent.asked == 1  # and left alone for a minute
    [said] = warnings(caplog)
    assert "0.tar cannot be confirmed by its origin, and is read as it is cached" in said
    strict = make_cache(revalidate="always", attempts=1, strict=True)
    with pytest.raises(TransferError, match="503"):
        read(strict, urls[0])
    with pytest.raises(TransferError, match="asked again in"):
        read(strict, urls[1])


def test_where_a_server_is_gone_a_job_reads_what_is_cached(
    s3: S3Server,
    bucket: str,
    s3_environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    urls = [f"s3://{bucket}/{number}.tar" for number in range(3)]
    with Proxy(s3.endpoint_url) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint_url)
        with Cache(tmp_path / "cache", min_free=0) as earlier:
            for number, url in enumerate(urls):
                s3.put(bucket, f"{number}.tar", make_tar(number))
                read(earlier, url)
    with Cache(tmp_path / "cache", min_free=0, revalidate="10ms", attempts=1) as job:
        for _ in range(2):
            assert [read(job, url) for url in urls] == [make_tar(number) for number in range(3)]
    [said] = warnings(caplog)
    assert "0.tar cannot be confirmed by its origin" in said


@pytest.mark.parametrize("kind", [ShardNotFoundError, AccessDeniedError])
def test_what_the_origin_has_no_longer_is_read_with_a_warning_and_refused_with_strict(
    make_cache: Make, origin: MemoryOrigin, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    assert read(make_cache()) == OLD
    silent = Silent(origin, kind(f"{URL}: no", url=URL))
    cache = make_cache(revalidate="always")
    assert [read(cache), read(cache)] == [OLD, OLD]
    assert (silent.asked, len(warnings(caplog))) == (1, 1)
    with pytest.raises(kind):
        read(make_cache(revalidate="always", strict=True))
    assert versions_on_disk(cache) == 1


def test_an_origin_without_versions_is_believed_not_to_change(
    make_cache: Make, origin: MemoryOrigin, caplog: pytest.LogCaptureFixture
) -> None:
    origin.etags = False
    assert read(make_cache()) == OLD
    origin.sizes = False
    cache = make_cache(revalidate="always")
    assert [read(cache), read(cache)] == [OLD, OLD]
    assert "nothing that tells versions apart" in warnings(caplog)[0]
    assert len(origin.stats) == 1


# -- a duration ------------------------------------------------------------------------


@pytest.mark.locks_work("flock", "files")
def test_a_duration_asks_for_what_was_confirmed_longer_ago(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    clock = Shifted()
    config = Config(tmp_path / "cache", min_free=0, revalidate="10m")
    made = []

    def job() -> Cache:
        cache = Cache.from_config(config, clock=clock)
        made.append(cache)
        cache._here().coordinator()
        cache._here().origins.add("s3", origin)
        return cache

    try:
        assert read(job()) == OLD
        for minutes, asked in [(5, 0), (11, 1), (20, 1), (22, 2), (31, 2), (33, 3)]:
            clock.ahead = minutes * 60.0
            for one in (job(), job()):  # the second one finds what the first one was told
                assert [read(one), read(one)] == [OLD, OLD]
            assert len(origin.stats) == asked, minutes
        origin.objects[URL] = NEW
        clock.ahead = 40 * 60.0
        running = job()
        assert read(running) == OLD  # confirmed seven minutes ago
        clock.ahead = 60 * 60.0
        assert (read(running), len(origin.stats)) == (OLD, 3)
        assert (read(job()), len(origin.stats)) == (NEW, 4)
        clock.ahead = -1000 * 60.0  # set back: what is dated in the future says nothing
        assert (read(job()), len(origin.stats)) == (NEW, 5)
        assert (read(job()), len(origin.stats)) == (NEW, 5)
        clock.ahead = -3000 * 60.0
        assert (read(job()), len(origin.stats)) == (NEW, 6)
    finally:
        for cache in made:
            cache.close()


# -- several processes -------------------------------------------------------------------


def _open_all(parent: Parent, number: int, directory: Path, urls: list[str]) -> None:
    cache = Cache(directory, min_free=0, revalidate="always")
    cache.prepare_here(urls[0])
    parent.say()
    parent.hear()
    shift = number % len(urls)
    found = {url: read(cache, url) for url in urls[shift:] + urls[:shift]}
    parent.say([found[url] for url in urls])
    parent.hear()


@pytest.mark.locks_work()
@pytest.mark.parametrize("replaced", [False, True])
def test_the_processes_of_a_job_ask_once_for_each_shard(
    s3: S3Server,
    bucket: str,
    proxy: Proxy,
    s3_environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replaced: bool,
) -> None:
    urls = [f"s3://{bucket}/{n}.tar" for n in range(3)]
    for number in range(3):
        s3.put(bucket, f"{number}.tar", make_tar(number))
    with Cache(tmp_path / "cache", min_free=0) as earlier:
        for url in urls:
            read(earlier, url)
    if replaced:
        for number in range(3):
            s3.put(bucket, f"{number}.tar", make_tar(number + 10))
    expected = [make_tar(number + 10 * replaced) for number in range(3)]
    proxy.reset()
    monkeypatch.setenv("SHARDCACHE_JOB", "many")
    with crowd(4, _open_all, tmp_path / "cache", urls) as ranks:
        for rank in ranks:
            rank.hear()
        for rank in ranks:
            rank.tell()
        for rank in ranks:
            assert rank.hear() == expected
        for rank in ranks:
            rank.tell()
            assert rank.wait() == 0
    seen = traffic(proxy.requests())
    assert {name: found.heads for name, found in seen.items()} == {
        f"{bucket}/{n}.tar": 1 + replaced
        for n in range(3)  # fetching takes one of its own
    }
    assert {found.object_fetches for found in seen.values()} == {int(replaced)}


@pytest.mark.locks_work()
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("one_job", [False, True])
def test_who_wants_a_shard_that_is_just_asked_for_waits_for_the_answer(
    make_cache: Make, origin: MemoryOrigin, replaced: bool, one_job: bool
) -> None:
    assert read(make_cache()) == OLD
    if replaced:
        origin.objects[URL] = NEW
    first = make_cache(revalidate="always")
    second = worker(make_cache, first, origin) if one_job else make_cache(revalidate="always")
    asked, answer, polled, settled, fetch = (threading.Event() for _ in range(5))
    stat = origin.stat
    origin.faults.append(Fault(wait=fetch))  # the fetch that follows is not waited for

    def slowly(url: Any) -> Any:
        asked.set()
        assert answer.wait(PATIENCE)
        return stat(url)

    origin.stat = slowly  # type: ignore[method-assign]
    found: list[bytes] = []
    readers = [threading.Thread(target=lambda c=c: found.append(read(c))) for c in (first, second)]
    decided = second._opener._decided

    def counted(*arguments: Any) -> bool:
        polled.set()
        found = decided(*arguments)
        if found:
            settled.set()
        return found

    try:
        readers[0].start()
        assert asked.wait(PATIENCE)
        second._opener._decided = counted
        readers[1].start()
        assert polled.wait(PATIENCE)
        answer.set()
        assert settled.wait(PATIENCE)
    finally:
        for event in (answer, fetch):
            event.set()
        for reader in readers:
            if reader.ident is not None:
                reader.join(PATIENCE)
    assert found == [NEW if replaced else OLD] * 2
    assert (origin.stats, len(origin.requests)) == ([URL], 1 + replaced)


# -- training ----------------------------------------------------------------------------


@pytest.mark.locks_work("flock")
def test_a_data_set_that_is_replaced_between_two_epochs(
    s3: S3Server, bucket: str, proxy: Proxy, s3_environment: dict[str, str], tmp_path: Path
) -> None:
    """A job goes on with the samples that it began with; workers are new ones in each epoch."""
    from torch.utils.data import DataLoader

    spec = f"s3://{bucket}/{{0..3}}.tar"

    def publish(begin: int) -> None:
        for number in range(4):
            s3.put(bucket, f"{number}.tar", make_tar(begin + number))

    def job() -> tuple[Cache, Callable[[], list[str]]]:
        cache = Cache(tmp_path / "cache", min_free=0, revalidate="always")
        dataset = cache.attach(wds.WebDataset(spec, shardshuffle=False))
        loader = DataLoader(dataset, batch_size=None, num_workers=2)
        return cache, lambda: sorted(sample["__key__"] for sample in loader)

    def samples(begin: int) -> list[str]:
        return [f"{begin + n:04d}-{member:05d}" for n in range(4) for member in range(4)]

    publish(0)
    first, epoch = job()
    assert epoch() == samples(0)
    publish(10)
    second, other_epoch = job()
    assert other_epoch() == samples(10)
    proxy.reset()
    assert (epoch(), other_epoch()) == (samples(0), samples(10))
    assert proxy.requests() == []
    first.close()
    second.close()


# -- prewarming --------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_a_prewarm_that_refreshes_fetches_what_was_replaced_and_says_how_much(
    run: Any, spec: str, warm: list[str], s3: S3Server, bucket: str, proxy: Proxy, processes: int
) -> None:
    arguments = ["prewarm", "--refresh", spec, "--processes", processes]
    code, out, _ = run(*arguments)
    assert code == 0 and "All 4 shards cached" in out
    for number in (1, 3):
        s3.put(bucket, f"train-{number:04d}.tar", make_tar(50 + number))
    assert run("prewarm", "--check", spec)[0] == 0  # it asks nobody
    assert run("prewarm", "--check", "--refresh", spec)[0] == 4
    code, out, _ = run("prewarm", "--dry-run", "--refresh", spec, "--json")
    assert [row["outcome"] for row in json.loads(out)["shards"]] == ["cached", "missing"] * 2
    proxy.reset()
    code, out, _ = run(*arguments, "--json")
    found = json.loads(out)["summary"]
    assert (code, found["refreshed"], found["fetched"], found["cached"]) == (0, 2, 2, 2)
    assert found["plan"]["outdated"] == 2
    fetches = {name: one.object_fetches for name, one in traffic(proxy.requests()).items()}
    assert fetches == {f"{bucket}/train-{n:04d}.tar": n % 2 for n in range(4)}
    code, out, _ = run(*arguments)
    assert code == 0 and "All 4 shards cached" in out
    s3.put(bucket, "train-0000.tar", make_tar(50))
    code, out, _ = run(*arguments)
    assert "1 to fetch (" in out and ", 1 replaced at the origin)" in out
    assert "1 replaced at the origin." in out
    code, out, _ = run("path", warm[1])
    assert Path(out.strip()).read_bytes() == make_tar(51)


def test_a_refresh_that_gets_no_answer_keeps_what_is_there_and_fails(
    make_cache: Make, origin: MemoryOrigin
) -> None:
    urls = [f"s3://lab/{n}.tar" for n in range(3)]
    origin.objects.update(dict.fromkeys(urls, OLD))
    cache = make_cache(attempts=1)
    cache.prewarm(urls)
    Silent(origin, TransientError("503 Slow Down"))
    report = cache.prewarm(urls, refresh=True)
    assert (report.failed, report.cached, report.refreshed) == (3, 0, 0)
    assert any("503" in str(result.error) for result in report.results)
    assert {read(cache, url) for url in urls} == {OLD}
    gone = make_cache()
    Silent(origin, ShardNotFoundError("gone", url=urls[0]))
    assert gone.prewarm(urls, refresh=True).failed == 3
    assert cache.prewarm(urls).cached == 3


@pytest.mark.locks_work("flock")
@pytest.mark.parametrize("revalidate", ["never", "always"])
def test_a_refresh_disturbs_no_running_job(
    make_cache: Make, origin: MemoryOrigin, revalidate: str
) -> None:
    running = make_cache(revalidate=revalidate)
    assert read(running) == OLD
    origin.objects[URL] = NEW
    assert running.prewarm([URL], refresh=True).refreshed == 1
    assert (read(running), versions_on_disk(running)) == (OLD, 2)
    assert make_cache().prewarm([URL], refresh=True).cached == 1
    assert read(worker(make_cache, running, origin)) == OLD
    assert read(make_cache(revalidate=revalidate)) == NEW
    assert len(origin.requests) == 2


# -- room --------------------------------------------------------------------------------


@pytest.mark.locks_work("flock")
@pytest.mark.parametrize("revalidate", ["never", "always"])
def test_both_versions_count_and_the_older_goes_first_once_nobody_reads_it(
    make_cache: Make, origin: MemoryOrigin, revalidate: str
) -> None:
    others = [f"s3://lab/other-{n}.tar" for n in range(2)]
    origin.objects.update(dict.fromkeys(others, OLD))
    options = {"max_size": 3 * len(OLD), "revalidate": revalidate}
    later = make_cache(**options)  # by its date it may have used all that follows
    running = make_cache(**options)
    assert read(running) == OLD
    origin.objects[URL] = NEW
    assert read(later, others[0]) == OLD
    if revalidate == "never":
        later.prewarm([URL], refresh=True)
    assert [read(later), read(later), read(running)] == [NEW, NEW, OLD]
    assert versions_on_disk(later) == 3
    read(later, others[1])  # no room: the running job reads the older version
    assert (versions_on_disk(later), read(running)) == (3, OLD)
    running.close()
    assert read(later, others[1]) == OLD
    assert {read(later, url) for url in (URL, *others)} == {NEW, OLD}
    kept = {(entry.metadata().url, entry.metadata().info.etag) for entry in later.entries()}
    assert {url for url, _ in kept} == {URL, *others} and len(kept) == 3
    assert read(later) == NEW and len(origin.requests) == 6  # one was streamed, in two


@pytest.mark.locks_work("flock")
def test_a_pinned_shard_keeps_its_versions_and_without_a_pin_the_older_one_goes(
    make_cache: Make, origin: MemoryOrigin
) -> None:
    for options, content in (({}, OLD), ({"revalidate": "always"}, NEW)):
        origin.objects[URL] = content
        with make_cache(**options) as job:
            assert read(job) == content
    cache = make_cache()
    for other in list(cache.entries()):
        if other.metadata().info.etag == origin.info(cache.parse(URL)).etag:
            os.utime(other.path / "meta.json", (1, 1))  # by its last use the newer would go
    cache.pin(URL)
    cache.clean(max_size=1)
    assert versions_on_disk(cache) == 2
    cache.unpin(URL)
    cache.clean(max_size=len(NEW))
    assert (versions_on_disk(cache), read(cache)) == (1, NEW)


@pytest.mark.locks_work("flock")
def test_a_version_on_a_slower_tier_is_kept_though_the_new_one_is_on_a_faster(
    make_cache: Make, origin: MemoryOrigin, tmp_path: Path
) -> None:
    for revalidate in ("never", "always"):
        url = f"s3://lab/{revalidate}.tar"
        origin.objects[url] = OLD
        directory = tmp_path / revalidate
        running = make_cache(dir=directory, revalidate=revalidate)
        assert read(running, url) == OLD
        origin.objects[url] = NEW
        tiers = {"dir": directory, "tiers": f"{tmp_path}/ram-{revalidate}=1GB"}
        later = make_cache(revalidate="always", **tiers)
        assert read(later, url) == NEW and "ram" in str(later.path(url))
        # As a worker of the running job would see it, had that the tier, too.
        same = Cache.__new__(Cache)
        config = running.config.replace(tiers=later.config.tiers)
        same._setup(config, {}, running._clock, running._started)
        same._here().coordinator()
        assert read(same, url) == OLD
        same.close()


@pytest.mark.locks_work("flock")
def test_a_sibling_namespace_gives_no_outdated_version(
    make_cache: Make, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job, expected in (("one", OLD), ("two", NEW)):
        monkeypatch.setenv("SHARDCACHE_JOB", job)
        cache = make_cache(isolation="job", revalidate="always")
        assert read(cache) == expected
        origin.objects[URL] = NEW
    monkeypatch.setenv("SHARDCACHE_JOB", "three")
    assert read(make_cache(isolation="job", revalidate="always")) == NEW
    assert len(origin.requests) == 2  # the third one was linked


def test_a_copy_upstream_of_what_was_replaced_is_not_taken(
    make_cache: Make, origin: MemoryOrigin, tmp_path: Path
) -> None:
    near = {"url": str(tmp_path / "near"), "write_back": True}
    first = make_cache(upstreams=[near])
    assert read(first) == OLD
    assert first._here().copier.drain(PATIENCE)
    other = {"dir": tmp_path / "another node", "upstreams": [near], "revalidate": "always"}
    assert read(make_cache(**other)) == OLD
    assert len(origin.requests) == 1
    origin.objects[URL] = NEW
    later = make_cache(**other)
    assert [read(later), read(later)] == [NEW, NEW]
    assert len(origin.requests) == 2


# -- the log of choices ------------------------------------------------------------------

KEY, ONE, TWO, THREE = "ab" * 16, "1" * 24, "2" * 24, "3" * 24
JOB = "c" * 32


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path / "v1")
    made.make()
    return made


@pytest.fixture
def chooser(layout: Layout) -> Iterator[Callable[..., Choices]]:
    made: list[Choices] = []

    def make(*, strict: bool = True) -> Choices:
        choices = Choices(strict=strict)
        choices.keep(layout, JOB, primary=True)
        made.append(choices)
        return choices

    yield make
    for choices in made:
        choices.close()


@pytest.mark.locks_work("flock")
def test_of_two_processes_that_choose_at_once_the_first_one_counts(
    chooser: Callable[..., Choices], layout: Layout
) -> None:
    one, two = chooser(), chooser()
    assert one.version(KEY) is two.version(KEY) is None
    one._log.propose(KEY, ONE)
    assert two._log.propose(KEY, TWO) == ONE  # it had not read of the other one's
    assert one.version(KEY) == two.version(KEY) == chooser().version(KEY) == ONE


@pytest.mark.locks_work("flock")
def test_a_version_that_was_lost_is_replaced_once_for_all(
    chooser: Callable[..., Choices],
) -> None:
    one, two = chooser(), chooser()
    assert one.note(KEY, ONE) is None and two.note(KEY, ONE) is None
    assert two.note(KEY, TWO) is None and two.version(KEY) == ONE  # it is still there
    for each in (one, two):
        each.lose(KEY)
        assert each.version(KEY) is None and not each.knows(KEY)
    assert one.note(KEY, TWO) == ONE
    assert two.version(KEY) == TWO
    assert two.note(KEY, THREE) is None
    assert two.version(KEY) == chooser().version(KEY) == TWO


@pytest.mark.locks_work("flock")
def test_a_line_that_was_cut_short_spoils_no_other(
    chooser: Callable[..., Choices], layout: Layout
) -> None:
    one = chooser()
    one.note(KEY, ONE)
    with layout.choices(JOB).open("ab") as file:
        file.write(f"\n{'cd' * 16} {TWO} 00".encode())  # a full disk
    one.note("ef" * 16, TWO)
    again = chooser()
    assert [again.version(key) for key in (KEY, "cd" * 16, "ef" * 16)] == [ONE, None, TWO]


@pytest.mark.locks_work("flock")
def test_the_last_process_removes_the_log_and_a_sweeper_what_was_left(
    chooser: Callable[..., Choices], layout: Layout, make_cache: Make
) -> None:
    one, two = chooser(), chooser()
    one.note(KEY, ONE)
    one.close()
    assert layout.choices(JOB).exists()
    two.close()
    assert not layout.choices(JOB).exists()
    cache = make_cache()
    layout = cache.node_layout
    layout.choices(JOB).write_bytes(b"of a job that was killed")
    mine = [p for p in layout.sessions.glob("*.versions") if p != layout.choices(JOB)]
    cache.clean()
    assert not layout.choices(JOB).exists() and len(mine) == 1 and mine[0].exists()


def test_without_a_log_a_process_keeps_its_choices_to_itself(
    make_cache: Make, origin: MemoryOrigin
) -> None:
    cache = make_cache(revalidate="always")
    cache._here().choices._log.close()
    assert read(cache) == OLD
    origin.objects[URL] = NEW
    assert read(make_cache(revalidate="always")) == NEW
    assert (read(cache), origin.stats) == (OLD, [URL])
