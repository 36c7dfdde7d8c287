"""The breaker: it opens after faults in a row, lets one try, and never stays shut for good."""

from __future__ import annotations

import errno
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import CacheFullError, TransferError
from shardcache.files import DISK_FAULTS, FULL, OWN_LIMITS, Breaker, is_disk_fault
from tests.support.fakes import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def breaker(clock: FakeClock) -> Breaker:
    return Breaker(clock, threshold=3, first=60, longest=600)


def break_it(breaker: Breaker) -> None:
    assert [breaker.failed() for _ in range(3)] == [False, False, True]


def test_only_faults_in_a_row_open_it(breaker: Breaker) -> None:
    for _ in range(10):
        assert not breaker.failed() and not breaker.failed()
        assert breaker.faults
        assert not breaker.succeeded()  # it was never open
        assert not breaker.faults
    assert breaker.closed and breaker.allows()
    break_it(breaker)
    assert not breaker.closed and not breaker.allows()
    assert breaker.left == 60


def test_after_the_pause_one_caller_tries(breaker: Breaker, clock: FakeClock) -> None:
    break_it(breaker)
    clock.sleep(59.9)
    assert not breaker.allows()
    clock.sleep(0.1)
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    assert breaker.succeeded()
    assert breaker.closed and not breaker.faults
    assert [breaker.allows() for _ in range(3)] == [True, True, True]
    break_it(breaker)
    assert breaker.left == 60  # the first pause again


def test_the_pause_doubles_up_to_its_limit(breaker: Breaker, clock: FakeClock) -> None:
    break_it(breaker)
    pauses = []
    for _ in range(6):
        pauses.append(breaker.left)
        clock.sleep(breaker.left)
        assert breaker.allows()
        assert not breaker.failed()  # still open: no news
    assert pauses == [60, 120, 240, 480, 600, 600]


def test_a_try_without_an_answer_is_passed_on(breaker: Breaker, clock: FakeClock) -> None:
    break_it(breaker)
    clock.sleep(60)
    assert breaker.allows() and not breaker.allows()
    breaker.undecided()
    assert breaker.allows() and not breaker.allows()
    breaker.undecided()
    breaker.undecided()
    assert breaker.allows()


def test_of_many_threads_one_tries(breaker: Breaker, clock: FakeClock) -> None:
    break_it(breaker)
    clock.sleep(60)
    together = threading.Barrier(8)
    answers: list[bool] = []

    def ask() -> None:
        together.wait(60)
        answers.append(breaker.allows())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [False] * 7 + [True]


@given(st.lists(st.sampled_from(["fail", "succeed", "undecided", "ask", "wait"]), max_size=60))
def test_whatever_happened_somebody_may_try_within_ten_minutes(steps: list[str]) -> None:
    clock = FakeClock()
    breaker = Breaker(clock)
    for step in steps:
        if step == "fail":
            breaker.failed()
        elif step == "succeed":
            breaker.succeeded()
        elif step == "undecided":
            breaker.undecided()
        elif step == "ask":
            breaker.allows()
        else:
            clock.sleep(61)
        assert 0 <= breaker.left <= 600
    clock.sleep(breaker.left)
    assert breaker.allows()


def test_what_is_a_fault_of_the_disk() -> None:
    for number in (errno.EIO, errno.EROFS, errno.ESTALE, errno.EUCLEAN, errno.EACCES):
        assert is_disk_fault(OSError(number, os.strerror(number)))
    for number in (*FULL, *OWN_LIMITS, errno.ENOENT, errno.EFBIG, errno.EBADF):
        assert not is_disk_fault(OSError(number, os.strerror(number)))
    assert not is_disk_fault(TransferError("of the origin, whose errno is EIO"))
    assert not is_disk_fault(CacheFullError("of ours"))
    assert not is_disk_fault(ValueError("no error of the system"))
    assert not DISK_FAULTS & (FULL | OWN_LIMITS)
