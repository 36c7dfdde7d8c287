"""Which version of a shard is read when its object is replaced: `docs/versions.md`."""

import contextlib
import json
import os
import time
from pathlib import Path

import pytest

from shardcache.errors import ShardNotFoundError, TransferError
from shardcache.layout import Layout
from tests.support import caches
from tests.support.storetools import room, wait_until
from tests.support.tars import make_tar

URL = "s3://lab/a.tar"
OLD, NEW = make_tar(1), make_tar(2)
OBJECTS = {URL: OLD}


@pytest.fixture(autouse=True)
def _downloads_send_no_head(origin):
    origin.states_checksums = False


@pytest.fixture(params=["one directory", "tiers", "a tier for one version"])
def options(request, tmp_path):
    limit = 3 * room(tmp_path, len(OLD)) // 2 if "version" in request.param else None
    tier = {"dir": tmp_path / "ram", "max_size": limit, "min_free": 0}
    return {"tiers": [tier]} if "tier" in request.param else {}


def read(cache):
    return caches.read(cache, URL)


def versions_on_disk(cache):
    return len({(entry.key, entry.version) for entry in cache.entries()})


def refresh(cache):
    assert cache.prewarm([URL], refresh=True).refreshed == 1


@pytest.mark.parametrize("then", [OLD, NEW], ids=["rolled back", "replaced"])
@pytest.mark.parametrize("later", [0, 7200])
def test_the_old_version_never_comes_back_by_itself(make_cache, origin, options, then, later):
    """But an open stream keeps it. Its time may be one of a clock that was ahead."""
    cache = make_cache(**options)
    entry, now = cache.fetch(URL), time.time()
    for path in (entry.directory, entry.data):
        os.utime(path, (now + later, now + later))
    with cache.open(URL) as stream:
        first = stream.read(1000)
        origin.objects[URL] = NEW
        assert read(make_cache(**options)) == OLD  # without a request
        assert len(origin.requests) == 1 and not origin.stats
        refresh(make_cache(**options))
        assert read(cache) == NEW and versions_on_disk(cache) == 2
        cache.clean(everything=True)  # but the version that is read
        origin.objects[URL] = then
        assert read(make_cache(**options)) == read(cache) == then
        assert first + stream.read() == OLD
    requested = len(origin.requests)
    assert read(make_cache(**options)) == then and len(origin.requests) == requested


@pytest.mark.parametrize("most", [1 << 19, 0])  # with 0, the stream has told its size only
def test_a_replaced_object_fails_the_read_and_not_the_next_open(make_cache, origin, most):
    old, new = make_tar(1, 200, 20_000), make_tar(2, 200 if most else 300, 20_000)
    origin.objects[URL] = old
    go_on = origin.hold(1 << 20)
    cache = make_cache(connections=1, part_size="4MiB")
    with cache.open(URL) as stream:
        assert most or stream.seek(0, os.SEEK_END) == len(old)
        assert stream.read(most) == old[:most]
        origin.objects[URL] = new
        go_on.set()
        if not most:
            wait_until(lambda: not caches.unfinished(cache))
            stream.seek(0)
        with pytest.raises(TransferError, match="was replaced while it was read"):
            stream.read()
    assert read(cache) == read(cache) == new


def test_prewarm_refresh_downloads_and_counts_replaced_shards(run, spec, warm, s3, bucket, proxy):
    arguments = ["prewarm", "--refresh", spec]
    for number in (1, 3):
        s3.put(bucket, f"train-{number:04d}.tar", make_tar(50 + number))
    assert run("prewarm", "--check", spec)[0] == 0  # sends no request
    assert run("prewarm", "--check", "--refresh", spec)[0] == 4
    code, out, _ = run("prewarm", "--dry-run", "--refresh", spec, "--json")
    assert [row["outcome"] for row in json.loads(out)["shards"]] == ["cached", "missing"] * 2
    proxy.reset()
    code, out, _ = run(*arguments, "--json")
    found = json.loads(out)["summary"]
    assert (code, found["refreshed"], found["fetched"], found["cached"]) == (0, 2, 2, 2)
    assert found["plan"]["outdated"] == 2
    assert proxy.fetches() == {f"{bucket}/train-{n:04d}.tar": 1 for n in (1, 3)}
    s3.put(bucket, "train-0000.tar", make_tar(50))
    code, out, _ = run(*arguments)
    assert "1 to fetch (" in out and ", 1 replaced at the origin)" in out
    assert "1 replaced at the origin." in out
    _, out, _ = run("path", warm[1])
    assert Path(out.strip()).read_bytes() == make_tar(51)


@pytest.mark.parametrize("error", [TransferError("503"), ShardNotFoundError("gone", url=URL)])
def test_a_refresh_without_a_response_fails_and_keeps_the_entry(make_cache, origin, error):
    cache = make_cache(attempts=1)
    assert read(cache) == OLD

    def silent(url):
        raise error

    origin.stat = silent  # type: ignore[method-assign]
    report = cache.prewarm([URL], refresh=True)
    assert (report.failed, report.cached, report.refreshed) == (1, 0, 0)
    assert str(error) in str(report.results[0].error)
    assert read(cache) == OLD


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_read", [False, True])
def test_a_refresh_keeps_the_entry_if_the_origin_sends_what_it_says_is_replaced(
    make_cache, origin, monkeypatch, caplog, is_read
):
    """HEAD states another version than GET sends, as after a rollback."""
    cache = make_cache()
    assert read(cache) == OLD
    info = origin.info(cache.parse(URL))
    monkeypatch.setattr(origin, "stat", lambda shard: info._replace(etag='"other"'))
    with cache.open(URL) if is_read else contextlib.nullcontext():
        report = cache.prewarm([URL], refresh=True)
    assert (report.failed, len(origin.requests)) == (0, 2)
    assert "sends; the old one stays" in caplog.text
    assert read(cache) == OLD and len(origin.requests) == 2


def test_a_response_from_before_a_replacement_is_not_published_after_it(
    make_cache, origin, monkeypatch, options
):
    """Its process was stopped, and another one passed it by."""
    cache, real = make_cache(**options), origin.open

    def open_late(shard, *arguments):
        response = real(shard, *arguments)
        monkeypatch.setattr(origin, "open", real)
        Layout.of_root(cache.dir).key_lock(shard.key).unlink()
        origin.objects[URL] = NEW
        assert read(make_cache()) == NEW
        return response

    monkeypatch.setattr(origin, "open", open_late)
    assert cache.fetch(URL).data.read_bytes() == read(cache) == NEW
    assert versions_on_disk(cache) == 1 and len(origin.requests) == 2


@pytest.mark.parametrize("then", [0, 1])
@pytest.mark.parametrize("states_checksums", [False, True])
def test_a_complete_partial_is_compared_with_the_origin(make_cache, origin, states_checksums, then):
    origin.states_checksums = states_checksums
    versions = [make_tar(seed, members=40, size=60_000) for seed in (1, 2)]
    origin.objects[URL] = versions[0]

    def interrupt(path):
        raise KeyboardInterrupt  # after the last byte

    with pytest.raises(KeyboardInterrupt), make_cache(validate=interrupt) as cache:
        cache.fetch(URL)
    origin.objects[URL] = versions[then]
    cache = make_cache()
    assert cache.prewarm([URL], refresh=True).received == then * len(versions[then])
    assert read(cache) == versions[then]


@pytest.mark.parametrize("is_read", [True, False])
def test_a_replaced_version_with_other_names_does_not_come_back(
    make_cache, origin, tmp_path, set_variables, is_read
):
    """Another rank and the user have the same file."""
    file, ranks = tmp_path / "mine.tar", []
    file.write_bytes(OLD)
    origin.state_checksum(URL, OLD)
    modified = file.stat().st_mtime_ns
    for number in "01":
        set_variables(SHARDCACHE_JOB="job", SHARDCACHE_RANK=number)
        ranks.append(make_cache(isolation="rank"))
    cache, other = ranks
    cache.add(URL, file)
    assert other.fetch(URL).data.samefile(file) and read(cache) == OLD
    with cache.open(URL) if is_read else contextlib.nullcontext():
        origin.objects[URL] = NEW
        origin.state_checksum(URL, NEW)
        refresh(cache)
        for requests in (1, 2):
            assert read(cache) == NEW and len(origin.requests) == requests
            assert cache.process.last_tier.store.evict(cache.entry(URL))
    assert read(cache) == NEW and read(other) == OLD
    assert file.stat().st_mtime_ns == modified


@pytest.mark.parametrize("is_read", [False, True])
def test_a_pin_keeps_the_versions_that_are_read_during_a_refresh(
    make_cache, origin, tmp_path, is_read
):
    cache = make_cache()
    assert read(cache) == OLD
    cache.pin(URL)
    with cache.open(URL) if is_read else contextlib.nullcontext():
        origin.objects[URL] = NEW
        refresh(make_cache())
    for entry in list(cache.entries()):
        if entry.metadata().info.etag == origin.info(cache.parse(URL)).etag:
            os.utime(entry.path / "meta.json", (1, 1))  # the newer one is used less recently
    cache.clean(everything=True)
    assert versions_on_disk(cache) == 1 + is_read
    cache.unpin(URL)
    cache.clean(max_size=room(tmp_path, len(NEW)))
    assert (versions_on_disk(cache), read(cache)) == (1, NEW) and len(origin.requests) == 2


@pytest.mark.parametrize("newest", [0, 1, 2])
def test_an_outdated_version_is_not_linked(make_job, origin, newest):
    caches = [make_job(name) for name in ("one", "two", "three", "four")]
    assert [read(cache) for cache in caches[:3]] == [OLD] * 3
    origin.objects[URL] = NEW
    refresh(caches[newest])
    versions = [NEW if number in (newest, 3) else OLD for number in range(4)]
    assert [read(cache) for cache in caches] == versions  # each has its own namespace
    caches[2].remove(URL)
    assert len(origin.requests) == 2


def test_a_refresh_without_a_tier_is_made_good_by_one_with_it(make_cache, origin, tmp_path):
    tiers = [{"dir": tmp_path / "ram", "min_free": 0}]
    running = make_cache(tiers=tiers)
    with running.open(URL):
        origin.objects[URL] = NEW
        make_cache().prewarm([URL], refresh=True)  # does not know the tier with the old version
        assert read(make_cache(tiers=tiers)) == NEW
        assert read(running) == OLD  # which it remembers
        assert make_cache(tiers=tiers).prewarm([URL], refresh=True).cached == 1
        assert read(running) == NEW
    assert len(origin.requests) == 2


def test_an_entry_without_its_data_does_not_set_the_time_of_the_next(make_cache, origin):
    cache = make_cache()
    assert read(cache) == OLD
    cache.entry(URL).data.unlink()
    origin.objects[URL] = NEW
    make_cache().prewarm([URL], refresh=True)
    assert read(cache) == NEW and cache.entry(URL).data.stat().st_mtime < time.time() + 60
