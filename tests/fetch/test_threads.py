"""What a fork waits for, and what not."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time

import pytest

from shardcache import threads
from tests.support.storetools import PATIENCE, forked

#: Seconds that something takes which a fork has to wait for.
LONG = 0.4


def is_there(thread: threading.Thread) -> bool:
    """Whether the kernel knows it."""
    return os.path.exists(f"/proc/self/task/{thread.native_id}")


@pytest.fixture
def ends_slowly():
    """Makes the calling thread take `LONG` to end once Python has forgotten it, as one does
    that has used OpenSSL, for microseconds: by the destructor of what is its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    key = ctypes.c_uint()
    libc.pthread_setspecific.argtypes = [ctypes.c_uint, ctypes.c_void_p]
    assert libc.pthread_key_create(ctypes.byref(key), libc.usleep) == 0
    yield lambda: libc.pthread_setspecific(key, int(LONG * 1e6))
    libc.pthread_key_delete(key)


def test_a_fork_waits_until_a_thread_that_has_ended_is_gone(ends_slowly) -> None:
    """OpenSSL locks what all its users share while such a thread ends."""
    thread = threads.start(ends_slowly, "shardcache-test")
    thread.join()
    assert is_there(thread)
    with forked(lambda parent: parent.say("here")) as child:
        assert not is_there(thread)
        assert child.hear() == "here"


def test_a_fork_waits_for_no_thread_that_goes_on() -> None:
    end = threading.Event()
    thread = threads.start(lambda: end.wait(PATIENCE), "shardcache-test")
    try:
        with forked(lambda parent: parent.say(len(threads._ours))) as child:
            assert thread.is_alive()
            assert child.hear() == 0  # it has none of them
    finally:
        end.set()
        thread.join()


def test_a_fork_waits_for_what_is_not_to_be_divided() -> None:
    begun, over = threading.Event(), []

    def work() -> None:
        with threads.undivided():
            with threads.undivided():
                pass
            begun.set()
            time.sleep(LONG)
            over.append(True)

    thread = threads.start(work, "shardcache-test")
    assert begun.wait(PATIENCE)
    with forked(lambda parent: parent.say((list(over), dict(threads._undivided)))) as child:
        assert child.hear() == ([True], {})
    thread.join()
    assert threads._undivided == {}


def test_a_fork_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_BEFORE_FORK", 0.2)
    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        with threads.undivided():
            begun.set()
            end.wait(PATIENCE)

    stuck = threads.start(work, "shardcache-test")
    assert begun.wait(PATIENCE)
    try:
        with forked(lambda parent: parent.say("here")) as child:
            assert child.hear() == "here"
            assert stuck.is_alive()
    finally:
        end.set()
        stuck.join()


def test_what_spells_the_names_of_hosts_is_there_before_a_thread_is() -> None:
    """A fork while it is being imported makes a child that knows no host."""
    program = (
        "import sys\nfrom shardcache import threads\nassert 'encodings.idna' not in sys.modules\n"
        "threads.start(lambda: print('encodings.idna' in sys.modules), 'x').join()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=PATIENCE)
    assert done.stdout == b"True\n", done
