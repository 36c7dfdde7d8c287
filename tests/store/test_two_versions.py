"""Two versions of the library share a root: each touches only the layouts that it knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.layout import MANIFEST
from shardcache.locks.sessions import Session
from tests.support.fakes import MemoryOrigin
from tests.support.storetools import begin, make_store, metadata_for, publish, tree
from tests.support.tars import make_tar

URL = "s3://lab/a.tar"
MakeCache = Callable[..., Cache]


@pytest.fixture(autouse=True)
def _object(origin: MemoryOrigin) -> None:
    origin.objects[URL] = make_tar(1)


def newer_library(root: Path) -> Path:
    """A subtree as a newer library might keep it: much like ours, down to the names."""
    newer = root / "v2"
    store = make_store(root / "newer")
    publish(store, URL, b"shard of the newer library")
    begin(store.layout, metadata_for(data=b"x" * 5000)).close()
    Session(store.layout, 1.0).close()
    (store.layout.sessions / f"{'0' * 32}.session").touch()
    (store.layout.locks / "00").mkdir()
    (store.layout.locks / "00" / f"{'0' * 32}.lock").touch()
    store.layout.base.rename(newer)
    (root / "newer").rmdir()
    (newer / "index.bin").write_bytes(b"something else altogether")
    manifest = {"schema": 1, "layouts": ["v1", "v2"], "id": "f" * 32, "library": "9.0", "more": [1]}
    (root / MANIFEST).write_text(json.dumps(manifest))
    return newer


def use(make_cache: MakeCache, root: Path) -> None:
    """Everything that writes or removes."""
    cache = make_cache(dir=root)
    with cache.open(URL) as stream:
        assert stream.read() == make_tar(1)
    assert len(list(cache.entries())) == 1
    cache.clean(max_size=1)
    cache.clean(orphans=True)
    cache.fetch(URL)
    assert cache.remove(URL)[0] == len(make_tar(1))
    cache.clean(everything=True)
    cache.close()


def test_the_layout_of_another_version_is_left_alone(make_cache: MakeCache, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    make_cache(dir=root).close()
    newer = newer_library(root)
    before, manifest = tree(newer), (root / MANIFEST).read_bytes()
    use(make_cache, root)
    assert tree(newer) == before
    assert (root / MANIFEST).read_bytes() == manifest
