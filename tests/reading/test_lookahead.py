"""A pipeline downloads its next shards ahead, and stops when the pipeline ends."""

import errno
import gc
import threading

import pytest
from webdataset import SimpleShardList

from shardcache.errors import ShardNotFoundError, TransferError
from tests.support.caches import held_elsewhere
from tests.support.fakes import Fault
from tests.support.storetools import BLOCK, wait_until
from tests.support.tars import make_tar

SHARDS = 6
URLS = [f"s3://lab/train-{number:04d}.tar" for number in range(SHARDS)]
DATA = [make_tar(number) for number in range(SHARDS)]
OBJECTS = dict(zip(URLS, DATA, strict=True))


def running():
    names = [thread.name for thread in threading.enumerate()]
    return [n for n in names if n.startswith("shardcache-") and n != "shardcache-stats"]


def requested(origin):
    return sorted({url for url, _, _ in origin.requests})


@pytest.mark.parametrize("fill", ["follow", "complete"])
@pytest.mark.parametrize("prefetch", [0, 1, 64])
def test_shards_arrive_in_order_and_are_downloaded_once(make_cache, origin, fill, prefetch):
    cache = make_cache(prefetch=prefetch, fill=fill)
    for _ in range(2):
        found = []
        for number, sample in enumerate(cache.url_opener(URLS)):
            found.append(sample["stream"].read())
            assert prefetch or requested(origin) in (URLS[: number + 1], URLS)  # nothing early
        assert found == DATA
    assert sorted(url for url, _, _ in origin.requests) == URLS


def test_only_the_items_of_a_list_are_taken_ahead(make_cache):
    def counted(urls):
        while urls:
            yield urls.pop(0)

    def split(items):  # by a function of the program
        for item in items:
            taken.append(item)
            yield item

    for items, most in (SimpleShardList(URLS), 3), (counted([*URLS]), 1):
        taken = []
        rows = make_cache(prefetch=2).url_opener(split(iter(items)))
        next(rows)
        assert len(taken) == most
        rows.close()


@pytest.mark.parametrize("prefetch", [0, 5])
def test_errors_come_in_the_order_of_the_shards(make_cache, origin, prefetch):
    """At the end, the error of the list itself is raised."""
    missing, errors, found = "s3://lab/missing.tar", [], []

    def listed():
        yield from (missing, missing, URLS[0], missing, URLS[1], missing)
        yield from [URLS[2]] * 9
        origin.objects[missing] = DATA[0]  # now it is there
        yield missing
        raise LookupError("no more")

    opener = make_cache(prefetch=prefetch).url_opener
    with pytest.raises(LookupError, match="no more"):
        for row in opener(listed(), handler=lambda exn: errors.append(exn) or True):
            found.append((row["url"], len(errors)))
    assert found == [(URLS[0], 2), (URLS[1], 3), *[(URLS[2], 4)] * 9, (missing, 4)]
    assert [url for url, *_ in origin.requests].count(missing) <= 5
    assert [(type(exn), missing in str(exn)) for exn in errors] == [(ShardNotFoundError, True)] * 4
    assert len({id(exn) for exn in errors}) == 4


@pytest.mark.parametrize("how", ["close", "drop"])
def test_downloads_end_with_their_pipeline(make_cache, origin, how):
    origin.objects |= dict.fromkeys(URLS, make_tar(1, members=20, size=BLOCK))
    held = [origin.hold(0) for _ in URLS]
    cache = make_cache(prefetch=1)
    samples = cache.url_opener(URLS)
    sample = next(samples)
    wait_until(lambda: len(requested(origin)) == 2)
    assert running()
    if how == "close":
        samples.close()
        sample["stream"].close()
    else:
        del samples, sample
        gc.collect()
    for event in held:  # a download ends at its next byte
        event.set()
    wait_until(lambda: not running())
    assert not list(cache.entries())
    assert len(requested(origin)) == 2


def test_cached_shards_ahead_are_not_evicted(make_cache):
    cache = make_cache(prefetch=2)
    for url in URLS:
        cache.fetch(url)
    samples = cache.url_opener(URLS)
    first = next(samples)
    assert len(cache.clean(everything=True).removed) == SHARDS - 3
    assert [first["stream"].read(), *(next(samples)["stream"].read() for _ in range(2))] == DATA[:3]
    samples.close()


@pytest.mark.parametrize("error", [TransferError("reset"), OSError(errno.EIO, "no disk")])
def test_only_disk_errors_of_a_download_ahead_are_retried(make_cache, origin, error):
    cache = make_cache(prefetch=1, attempts=1)
    origin.faults += [Fault(), Fault(after=None, error=error)]  # the second one of URLS[1]
    samples = cache.url_opener(URLS[:2])
    assert next(samples)["stream"].read() == DATA[0]
    wait_until(lambda: not origin.faults and not running())
    if isinstance(error, TransferError):
        with pytest.raises(TransferError, match="reset"):
            next(samples)
    else:
        with next(samples)["stream"] as stream:
            assert stream.read() == DATA[1] and URLS[1] in cache


def test_a_shard_that_another_process_downloads_is_left_to_it(make_cache, origin):
    cache = make_cache(prefetch=2)
    lock = held_elsewhere(cache, URLS[1])
    samples = cache.url_opener(URLS[:3])
    assert next(samples)["stream"].read() == DATA[0]
    wait_until(lambda: not running())  # no thread waits for that process
    assert requested(origin) == [URLS[0], URLS[2]]
    threading.Timer(0.2, lock.release).start()
    assert next(samples)["stream"].read() == DATA[1]


def test_the_processes_of_a_node_share_a_limit_of_downloads_ahead(make_cache, origin, monkeypatch):
    monkeypatch.setattr("shardcache.download.worker._AHEAD", 1)
    one, other = make_cache(prefetch=1), make_cache(prefetch=2)
    origin.faults.append(Fault())
    event = origin.hold(0)  # the second shard
    first = one.url_opener(URLS[:2])
    assert next(first)["stream"].read() == DATA[0]
    wait_until(lambda: URLS[1] in requested(origin))
    second = other.url_opener(URLS[2:5])
    assert next(second)["stream"].read() == DATA[2]
    wait_until(lambda: len(running()) <= 1)
    assert URLS[3] not in requested(origin)
    assert next(second)["stream"].read() == DATA[3]  # the limit does not apply to a waiting reader
    event.set()
    assert next(first)["stream"].read() == DATA[1]
