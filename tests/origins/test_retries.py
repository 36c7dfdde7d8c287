"""Retries: their number, pauses and credentials, counted at a proxy before a real S3 server."""

import gc
import json
import random
import weakref

import pytest

from shardcache import Cache, TransferError
from shardcache.origins.base import RepeatError, TransientError
from shardcache.origins.retry import BASE, CAP, RETRY_AFTER_CAP, RetryPolicy
from tests.download.test_faults import MIB, SIZE, Lab, bucket, lab, page  # noqa: F401 - fixtures
from tests.support.proxy import Fault, Rule
from tests.support.webservers import answer


@pytest.mark.parametrize("retry_after", [None, 5.0, 3600.0])
def test_pauses_are_random_and_grow_beyond_retry_after(retry_after):
    """Uniform between zero and a limit that doubles with every attempt, up to a cap."""
    state = random.getstate()
    runs: list[list[float]] = []
    for _ in range(100):
        naps: list[float] = []

        def fail() -> None:
            raise TransientError("503 SlowDown", retry_after=retry_after)

        with pytest.raises(TransferError, match="10 attempts failed"):
            RetryPolicy(10, None, 0).started("s3://lab/a.tar").call(fail, sleep=naps.append)
        runs.append([nap - min(retry_after or 0, RETRY_AFTER_CAP) for nap in naps])
    for number, spread in enumerate(zip(*runs, strict=True)):
        longest = min(CAP, BASE * 2**number)
        assert -1e-9 <= min(spread) < longest / 5
        assert longest * 0.8 < max(spread) <= longest + 1e-9
    assert (number, longest) == (8, CAP)  # the cap was reached
    assert random.getstate() == state  # that of the user's program, which ranks seed alike


def test_a_repeated_call_leaves_no_reference_cycle():
    """A cycle would keep a partial and its lock until the next garbage collection."""
    errors = [TransientError("503"), RepeatError("a", lambda: TransientError("503"), lambda: False)]

    def fail() -> None:
        if errors:
            raise errors.pop()

    sleep = lambda seconds: None  # noqa: E731
    kept = weakref.ref(sleep)
    gc.disable()
    try:
        RetryPolicy(3, None, 0).started("s3://lab/a.tar").call(fail, sleep=sleep)
        del sleep
        assert kept() is None
    finally:
        gc.enable()


def prewarm(cache: Cache, url: str) -> None:
    (result,) = cache.prewarm([url], jobs=4).results
    assert result.error is not None
    raise result.error


@pytest.mark.parametrize("call", [Cache.open, prewarm])
def test_each_attempt_is_one_request(lab, call):  # noqa: F811
    """Neither the SDK nor its pool nor a layer above adds retries of its own."""
    lab.proxy.script(Rule(Fault(name="500", answer=page(500, "InternalError")), times=None))
    with pytest.raises(TransferError, match="3 attempts failed"):
        call(lab.cache(attempts=3, connections=1), lab.url())
    assert lab.gets() == 3


def test_expired_credentials_are_renewed_once(lab, serve, monkeypatch, s3):  # noqa: F811
    """In the middle of a shard, with the credentials of a container."""
    keys = {"AccessKeyId": s3.access_key, "SecretAccessKey": s3.secret_key, "Token": None}
    keys["Expiration"] = "2099-01-01T00:00:00Z"
    accounts = iter(range(100, 200))
    vendor = serve(
        lambda head: answer("200 OK", json.dumps({**keys, "AccountId": next(accounts)}).encode())
    )
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{vendor.url}/credentials")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    expired = Rule(Fault(name="old", answer=page(400, "ExpiredToken")), start=3 * MIB)
    lab.proxy.script(expired)
    lab.expect(lab.cache(connections=1))
    assert (expired.fired, len(vendor.heads)) == (1, 2)


@pytest.mark.parametrize("size", [SIZE + 4096, SIZE - MIB, SIZE], ids=["longer", "shorter", "same"])
def test_a_prewarm_reads_the_new_version_of_a_shard_replaced_after_the_listing(lab, size):  # noqa: F811
    put = Rule(Fault(name="put", before=lambda: lab.put(version=2, size=size)), path=lab.path_of())
    lab.proxy.script(put)
    report = lab.cache().prewarm(f"s3://{lab.bucket}/a.t*")
    assert (put.fired, report.fetched, report.failed) == (1, 1, 0)
    assert lab.proxy.requests()[0].path.rstrip("/") == lab.bucket  # the listing
    lab.expect(lab.caches[0], version=2, size=size)
