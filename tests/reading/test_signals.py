"""A signal handler raises in the middle of a call, and the caller reads on with the same stream."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shardcache
from shardcache import TransferError
from shardcache.origins.base import TransientError
from shardcache.origins.pace import Pace
from tests.support.caches import read
from tests.support.storetools import no_descriptor_left
from tests.support.tars import make_tar
from tests.support.webservers import Files, part_of, running

DATA = make_tar(1, members=50, size=40_000)
HERE = str(Path(shardcache.__file__).parent)


class Deadline(Exception):
    """Raised by a handler."""


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


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the file is dropped
def test_a_handler_that_raises_in_open_leaves_no_descriptor(make_cache, files):
    cache, url = make_cache(), f"{files.url}/a.tar"
    read(cache, url)
    caught = 0

    def handler(*_):
        raise Deadline

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with no_descriptor_left():
            for number in range(4000):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 1e-6 * (5 + number % 80))
                    cache.open(url).close()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Deadline:
                    caught += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert caught
    assert cache.remove(url)


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


@pytest.mark.parametrize("number", range(1, 12))
def test_a_request_that_a_handler_ended_does_not_count_as_in_flight(number):
    """Otherwise, it would keep others from a server that throttles."""
    pace, left = Pace("s3://lab", 60.0), [None] * number

    def handler(frame, event, _):
        if frame.f_code.co_filename.startswith(HERE) and left and not (left.pop() or left):
            raise Deadline

    def request():
        with pace.turn(time.sleep):
            raise TransientError("throttled", patient=True)

    sys.setprofile(handler)
    try:
        request()
    except (Deadline, TransientError):
        pass
    finally:
        sys.setprofile(None)
    assert not pace._turns
