"""A signal handler raises in the middle of a call, and the caller reads on with the same stream."""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

import shardcache
from shardcache import threads
from shardcache.origins.base import TransientError
from shardcache.origins.retry import Pace
from tests.support.caches import read
from tests.support.clitools import run_process
from tests.support.storetools import PATIENCE, descriptors, no_descriptor_left, wait_until
from tests.support.tars import make_tar

# Python drops what a handler raises in a finalizer.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

DATA = make_tar(1, members=50, size=40_000)
HERE = str(Path(shardcache.__file__).parent)


class Deadline(Exception):
    """Raised by a handler."""


def interrupted(function, step, error=Deadline):
    """Call a function once for each of its moments, at which a handler of the thread raises."""

    def handler(frame, event, _):
        if left and event in ("call", "c_return") and not (left.pop() or left):
            raise error

    function()  # imports its modules
    for number in itertools.count(1, step):
        left = [None] * number
        with contextlib.suppress(error):
            try:
                sys.setprofile(handler)
                function()
            finally:
                sys.setprofile(None)
        yield number
        if left:
            break


@pytest.fixture
def url(files):
    files.files["/a.tar"] = DATA
    return f"{files.url}/a.tar"


@pytest.mark.parametrize(
    "error",
    [
        *(Deadline(), TimeoutError("my own deadline"), RuntimeError("a worker died")),
        *(ValueError("mine"), BlockingIOError(11, "the wake-up pipe is full")),
    ],
    ids=repr,
)
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
def test_a_handler_may_raise_in_a_read(
    make_cache, files, url, monkeypatch, source, size, step, error
):
    """After an error with a number, which may be taken for one of the network, reading may fail."""
    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    cache = make_cache(max_size=1000 if source == "past" else None)

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
            with contextlib.suppress(BlockingIOError):
                assert found + stream.read() == DATA
        if left:
            break
        assert caught is error or dropped or isinstance(error, BlockingIOError)
        dropped.clear()


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
@pytest.mark.parametrize("most", [None, 1000])
def test_no_error_of_a_handler_is_taken_for_another(make_cache, url, error, most):
    """torch's handler of SIGCHLD raises a RuntimeError, as Python does at the limit of threads."""
    cache, ended = make_cache(max_size=most), []

    def open_missing():
        cache.open(url).close()
        ended.append(None)

    moments = 0
    for moments in interrupted(open_missing, 5, error):  # noqa: B007
        cache.remove(url)
    # The last call has no more moments, and `io.BufferedReader` drops an error of `tell`.
    assert moments > 40 and len(ended) <= 4


def test_a_fetch_that_a_handler_ends_has_released_the_shard(make_cache, files, url):
    cache, held = make_cache(), files.hold("/a.tar", 1_000_000)

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


def opening(cache, url, pool):
    """A download without a worker, or a lock, would stop the next reader."""

    def is_read_again():
        return pool.submit(read, cache, url).result(20) == DATA and cache.clean(everything=True)

    return lambda: cache.open(url).close(), is_read_again


def opening_a_cached_shard(cache, url, pool):
    read(cache, url)
    return lambda: cache.open(url).close(), lambda: url in cache


def counting(cache, url, pool):
    counters = cache.process.counters

    def write():
        counters.add({"hits": 1})
        counters.flush()
        return counters.snapshot() == counters._written

    return write, lambda: pool.submit(write).result(20)


def requesting(cache, url, pool):
    """A request in flight would keep others from a server that throttles."""
    pace = Pace("s3://lab", 60.0)

    def request():
        with contextlib.suppress(TransientError), pace.turn(time.sleep):
            raise TransientError("throttled", patient=True)

    return request, lambda: not pace._turns


def starting_a_thread(cache, url, pool):
    """In `Thread.start`, it would raise other exceptions, and keep a lock of the new thread."""
    tasks = len(os.listdir("/proc/self/task"))
    start = partial(threads.start, lambda: None, "shardcache-test")

    def is_over():
        return wait_until(lambda: len(os.listdir("/proc/self/task")) <= tasks)

    return lambda: start().join(PATIENCE), is_over


def undivided_work(cache, url, pool):
    def work():
        with threads.no_fork(), threads.no_fork():
            pass

    def fork():
        if not (pid := os.fork()):
            os._exit(0)
        return os.waitpid(pid, 0)[1] == 0

    return work, lambda: pool.submit(fork).result(20)


CALLS = {opening: 5, opening_a_cached_shard: 1, counting: 3}
CALLS |= {requesting: 1, starting_a_thread: 1, undivided_work: 1}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python: threads and a fork
@pytest.mark.parametrize(("made", "step"), CALLS.items())
def test_a_handler_may_end_a_call_at_any_moment(make_cache, pool, url, monkeypatch, made, step):
    monkeypatch.setattr(threads, "_BEFORE_FORK", PATIENCE)
    call, is_well = made(make_cache(), url, pool)
    with no_descriptor_left() if made is opening_a_cached_shard else contextlib.nullcontext():
        for _ in interrupted(call, step):
            assert is_well()


def test_a_first_read_in_a_hook_of_atexit_works(url, tmp_path):
    code = (
        "import atexit, sys, shardcache\n"
        "cache = shardcache.Cache(sys.argv[1], min_free=0)\n"
        "atexit.register(lambda: print(len(cache.open(sys.argv[2]).read())))\n"
    )
    ended = run_process(tmp_path / "cache", url, python=[sys.executable, "-c", code])
    assert ended == (0, f"{len(DATA)}\n", "")


def test_the_first_use_of_a_cache_may_be_interrupted_and_repeated(url, tmp_path):
    code = """if True:
        import importlib.machinery, signal, sys, time
        import shardcache

        class SlowImport:
            def find_spec(self, name, path, _):
                if name != "shardcache.download.connections":  # which another module imports
                    return None
                spec = importlib.machinery.PathFinder.find_spec(name, path)
                execute = spec.loader.exec_module
                spec.loader.exec_module = lambda module: time.sleep(1) or execute(module)
                return spec

        def interrupt(_, frame):
            raise InterruptedError("importing" * ("importlib" in frame.f_code.co_filename))

        sys.meta_path.insert(0, SlowImport())
        signal.signal(signal.SIGALRM, interrupt)
        cache = shardcache.Cache(sys.argv[1], min_free=0)
        for _ in range(3):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            try:
                cache.open(sys.argv[2])
            except InterruptedError as exn:
                print("interrupted", *exn.args)
        print(len(cache.open(sys.argv[2]).read()))
    """
    ended = run_process(tmp_path / "cache", url, python=[sys.executable, "-c", code])
    # Its main thread did not import: a handler that raises there keeps a lock of a module.
    assert ended == (0, "interrupted \n" * 3 + f"{len(DATA)}\n", "")


def test_a_long_shard_is_read_once(make_cache, url, monkeypatch):
    """The kernel reads at most 2 GiB in one call."""
    cache, pread, preadv, starts = make_cache(), os.pread, os.preadv, list[int]()
    read(cache, url)
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 1_000_000), at))
    monkeypatch.setattr(os, "preadv", lambda *args: starts.append(args[2]) or preadv(*args))
    assert read(cache, url) == DATA
    assert min(starts) == 1_000_000
