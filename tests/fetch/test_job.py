"""One fetch from inside: which threads it starts, and what it still does once it is called off."""

from __future__ import annotations

import base64
import os
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from shardcache.errors import FetchCancelledError, IntegrityError
from shardcache.fetch.connections import Lanes
from shardcache.fetch.job import FetchStatus
from shardcache.fetch.transfer import Fetcher
from shardcache.origins.base import Checksum, TransientError
from shardcache.store.digest import BLOCK, file_digest
from shardcache.store.partial import Partial
from tests.fetch.test_transfer import URL, Bench, bench, contents, payload  # noqa: F401 - a fixture
from tests.support.fakes import Fault
from tests.support.storetools import PATIENCE, wait_until

# ruff: noqa: F811


def alone(bench: Bench) -> None:
    """One connection, and nobody who asks for checksums: everything happens in one order."""
    bench.origin.states_checksums = False
    bench.fetcher = Fetcher(
        bench.fetcher.policy, bench.clock, connections=1, part_size=2 * BLOCK, timeout=30
    )


def remains(bench: Bench, blocks: int) -> Partial:
    """What a fetch that was called off after ``blocks`` leaves."""
    bench.origin.faults.append(Fault(after=blocks * BLOCK + 10, error=KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        bench.fetch()
    (name,) = bench.left()
    partial = Partial.claim(bench.layout, bench.layout.partial / name, URL.basename)
    assert partial is not None
    bench.origin.requests.clear()
    return partial


def called(function: Callable[..., object], *, when: Callable[..., bool], then: Callable[[], None]):
    """``function``, and ``then()`` after the first call for which ``when`` is true."""
    left = [True]

    def call(*args, **kw):
        answer = function(*args, **kw)
        if left and when(*args, **kw):
            left.clear()
            then()
        return answer

    return call


# -- threads -------------------------------------------------------------------


@pytest.mark.parametrize(("parts", "helpers"), [(1, 0), (2, 1), (3, 2), (4, 3), (9, 3)])
def test_a_fetch_starts_as_many_threads_as_can_be_of_use(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, parts: int, helpers: int
) -> None:
    started: list[threading.Thread] = []
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        started.append(self)
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    bench.origin.objects[str(URL)] = payload(parts * 2 * BLOCK)
    fetched = bench.fetch()
    # One beside them asks for the checksum. None keeps the interpreter from ending.
    assert len(started) == helpers + 1
    assert all(thread.daemon for thread in started)
    fetched.partial.discard()


def test_a_resumed_fetch_takes_a_part_itself(bench: Bench, monkeypatch) -> None:
    alone(bench)
    bench.origin.objects[str(URL)] = payload(6 * BLOCK)
    resumed = remains(bench, 1)
    started: list[threading.Thread] = []
    real = threading.Thread.start
    monkeypatch.setattr(
        threading.Thread, "start", lambda self: (started.append(self), real(self))[1]
    )
    bench.fetcher.lanes = Lanes(4, 2 * BLOCK)
    fetched = bench.fetch(resume=resumed)
    assert contents(fetched) == payload(6 * BLOCK)
    assert len(bench.origin.requests) == 3  # of which two in threads
    assert len(started) == 2
    fetched.partial.discard()


# -- what a status says --------------------------------------------------------


def test_a_status_counts_from_the_first_moment_what_was_resumed(bench: Bench) -> None:
    alone(bench)
    resumed = remains(bench, 1)
    status = FetchStatus()
    seen: list[tuple[int | None, int, int]] = []
    real = bench.origin.open

    def watched(*args):
        seen.append((status.size, status.written, status.received))
        return real(*args)

    bench.origin.open = watched
    fetched = bench.fetch(resume=resumed, status=status)
    size = len(payload())
    assert seen[0] == (size, BLOCK, 0)
    assert (status.size, status.written, status.received) == (size, size, size - BLOCK)
    assert status.retries == 0
    fetched.partial.discard()


def test_a_status_counts_every_repeated_request(bench: Bench) -> None:
    alone(bench)
    for fault in (
        Fault(after=100_000, error=TransientError("reset")),  # with progress
        Fault(after=None, error=TransientError("busy", retry_after=0.0)),  # without
        Fault(after=100_000, error=TransientError("reset")),
    ):
        bench.origin.faults.append(fault)
    status = FetchStatus()
    fetched = bench.fetch(status=status)
    assert status.retries == 3
    assert contents(fetched) == payload()
    fetched.partial.discard()


# -- progress and beginnings ---------------------------------------------------


def test_64_kib_are_progress_and_a_byte_less_is_none(bench: Bench) -> None:
    alone(bench)
    bench.origin.objects[str(URL)] = payload(BLOCK)
    bench.origin.faults.extend(
        Fault(after=64 * 1024, error=TransientError("reset")) for _ in range(10)
    )
    fetched = bench.fetch()
    assert contents(fetched) == payload(BLOCK)
    fetched.partial.discard()
    bench.origin.requests.clear()
    bench.origin.faults.clear()
    bench.origin.faults.extend(
        Fault(after=64 * 1024 - 1, error=TransientError("reset", retry_after=0.0))
        for _ in range(10)
    )
    with pytest.raises(Exception, match="3 attempts failed"):
        bench.fetch()
    assert len(bench.origin.requests) == 3


@pytest.mark.parametrize("size", [0, 5, BLOCK, 2 * BLOCK + 1, 7 * BLOCK])
def test_what_begins_again_at_the_first_byte_keeps_nothing(bench: Bench, size: int) -> None:
    alone(bench)
    bench.origin.etags = bench.origin.sizes = False
    bench.origin.faults.append(Fault(after=3 * BLOCK + 5, error=TransientError("reset")))
    replacement = payload(size, seed=2)
    real = bench.origin.open

    def replaced(*args):
        if bench.origin.requests:
            bench.origin.objects[str(URL)] = replacement
        return real(*args)

    bench.origin.open = replaced
    fetched = bench.fetch()
    assert contents(fetched) == replacement
    assert (fetched.size, fetched.digest) == (size, file_digest(fetched.partial.fd))
    fetched.partial.discard()


# -- what arrived --------------------------------------------------------------


def described(bench: Bench, value: str) -> None:
    """Only a description states the checksum, as in S3, and it comes before the bytes."""
    bench.origin.checksums[str(URL)] = Checksum("crc32", value)
    real = bench.origin.open

    def silent(*args):
        body = real(*args)
        body.info = replace(body.info, checksum=None)
        read = body.readinto

        def readinto(buffer):
            wait_until(lambda: all(job.comparison.stated for job in bench.fetcher._jobs))
            return read(buffer)

        body.readinto = readinto
        return body

    bench.origin.open = silent


def crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def test_a_described_checksum_is_compared_without_a_second_pass(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    described(bench, crc32(payload()))

    def read_back(*_: object) -> int:
        raise AssertionError("a block is read back")

    monkeypatch.setattr(os, "preadv", read_back)
    fetched = bench.fetch()
    assert fetched.checked == "crc32"
    fetched.partial.discard()


def test_a_described_checksum_that_differs_is_an_error(bench: Bench) -> None:
    described(bench, crc32(b"other bytes"))
    with pytest.raises(IntegrityError, match="the bytes it sent twice"):
        bench.fetch()
    assert bench.left() == []


@pytest.mark.parametrize("forgotten", [0, 1, 2])
def test_a_part_that_was_forgotten_is_noticed_before_anything_is_published(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, forgotten: int
) -> None:
    alone(bench)
    bench.origin.objects[str(URL)] = payload(6 * BLOCK)
    resumed = remains(bench, 1)
    real = Partial.missing

    def missing(self: Partial):
        [(start, stop)] = real(self)
        parts = [(start, 2 * BLOCK), (2 * BLOCK, 4 * BLOCK), (4 * BLOCK, stop)]
        return iter(parts[:forgotten] + parts[forgotten + 1 :])

    monkeypatch.setattr(Partial, "missing", missing)
    with pytest.raises(IntegrityError, match="in pieces"):
        bench.fetch(resume=resumed)
    assert bench.left() == []


# -- called off ----------------------------------------------------------------


def test_a_call_off_before_room_is_made_makes_none(bench: Bench) -> None:
    alone(bench)
    made: list[object] = []
    bench.origin.open = called(bench.origin.open, when=lambda *_: True, then=bench.fetcher.cancel)
    with pytest.raises(FetchCancelledError):
        bench.fetch(target=lambda info: made.append(info))
    assert made == []
    assert len(bench.origin.requests) == 1


def test_a_call_off_while_room_is_made_is_heard(bench: Bench) -> None:
    alone(bench)
    with pytest.raises(FetchCancelledError):
        bench.fetch(target=lambda info: (bench.fetcher.cancel(), bench.target(info))[1])
    assert len(bench.origin.requests) == 1
    assert len(bench.left()) == 1  # to be resumed


def test_nothing_is_asked_for_after_a_call_off_between_two_parts(bench: Bench, monkeypatch) -> None:
    alone(bench)
    monkeypatch.setattr(
        Partial,
        "record",
        called(Partial.record, when=lambda self, i, *_: i == 1, then=bench.fetcher.cancel),
    )
    with pytest.raises(FetchCancelledError):
        bench.fetch()
    assert len(bench.origin.requests) == 1


def test_nothing_is_asked_for_after_a_call_off_in_a_pause(bench: Bench) -> None:
    alone(bench)
    pause = TransientError("busy", retry_after=50.0)
    bench.origin.faults.extend([Fault(after=10**9), Fault(after=None, error=pause)])
    failure: list[BaseException] = []

    def fetch() -> None:
        try:
            bench.fetch()
        except FetchCancelledError as exn:
            failure.append(exn)

    thread = threading.Thread(target=fetch)
    thread.start()
    wait_until(lambda: len(bench.origin.requests) == 2 or not thread.is_alive())
    bench.fetcher.cancel()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert len(failure) == 1
    assert len(bench.origin.requests) == 2


def test_an_aborted_answer_is_no_reason_to_ask_again(bench: Bench) -> None:
    alone(bench)
    never = threading.Event()
    bench.origin.faults.append(Fault(after=BLOCK + 100_000, wait=never))
    status = FetchStatus()
    timer = threading.Timer(0.1, bench.fetcher.cancel)
    timer.start()
    with pytest.raises(FetchCancelledError):
        bench.fetch(status=status)
    timer.join()
    assert len(bench.origin.requests) == 1
    assert status.retries == 0


def test_workers_that_wait_for_a_connection_hear_the_call_off(bench: Bench) -> None:
    bench.origin.states_checksums = False
    others = [bench.fetcher.lanes.spare() for _ in range(3)]  # other shards' connections
    never = threading.Event()
    bench.origin.faults.append(Fault(after=10, wait=never))
    timer = threading.Timer(0.1, bench.fetcher.cancel)
    timer.start()
    try:
        with pytest.raises(FetchCancelledError):
            bench.fetch()
        timer.join()
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if name.startswith("shardcache-")]
    finally:
        for lane in others:
            lane.give_back()


def test_a_fetch_leaves_no_descriptor_whichever_way_it_ends(bench: Bench) -> None:
    alone(bench)
    bench.fetch().partial.discard()
    before = sorted(os.listdir("/proc/self/fd"))
    for error in (KeyboardInterrupt(), ValueError("odd"), OSError("disk")):
        bench.origin.faults.append(Fault(after=BLOCK, error=error))
        with pytest.raises(type(error)):
            bench.fetch()
        assert sorted(os.listdir("/proc/self/fd")) == before


def test_an_answer_that_comes_after_the_call_off_is_not_read(bench: Bench) -> None:
    alone(bench)
    bench.origin.open = called(
        bench.origin.open, when=lambda url, start, *_: start > 0, then=bench.fetcher.cancel
    )
    with pytest.raises(FetchCancelledError):
        bench.fetch()
    assert bench.origin.delivered == 2 * BLOCK  # the first part
    # The connection of what was read before may be another request's by now.
    assert not bench.origin.bodies[0].aborted.is_set()


# -- answers that end ----------------------------------------------------------


def test_an_answer_that_just_ends_is_continued_not_waited_for(bench: Bench) -> None:
    alone(bench)
    bench.origin.objects[str(URL)] = payload(BLOCK)
    real = bench.origin.open

    def short(*args):
        body = real(*args)
        if len(bench.origin.requests) == 1:
            read = body.readinto
            body.readinto = lambda buffer: read(buffer) if body._at < 100_000 else 0
        return body

    bench.origin.open = short
    fetched = bench.fetch()
    assert contents(fetched) == payload(BLOCK)
    assert len(bench.origin.requests) == 2
    fetched.partial.discard()


def test_an_answer_that_comes_byte_by_byte_is_read(bench: Bench) -> None:
    alone(bench)
    bench.origin.chunk = 1
    bench.origin.objects[str(URL)] = payload(50)
    fetched = bench.fetch()
    assert contents(fetched) == payload(50)
    assert len(bench.origin.requests) == 1
    fetched.partial.discard()
