"""Local names for wids, without wids: `tests/packages` uses them with wids."""

import os
import pickle
import threading
from pathlib import Path

import pytest

from shardcache import CacheFullError, wids
from tests.support.tars import make_tar

URLS = [f"s3://lab/train-{n:04d}.tar" for n in range(3)]


@pytest.fixture(autouse=True)
def _objects(origin):
    origin.objects.update({url: make_tar(seed) for seed, url in enumerate(URLS)})


@pytest.fixture
def links(tmp_path):
    return tmp_path / "links"


def evictable(cache) -> int:
    """Return the number of shards that are not in use."""
    return len(cache.clean(everything=True, dry_run=True).removed)


@pytest.mark.locks_work("flock")
def test_a_name_is_a_link_to_a_shard_that_is_pinned_until_the_next(make_cache, links):
    cache = make_cache()
    names = wids.LocalNames(cache, links)
    for seed, url in enumerate(URLS):
        name = Path(names(url))
        assert name.parent == links and name.is_symlink()
        assert name.name.endswith(f"-train-{seed:04d}.tar")
        assert name.read_bytes() == make_tar(seed)
        assert names(url) == str(name)
        assert evictable(cache) == seed
    other = threading.Thread(target=lambda: (names(URLS[0]), found.append(evictable(cache))))
    found: list[int] = []
    other.start()
    other.join()
    assert found == [1]  # each thread pins one shard
    again = pickle.loads(pickle.dumps(names))
    assert again(URLS[2]) == str(name)
    again.close()
    names.close()
    names.close()
    assert evictable(cache) == len(os.listdir(links)) == len(URLS)


def test_a_file_in_the_way_is_replaced_but_no_directory(make_cache, links):
    names = wids.LocalNames(make_cache(), links)
    name = Path(names(URLS[0]))
    for create, argument in (name.symlink_to, links / "gone"), (name.write_bytes, b"a download"):
        name.unlink()
        create(argument)
        assert Path(names(URLS[0])).read_bytes() == make_tar(0)
    name.unlink()
    name.mkdir()
    with pytest.raises(IsADirectoryError):
        names(URLS[0])
    assert os.listdir(links) == [name.name]


def test_a_shard_that_cannot_be_stored_leaves_no_link(make_cache, links):
    with pytest.raises(CacheFullError):
        wids.LocalNames(make_cache(max_size=100), links)(URLS[0])
    assert not links.exists()
