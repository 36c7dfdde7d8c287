"""The breaker: it opens after faults in a row, for a minute."""

from __future__ import annotations

import errno
import os

import pytest

from shardcache.errors import CacheFullError, TransferError
from shardcache.files import FULL, Breaker, is_disk_fault
from tests.support.fakes import FakeClock


@pytest.fixture
def breaker(clock: FakeClock) -> Breaker:
    return Breaker()


def break_it(breaker: Breaker) -> None:
    assert [breaker.failed() for _ in range(3)] == [False, False, True]


def test_only_faults_in_a_row_open_it(breaker: Breaker) -> None:
    for _ in range(10):
        assert not breaker.failed() and not breaker.failed()
        assert breaker.faults
        assert not breaker.succeeded()  # it was never open
        assert not breaker.faults
    assert breaker.closed and not breaker.left
    break_it(breaker)
    assert not breaker.closed
    assert breaker.left == 60


def test_after_the_pause_it_may_be_asked_again(breaker: Breaker, clock: FakeClock) -> None:
    break_it(breaker)
    clock.sleep(59.9)
    assert not breaker.succeeded()  # the echo of an earlier call
    assert not breaker.failed() and breaker.left  # likewise: the pause grows no longer
    clock.sleep(0.1)
    assert not breaker.left
    assert not breaker.failed()  # still open: no news
    assert breaker.left == 60
    clock.sleep(60)
    assert not breaker.left and not breaker.closed
    assert breaker.succeeded()
    assert breaker.closed and not breaker.faults


def test_one_fault_may_be_enough(breaker: Breaker) -> None:
    assert breaker.failed(at_once=True)
    assert breaker.left == 60


def test_what_is_a_fault_of_the_disk() -> None:
    for number in (errno.EIO, errno.EROFS, errno.ESTALE, errno.EUCLEAN, errno.EACCES):
        assert is_disk_fault(OSError(number, os.strerror(number)))
    for number in (*FULL, errno.EMFILE, errno.ENOMEM, errno.ENOENT, errno.EFBIG):
        assert not is_disk_fault(OSError(number, os.strerror(number)))
    assert not is_disk_fault(TransferError("of the origin, whose errno is EIO"))
    assert not is_disk_fault(CacheFullError("of ours"))
    assert not is_disk_fault(ValueError("no error of the system"))
