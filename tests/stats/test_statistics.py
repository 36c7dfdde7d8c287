"""Statistics equal the events; tests/test_processes.py compares them with the server's."""

import re
import sys
import threading
import time
from functools import partial

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shardcache.cache import Cache
from shardcache.errors import ConfigError, IntegrityError, ShardNotFoundError, TransferError
from shardcache.units import format_bytes
from tests.support.caches import unfinished
from tests.support.clitools import run_process
from tests.support.fakes import Fault
from tests.support.shop import Shop
from tests.support.storetools import BLOCK, forked, no_thread, room, wait_until
from tests.support.tars import make_tar


def test_a_forked_child_writes_no_count_of_its_parent(shop):
    def read(parent):
        stream.read()
        no_thread("shardcache-stats")  # it would write after a second
        parent.say()

    with shop.cache() as cache:
        cache.fetch(shop.urls[0])
    with shop.cache() as cache:
        cache.open(shop.urls[0]).close()  # is written at once, unlike the next
        with cache.open(shop.urls[0]) as stream, forked(read) as child:
            child.hear()
        assert cache.stats().hits == 2


@pytest.fixture
def urls(origin):
    """The URLs of three shards of one size."""
    found = [f"s3://lab/{name}.tar" for name in "abc"]
    origin.objects |= {url: make_tar(1, members=20, size=10_000) for url in found}
    return found


@pytest.mark.parametrize("fill", ["follow", "complete"])
def test_outcomes_of_open(make_cache, origin, urls, tmp_path, fill):
    size = len(origin.objects[urls[0]])
    cache = make_cache(fill=fill, max_size=room(tmp_path, size, size, 1000))
    origin.faults.append(Fault(after=None))  # so that the first download asks twice
    with pytest.raises(ShardNotFoundError):
        cache.open("s3://lab/none.tar").read()
    for number in (0, 1, 0, 2, 2):  # two shards fit
        with cache.open(urls[number]) as stream:
            assert len(stream.read()) == size
    with cache.open(urls[0]) as stream:
        stream.read(1)  # fills a buffer
    found = cache.stats()
    assert found.since < found.until <= time.time()
    counted = {name: n for name, n in found.counters.items() if n and "wait" not in name}
    assert counted.pop("bytes_origin") >= 4 * size
    assert 3 * size < counted.pop("bytes_opened") < 4 * size
    twice = ("hits", "misses", "streamed", "fetches", "streamed_full")
    sizes = {"bytes_streamed": 2 * size, "bytes_stored": 2 * size}
    once = "failed", "errors_origin", "fetches_failed", "retries"
    assert counted == {**dict.fromkeys(twice, 2), **dict.fromkeys(once, 1), **sizes}
    assert found.bytes_saved <= 2 * size


def test_a_reader_that_leaves_after_its_download_failed_has_missed(make_cache, origin, urls):
    """Not coalesced: that would count as bytes saved."""
    origin.objects[urls[0]] = make_tar(1, members=3, size=BLOCK)
    has_read = threading.Event()
    failure = Fault(after=BLOCK + 5, error=TransferError("reset"), wait=has_read)
    origin.faults.extend([failure, Fault(after=None)])
    cache = make_cache(connections=1, attempts=1)
    with cache.open(urls[0]) as stream:
        stream.read(10)
        has_read.set()
        wait_until(lambda: cache.stats().fetches_failed)
        wait_until(lambda: not unfinished(cache))
    assert (cache.stats().misses, cache.stats().coalesced) == (1, 0)


def test_a_download_that_its_reader_leaves_has_not_failed(make_cache, origin, urls):
    origin.objects[urls[0]] = make_tar(1, members=10, size=BLOCK)  # more than 16 MiB are missing
    origin.hold(2 * BLOCK)
    cache = make_cache(connections=1)
    with next(cache.url_opener(urls[:1]))["stream"] as stream:
        stream.read(BLOCK)
    no_thread("fetch")
    assert cache.stats().bytes_origin and not cache.stats().fetches_failed


def test_retries_errors_removals_and_upstreams_are_counted(make_cache, origin, urls, tmp_path):
    near = tmp_path / "nas/lab/b.tar"
    near.parent.mkdir(parents=True)
    near.write_bytes(origin.objects[urls[1]])
    origin.objects[urls[2]] = b"no archive at all" * 1000
    origin.faults.extend(Fault(after=100) for _ in range(2))
    cache = make_cache(upstreams=[tmp_path / "nas"])
    cache.prewarm(urls[0])
    with pytest.raises(IntegrityError, match=r"c\.tar"):
        cache.open(urls[2]).read()
    cache.remove(urls[0])
    cache.fetch(urls[1])
    cache.clean(everything=True)
    found, size = cache.stats("24h"), near.stat().st_size
    assert (found.retries, found.errors_integrity, found.failed, found.opens) == (2, 1, 1, 1)
    assert (found.evicted_asked, found.evicted_all, found.evicted) == (1, 1, 2)
    assert (found.bytes_evicted, found.bytes_upstream) == (2 * size, size)
    assert (found.fetches, found.fetches_upstream) == (2, 1)
    with pytest.raises(ConfigError, match="soon"):
        cache.stats("soon")


def test_hits_are_counted_by_tier(tmp_path):
    shop = Shop(tmp_path, count=6)
    tier = {"dir": tmp_path / "fast", "max_size": shop.room(2), "min_free": 0}
    with Cache(shop.path, cache_local=True, min_free=0, tiers=[tier]) as cache:
        for url in shop.urls * 3:
            cache.open(url).read()
        found = cache.stats()
    assert (found.misses, found.hits_tier_1, found.hits_tier_2, found.hits_tier_3) == (6, 4, 8, 0)


def test_the_stats_command(run, tmp_path, monkeypatch):
    shop = Shop(tmp_path, count=2)
    with Cache(shop.path, cache_local=True, min_free=0, max_size=shop.room(1)) as cache:
        for url in (*shop.urls, shop.urls[0]):
            cache.open(url).read()

    stats = partial(run.out, "stats")
    size, shown = format_bytes(shop.size), re.sub(" +", " ", stats())
    for line in (
        *("Shards opened 3", " hits 1 / 3 (33.33%)", " misses 1 / 3 (33.33%)", "Errors 0"),
        *("Entries evicted or removed 0", "Waits for disk mean "),
        *(f"Bytes streamed, not stored {size}", f"Bytes saved at the origin {size}"),
    ):
        assert f"\n{line}" in shown
    assert "HIT RATE" in stats("--by", "rank")
    assert "3 opens, 33.33% hits" in stats("--by", "hour")

    page = tmp_path / "textfiles" / "shardcache.prom"
    page.parent.mkdir()
    page.write_text("an older page")
    before = page.stat()
    assert stats("--format", "prometheus", "-o", page) == ""
    assert page.stat().st_ino != before.st_ino and list(page.parent.iterdir()) == [page]
    found = {}
    for family in text_string_to_metric_families(page.read_text()):
        for sample in family.samples:
            directory, *labels = sample.labels.values()
            assert directory == str(shop.path)
            found[sample.name.removeprefix("shardcache_"), *labels] = sample.value
    opens = [found["opens_total", name] for name in ("hits", "misses", "bypassed", "failed")]
    assert (opens, found["opened_bytes_total",]) == ([1, 1, 1, 0], 2 * shop.size)
    waits = [found["wait_seconds_count", name] for name in ("disk", "lock", "network")]
    assert waits == [1, 0, 1] and found["wait_seconds_sum", "network"] > 0
    assert found["entries",] == 1 and found["entries_bytes",] == found["limit_bytes",]
    assert found["downloads",] == 0 and found["processes",] == 0 and found["free_bytes",] > 0

    assert stats("--zero") == "counters are reset\n"
    assert stats() == "Nothing was counted.\n"
    with shop.cache() as cache:
        cache.process.counters.read(9, "bytes_origin")  # of a download that was cancelled
    assert "Bytes received over the network" in stats()


def test_a_python_without_sqlite_counts_nothing(shop):
    program = "import sys; sys.modules['_sqlite3'] = None; from shardcache import Cache; "
    program += "print(len(Cache(cache_local=True).open(sys.argv[1]).read()))"
    code, out, err = run_process(shop.urls[0], python=[sys.executable, "-c", program])
    assert (code, out) == (0, f"{shop.size}\n") and "Traceback" not in err, err
