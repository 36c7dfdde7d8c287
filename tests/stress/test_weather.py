"""Stores and metadata services that throttle many processes, in real time."""

import json
import os
import shutil
import statistics
import threading
import time
from dataclasses import dataclass

import pytest

from shardcache import Cache, ShardCacheError
from tests.support.storetools import together
from tests.support.tars import make_tar
from tests.support.webservers import Scripted, answer, part_of, running

full_only = pytest.mark.skipif(os.environ.get("FUZZ", "1") == "1", reason="make stress-full")

SHARDS = {
    f"/lab/{number:02}.tar": make_tar(number, members=5, size=100_000) for number in range(64)
}
KEYS = {"key": "AK", "secret": "SK"}
SLOW_DOWN = answer(
    "503 Slow Down", b"<Error><Code>SlowDown</Code></Error>", ETag=None, Connection=None
)
LISTING = answer(
    "200 OK",
    "<ListBucketResult>{}</ListBucketResult>".format(
        "".join(
            f"<Contents><Key>{path[5:]}</Key><Size>{len(data)}</Size></Contents>"
            for path, data in SHARDS.items()
        )
    ).encode(),
    Connection=None,
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


@dataclass(frozen=True, slots=True)
class Reading:
    """The cost of reading all shards in all processes: seconds, and numbers of requests."""

    seconds: float
    refused: int
    served: int


@pytest.fixture
def read_all(tmp_path):
    """Read all shards in eight processes, each with its own cache, and compare every byte."""
    with running(Store()) as store:

        def read_all(storm=0.0, **options):
            def read(number):
                given = {"endpoint_url": store.url, "storage_options": KEYS, "min_free": 0}
                urls = [f"s3:/{path}" for path in SHARDS]
                with Cache(tmp_path / str(number), **given, **options) as cache:
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
            reading = Reading(time.monotonic() - begun, store.refused, store.served)
            print(f"storm of {storm} s, {options or 'default options'}: {reading}", flush=True)
            return reading

        yield read_all


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("storm", [20, pytest.param(180, marks=full_only)])
def test_a_storm_of_slow_down_costs_few_requests(read_all, storm):
    calm = read_all()
    paced = read_all(storm)
    unpaced = read_all(storm, patience=0, attempts=100)
    assert calm.refused == 0
    assert paced.served == calm.served
    # Each process sends up to 32 requests before it slows down, and 6 until its pauses are longest:
    # 4 to 8 s each.
    assert paced.refused < 8 * (32 + 6 + storm / 4)
    assert paced.refused < unpaced.refused
    assert paced.seconds - storm - calm.seconds < 60


class Metadata(Scripted):
    """A metadata service that answers ``rate`` requests a second, and refuses all others."""

    def __init__(self, rate):
        super().__init__(self.respond)
        self.rate = rate
        self.tokens = rate  # requests to answer before the next refusal
        self.then = time.monotonic()
        self.answered = self.refused = 0
        self.guard = threading.Lock()

    def respond(self, head):
        with self.guard:
            now = time.monotonic()
            self.tokens = min(self.rate, self.tokens + (now - self.then) * self.rate)
            self.then = now
            if self.tokens < 1:
                self.refused += 1
                return answer("429 Too Many Requests")
            self.tokens -= 1
            self.answered += 1
        if head.startswith("PUT"):
            return answer("200 OK", b"token")
        if head.split()[1].endswith("/security-credentials/"):
            return answer("200 OK", b"role")
        keys = {"AccessKeyId": "AK", "SecretAccessKey": "SK", "Token": "T", "Code": "Success"}
        return answer("200 OK", json.dumps({**keys, "Expiration": "2099-01-01T00:00:00Z"}).encode())


@pytest.mark.timeout(1500)
def test_every_process_gets_credentials_from_a_throttling_service(tmp_path, monkeypatch):
    count, (path, data) = 64, next(iter(SHARDS.items()))
    with running(Store()) as store, running(Metadata(rate=5)) as metadata:
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
        begun = time.monotonic()

        def read(number):
            """Returns when the process was done, and its error."""
            error = ""
            with Cache(tmp_path / str(number), endpoint_url=store.url, min_free=0) as cache:
                try:
                    assert cache.open(f"s3:/{path}").read() == data
                except ShardCacheError as exn:
                    error = str(exn)
            return time.monotonic() - begun, error

        seconds, errors = zip(*together(count, read, seconds=600), strict=True)
    failed = [error for error in errors if error]
    print(
        f"half of {count} processes took {statistics.median(seconds):.0f} s, all of them "
        f"{max(seconds):.0f} s; {metadata.answered} requests were answered, {metadata.refused} "
        f"refused; {len(failed)} processes failed"
    )
    assert not failed
