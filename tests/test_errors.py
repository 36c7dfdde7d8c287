"""Errors: what they say, what they are, and that they travel."""

from __future__ import annotations

import copy
import errno
import pickle

import pytest

from shardcache import errors
from shardcache.errors import (
    AccessDeniedError,
    CacheFullError,
    ConfigError,
    FetchCancelledError,
    IntegrityError,
    LockTimeoutError,
    ShardCacheError,
    ShardNotFoundError,
    TransferError,
    TransferTimeoutError,
)

ALL = [c for c in vars(errors).values() if isinstance(c, type) and c.__module__ == errors.__name__]
URL = "s3://lab/train-0000.tar"


@pytest.mark.parametrize("cls", ALL)
def test_an_error_survives_pickling_also_after_webdataset_added_the_url(cls: type) -> None:
    exn = cls(f"{URL} is gone. Look again.", url=URL, waited=1.5)
    exn.args += (URL,)
    exn.__notes__ = ["seen by worker 3"]
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        found = pickle.loads(pickle.dumps(exn, protocol))
        assert type(found) is cls
        assert str(found) == found.message == f"{URL} is gone. Look again."
        assert found.args == (f"{URL} is gone. Look again.", URL)
        assert (found.url, found.waited) == (URL, 1.5)
        assert found.__notes__ == ["seen by worker 3"]
    assert copy.copy(exn).url == URL


@pytest.mark.parametrize(
    ("cls", "builtin", "number"),
    [
        (ConfigError, ValueError, None),
        (ShardNotFoundError, FileNotFoundError, errno.ENOENT),
        (AccessDeniedError, PermissionError, errno.EACCES),
        (TransferError, OSError, errno.EIO),
        (TransferTimeoutError, TimeoutError, errno.ETIMEDOUT),
        (FetchCancelledError, OSError, errno.ECANCELED),
        (CacheFullError, OSError, errno.ENOSPC),
        (LockTimeoutError, TimeoutError, errno.ETIMEDOUT),
        (errors.WaitTimeoutError, TimeoutError, errno.ETIMEDOUT),
        (errors.BarrierTimeoutError, errors.WaitTimeoutError, errno.ETIMEDOUT),
        (errors.InTheWayError, FileExistsError, errno.EEXIST),
        (errors.OnceError, RuntimeError, None),
        (errors.BoardError, ConnectionError, errno.ECONNRESET),
    ],
)
def test_the_builtin_a_caller_would_catch_catches_it(cls, builtin, number) -> None:
    with pytest.raises(builtin) as caught:
        raise cls("what happened", url=URL)
    assert isinstance(caught.value, ShardCacheError)
    if number is not None:
        assert caught.value.errno == number
        assert pickle.loads(pickle.dumps(caught.value)).errno == number


def test_an_integrity_error_is_no_os_error() -> None:
    # It must not be taken for a fault of the local disk and streamed around.
    assert not issubclass(IntegrityError, OSError)
