"""How many connections a process uses, which the processes of a node share, and their rate."""

import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from shardcache import Cache
from shardcache.download.connections import NodeDownloaders, Throttle, parse_rate
from shardcache.errors import ConfigError
from shardcache.origins.retry import Retries
from shardcache.prewarm import Stopped
from tests.support.caches import read, unfinished
from tests.support.storetools import BLOCK, PATIENCE, crowd, descriptors, payload, wait_until
from tests.support.tars import make_tar
from tests.support.webservers import Scripted, answer, part_of, running

NODE, PROCESS, FEW = 64, 32, 2  # limits of connections
FAR, SLOW, FAST = 0.03, 0.01, 0.001  # seconds until the first byte
URLS = [f"s3://lab/{number}.bin" for number in range(5)]
OBJECTS = dict.fromkeys(URLS, payload(3 * BLOCK))


class Store(Scripted):
    """A store that responds after 30 ms.

    The first request for each shard waits until ``gate`` is set, and all others until ``least``
    requests are in progress.
    """

    def __init__(self, data, least=0):
        super().__init__(self.respond, most=1000)
        self.data, self.least, self.gate = data, least, threading.Event()
        self.active = self.peak = 0
        self.changed = threading.Condition()

    def respond(self, head):
        is_first = "bytes=0-" in head
        with self.changed:
            self.active += 1
            self.peak = max(self.peak, self.active)
            if self.active >= self.least and not is_first:
                self.least = 0
                self.changed.notify_all()
            assert is_first or self.changed.wait_for(lambda: not self.least, PATIENCE)
        assert not is_first or self.gate.wait(PATIENCE)
        time.sleep(0.03)
        stated, body = part_of(self.data, head)
        yield stated + body[:-1]
        with self.changed:  # before the client can send another request
            self.active -= 1
        yield body[-1:]


def sockets():
    return {each for each in descriptors() if "socket:[" in each}


def reader(parent, number, store, root):
    """Read the shards that the parent names, and report the sockets that are open after each."""
    before = sockets()  # of the test, which the garbage collector may close
    with Cache(root, min_free=0, part_size=BLOCK) as cache:
        while True:
            assert read(cache, f"{store.url}/{parent.hear()}.bin") == store.data
            parent.say(len(sockets() - before))


def test_32_processes_that_download_at_once_use_64_connections(tmp_path):
    store = Store(payload(6 * BLOCK), least=NODE)
    with running(store), crowd(32, reader, store, tmp_path) as readers:
        for number, each in enumerate(readers):
            each.tell(number)
        wait_until(lambda: store.active == 32)
        store.gate.set()
        assert all(each.hear() for each in readers)
        assert store.peak == NODE


@pytest.mark.parametrize("killed", [0, 7])
def test_a_process_that_downloads_alone_uses_all_its_connections(tmp_path, killed):
    store = Store(payload((1 + PROCESS) * BLOCK), least=PROCESS)
    with running(store), crowd(killed + 1, reader, store, tmp_path) as readers:
        for number, each in enumerate(readers):
            each.tell(number)
        wait_until(lambda: store.active == killed + 1)
        for each in readers[1:]:
            each.kill()
        store.gate.set()
        assert readers[0].hear()


def test_processes_that_have_downloaded_leave_connections_to_others(tmp_path):
    store = Store(payload((1 + PROCESS) * BLOCK), least=PROCESS)
    store.gate.set()
    with running(store), crowd(3, reader, store, tmp_path) as readers:
        for number, each in enumerate(readers):
            each.tell(f"alone-{number}")
            assert 0 < each.hear() <= 4
            store.least = PROCESS


def test_the_server_that_was_used_last_keeps_its_connections(make_cache, pool, serve):
    copies = []  # whether the upstream has any

    def origin(head):
        wait_until(lambda: len(first.heads) > 1)
        return b"".join(part_of(payload(1), head))

    def upstream(head):
        if not copies or ".shardcache.json" in head:
            return answer("404 Not Found", Connection=None)
        stated, body = part_of(payload(1), head)
        return stated if head.startswith("HEAD") else stated + body

    first, second = serve(origin, most=1000), serve(upstream, most=1000)
    cache, kept = make_cache(upstreams=[second.url]), []
    assert all(pool.map(partial(read, cache), (f"{first.url}/{n}.bin" for n in range(2))))
    wait_until(lambda: len(first.clients) == 2 and not second.clients)
    copies.append(True)
    for number in range(2, 5):
        assert read(cache, f"{first.url}/{number}.bin") == payload(1)
        kept += second.clients
    assert len(kept) == 3 and len({*kept}) == 1


@pytest.fixture
def cache(make_cache):
    """A cache whose shards have three parts each."""
    return make_cache(part_size=BLOCK)


@contextlib.contextmanager
def others(cache, count=NODE):
    """Register as many other downloaders on the node."""
    with contextlib.ExitStack() as stack:
        for each in [NodeDownloaders(lambda: cache.process.last_tier.node) for _ in range(count)]:
            each.join()
            stack.callback(each.leave)
        yield


def test_a_waiting_download_starts_when_connections_are_free(cache, origin, pool):
    origin.hold(0)
    with others(cache):
        first = pool.submit(read, cache, URLS[0])
        wait_until(lambda: origin.requests)
        second = pool.submit(read, cache, URLS[1])
        wait_until(lambda: cache.process.resources.connections._waiting)
    assert second.result(PATIENCE) == origin.objects[URLS[1]]
    assert not first.done()
    origin.release()
    assert first.result() == origin.objects[URLS[0]]


@pytest.mark.parametrize(("count", "ahead"), [(0, 3), (NODE, 0)])
def test_a_crowded_node_downloads_nothing_ahead_of_its_readers(cache, origin, count, ahead):
    held = origin.hold(0)
    with others(cache, count):
        samples = cache.url_opener(URLS)
        stream = next(samples)["stream"]
        wait_until(lambda: origin.requests and len(unfinished(cache)) == 1)
        assert len({url for url, *_ in origin.requests}) == 1 + ahead
        held.set()
        assert stream.read() == origin.objects[URLS[0]]
        assert all(sample["stream"].read() for sample in samples)


def test_a_download_adjusts_its_threads_to_its_share_of_connections(
    make_cache, origin, pool, clock
):
    origin.objects[URLS[0]], origin.waited = payload(12 * BLOCK), FAR
    cache = make_cache(part_size=BLOCK, connections=4)
    held = [origin.hold(0) for _ in range(12)]

    def helpers():
        return sum(thread.name == "shardcache-part" for thread in threading.enumerate())

    download = pool.submit(read, cache, URLS[0])
    wait_until(lambda: len(origin.requests) == 4)
    with others(cache):
        clock.sleep(2)  # for the next count
        for event in held[:4]:
            event.set()
        wait_until(lambda: not helpers())
        assert len(origin.requests) <= 5
    clock.sleep(2)
    held[4].set()
    wait_until(lambda: len(origin.requests) == 9)
    origin.release()
    assert download.result() == origin.objects[URLS[0]]


@pytest.mark.parametrize(
    ("responses", "limit"),
    [
        ([FAST, FAR], FEW),  # one slow response of many
        ([FAR, SLOW], PROCESS),
        ([FAR, SLOW, FAST], FEW),  # the first response of a near origin was late
        ([SLOW, FAR], FEW),
    ],
)
def test_a_slow_first_response_allows_all_connections(cache, origin, clock, responses, limit):
    for url, origin.waited in zip(URLS, responses, strict=False):
        origin.objects[url] = payload(1)
        read(cache, url)
    assert cache.process.resources.connections.allowed == limit


def test_shards_get_more_connections_if_all_are_stuck(cache, origin, pool):
    for _ in range(FEW):
        origin.hold(0)
    reads = [pool.submit(read, cache, url) for url in URLS[:FEW]]
    wait_until(lambda: len(origin.requests) == FEW)
    assert pool.submit(read, cache, URLS[-1]).result(PATIENCE) == origin.objects[URLS[-1]]
    assert not all(each.done() for each in reads)


def test_a_throttle_allows_a_short_burst_and_saves_nothing_up(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    throttle = Throttle(1_000_000)
    assert throttle.spend(100_000) == pytest.approx(0.0, abs=1e-6)
    assert throttle.spend(500_000) == pytest.approx(0.5)
    assert throttle.spend(500_000) == pytest.approx(1.0)
    now[0] += 1.0
    assert throttle.spend(0) == pytest.approx(0.0, abs=1e-6)
    now[0] += 3600.0
    assert throttle.spend(1_000_000) == pytest.approx(0.9)


def test_a_rate_is_a_size_with_or_without_seconds():
    rates = {"50MB": 50_000_000, "1MiB/s": 1 << 20, " 64kB ": 64_000, 200_000: 200_000}
    assert {text: parse_rate(text) for text in rates} == rates
    for text in ("", "/s", "63kB", "-1MB", "fast", "1MB/h", 63_999):
        with pytest.raises(ConfigError):
            parse_rate(text)


def test_a_prewarm_keeps_its_rate(run, shop, monkeypatch):
    monkeypatch.setenv("SHARDCACHE_CACHE_LOCAL", "1")
    total = len(shop.urls) * shop.size  # the bytes of half a second
    code, out, _ = run("prewarm", *shop.urls, "--json", "--limit-rate", f"{2 * total}B")
    summary = json.loads(out)["summary"]
    assert (code, summary["fetched"], summary["received_bytes"]) == (0, 8, total)
    assert summary["seconds"] >= 0.35  # the burst has the bytes of a tenth of a second


def test_connections_that_wait_together_extend_the_deadline_once(shop, monkeypatch):
    Path(shop.urls[0]).write_bytes(make_tar(1, 5, 1_600_000))
    waited = list[float]()
    monkeypatch.setattr(Retries, "extend", lambda self, seconds: waited.append(seconds))
    with shop.cache(part_size=1 << 20, connections=4) as cache:
        began = time.monotonic()
        assert cache.prewarm(shop.urls[0], limit_rate="10MB").fetched == 1
    assert 0 < sum(waited) <= 2 * (time.monotonic() - began)  # one alone would wait as long


def test_a_download_that_waits_for_the_rate_can_be_stopped(shop, monkeypatch):
    Path(shop.urls[0]).write_bytes(make_tar(1, 3000, 700))
    stop, calls = threading.Event(), []

    def take(self, count):
        calls.append(count)
        stop.set()
        return 1e6

    monkeypatch.setattr(Throttle, "spend", take)
    with shop.cache(fill="complete") as cache:
        report = cache.prewarm(shop.urls[0], limit_rate="64kB", stop=stop)
    assert report.stopped is Stopped.REQUESTED and len(calls) == 1


def test_streams_past_a_full_cache_leave_few_idle_connections(tmp_path):
    store, count = Store(payload(3 * BLOCK)), 12
    store.gate.set()
    with running(store), Cache(tmp_path, max_size=BLOCK, min_free=0, connections=FEW) as cache:
        before, all_read = sockets(), threading.Barrier(count)

        def stream(url):
            with cache.open(url) as opened:
                opened.read(1000)
                all_read.wait(PATIENCE)
                assert len(opened.read()) == len(store.data) - 1000

        urls = [f"{store.url}/{number}.bin" for number in range(count)]
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(stream, urls))
        wait_until(lambda: len(sockets() - before) <= 2 * FEW)  # both ends are in this process
