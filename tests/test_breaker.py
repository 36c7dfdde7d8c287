"""The breaker opens for a minute after faults in a row."""

import errno

from shardcache.errors import TransferError
from shardcache.faults import FULL, Breaker, is_disk_fault


def test_faults_in_a_row_open_the_breaker(clock):
    breaker = Breaker()
    for _ in range(10):
        assert not breaker.failed() and not breaker.failed()
        breaker.succeeded()
    assert not breaker.is_tripped and not breaker.left and not breaker.faults
    assert [breaker.failed() for _ in range(3)] == [False, False, True]
    assert breaker.is_tripped and breaker.left == 60
    clock.sleep(59.9)
    breaker.succeeded()  # the result of a call that began before
    assert not breaker.failed() and breaker.left  # the same
    clock.sleep(0.1)
    assert not breaker.left
    assert not breaker.failed() and breaker.left == 60  # still open
    clock.sleep(60)
    breaker.succeeded()
    assert not breaker.is_tripped and not breaker.faults
    assert breaker.failed(at_once=True) and breaker.left == 60


def test_only_faults_of_the_disk_count():
    for number in (errno.EIO, errno.EROFS, errno.ESTALE, errno.EUCLEAN, errno.EACCES):
        assert is_disk_fault(OSError(number, "text"))
    for number in (*FULL, errno.EMFILE, errno.ENOMEM, errno.ENOENT, errno.EFBIG):
        assert not is_disk_fault(OSError(number, "text"))
    assert not is_disk_fault(TransferError("reset"))
