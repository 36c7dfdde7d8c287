"""What is made ready in the background; what a fork waits for, and what not."""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import webdataset as wds

from shardcache import threads
from shardcache.cache import Cache
from shardcache.store.digest import BLOCK
from tests.support.storetools import PATIENCE, Parent, forked, wait_until
from tests.support.tars import make_tar


def test_a_fork_waits_until_a_thread_that_has_ended_is_gone() -> None:
    """OpenSSL locks what all its users share while such a thread ends, which takes microseconds.

    This one ends when it is let: by the destructor of what is its own it waits for a semaphore.
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
    threading.Timer(0.4, libc.sem_post, [semaphore]).start()  # so long a fork has to wait
    with forked(lambda parent: parent.say("here")) as child:
        assert not task.exists()
        assert child.hear() == "here"
    libc.pthread_key_delete(key)


def test_a_fork_waits_for_an_import_in_another_thread(tmp_path, monkeypatch):
    """The child would copy the lock of the module, and wait for ever when it imports it."""
    begun, end = threading.Event(), threading.Event()
    (tmp_path / "slow_module.py").write_text("import builtins; builtins.slow_import()")
    monkeypatch.syspath_prepend(tmp_path)
    slow = lambda: begun.set() or end.wait(PATIENCE)  # noqa: E731
    monkeypatch.setattr("builtins.slow_import", slow, raising=False)
    threads.start(lambda: importlib.import_module("slow_module"), "shardcache-test")
    assert begun.wait(PATIENCE)
    threading.Timer(0.4, end.set).start()

    def work(parent: Parent) -> None:
        parent.say(importlib.import_module("slow_module").__name__)

    with forked(work) as child:
        assert end.is_set()
        assert child.hear() == "slow_module"


def test_a_value_that_is_made_on_first_use_is_made_without_a_lock():
    """The child of a process in which a thread makes one makes its own."""
    begun, end = threading.Event(), threading.Event()

    class Slow:
        @threads.lazy
        def value(self) -> int:
            if os.getpid() == parent:
                begun.set()
                end.wait(PATIENCE)
            return os.getpid()

    parent = os.getpid()
    thread = threading.Thread(target=lambda: Slow().value)
    thread.start()
    assert begun.wait(PATIENCE)
    with forked(lambda parent: parent.say(Slow().value)) as child:
        assert child.hear() not in (None, parent)
    end.set()
    thread.join()


def test_a_fork_waits_for_no_thread_that_goes_on_and_not_for_ever(monkeypatch):
    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        with threads.undivided():
            begun.set()
            end.wait(PATIENCE)

    going = threads.start(lambda: end.wait(PATIENCE), "shardcache-test")
    monkeypatch.setattr(threads, "_BEFORE_FORK", 2 * PATIENCE)
    with forked(lambda parent: parent.say(len(threads._started))) as child:
        assert going.is_alive()
        assert child.hear() == 0  # it has none of them
    monkeypatch.setattr(threads, "_BEFORE_FORK", 0.2)
    stuck = threads.start(work, "shardcache-test")
    assert begun.wait(PATIENCE)
    with forked(lambda parent: parent.say("here")) as child:
        assert stuck.is_alive()
        assert child.hear() == "here"
    end.set()
    for thread in (going, stuck):
        thread.join()


FORK = """
import filelock, os, sys, threading, time
begun = threading.Event()
from shardcache.threads import start, undivided
done = []
@undivided()
def prepare():
    with undivided():
        begun.set()
    time.sleep(0.2)
    from shardcache.files import PRIVATE, open_exclusive
    with filelock.FileLock(sys.argv[1]):
        open_exclusive(sys.argv[1] + "2", os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE).close()
    done.append(True)
start(prepare, "prepare")
begun.wait()
pid = os.fork()
if not pid:
    os._exit(0 if done else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_fork_waits_for_work_that_takes_locks(tmp_path: Path) -> None:
    """Others take locks of theirs for a fork, which would not be had then: it waits first."""
    command = [sys.executable, "-c", FORK, str(tmp_path / "lock")]
    assert subprocess.run(command, timeout=2 * PATIENCE, check=False).returncode == 0


def test_what_spells_the_names_of_hosts_is_there_before_a_thread_is() -> None:
    """A fork while it is being imported makes a child that knows no host."""
    program = (
        "import sys\nfrom shardcache import threads\nassert 'encodings.idna' not in sys.modules\n"
        "threads.start(lambda: print('encodings.idna' in sys.modules), 'x').join()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=PATIENCE)
    assert done.stdout == b"True\n", done


# -- what a cache makes ready --------------------------------------------------------------


def prepared(cache: Cache, url: str | None) -> None:
    cache.prepare(url)
    wait_until(lambda: not any(t.name == "shardcache-prepare" for t in threading.enumerate()))


def test_a_cache_prepares_its_directory_and_its_client(tmp_path: Path) -> None:
    with Cache(tmp_path / "cache", min_free=0, endpoint_url="http://127.0.0.1:9") as cache:
        prepared(cache, "s3://lab/a.tar")
        assert (tmp_path / "cache" / "v1").is_dir()
        assert cache._here().origins.of(cache.parse("s3://lab/a.tar"))._keys is not None


@pytest.mark.parametrize(
    ("url", "failing"), [(None, 0), ("s3://lab/a.tar", 0), ("no://URL", 1), ("pipe:x", 1)]
)
def test_whatever_cannot_be_prepared_is_no_error(make_cache, origin, url, failing, caplog):
    with caplog.at_level(logging.DEBUG, "shardcache.cache"):
        prepared(make_cache(), url)
    assert origin.requests == []
    assert ["not prepared" in message for message in caplog.messages] == [True] * failing


def test_attaching_prepares_for_the_first_shard(make_cache, monkeypatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(Cache, "prepare", lambda self, url=None: asked.append(url))
    cache = make_cache()
    cache.attach(wds.WebDataset("s3://lab/{c..d}.tar", shardshuffle=False))
    cache.attach(wds.WebDataset(["s3://lab/e.tar"], resampled=True, shardshuffle=False))
    cache.attach(wds.DataPipeline(lambda: iter(()), wds.tariterators.url_opener))
    assert asked == ["s3://lab/c.tar", "s3://lab/e.tar", None]


@pytest.mark.parametrize("left", ["by close", "to the collector"])
def test_a_fetch_without_a_reader_does_not_wait_for_a_silent_origin(tmp_path, serve, left):
    silent, data = threading.Event(), make_tar(1, members=3, size=BLOCK)

    def answer(head: str) -> Iterator[bytes]:
        size = 64 << 20  # far from its end: a fetch that is almost complete goes on
        yield f'HTTP/1.1 200 OK\r\nETag: "a"\r\nContent-Length: {size}\r\n\r\n'.encode()
        yield data[: 2 * BLOCK]  # whole blocks: the next read has nothing to return
        silent.wait(PATIENCE)

    def fetching() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.endswith("-fetch")]

    url = f"{serve(answer).url}/a.tar"
    cache = Cache(tmp_path / "cache", min_free=0, attempts=1, timeout=10 * PATIENCE)
    (row,) = (
        cache.url_opener([url]) if left == "to the collector" else [{"stream": cache.open(url)}]
    )
    assert row["stream"].read(BLOCK) == data[:BLOCK]
    assert fetching()
    if left == "by close":
        row["stream"].close()
        cache.close()
    else:
        row["row"] = row
        del row
        gc.collect()
    wait_until(lambda: not fetching())
    silent.set()
