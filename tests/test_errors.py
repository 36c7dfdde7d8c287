"""Errors: their messages, their base classes, and pickling."""

import errno
import pickle

import pytest

import shardcache
from shardcache import errors
from shardcache.wds import register

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
    # The cache must not take others for a fault of the local disk, and stream the shard.
    assert isinstance(exn, OSError) is (getattr(found, "errno", None) in errno.errorcode)


def test_errors_are_builtin_exceptions_too():
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.ShardNotFoundError, FileNotFoundError)
    assert issubclass(errors.AccessDeniedError, PermissionError)
    assert issubclass(errors.LockTimeoutError, TimeoutError)


WRONG = {
    "a URL or a list of URLs, not int": [
        lambda cache: cache.prewarm(5),
        lambda cache: cache.select([URL, 5]),
        lambda cache: shardcache.expand(5, cache),
        lambda cache: shardcache.TarDataset(5, cache=cache),
    ],
    "cache is a Cache, such as Cache\\('dir'\\)": [
        lambda cache: shardcache.TarDataset(URL, cache="dir"),
        lambda cache: register("s3", "dir"),
    ],
    "split takes positive fractions of 1 in all, not 2": [
        lambda cache: shardcache.TarDataset(cache.dir.parent / "train.json", cache=cache).split(2)
    ],
    "shardcache index SPEC -o .*absent.json": [
        lambda cache: shardcache.TarDataset(cache.dir.parent / "absent.json", cache=cache)
    ],
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_argument_is_named(tmp_path, text):
    cache = shardcache.Cache(tmp_path / "cache")
    (tmp_path / "train.json").write_text(f'{{"shardlist": [{{"url": "{URL}", "nsamples": 9}}]}}')
    for call in WRONG[text]:
        with pytest.raises((errors.ConfigError, errors.ShardNotFoundError), match=text):
            call(cache)
