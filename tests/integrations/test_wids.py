"""Local names for wids, without wids: `tests/integrations` has them in its dataset."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shardcache import Cache, CacheFullError, ShardNotFoundError, wids
from tests.support.fakes import MemoryOrigin
from tests.support.tars import make_tar

MakeCache = Callable[..., Cache]
URLS = [f"s3://lab/train-{n:04d}.tar" for n in range(3)]


@pytest.fixture(autouse=True)
def _objects(origin: MemoryOrigin) -> None:
    for seed, url in enumerate(URLS):
        origin.objects[url] = make_tar(seed)


@pytest.fixture
def links(tmp_path: Path) -> Path:
    return tmp_path / "links"


def pinned(cache: Cache) -> list[str]:
    own = cache._here().namespaces.own
    return [entry.metadata().url for entry in cache.entries() if own.is_pinned(entry)]


def test_a_name_is_a_link_to_the_shard_which_is_there(make_cache: MakeCache, links: Path) -> None:
    cache = make_cache()
    names = wids.LocalNames(cache, links)
    for seed, url in enumerate(URLS):
        name = Path(names(url))
        assert name.parent == links
        assert name.name.endswith(f"-train-{seed:04d}.tar")
        assert name.is_symlink()
        assert name.read_bytes() == make_tar(seed)
        assert names(url) == str(name)
    assert len(os.listdir(links)) == len(URLS)
    again = pickle.loads(pickle.dumps(names))
    assert again(url) == str(name)  # it is cached: no origin is asked
    again.close()


@pytest.mark.locks_work("flock")
def test_the_shard_that_was_named_last_is_pinned(make_cache: MakeCache, links: Path) -> None:
    cache = make_cache()
    names = wids.LocalNames(cache, links)
    for url in URLS:
        names(url)
        assert pinned(cache) == [url]
    both: list[str] = []
    other = threading.Thread(target=lambda: (names(URLS[0]), both.extend(pinned(cache))))
    other.start()
    other.join()
    assert sorted(both) == [URLS[0], URLS[2]]  # another thread's is its own
    assert pinned(cache) == [URLS[2]]
    names.close()
    assert pinned(cache) == []
    names.close()


def test_what_is_in_the_way_is_replaced_unless_it_is_a_directory(
    make_cache: MakeCache, links: Path
) -> None:
    names = wids.LocalNames(make_cache(), links)
    name = Path(names(URLS[0]))
    name.unlink()
    name.symlink_to(links / "gone")
    assert Path(names(URLS[0])).read_bytes() == make_tar(0)
    name.unlink()
    name.write_bytes(b"what a download left")
    assert Path(names(URLS[0])).read_bytes() == make_tar(0)
    name.unlink()
    name.mkdir()
    with pytest.raises(IsADirectoryError):
        names(URLS[0])
    assert os.listdir(links) == [name.name]


def test_what_cannot_be_had_leaves_no_link_and_no_pin(make_cache: MakeCache, links: Path) -> None:
    cache = make_cache()
    names = wids.LocalNames(cache, links)
    with pytest.raises(ShardNotFoundError):
        names("s3://lab/none.tar")
    with pytest.raises(CacheFullError):
        wids.LocalNames(make_cache(max_size=100, dir=links.parent / "small"), links)(URLS[0])
    assert not links.exists()
    assert list(cache.entries()) == []
