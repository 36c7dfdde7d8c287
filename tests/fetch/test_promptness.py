"""Nothing but its bytes delays a shard, and nothing keeps `Cache.close` for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardcache.cache import Cache
from shardcache.fetch import job
from shardcache.origins.base import TransientError
from tests.support.fakes import MemoryOrigin
from tests.support.storetools import PATIENCE
from tests.support.tars import make_tar

Make = Callable[..., Cache]
URL = "s3://lab/a.tar"
DATA = make_tar(1)


@pytest.fixture(autouse=True)
def _object(origin: MemoryOrigin) -> None:
    origin.objects[URL] = DATA


def test_a_complete_shard_does_not_wait_for_the_retries_of_its_checksum(
    make_cache: Make, origin: MemoryOrigin
) -> None:
    asked = []

    def stat(url: object) -> Any:
        asked.append(url)
        raise TransientError("503 Slow Down", retry_after=2 * PATIENCE)

    origin.stat = stat  # type: ignore[method-assign]
    begun = time.monotonic()
    with make_cache(attempts=5).open(URL) as stream:
        assert stream.read() == DATA
    assert time.monotonic() - begun < PATIENCE
    assert len(asked) == 1


def test_a_complete_shard_waits_for_an_answer_that_never_comes_only_so_long(
    make_cache: Make, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_LAST_ANSWER", 0.1)
    silent = threading.Event()

    def stat(url: object) -> Any:
        silent.wait(2 * PATIENCE)
        raise TransientError("timed out")

    origin.stat = stat  # type: ignore[method-assign]
    begun = time.monotonic()
    with make_cache().open(URL) as stream:
        assert stream.read() == DATA
    assert time.monotonic() - begun < PATIENCE
    silent.set()


def test_closing_waits_for_copies_to_an_upstream_only_so_long(
    make_cache: Make, origin: MemoryOrigin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcache.runtime.LAST_COPIES", 0.1)
    hangs = threading.Event()
    origin.objects["s3://lab/other.tar"] = DATA
    cache = make_cache(upstreams=[{"url": str(tmp_path / "nas"), "write_back": True}])
    cache.fetch(URL)
    monkeypatch.setattr(cache._here().origins, "write_back", lambda *_: hangs.wait(2 * PATIENCE))
    begun = time.monotonic()
    with cache.open("s3://lab/other.tar") as stream:
        assert stream.read() == DATA
    cache.close()
    assert time.monotonic() - begun < PATIENCE
    hangs.set()


def test_a_prewarm_ends_when_the_upstream_has_what_was_fetched(
    make_cache: Make, origin: MemoryOrigin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcache.runtime.LAST_COPIES", 0.0)
    urls = [f"s3://lab/{number}.tar" for number in range(3)]
    origin.objects.update(dict.fromkeys(urls, DATA))
    with make_cache(upstreams=[{"url": str(tmp_path / "nas"), "write_back": True}]) as cache:
        copy = cache._here().origins.write_back

        def slow_copy(*arguments: Any) -> None:
            time.sleep(0.2)
            copy(*arguments)

        monkeypatch.setattr(cache._here().origins, "write_back", slow_copy)
        cache.prewarm(urls)
        assert len(list((tmp_path / "nas").rglob("*.tar"))) == len(urls)
