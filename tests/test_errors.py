"""Errors: their messages, their base classes, and pickling."""

import errno
import pickle

import pytest

from shardcache import errors
from shardcache.faults import FULL, is_disk_fault

ALL = [c for c in vars(errors).values() if isinstance(c, type) and c.__module__ == errors.__name__]
URL = "s3://lab/train-0000.tar"


@pytest.mark.parametrize("cls", ALL)
def test_errors_can_be_pickled(cls):
    exn = cls(f"{URL} is gone. Look again.", url=URL, waited=1.5)
    exn.args += (URL,)
    exn.__notes__ = ["seen by worker 3"]
    found = pickle.loads(pickle.dumps(exn))
    assert type(found) is cls and isinstance(found, errors.ShardCacheError)
    assert str(found) == found.message == f"{URL} is gone. Look again."
    assert found.args == (f"{URL} is gone. Look again.", URL)
    assert (found.url, found.waited, found.__notes__) == (URL, 1.5, ["seen by worker 3"])
    assert isinstance(exn, OSError) is (getattr(found, "errno", None) in errno.errorcode)


def test_errors_are_builtin_exceptions_too():
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.ShardNotFoundError, FileNotFoundError)
    assert issubclass(errors.AccessDeniedError, PermissionError)
    assert issubclass(errors.LockTimeoutError, TimeoutError)
    assert issubclass(errors.CacheFullError, OSError)


def test_only_faults_of_the_disk_pause_its_use():
    for number in (errno.EIO, errno.EROFS, errno.ESTALE, errno.EUCLEAN, errno.EACCES):
        assert is_disk_fault(OSError(number, "text"))
    for number in (*FULL, errno.EMFILE, errno.ENOMEM, errno.ENOENT, errno.EFBIG):
        assert not is_disk_fault(OSError(number, "text"))
    for cls in (errors.IntegrityError, errors.TransferError):
        assert not isinstance(cls("text"), OSError) and not is_disk_fault(cls("text"))
