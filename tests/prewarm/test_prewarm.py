"""`Cache.prewarm`: plans, runs, and every way in which a run can end."""

import errno
import os
import threading
import time
from functools import partial

import pytest

from shardcache import AccessDeniedError, Cache, CacheFullError, ConfigError
from shardcache.errors import ShardNotFoundError, TransferError
from shardcache.layout import REPLACED
from shardcache.origins.base import ObjectInfo
from shardcache.prewarm import Finished, Planned, Started, Stopped
from shardcache.prewarm.plan import same_version
from shardcache.prewarm.ray import prewarm_nodes
from shardcache.process import ProcessCache
from tests.support.fakes import Fault
from tests.support.storetools import PATIENCE, damage, refusing, room, taken, wait_until
from tests.support.tars import make_tar

#: Bytes of a shard that `fill` makes.
SIZE = len(make_tar(0, 4))


def names(count, bucket="b"):
    return [f"s3://{bucket}/train-{n:04d}.tar" for n in range(count)]


@pytest.fixture
def listed(monkeypatch, origin):
    """Let listings state the sizes of the in-memory origin."""

    def sizes(self, shards, level, ask):
        return {s.key: len(origin.objects[str(s)]) for s in shards if str(s) in origin.objects}

    monkeypatch.setattr("shardcache.origins.listing.Listing.sizes", sizes)


@pytest.fixture
def fill(origin):
    """Store archives under URLs; returns the URLs."""

    def fill(urls, members=4):
        origin.objects.update({url: make_tar(n, members) for n, url in enumerate(urls)})
        return urls

    return fill


def outcomes(report):
    marks = {"failed": "F", "not_started": "-", "fetched": "."}
    marks |= {"cached": "c", "linked": "l", "left_out": "o"}
    return "".join(marks[result.outcome] for result in report.results)


def test_progress_and_failures_of_a_prewarm(make_cache, fill, capsys, caplog, monkeypatch):
    monkeypatch.setattr("shardcache.cli.output.LINE_EVERY", 0.01)
    urls, shown = [*fill(names(2)), "s3://b/absent.tar"], []

    def on_event(event):
        if isinstance(event, Started) and not shown:
            wait_until(lambda: shown.append(capsys.readouterr().err) or "0/3" in "".join(shown))

    report = make_cache().prewarm(urls, progress=True, on_event=on_event)
    assert [*map(type, report.failures.values())] == [ShardNotFoundError]
    assert [*report.failures] == urls[2:]
    (message,) = caplog.messages
    assert "1 of 3 shards" in message and urls[2] in message


def test_an_interrupted_prewarm_resumes_within_the_budget(make_cache, origin, listed, fill):
    (url,) = fill(names(1), members=3000)
    size, stop = len(origin.objects[url]), threading.Event()
    cache = make_cache(max_size=size + 100_000, part_size="64MiB")
    origin.faults.append(Fault(after=size - 200_000, wait=threading.Event()))

    def on_event(event):
        if isinstance(event, Started):
            wait_until(lambda: event.progress().written >= size // 2)
            stop.set()

    assert cache.prewarm([url], stop=stop, on_event=on_event).stopped is Stopped.REQUESTED
    assert cache.prewarm([url], dry_run=True).plan.missing == 0
    assert cache.prewarm([url]).fetched == 1


def test_invalid_arguments_are_refused_at_once(make_cache):
    with pytest.raises(ConfigError, match="cannot be written .* Point dir"):
        Cache("/proc/cache").prewarm(names(9))
    with pytest.raises(ConfigError, match="jobs"):
        make_cache().prewarm([], jobs=0)
    for prewarm in (make_cache().prewarm, prewarm_nodes):
        with pytest.raises(TypeError, match="nosuch"):
            prewarm("s3://b/a.tar", nosuch=1)


def test_a_plan_beyond_the_budget_is_refused_with_its_numbers(make_cache, listed, fill, tmp_path):
    limit, urls = room(tmp_path, *2 * [SIZE]), fill(names(4))
    with pytest.raises(CacheFullError, match="best-effort") as caught:
        make_cache(max_size=limit).prewarm(urls)
    assert caught.value.needed == caught.value.missing + limit == room(tmp_path, *4 * [SIZE])


def test_a_spec_is_expanded_once_and_duplicates_are_dropped(make_cache, fill):
    cache, urls = make_cache(), fill(names(4))
    spec = "s3://b/train-{0000..0003}.tar"
    for wanted in (spec, [spec, urls[0].replace("//", "//me@"), urls[1].replace("s3:", "s3a:")]):
        assert [result.url for result in cache.prewarm(wanted).results] == urls
    (url,) = fill(["s3://b/odd-{0..1}.tar"])  # braces in the name of an object
    assert cache.prewarm(cache.parse(url)).fetched == 1
    assert cache.prewarm([cache.parse(url)]).cached == 1
    assert cache.prewarm([r"s3://b/odd-\{0..1\}.tar"]).cached == 1


def test_each_shard_is_fetched_once_and_reported_in_order(make_cache, origin, fill):
    cache, urls = make_cache(), fill(names(6))
    cache.fetch(urls[2])
    damaged = cache.fetch(urls[3])
    os.chmod(damaged.data, 0o600)
    os.truncate(damaged.data, 10)
    origin.requests.clear()
    events = []
    report = cache.prewarm(urls, jobs=3, on_event=events.append)
    assert [r.url for r in report.results] == urls
    assert outcomes(report) == "..c..." and report.stopped is None
    size = sum(len(origin.objects[url]) for url in urls if url != urls[2])
    assert report.bytes == report.received == size
    assert sorted(url for url, *_ in origin.requests) == sorted(set(urls) - {urls[2]})
    assert isinstance(events[0], Planned)
    for url in urls:
        assert [type(e) for e in events[1:] if str(e.shard) == url] == [Started, Finished]
    again = cache.prewarm(urls)
    assert (again.cached, again.received) == (6, 0)


def test_cached_shards_are_opened_only_in_doubt(make_cache, fill, monkeypatch):
    urls = fill(names(6))
    monkeypatch.setenv("SHARDCACHE_RANK", "1")
    make_cache(isolation="rank").fetch(urls[0])  # in the namespace of another rank
    monkeypatch.setenv("SHARDCACHE_RANK", "0")
    cache, opened = make_cache(isolation="rank"), []
    scribbled, replaced, changed, booted, _ = (cache.fetch(url) for url in urls[1:])
    (scribbled.path / "meta.json").write_text("{")
    assert replaced.mark(REPLACED)
    damage(changed.data)
    for entry in (changed, booted):
        sidecar = entry.metadata()._replace(boot="the last boot")
        (entry.path / "meta.json").write_bytes(sidecar.encode())
    real = ProcessCache.fetch
    monkeypatch.setattr(
        ProcessCache, "fetch", lambda self, it: opened.append(str(it.shard)) or real(self, it)
    )
    report = make_cache(isolation="rank").prewarm(urls)  # remembers no entries
    assert outcomes(report) == "l...cc"
    assert sorted(opened) == urls[:5]


POINTS = "arn:aws:s3:us-west-2:123456789012:accesspoint"
DENIED, MISTAKEN, GONE = AccessDeniedError("no"), ConfigError("no"), ShardNotFoundError("no")


@pytest.mark.parametrize(
    ("errors", "buckets", "expected", "stopped"),
    [
        ([None, ZeroDivisionError("odd"), GONE], ["b"], ".FF..", None),
        ([None, None, *[GONE] * 20], ["b"], "..FFFFFFF" + 13 * "-", Stopped.FAILURES),
        ([DENIED] * 50, ["b"], "FFF" + 47 * "-", Stopped.REFUSED),
        ([TransferError("silent")] * 50, ["b"], "FFF" + 17 * "-", Stopped.REFUSED),
        # To credentials without s3:ListBucket, a missing object looks like a refusal.
        ([DENIED, None, DENIED, DENIED, None, *[DENIED] * 3], ["b"], "F.FF.FFF..", None),
        ([MISTAKEN] * 3, ["bad", "good"], "FFF---......", Stopped.REFUSED),
        ([DENIED] * 3, [f"{POINTS}/bad", f"{POINTS}/good"], "FFF---......", Stopped.REFUSED),
    ],
)
def test_failures_end_a_run_beyond_a_limit_or_if_a_bucket_refuses_all_shards(
    make_cache, origin, fill, errors, buckets, expected, stopped
):
    urls = [url for b in buckets for url in fill(names(len(expected) // len(buckets), b))]
    for error in errors:
        origin.faults.append(Fault(after=None if error else 10**9, error=error))
    report = make_cache().prewarm(urls, jobs=1, max_failures=6)
    assert (outcomes(report), report.stopped) == (expected, stopped)
    assert len({url for url, *_ in origin.requests}) == len(expected.replace("-", ""))


@pytest.mark.parametrize("idle", [True, False])
def test_threads_are_added_only_while_python_is_idle(make_cache, origin, fill, monkeypatch, idle):
    counts, added = set(), threading.Event()
    if not idle:  # a loaded machine may stop a thread that computes, which then seems to be idle
        monkeypatch.setattr("shardcache.prewarm.run._TICK", PATIENCE)
        busy = "shardcache.download.connections._processor_seconds"
        monkeypatch.setattr(busy, time.monotonic)

    def respond():
        counts.add(sum(each.name == "shardcache-prewarm" for each in threading.enumerate()))
        if max(counts) > 2:
            added.set()
        added.wait(1) if idle else sum(range(200_000))

    origin.faults.extend([Fault(after=10**9, before=respond)] * 90)
    make_cache().prewarm(fill(names(90)))
    assert added.is_set() == idle


def test_shards_that_others_download_hold_up_no_others(make_cache, fill):
    cache, urls, ended = make_cache(lock_timeout=PATIENCE), fill(names(40)), []
    layout = cache.process.prepare().layout
    locks = [taken(layout.key_lock(cache.parse(url).key)) for url in urls[:4]]

    def release(event):
        ended.extend([str(event.shard)] if isinstance(event, Finished) else [])
        if len(ended) == 36:
            for lock in locks:
                lock.release()

    assert outcomes(cache.prewarm(urls, on_event=release)) == 40 * "."
    assert {*ended[36:]} == {*urls[:4]}


def test_a_process_that_cannot_start_threads_prewarms(make_cache, fill, no_threads):
    cache = make_cache()
    assert outcomes(cache.prewarm(fill(names(9)), progress=True)) == 9 * "."
    assert cache.prewarm(names(9), refresh=True).cached == 9


def test_a_broken_disk_ends_the_run_after_three_shards(make_cache, fill, monkeypatch):
    monkeypatch.setattr(os, "pwrite", refusing(errno.EIO, real=None))
    report = make_cache().prewarm(fill(names(9)), jobs=1)
    assert outcomes(report) == "FFF------" and report.stopped is Stopped.REFUSED


def test_an_interrupt_is_raised_after_all_downloads_ended(make_cache, origin, fill):
    cache, urls = make_cache(), fill(names(3))
    origin.faults.extend(Fault(after=100, wait=threading.Event()) for _ in urls)

    def on_event(event):
        if isinstance(event, Started):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.prewarm(urls, jobs=2, on_event=on_event)
    assert not [t for t in threading.enumerate() if t.name.startswith("shardcache-prewarm")]


def test_only_best_effort_goes_on_in_a_full_cache(make_cache, origin, fill, monkeypatch, tmp_path):
    urls = fill(names(10))
    origin.objects[urls[9]] = small = make_tar(9, 1, 100)  # there is room for this one
    limit = room(tmp_path, SIZE, len(small))
    prewarm = partial(make_cache(max_size=limit).prewarm, urls, jobs=1)
    report = prewarm()
    assert outcomes(report) == ".F--------" and report.stopped is Stopped.FULL and report.full
    assert isinstance(report.results[1].error, CacheFullError)
    report = prewarm(best_effort=True)
    assert outcomes(report) == "c" + 8 * "o" + "." and not report.full
    origin.requests.clear()
    monkeypatch.setattr("shardcache.prewarm.run._MISFITS", 3)
    more = fill(names(10, "more"))
    assert outcomes(make_cache(max_size=limit).prewarm(more, jobs=1, best_effort=True)) == 10 * "o"
    assert len({url for url, *_ in origin.requests}) == 3


def test_wanted_shards_are_not_evicted_for_each_other(make_cache, listed, fill, tmp_path):
    urls, size = fill(names(4)), room(tmp_path, SIZE)
    first = make_cache(max_size=3 * size)
    for used, url in zip((1000, 3000, 2000), urls[:3], strict=True):
        entry = first.fetch(url)
        os.utime(entry.path / "meta.json", (used, used))
    first.close()
    (new,) = fill(["s3://b/new.tar"])
    cache = make_cache(max_size=3 * size)
    report = cache.prewarm([new, urls[0], urls[2]], jobs=1)
    assert outcomes(report) == ".cc" and report.plan.evict == size
    assert urls[1] not in cache  # although it is the most recently used


def test_a_pattern_is_listed_once_for_names_and_sizes(spec, bucket, data, proxy, tmp_path):
    with Cache(tmp_path / "cache") as cache:
        plan = cache.prewarm(f"s3://{bucket}/train-*.tar", dry_run=True).plan
    assert plan.fetch_bytes == sum(map(len, data.values())) and str(plan).endswith("  ok")
    assert len(proxy.requests()) == 1


def test_versions_are_compared_by_the_best_common_validator():
    then = ObjectInfo(size=5, etag='"a"', version_id="v1", modified="monday")
    same = [(5, '"a"', "null"), (5, 'W/"a"'), (None, '"a"'), (5, None, None, "monday")]
    others = [(5, '"a"', "v2"), (5, '"b"'), (6, '"a"'), (5, None, None, "tuesday")]
    assert [now for now in (then, *same) if not same_version(then, ObjectInfo(*now))] == []
    assert [now for now in others if same_version(then, ObjectInfo(*now))] == []
