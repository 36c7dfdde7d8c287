"""A store that throttles many processes, in real time."""

import os
import shutil
import threading
import time

import pytest

from shardcache import Cache
from tests.support.storetools import together
from tests.support.tars import make_tar
from tests.support.webservers import Scripted, answer, part_of, running

full_only = pytest.mark.skipif(os.environ.get("FUZZ", "1") == "1", reason="make stress-full")

SHARDS = {
    f"/lab/{number:02}.tar": make_tar(number, members=5, size=100_000) for number in range(64)
}
SLOW_DOWN = answer(
    "503 Slow Down", b"<Error><Code>SlowDown</Code></Error>", ETag=None, Connection=None
)
LISTED = "".join(
    f"<Contents><Key>{path[5:]}</Key><Size>{len(data)}</Size></Contents>"
    for path, data in SHARDS.items()
)
LISTING = answer(
    "200 OK", f"<ListBucketResult>{LISTED}</ListBucketResult>".encode(), Connection=None
)


class Store(Scripted):
    """Serves `SHARDS`; in a storm it refuses every request."""

    def __init__(self):
        super().__init__(self.respond, most=1_000_000)
        self.storm_end = 0.0
        self.refused = self.served = 0
        self.guard = threading.Lock()

    def respond(self, head):
        refuses = time.monotonic() < self.storm_end
        with self.guard:
            self.refused += refuses
            self.served += not refuses
        if refuses:
            return SLOW_DOWN
        method, path = head.split()[:2]
        if "list-type=2" in path:
            return LISTING
        stated, body = part_of(SHARDS[path], head)
        return stated if method == "HEAD" else stated + body


@pytest.fixture
def read_all(tmp_path):
    """Read all shards in eight processes, each with its own cache, and compare every byte.

    Returns the seconds, the number of refused requests, and the number of the others.
    """
    with running(Store()) as store:

        def read_all(storm=0.0, **options):
            options |= {"endpoint_url": store.url, "min_free": 0}
            options["storage_options"] = {"key": "AK", "secret": "SK"}

            def read(number):
                urls = [f"s3:/{path}" for path in SHARDS]
                with Cache(tmp_path / str(number), **options) as cache:
                    if number % 2:  # downloads many shards at once; the other processes do not
                        assert cache.prewarm(urls).fetched == len(urls)
                    for url, data in zip(urls, SHARDS.values(), strict=True):
                        with cache.open(url) as stream:
                            assert stream.read() == data
                shutil.rmtree(tmp_path / str(number))

            begun = time.monotonic()
            store.refused = store.served = 0
            store.storm_end = begun + storm
            together(8, read, seconds=storm + 300)
            return time.monotonic() - begun, store.refused, store.served

        yield read_all


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("storm", [20, pytest.param(180, marks=full_only)])
def test_a_storm_of_slow_down_costs_few_requests(read_all, storm):
    calm_seconds, calm_refused, calm_served = read_all()
    seconds, refused, served = read_all(storm)
    _, unpaced_refused, _ = read_all(storm, patience=0, attempts=100)
    assert calm_refused == 0
    assert served == calm_served
    # Each process sends up to 32 requests before it slows down, and 6 until its pauses are longest:
    # 4 to 8 s each.
    assert refused < 8 * (32 + 6 + storm / 4)
    assert refused < unpaced_refused
    assert seconds - storm - calm_seconds < 60
