"""A signal handler raises in the middle of a call, and the caller reads on with the same stream."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import shardcache
from shardcache import TransferError, threads
from shardcache.origins.base import TransientError
from shardcache.origins.retry import Pace
from tests.support.caches import read
from tests.support.storetools import PATIENCE, descriptors, no_descriptor_left, wait_until
from tests.support.tars import make_tar
from tests.support.webservers import Files, part_of, running

DATA = make_tar(1, members=50, size=40_000)
HERE = str(Path(shardcache.__file__).parent)


class Deadline(Exception):
    """Raised by a handler."""


def interrupted(
    function: Callable[[], object], *, step: int = 1, within: str = ""
) -> Iterator[int]:
    """Call a function once for each of its moments, at which a handler of the thread raises.

    Only the moments in methods of the class ``within`` count, if it is given.
    """

    def handler(frame, event, _):
        counts = event in ("call", "c_return") and frame.f_code.co_qualname.startswith(within)
        if left and counts and not (left.pop() or left):
            raise Deadline

    function()  # imports its modules
    for number in itertools.count(1, step):
        left = [None] * number
        with contextlib.suppress(Deadline):
            try:
                sys.setprofile(handler)
                function()
            finally:
                sys.setprofile(None)
        yield number
        if left:
            break


@pytest.fixture
def files():
    with running(Files()) as server:
        server.files["/a.tar"] = DATA
        yield server


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [Deadline(), TimeoutError("my own deadline")], ids=repr)
@pytest.mark.parametrize(
    ("source", "size", "step"),
    [
        ("hit", 600_000, 1),
        ("hit", -1, 1),
        ("past", 600_000, 3),
        ("past", -1, 9),
        ("follow", 600_000, 40),
    ],
)
def test_the_caller_gets_what_its_handler_raises_and_may_read_on(
    make_cache, files, monkeypatch, source, size, step, error
):
    """A handler may raise after each call. Python itself drops what is raised in a finalizer."""
    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    cache, url = make_cache(max_size=1000 if source == "past" else None), f"{files.url}/a.tar"

    def handler(frame, event, _):
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(HERE) and left:
            left.pop()
            if not left:
                raise error

    for number in itertools.count(1, step):
        if source == "follow":
            cache.remove(url)
            held = files.hold("/a.tar", 1_000_000)
        with cache.open(url) as stream:
            found, left, caught = stream.read(1000), [None] * number, None
            sys.setprofile(handler)
            try:
                found += stream.read(size)
            except type(error) as exn:
                found, caught = DATA[: stream.tell()], exn
            finally:
                sys.setprofile(None)
                if source == "follow":
                    held.set()
            assert found + stream.read() == DATA
        if left:
            break
        assert caught is error or dropped
        dropped.clear()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_handler_that_raises_in_open_leaves_no_descriptor(make_cache, files):
    cache, url = make_cache(), f"{files.url}/a.tar"
    read(cache, url)
    with no_descriptor_left():
        for _ in interrupted(lambda: cache.open(url).close()):
            assert url in cache
    assert cache.remove(url) == (len(DATA), 0)


def test_a_fetch_that_a_handler_ends_has_released_the_shard(make_cache, files, monkeypatch):
    cache, url = make_cache(), f"{files.url}/a.tar"
    held = files.hold("/a.tar", 1_000_000)

    def handler(*_):
        raise Deadline

    def interrupt():
        wait_until(lambda: any("/partial/" in each for each in descriptors()))
        os.kill(os.getpid(), signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(Deadline):
            cache.fetch(url)
        held.set()
        assert not [each for each in descriptors() if "/partial/" in each or "/locks/" in each]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert cache.fetch(url).data.read_bytes() == DATA


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_after_a_handler_ended_an_open_the_next_reader_gets_the_shard(make_cache, files):
    """No download is left without a worker, and no lock is held."""
    cache, url = make_cache(), f"{files.url}/a.tar"
    with ThreadPoolExecutor(1) as pool:
        for _ in interrupted(lambda: cache.open(url).close(), step=5):
            assert pool.submit(read, cache, url).result(20) == DATA
            cache.clean(everything=True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_handler_may_end_a_fetch_that_waits_for_a_connection(make_cache, files):
    """The methods of Python's conditions would then lose their lock."""
    cache = make_cache(connections=1)
    files.files["/b.tar"] = DATA

    def occupy():
        """Let another thread use the only connection for a moment."""
        pool.submit(cache.clean, everything=True).result(20)  # after the last one
        seen, held = files.requests.count("GET /b.tar"), files.hold("/b.tar", 1000)
        pool.submit(cache.fetch, f"{files.url}/b.tar")
        wait_until(lambda: files.requests.count("GET /b.tar") > seen)
        threading.Timer(0.2, held.set).start()

    def fetch():
        threads.call(occupy, PATIENCE, "shardcache-test")
        cache.fetch(f"{files.url}/a.tar")

    with ThreadPoolExecutor(1) as pool:
        for _ in interrupted(fetch, within="Condition."):
            assert pool.submit(cache.fetch, f"{files.url}/a.tar").result(20).size == len(DATA)


def test_a_first_read_in_a_hook_of_atexit_works(files, tmp_path):
    code = (
        "import atexit, sys, shardcache\n"
        "cache = shardcache.Cache(sys.argv[1], min_free=0)\n"
        "atexit.register(lambda: print(len(cache.open(sys.argv[2]).read())))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), f"{files.url}/a.tar"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == (f"{len(DATA)}\n", "")


@pytest.mark.parametrize("max_size", [None, 1000], ids=["download", "past"])
def test_a_server_that_ends_each_answer_early_gets_few_requests(make_cache, serve, max_size):
    """Fewer bytes than an attempt must receive."""

    def short(head):
        stated, body = part_of(DATA, head, Connection="close")
        return stated + body[:5000]

    server = serve(short)
    cache = make_cache(max_size=max_size, attempts=3)
    with pytest.raises(TransferError):
        read(cache, f"{server.url}/a.tar")
    assert len(server.heads) <= 4


def test_a_long_shard_is_read_once(make_cache, files, monkeypatch):
    """The kernel reads at most 2 GiB in one call."""
    cache, url, pread, preadv = make_cache(), f"{files.url}/a.tar", os.pread, os.preadv
    starts: list[int] = []
    read(cache, url)
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 1_000_000), at))
    monkeypatch.setattr(os, "preadv", lambda *args: starts.append(args[2]) or preadv(*args))
    assert read(cache, url) == DATA
    assert min(starts) == 1_000_000


def test_a_request_that_a_handler_ended_does_not_count_as_in_flight():
    """Otherwise, it would keep others from a server that throttles."""
    pace = Pace("s3://lab", 60.0)

    def request():
        with contextlib.suppress(TransientError), pace.turn(time.sleep):
            raise TransientError("throttled", patient=True)

    for _ in interrupted(request):
        assert not pace._turns


def test_a_handler_that_raises_while_a_thread_starts_leaves_no_thread_that_hangs():
    """In `Thread.start`, it would raise other exceptions, and keep a lock of the new thread."""
    tasks = len(os.listdir("/proc/self/task"))
    for _ in interrupted(lambda: threads.start(lambda: None, "shardcache-test").join(PATIENCE)):
        wait_until(lambda: len(os.listdir("/proc/self/task")) <= tasks)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads
def test_no_fork_waits_for_undivided_work_that_a_handler_ended(monkeypatch):
    monkeypatch.setattr(threads, "_BEFORE_FORK", PATIENCE)

    def work():
        with threads.undivided(), threads.undivided():
            pass

    def fork():
        if not (pid := os.fork()):
            os._exit(0)
        return os.waitpid(pid, 0)[1]

    with ThreadPoolExecutor(1) as pool:
        for _ in interrupted(work):
            assert pool.submit(fork).result(20) == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_counts_are_written_after_a_handler_ended_their_writing(make_cache, files):
    cache, url = make_cache(), f"{files.url}/a.tar"
    read(cache, url)
    counters = cache.process.counters

    def write():
        counters.add({"hits": 1})
        counters.flush()

    with ThreadPoolExecutor(1) as pool:
        for _ in interrupted(write, step=3):
            pool.submit(write).result(20)
            assert counters.snapshot() == counters._written
