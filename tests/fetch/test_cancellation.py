"""`FetchStatus.cancel` ends a fetch wherever it is: retrying, or waiting for another process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from shardcache.cache import Cache
from shardcache.errors import FetchCancelledError
from shardcache.fetch.status import FetchStatus
from shardcache.locks.flock import Holder, KeyLock
from tests.support.fakes import FakeClock, Fault, MemoryOrigin
from tests.support.storetools import PATIENCE
from tests.support.tars import make_tar

URL = "s3://lab/a.tar"


def test_a_wait_that_is_called_off_says_so(clock: FakeClock) -> None:
    status = FetchStatus()
    status.sleep(1.0, URL)
    assert clock.elapsed == 1.0
    clock.on_sleep.append(lambda: setattr(status, "called_off", True))
    with pytest.raises(FetchCancelledError, match=URL):
        status.sleep(60.0, URL)
    assert clock.elapsed < 2.0  # it did not sleep to the end


def caught_in(cache: Cache, until: Callable[[], bool]) -> list[BaseException]:
    """What a thread that fetches the shard raises when that is called off."""
    found: list[BaseException] = []
    status = FetchStatus()

    def read() -> None:
        try:
            cache.fetch(URL, status)
        except BaseException as exn:
            found.append(exn)

    thread = threading.Thread(target=read)
    thread.start()
    end = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < end and thread.is_alive(), found
        time.sleep(0.01)
    status.cancel()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    return found


def test_a_wait_for_another_process_is_called_off(
    make_cache: Callable[..., Cache], origin: MemoryOrigin
) -> None:
    origin.objects[URL] = make_tar(1)
    cache = make_cache()
    layout = cache._here().home.store.layout
    lock = KeyLock(layout.key_lock(cache.parse(URL).key))
    assert lock.try_acquire(Holder(1, "node", None, None, 0.0))
    try:
        begun = time.monotonic()
        [error] = caught_in(cache, lambda: time.monotonic() - begun > 0.5)
        assert isinstance(error, FetchCancelledError)
    finally:
        lock.release()
    with cache.open(URL) as stream:  # and the cache goes on
        assert stream.read() == make_tar(1)


def test_retries_of_the_first_request_are_called_off(
    make_cache: Callable[..., Cache], origin: MemoryOrigin
) -> None:
    origin.objects[URL] = make_tar(1)
    origin.faults.extend(Fault(after=None) for _ in range(100))
    cache = make_cache(attempts=100)
    [error] = caught_in(cache, lambda: len(origin.requests) >= 4)
    assert isinstance(error, FetchCancelledError)
    origin.faults.clear()
    with cache.open(URL) as stream:
        assert stream.read() == make_tar(1)
