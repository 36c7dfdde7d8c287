"""A piece of work in a process of its own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from shardcache import forks
from shardcache.forks import HANDLED, Fork
from tests.support.storetools import children, no_descriptor_left, wait_until


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = children()
    with no_descriptor_left():
        yield
    assert children() <= before
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(HANDLED)


@pytest.mark.parametrize("size", [0, 1, 10_000_000], ids=["nothing", "a byte", "more than a pipe"])
def test_the_work_is_done_elsewhere_and_its_answer_comes_back(size: int) -> None:
    mine = os.getpid()
    with Fork(lambda: bytes(size) if os.getpid() != mine else b"in its parent") as fork:
        assert fork.answer() == bytes(size)


def fails() -> bytes:
    raise OSError("of the child")


def ends() -> bytes:
    os._exit(0)


def is_killed() -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return b"dead"


@pytest.mark.parametrize("work", [fails, ends, is_killed])
def test_work_that_fails_has_no_answer(work, capfd: pytest.CaptureFixture[str]) -> None:
    with Fork(work) as fork:
        assert fork.answer() is None
    assert capfd.readouterr() == ("", "")


def test_an_answer_that_was_cut_short_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(forks, "_LENGTH", 4)  # what is read below begins with eight bytes of length
        fork = Fork(lambda: bytes(100))
    with fork:
        assert fork.answer() is None


@pytest.mark.parametrize("number", HANDLED)
def test_signals_are_the_parents_to_answer(number: int) -> None:
    """The child dies of them without a word: neither a handler nor a traceback of its parent's."""
    seen: list[int] = []
    before = signal.signal(number, lambda *_: seen.append(os.getpid()))
    try:
        with Fork(lambda: time.sleep(60) or b"") as fork:
            os.kill(fork._pids[0], number)
            assert fork.answer() is None
    finally:
        signal.signal(number, before)
    assert seen == []


def test_an_answer_that_nobody_waits_for_is_called_off() -> None:
    begun = time.monotonic()
    with suppress(KeyboardInterrupt), Fork(lambda: time.sleep(60) or b"") as fork:
        pid = fork._pids[0]
        raise KeyboardInterrupt
    assert pid not in children() and time.monotonic() - begun < 30


def test_an_interrupt_while_forking_leaves_no_process() -> None:
    """One that comes while it is blocked strikes as soon as that ends."""
    real = os.fork

    def interrupted() -> int:
        pid = real()
        if pid:  # of this thread: another one might take it at once, between these statements
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        return pid

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fork", interrupted)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                Fork(lambda: time.sleep(60) or b"")
        finally:
            signal.signal(signal.SIGINT, before)


def test_where_nothing_can_be_forked_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refused)
    with pytest.raises(BlockingIOError):
        Fork(bytes)


def test_children_that_others_wait_for_are_let_be() -> None:
    others = children()
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel waits for them
    try:
        with Fork(lambda: b"done") as fork:
            assert fork.answer() == b"done"
            wait_until(lambda: children() <= others)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_where_forking_is_harmless() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "active_count", lambda: 1)
        patch.setattr(os, "listdir", lambda path: ["1"])
        patch.setattr(forks, "_LARGE", 1 << 50)
        assert forks.is_harmless() and forks.is_harmless(native=True)
        patch.setattr(os, "listdir", lambda path: ["1", "2"])  # a thread of a library's
        assert forks.is_harmless() and not forks.is_harmless(native=True)
        patch.setattr(threading, "active_count", lambda: 2)
        assert not forks.is_harmless()
        patch.setattr(threading, "active_count", lambda: 1)
        patch.setattr(forks, "_LARGE", 1 << 20)  # less than any Python has
        assert not forks.is_harmless()
