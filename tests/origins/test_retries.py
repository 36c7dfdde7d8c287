"""Repeating requests: how often, after which pause, with which credentials.

Counted and timed at a proxy before a real S3 server (see `tests.fetch.test_faults`). And what is
asked for again although somebody believes to know it: listings grow old.
"""

from __future__ import annotations

import http.server
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import webdataset as wds
from fsspec.implementations.memory import MemoryFileSystem

from shardcache import AccessDeniedError, Cache, TransferError
from shardcache.cli.demo import S3Server
from shardcache.origins.base import TransientError
from shardcache.origins.http import retry_after
from shardcache.origins.retry import BASE, CAP, RETRY_AFTER_CAP, RetryPolicy
from tests.fetch.test_faults import MIB, SIZE, Lab, bucket, lab, page, shard  # noqa: F401 - fixtures
from tests.origins.test_generic import Server, web  # noqa: F401 - a fixture
from tests.support.fakes import FakeClock
from tests.support.proxy import Fault, Rule
from tests.support.tars import make_tar

# -- pauses -----------------------------------------------------------------------------

ATTEMPTS, RUNS = 10, 400


@pytest.mark.parametrize("asked", [None, 0.0, 5.0, 3600.0])
def test_pauses_are_spread_over_a_growing_interval_behind_what_the_server_asks(
    asked: float | None,
) -> None:
    """Full jitter: uniform from nothing to twice as much with every attempt, up to a cap."""
    random.seed(11)
    runs: list[list[float]] = []
    for _ in range(RUNS):
        naps: list[float] = []

        def fail() -> None:
            raise TransientError("503 SlowDown", retry_after=asked)

        attempts = RetryPolicy(ATTEMPTS, None, FakeClock()).started("s3://lab/a.tar")
        with pytest.raises(TransferError, match=f"{ATTEMPTS} attempts failed"):
            attempts.call(fail, sleep=naps.append)
        runs.append(naps)
    for number, after in enumerate(zip(*runs, strict=True)):
        longest = min(CAP, BASE * 2**number)
        spread = [nap - min(asked or 0, RETRY_AFTER_CAP) for nap in after]
        assert -1e-9 <= min(spread) < longest / 10
        assert longest * 0.9 < max(spread) <= longest + 1e-9
    assert (number, longest) == (ATTEMPTS - 2, CAP)  # the cap was reached


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("-3", 0.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", None),  # a date: no clock of ours is compared with it
        ("soon", None),
        ("inf", None),
        ("nan", None),
        ("", None),
    ],
)
def test_what_retry_after_may_say(said: str, seconds: float | None) -> None:
    assert retry_after({"retry-after": said}) == seconds


# -- one layer --------------------------------------------------------------------------


def read(cache: Cache, url: str) -> None:
    cache.open(url).close()


def pipeline(cache: Cache, url: str) -> None:
    dataset = cache.attach(wds.WebDataset([url], shardshuffle=False, handler=wds.reraise_exception))
    next(iter(dataset))


def prewarm(cache: Cache, url: str) -> None:
    (result,) = cache.prewarm([url], jobs=4).results
    assert result.error is not None
    raise result.error


def filesystem(cache: Cache, url: str) -> None:
    through = fsspec.filesystem(
        "shardcache",
        target_protocol="s3",
        skip_instance_cache=True,
        dir=str(cache.dir),
        min_free=0,
        attempts=cache.config.attempts,
        connections=1,
    )
    with through.cache, through.open(url, "rb"):
        pass


#: Every way in -> how it is used; all raise the error of the fetch.
WAYS: dict[str, Callable[[Cache, str], None]] = {
    "open": read,
    "fetch": lambda cache, url: cache.fetch(url) and None,
    "WebDataset": pipeline,
    "prewarm": prewarm,
    "fsspec": filesystem,
}
FAULTS = {
    "503": Fault(name="503", answer=page(503, "SlowDown")),
    "reset": Fault(name="reset", hang_up="reset"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", WAYS)
def test_so_many_attempts_are_so_many_requests(
    lab: Lab,  # noqa: F811
    way: str,
    fault: str,
) -> None:
    """Neither the SDK nor its pool nor a layer above repeats what `attempts` bounds."""
    lab.proxy.script(Rule(FAULTS[fault], times=None))
    with pytest.raises(TransferError, match="3 attempts failed"):
        WAYS[way](lab.cache(attempts=3, connections=1), lab.url())
    assert lab.gets() == 3


# -- credentials that expire ------------------------------------------------------------


class Vendor(http.server.HTTPServer):
    """Hands out credentials as containers get them, each once."""

    def __init__(self, *keys: tuple[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), VendorHandler)
        self.keys = itertools.chain(keys, itertools.repeat(keys[-1]))
        self.asked = 0


class VendorHandler(http.server.BaseHTTPRequestHandler):
    server: Vendor

    def do_GET(self) -> None:
        self.server.asked += 1
        key, secret = next(self.server.keys)
        answer = {"AccessKeyId": key, "SecretAccessKey": secret, "Token": None}
        body = json.dumps({**answer, "Expiration": "2099-01-01T00:00:00Z"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def vendor(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Vendor]]:
    made: list[tuple[Vendor, threading.Thread]] = []

    def make(*keys: tuple[str, str]) -> Vendor:
        server = Vendor(*keys)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        made.append((server, thread))
        place = f"http://127.0.0.1:{server.server_port}/credentials"
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", place)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        return server

    yield make
    for server, thread in made:
        server.shutdown()
        server.server_close()
        thread.join()


def test_new_credentials_are_asked_for_once_and_used(
    lab: Lab,  # noqa: F811
    vendor: Callable[..., Vendor],
    s3: S3Server,
) -> None:
    """In the middle of a shard; what the server signs for is the new key alone."""
    seller = vendor((s3.access_key, s3.secret_key), (s3.access_key, s3.secret_key))
    expired = Rule(Fault(name="old", answer=page(400, "ExpiredToken")), start=3 * MIB)
    lab.proxy.script(expired)
    lab.expect(lab.cache(connections=1))
    assert (expired.fired, seller.asked) == (1, 2)
    assert lab.gets() == 5 + 1


def test_credentials_that_are_no_better_are_an_error_after_one_more_request(
    lab: Lab,  # noqa: F811
    vendor: Callable[..., Vendor],
    s3: S3Server,
) -> None:
    seller = vendor((s3.access_key, s3.secret_key), ("AKIAREVOKED", "canary-secret"))
    lab.proxy.script(Rule(Fault(name="old", answer=page(400, "ExpiredToken"))))
    with pytest.raises(AccessDeniedError, match="AWS_ACCESS_KEY_ID") as caught:
        lab.cache(connections=1).open(lab.url())  # the new key is unknown to the server
    assert lab.url() in str(caught.value) and "canary" not in str(caught.value)
    assert [r.status for r in lab.proxy.requests()] == [400, 403]
    assert seller.asked == 2


# -- listings that are out of date ------------------------------------------------------


@pytest.mark.parametrize("size", [SIZE + 4096, SIZE - MIB, SIZE], ids=["longer", "shorter", "same"])
def test_a_shard_that_was_replaced_since_it_was_listed_arrives_as_it_is_now(
    lab: Lab,  # noqa: F811
    size: int,
) -> None:
    """A prewarm learns sizes from a listing; by the first request they are wrong."""
    put = Rule(Fault(name="put", before=lambda: lab.put(version=2, size=size)), path=lab.path_of())
    lab.proxy.script(put)
    report = lab.cache().prewarm(f"s3://{lab.bucket}/a.*")
    assert (put.fired, report.fetched, report.failed) == (1, 1, 0)
    assert lab.proxy.requests()[0].path.rstrip("/") == lab.bucket  # the listing
    lab.expect(lab.caches[0], version=2, size=size)


def test_listings_that_a_filesystem_keeps_are_not_believed(tmp_path: Path) -> None:
    fsspec.register_implementation("keeps", Keeps, clobber=True)
    keeping = fsspec.filesystem("keeps")
    keeping.pipe("keeps://lab/a.tar", make_tar(1))
    assert keeping.info("keeps://lab/a.tar")["size"] == len(make_tar(1))
    new = make_tar(2, members=9)
    keeping.pipe("keeps://lab/a.tar", new)
    assert keeping.info("keeps://lab/a.tar")["size"] < len(new)  # which is wrong
    with Cache(tmp_path / "cache", min_free=0, allow_schemes=["keeps"]) as cache:
        assert cache.fetch("keeps://lab/a.tar").size == len(new)
        with cache.open("keeps://lab/a.tar") as stream:
            assert stream.read() == new


class Keeps(MemoryFileSystem):
    """A filesystem that never asks twice how long a file is, unless it is told to."""

    protocol = "keeps"
    known: dict[str, Any] = {}

    def info(self, path: str, **options: Any) -> Any:
        return self.known.setdefault(path, super().info(path, **options))

    def invalidate_cache(self, path: str | None = None) -> None:
        self.known.clear()
