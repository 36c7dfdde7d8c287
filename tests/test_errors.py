"""Errors: their messages, their base classes, and pickling."""

import errno
import pickle

import pytest

from shardcache import errors

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
    # The cache must not take them for a fault of the local disk, and stream the shard.
    for cls in (errors.IntegrityError, errors.TransferError):
        assert not issubclass(cls, OSError)
