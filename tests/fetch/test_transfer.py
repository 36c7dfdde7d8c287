"""The fetch engine against an origin that misbehaves."""

from __future__ import annotations

import base64
import hashlib
import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcache.errors import (
    CacheFullError,
    FetchCancelledError,
    IntegrityError,
    ShardNotFoundError,
    TransferError,
    TransferTimeoutError,
)
from shardcache.fetch.job import Fetched
from shardcache.fetch.status import FetchStatus
from shardcache.fetch.transfer import Fetcher
from shardcache.layout import Layout
from shardcache.origins.base import Checksum, ObjectInfo, TransientError
from shardcache.origins.retry import RetryPolicy
from shardcache.store.digest import BLOCK, file_digest
from shardcache.store.entry import Metadata
from shardcache.store.partial import Partial, read_progress
from shardcache.urls import ShardURL, parse_url
from tests.support.fakes import FakeClock, Fault, MemoryOrigin
from tests.support.storetools import PATIENCE, wait_until

URL = parse_url("s3://lab/train-0000.bin")
SIZE = 5 * BLOCK + 777


def payload(size: int = SIZE, seed: int = 1) -> bytes:
    return b"".join(
        hashlib.blake2b(f"{seed}/{n}".encode(), digest_size=64).digest()
        for n in range(size // 64 + 1)
    )[:size]


pytestmark = pytest.mark.usefixtures("clock")


class Bench:
    """A fetcher over a temporary namespace."""

    def __init__(self, path: Path, origin: MemoryOrigin, **policy: float) -> None:
        self.layout = Layout(path / "v1")
        self.layout.make()
        self.origin = origin
        options = {"attempts": 3, "deadline": None, **policy}
        self.fetcher = Fetcher(
            RetryPolicy(options["attempts"], options["deadline"]),
            connections=4,
            part_size=2 * BLOCK,
        )
        self.partials: list[Partial] = []

    def target(self, info: ObjectInfo) -> Partial:
        metadata = Metadata(str(URL), URL.key, info, info.size or 0, "", None, 1.0, "boot", "test")
        partial = Partial.create(self.layout, metadata, URL.basename)
        self.partials.append(partial)
        return partial

    def fetch(self, url: ShardURL = URL, **options: object) -> Fetched:
        options.setdefault("target", self.target)
        status = options.setdefault("status", FetchStatus())
        try:
            return self.fetcher.fetch(self.origin, url, **options)
        finally:
            status.drop_answer()
            assert status.on_cancel is None  # or whoever keeps it keeps the fetch

    def left(self) -> list[str]:
        return os.listdir(self.layout.partial)


@pytest.fixture
def bench(tmp_path: Path, origin: MemoryOrigin) -> Iterator[Bench]:
    origin.objects[str(URL)] = payload()
    bench = Bench(tmp_path, origin)
    yield bench
    wait_until(lambda: bench.fetcher.connections._busy == 0)
    assert all(body.closed for body in origin.bodies)


def contents(fetched: Fetched) -> bytes:
    return fetched.partial.data.read_bytes()


def test_every_byte_arrives_once(bench: Bench) -> None:
    status = FetchStatus()
    fetched = bench.fetch(status=status)
    assert contents(fetched) == payload()
    assert bench.origin.delivered == SIZE
    assert status.received == status.written == status.size == SIZE
    assert fetched.digest == file_digest(fetched.partial.fd)
    fetched.partial.discard()


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_sizes_around_a_block(bench: Bench, size: int) -> None:
    bench.origin.objects[str(URL)] = payload(size)
    fetched = bench.fetch()
    assert contents(fetched) == payload(size)
    assert fetched.size == size
    fetched.partial.discard()


def test_a_broken_connection_goes_on_at_the_byte_it_reached(bench: Bench, clock: FakeClock) -> None:
    bench.origin.objects[str(URL)] = payload(2 * BLOCK)
    bench.origin.faults.append(Fault(after=BLOCK + 100_000, error=TransientError("reset")))
    fetched = bench.fetch()
    assert contents(fetched) == payload(2 * BLOCK)
    assert [(start, stop) for _, start, stop in bench.origin.requests] == [
        (0, 2 * BLOCK),
        (BLOCK + 100_000, 2 * BLOCK),
    ]
    assert bench.origin.delivered == 2 * BLOCK  # nothing came twice
    assert clock.naps == []  # there was progress: no pause
    fetched.partial.discard()


def test_progress_resets_the_attempts(bench: Bench) -> None:
    bench.origin.objects[str(URL)] = payload(2 * BLOCK)
    for _ in range(6):  # twice the allowed number, but each one gets further
        bench.origin.faults.append(Fault(after=100_000, error=TransientError("reset")))
    fetched = bench.fetch()
    assert contents(fetched) == payload(2 * BLOCK)
    fetched.partial.discard()


def test_attempts_without_progress_in_the_middle_end_and_leave_a_resumable_partial(
    bench: Bench,
) -> None:
    bench.origin.objects[str(URL)] = payload(2 * BLOCK)
    bench.origin.faults.append(Fault(after=BLOCK + 5, error=TransientError("reset")))
    bench.origin.faults.extend(Fault(after=None) for _ in range(9))
    with pytest.raises(TransferError, match="could not be fetched"):
        bench.fetch()
    (name,) = bench.left()
    progress = read_progress(bench.layout.partial / name)
    assert progress is not None
    assert progress.written == BLOCK
    resumed = Partial.claim(bench.layout, bench.layout.partial / name, URL.basename)
    assert resumed is not None
    bench.origin.faults.clear()
    bench.origin.requests.clear()
    fetched = bench.fetch(resume=resumed)
    assert contents(fetched) == payload(2 * BLOCK)
    assert [(start, stop) for _, start, stop in bench.origin.requests] == [(BLOCK, 2 * BLOCK)]
    fetched.partial.discard()


def test_an_unpinned_origin_is_described_again_at_the_end(bench: Bench) -> None:
    bench.origin.pins = bench.origin.states_checksums = False
    changed = []
    real = bench.origin.stat

    def stat(url):
        if not changed:
            changed.append(True)
            bench.origin.objects[str(URL)] = payload(seed=3)
        return real(url)

    bench.origin.stat = stat
    fetched = bench.fetch()
    assert contents(fetched) == payload(seed=3)
    fetched.partial.discard()


@pytest.mark.parametrize("size", [0, 1, BLOCK, 2 * BLOCK, SIZE])
def test_an_origin_that_states_no_size_is_read_to_its_end(bench: Bench, size: int) -> None:
    bench.origin.sizes = False
    bench.origin.objects[str(URL)] = payload(size)
    fetched = bench.fetch()
    assert contents(fetched) == payload(size)
    assert fetched.size == size
    assert fetched.digest == file_digest(fetched.partial.fd)
    fetched.partial.discard()


@pytest.mark.parametrize("sizes", [True, False])
def test_an_answer_of_no_known_version_is_started_over_not_continued(
    bench: Bench, sizes: bool
) -> None:
    bench.origin.etags = False
    bench.origin.sizes = sizes
    if sizes:
        bench.origin.faults.append(Fault(after=10**9))  # the first look passes
    bench.origin.faults.append(Fault(after=3 * BLOCK, error=TransientError("reset")))
    real = bench.origin.open

    def replaced(url, start, stop, pin=None):
        if len(bench.origin.requests) == 1 + sizes:
            bench.origin.objects[str(URL)] = payload(seed=9)
        return real(url, start, stop, pin)

    bench.origin.open = replaced
    fetched = bench.fetch()
    assert contents(fetched) == payload(seed=9)
    fetched.partial.discard()


def crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def test_parts_of_two_versions_are_not_mixed_where_the_origin_ignores_the_pin(bench: Bench) -> None:
    old, new = payload(5 * BLOCK), payload(5 * BLOCK)[::-1]
    bench.origin.objects[str(URL)], serve = old, bench.origin.open

    def deaf(url, start, stop, pin=None):
        if start:
            bench.origin.objects[str(url)] = new
        return serve(url, start, stop)

    bench.origin.open = deaf
    fetched = bench.fetch()
    assert contents(fetched) == new
    fetched.partial.discard()


def test_a_stated_checksum_is_compared(bench: Bench) -> None:
    bench.origin.checksums[str(URL)] = Checksum("crc32", crc32(payload()))
    fetched = bench.fetch()
    assert fetched.checked == "crc32"
    fetched.partial.discard()


def test_sha256_is_compared_too(bench: Bench) -> None:
    value = base64.b64encode(hashlib.sha256(payload()).digest()).decode()
    bench.origin.checksums[str(URL)] = Checksum("sha256", value)
    fetched = bench.fetch()
    assert fetched.checked == "sha256"
    fetched.partial.discard()


def test_a_checksum_of_parts_is_not_mistaken_for_one_of_the_whole(bench: Bench) -> None:
    bench.origin.checksums[str(URL)] = Checksum("crc32", "AAAAAA==-3")
    fetched = bench.fetch()
    assert fetched.checked is None
    fetched.partial.discard()


def test_a_target_that_refuses_ends_the_fetch_after_one_request(bench: Bench) -> None:
    def refuse(info: ObjectInfo) -> Partial:
        raise CacheFullError(f"no room for {info.size}")

    with pytest.raises(CacheFullError):
        bench.fetch(target=refuse)
    assert len(bench.origin.requests) == 1


def test_cancelling_ends_a_silent_fetch_and_keeps_what_came(bench: Bench) -> None:
    never = threading.Event()
    bench.origin.objects[str(URL)] = payload(2 * BLOCK)
    bench.origin.faults.append(Fault(after=BLOCK + 10, wait=never))
    status = FetchStatus()
    timer = threading.Timer(0.2, status.cancel)
    timer.start()
    with pytest.raises(FetchCancelledError):
        bench.fetch(status=status)
    timer.join()
    (name,) = bench.left()
    progress = read_progress(bench.layout.partial / name)
    assert progress is not None
    assert progress.written == BLOCK


def test_the_deadline_bounds_the_whole_fetch(
    tmp_path: Path, origin: MemoryOrigin, clock: FakeClock
) -> None:
    origin.objects[str(URL)] = payload()
    bench = Bench(tmp_path, origin, attempts=100, deadline=10)
    origin.faults.extend(Fault(after=None) for _ in range(100))
    with pytest.raises(TransferTimeoutError, match="deadline of 10 s"):
        bench.fetch()
    assert clock.elapsed <= 10


def test_many_threads_share_the_connections(bench: Bench) -> None:
    active = 0
    most = 0
    guard = threading.Lock()
    real = bench.origin.open

    def counted(url, start, stop, pin=None):
        nonlocal active, most
        with guard:
            active += 1
            most = max(most, active)
        body = real(url, start, stop, pin)
        close = body.close

        def closed() -> None:
            nonlocal active
            with guard:
                active -= 1
            close()

        body.close = closed
        return body

    bench.origin.open = counted
    results: list[bytes] = []

    def work() -> None:
        fetched = bench.fetch()
        results.append(contents(fetched))
        fetched.partial.discard()

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [payload()] * 12
    assert most <= 4


def test_no_descriptor_is_left(bench: Bench) -> None:
    bench.fetch().partial.discard()
    before = len(os.listdir("/proc/self/fd"))
    for fault in (None, Fault(after=5), Fault(after=None, error=ValueError("odd"))):
        if fault is not None:
            bench.origin.faults.append(fault)
        try:
            bench.fetch().partial.discard()
        except ValueError:
            assert fault is not None
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_comes_after_an_abort_is_not_believed(bench: Bench) -> None:
    """A connection that is aborted behind TLS goes on with ciphertext."""
    bench.origin.objects[str(URL)] = payload(4 * BLOCK)
    receiving = threading.Event()
    real = bench.origin.open

    def open_(url, start, stop, pin=None):
        body = real(url, start, stop, pin)
        receive, came = body.readinto, 0

        def fail(buffer):
            nonlocal came
            if came < BLOCK:  # which brings the other connections
                count = receive(buffer[: BLOCK - came])
                came += count
                return count
            assert receiving.wait(PATIENCE)
            raise ShardNotFoundError("it vanished", url=str(URL))

        def ciphertext(buffer):
            receiving.set()
            assert body.aborted.wait(PATIENCE)
            buffer[:] = b"\xaa" * len(buffer)
            return len(buffer)

        body.readinto = ciphertext if start else fail
        return body

    bench.origin.open = open_
    with pytest.raises(ShardNotFoundError):
        bench.fetch()
    assert receiving.is_set()
    bench.origin.open = real
    (name,) = bench.left()
    resumed = Partial.claim(bench.layout, bench.layout.partial / name, URL.basename)
    assert resumed is not None
    fetched = bench.fetch(resume=resumed)
    assert contents(fetched) == payload(4 * BLOCK)
    fetched.partial.discard()


def test_a_process_that_may_start_no_threads_fetches_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    fetched = bench.fetch()
    assert contents(fetched) == payload()
    fetched.partial.discard()


def test_a_description_of_another_version_starts_the_fetch_over(bench: Bench) -> None:
    told = threading.Event()
    real = bench.origin.stat

    def stat(url):
        if not bench.origin.stats:
            bench.origin.objects[str(URL)] = payload(seed=2)
        told.set()
        return real(url)

    bench.origin.stat = stat
    bench.origin.faults.append(Fault(after=10, wait=told))
    fetched = bench.fetch()
    assert contents(fetched) == payload(seed=2)
    assert len([start for _, start, _ in bench.origin.requests if start == 0]) == 2
    fetched.partial.discard()


# -- what a listing knew ---------------------------------------------------------


@pytest.fixture
def describing(tmp_path: Path) -> Iterator[Bench]:
    origin = MemoryOrigin()
    origin.objects[str(URL)] = payload(BLOCK + 9)
    value = base64.b64encode(zlib.crc32(payload(BLOCK + 9)).to_bytes(4, "big")).decode()
    origin.checksums[str(URL)] = Checksum("crc32", value)
    yield Bench(tmp_path, origin)
    assert all(body.closed for body in origin.bodies)


def test_a_small_shard_whose_size_is_known_takes_one_request(describing: Bench) -> None:
    fetched = describing.fetch(status=FetchStatus(listed=BLOCK + 9))
    assert contents(fetched) == payload(BLOCK + 9)
    assert fetched.checked == "crc32"
    assert describing.origin.requests == [(str(URL), 0, None)]
    assert describing.origin.stats == []
    fetched.partial.discard()


def test_the_checksum_that_came_along_is_compared(describing: Bench) -> None:
    describing.origin.checksums[str(URL)] = Checksum("crc32", "AAAAAA==")
    with pytest.raises(IntegrityError, match="crc32 AAAAAA=="):
        describing.fetch(status=FetchStatus(listed=BLOCK + 9))
    assert describing.left() == []


def test_what_is_longer_than_it_was_listed_takes_no_other_request(describing: Bench) -> None:
    origin, data = describing.origin, payload(2 * BLOCK + 1)
    value = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
    origin.objects[str(URL)], origin.checksums[str(URL)] = data, Checksum("crc32", value)
    fetched = describing.fetch(status=FetchStatus(listed=BLOCK))
    assert contents(fetched) == data
    assert fetched.checked == "crc32"
    assert origin.requests == [(str(URL), 0, None), (str(URL), 2 * BLOCK, 2 * BLOCK + 1)]
    assert origin.stats == []
    fetched.partial.discard()


def test_what_has_no_version_comes_in_one_answer_though_it_was_listed(describing: Bench) -> None:
    """Its parts could be of different versions."""
    origin = describing.origin
    origin.objects[str(URL)] = payload(2 * BLOCK + 1)
    origin.checksums.clear()
    origin.etags = False
    fetched = describing.fetch(status=FetchStatus(listed=BLOCK))
    assert contents(fetched) == payload(2 * BLOCK + 1)
    assert origin.requests == [(str(URL), 0, None)]
    fetched.partial.discard()


def beside(name: str) -> ShardURL:
    return parse_url(str(URL).rpartition("/")[0] + "/" + name)


def test_a_shard_is_asked_for_as_its_neighbour_was(describing: Bench) -> None:
    """Nobody has told its size, but the one before was small: one request, with checksum."""
    describing.fetch().partial.discard()
    assert describing.origin.stats == [str(URL)]
    origin, neighbour = describing.origin, beside("neighbour.tar")
    origin.objects[str(neighbour)] = payload(BLOCK + 9)
    origin.checksums[str(neighbour)] = origin.checksums[str(URL)]
    fetched = describing.fetch(neighbour)
    assert contents(fetched) == payload(BLOCK + 9)
    assert fetched.checked == "crc32"
    assert origin.requests == [(str(URL), 0, 2 * BLOCK), (str(neighbour), 0, None)]
    assert origin.stats == [str(URL)]
    fetched.partial.discard()
