"""Preparation in the background, and the threads that a fork waits for."""

import contextlib
import ctypes
import gc
import logging
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from queue import Empty

import pytest
import webdataset as wds

from shardcache import threads
from shardcache.cache import Cache
from shardcache.errors import TransferError
from shardcache.origins.base import receive
from tests.support.storetools import BLOCK, PATIENCE, forked, no_thread, wait_until
from tests.support.tars import make_tar


def test_a_wait_ends_in_time_although_signals_arrive():
    """`queue.SimpleQueue.get` would wait forever."""

    def work(parent):
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        for _ in range(200):
            with contextlib.suppress(Empty):
                threads.Queue().get(timeout=0.002)
        parent.say("in time")

    with forked(work) as child:
        assert child.hear() == "in time"


def test_a_fork_waits_until_a_thread_that_has_ended_is_gone():
    """OpenSSL holds a global lock for microseconds while a thread ends.

    The destructor of the thread's local value waits for a semaphore, so the test decides when the
    thread ends.
    """
    libc, key, semaphore = ctypes.CDLL(None), ctypes.c_uint(), ctypes.create_string_buffer(64)
    libc.pthread_setspecific.argtypes = [ctypes.c_uint, ctypes.c_void_p]
    libc.sem_init(semaphore, 0, 0)
    assert libc.pthread_key_create(ctypes.byref(key), libc.sem_wait) == 0
    end = ctypes.addressof(semaphore)
    thread = threads.start(lambda: libc.pthread_setspecific(key, end), "shardcache-test")
    wait_until(lambda: not thread.is_alive())  # `join` waits for the kernel, from Python 3.13 on
    task = Path(f"/proc/self/task/{thread.native_id}")
    assert task.exists()
    threading.Timer(0.4, libc.sem_post, [semaphore]).start()  # the fork waits for this
    with forked(lambda parent: parent.say("here")) as child:
        assert not task.exists()
        assert child.hear() == "here"
    libc.pthread_key_delete(key)


def test_a_fork_waits_for_the_imports_of_a_first_use_in_another_thread(tmp_path):
    """The hooks of forks exist as soon as there is a cache, before it has started any thread."""
    program = f"""
import importlib.abc, os, signal, sys, threading
from shardcache import Cache
cache, importing, forking = Cache({str(tmp_path)!r}), threading.Event(), threading.Event()
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "shardcache.tiers" and not importing.is_set():
            importing.set()
            forking.wait()
sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=lambda: cache.process)
thread.start()
importing.wait()
os.register_at_fork(before=forking.set)  # called before the hooks that were registered earlier
if (pid := os.fork()) == 0:
    signal.alarm(10)
    cache.process
    os._exit(0)
thread.join()
sys.exit(os.waitpid(pid, 0)[1])
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=2 * PATIENCE)


def test_a_child_imports_again_what_a_thread_began_to_import_during_the_fork(tmp_path):
    waits = "import __main__ as main, os\nif os.getpid() == main.parent:\n    main.wait()\n"
    (tmp_path / "slow.py").write_text(waits)
    program = f"""
import os, signal, sys, threading
sys.path.insert(0, {str(tmp_path)!r})
parent, importing, end = os.getpid(), threading.Event(), threading.Event()
def wait():
    importing.set()
    end.wait()
thread = threading.Thread(target=lambda: __import__("slow"))
def begin():
    thread.start()
    importing.wait()
os.register_at_fork(before=begin)  # called after the hooks that are registered later
from shardcache import Cache
Cache({str(tmp_path)!r})
if (pid := os.fork()) == 0:
    signal.alarm(10)
    import slow
    os._exit(0)
end.set()
thread.join()
sys.exit(os.waitpid(pid, 0)[1])
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=2 * PATIENCE)


def test_a_fork_does_not_wait_for_running_threads_and_not_for_ever(monkeypatch):
    started, end = threading.Event(), threading.Event()

    def work():
        with threads.no_fork():
            started.set()
            end.wait(PATIENCE)

    going = threads.start(lambda: end.wait(PATIENCE), "shardcache-test")
    monkeypatch.setattr(threads, "_BEFORE_FORK", 2 * PATIENCE)
    with forked(lambda parent: parent.say(len(threads._started))) as child:
        assert going.is_alive()
        assert child.hear() == 0
    monkeypatch.setattr(threads, "_BEFORE_FORK", 0.2)
    stuck = threads.start(work, "shardcache-test")
    assert started.wait(PATIENCE)
    with forked(lambda parent: parent.say("here")) as child:
        assert stuck.is_alive()
        assert child.hear() == "here"
    end.set()
    for thread in (going, stuck):
        thread.join()


def test_a_fork_does_not_wait_for_the_server_in_a_handshake(make_cache, pool, monkeypatch):
    monkeypatch.setattr(threads, "_BEFORE_FORK", 2 * PATIENCE)

    def is_waiting():
        return any(f.f_code is receive.__code__ for f in sys._current_frames().values())

    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"https://127.0.0.1:{server.getsockname()[1]}/a.tar"
        reading = pool.submit(make_cache(attempts=1, timeout=PATIENCE).fetch, url)
        connection, _ = server.accept()
        with connection:
            wait_until(is_waiting)
            with forked(lambda parent: parent.say("here")) as child:
                assert child.hear() == "here" and not reading.done()
        assert isinstance(reading.exception(PATIENCE), TransferError)


FORK = """
import os, sys, threading, time
from shardcache.threads import start, no_fork
if "late" in sys.argv:
    start(lambda: None, "first").join()
import filelock
started, done = threading.Event(), []
def prepare():
    with no_fork():
        with no_fork():
            started.set()
        time.sleep(0.2)
        from shardcache.files import PRIVATE, open_exclusive
        with filelock.FileLock(sys.argv[1]):
            open_exclusive(sys.argv[1] + "2", os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE).close()
        done.append(True)
start(prepare, "prepare")
started.wait()
pid = os.fork()
if not pid:
    os._exit(0 if done else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_fork_waits_for_undivided_work_before_filelock_locks(tmp_path, when):
    """filelock holds its own locks during a fork. The work needs them to finish."""
    command = [sys.executable, "-c", FORK, str(tmp_path / "lock"), when]
    assert subprocess.run(command, timeout=2 * PATIENCE, check=False).returncode == 0


def test_the_codec_of_host_names_is_imported_before_the_first_thread():
    """A child that is forked during this import resolves no host name."""
    program = (
        "import sys\nfrom shardcache import threads\nassert 'encodings.idna' not in sys.modules\n"
        "threads.start(lambda: print('encodings.idna' in sys.modules), 'x').join()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=PATIENCE)
    assert done.stdout == b"True\n", done


def test_a_cache_prepares_its_directory_and_its_client(tmp_path):
    with Cache(tmp_path / "cache", min_free=0, endpoint_url="http://127.0.0.1:9") as cache:
        cache.prepare("s3://lab/a.tar")
        no_thread("-prepare")
        assert (tmp_path / "cache" / "v1").is_dir()
        assert cache.process.origins.of(cache.parse("s3://lab/a.tar"))._keys is not None


@pytest.mark.parametrize(
    ("url", "failing"), [(None, 0), ("s3://lab/a.tar", 0), ("no://URL", 1), ("pipe:x", 1)]
)
def test_a_failed_preparation_is_no_error(make_cache, origin, url, failing, caplog):
    with caplog.at_level(logging.DEBUG, "shardcache.cache"):
        make_cache().prepare(url)
        no_thread("-prepare")
    assert origin.requests == []
    assert ["not prepared" in message for message in caplog.messages] == [True] * failing


def test_attaching_prepares_for_the_first_shard(make_cache, monkeypatch):
    urls: list[str | None] = []
    monkeypatch.setattr(Cache, "prepare", lambda self, url=None: urls.append(url))
    cache = make_cache()
    cache.attach(wds.WebDataset("s3://lab/{c..d}.tar", shardshuffle=False))
    cache.attach(wds.WebDataset(["s3://lab/e.tar"], resampled=True, shardshuffle=False))
    cache.attach(wds.DataPipeline(lambda: iter(()), wds.tariterators.url_opener))
    assert urls == ["s3://lab/c.tar", "s3://lab/e.tar", None]


@pytest.mark.parametrize("end", ["close", "garbage collection"])
def test_a_download_without_readers_does_not_wait_for_a_silent_origin(tmp_path, serve, end):
    silent, data = threading.Event(), make_tar(1, members=3, size=BLOCK)

    def answer(head):
        size = 64 << 20  # an almost complete download continues without readers
        yield f'HTTP/1.1 200 OK\r\nETag: "a"\r\nContent-Length: {size}\r\n\r\n'.encode()
        yield data[: 2 * BLOCK]  # whole blocks: the next read blocks
        silent.wait(PATIENCE)

    url = f"{serve(answer).url}/a.tar"
    cache = Cache(tmp_path / "cache", min_free=0, attempts=1, timeout=10 * PATIENCE)
    (row,) = [{"stream": cache.open(url)}] if end == "close" else cache.url_opener([url])
    assert row["stream"].read(BLOCK) == data[:BLOCK]
    assert any(thread.name.endswith("-fetch") for thread in threading.enumerate())
    if end == "close":
        row["stream"].close()
        cache.close()
    else:
        row["row"] = row
        del row
        gc.collect()
    no_thread("-fetch")
    silent.set()
