"""What is made ready in the background, and forks meanwhile."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcache.cache import Cache
from tests.support.fakes import MemoryOrigin
from tests.support.storetools import wait_until


def is_preparing() -> bool:
    return any(thread.name == "shardcache-prepare" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    wait_until(lambda: not is_preparing())


# -- of a cache ------------------------------------------------------------------


def test_a_cache_prepares_its_directory_and_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    cache = Cache(tmp_path / "cache", min_free=0, endpoint_url="http://127.0.0.1:9")
    cache.prepare("s3://lab/a.tar")
    wait_until(lambda: not is_preparing())
    assert (tmp_path / "cache" / "v1").is_dir()
    process = cache.processes.made()
    assert process is not None
    origin = process.origins.of(cache.parse("s3://lab/a.tar"))
    assert origin._keys is not None
    assert list(cache.entries()) == []
    cache.close()


@pytest.mark.parametrize(
    ("url", "failing"), [(None, 0), ("s3://lab/a.tar", 0), ("no://URL", 1), ("pipe:x", 1)]
)
def test_whatever_cannot_be_prepared_is_no_error(
    make_cache, origin: MemoryOrigin, url, failing, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache()
    with caplog.at_level(logging.DEBUG, "shardcache.cache"):
        cache.prepare(url)
        wait_until(lambda: not is_preparing())
    assert origin.requests == []
    assert ["not prepared" in message for message in caplog.messages] == [True] * failing


def test_attaching_prepares_for_the_first_shard(make_cache, monkeypatch) -> None:
    wds = pytest.importorskip("webdataset")
    asked: list[str | None] = []
    monkeypatch.setattr(Cache, "prepare", lambda self, url=None: asked.append(url))
    cache = make_cache()
    cache.attach(wds.WebDataset(["s3://lab/a.tar", "s3://lab/b.tar"], shardshuffle=False))
    cache.attach(wds.WebDataset("s3://lab/{c..d}.tar", shardshuffle=False))
    cache.attach(wds.WebDataset(["s3://lab/e.tar"], resampled=True))
    cache.attach(wds.DataPipeline(lambda: iter(()), wds.tariterators.url_opener))
    assert asked == ["s3://lab/a.tar", "s3://lab/c.tar", "s3://lab/e.tar", None]


FORK = """
import os, sys, threading, time
begun = threading.Event()
from shardcache.threads import start, undivided
done = []
@undivided()
def prepare():
    begun.set()
    time.sleep(0.2)
    import filelock
    from shardcache.files import open_exclusive
    from shardcache.files import PRIVATE
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


def test_a_fork_waits_for_a_preparation_that_takes_locks(tmp_path: Path) -> None:
    """Others take locks of theirs for a fork, which would not be had then: it waits first."""
    command = [sys.executable, "-c", FORK, str(tmp_path / "lock")]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
