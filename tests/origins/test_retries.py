"""Retries: their pauses, and what they keep alive."""

import gc
import random
import weakref

import pytest

from shardcache import TransferError
from shardcache.origins import retry
from shardcache.origins.base import RepeatError, TransientError
from shardcache.origins.retry import BASE, CAP, RETRY_AFTER_CAP, RetryPolicy


@pytest.mark.parametrize("retry_after", [None, 5.0, 3600.0])
def test_pauses_are_random_and_grow_beyond_retry_after(retry_after, monkeypatch):
    """Uniform between zero and a limit that doubles with every attempt, up to a cap."""
    monkeypatch.setattr(retry, "BASE", BASE)
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
