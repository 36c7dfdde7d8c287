"""Two versions of the library share a root: each touches only the layouts that it knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.cli.main import main
from shardcache.errors import ConfigError
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


def newer_library(root: Path, **changes: object) -> Path:
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
    (root / MANIFEST).write_text(json.dumps({**manifest, **changes}))
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


@pytest.mark.parametrize("schema", [1, None, "2", []])
def test_the_layout_of_another_version_is_left_alone(
    make_cache: MakeCache, tmp_path: Path, schema: object
) -> None:
    root = tmp_path / "cache"
    make_cache(dir=root).close()
    newer = newer_library(root, schema=schema)
    before, manifest = tree(newer), (root / MANIFEST).read_bytes()
    use(make_cache, root)
    assert tree(newer) == before
    assert (root / MANIFEST).read_bytes() == manifest


def test_a_root_of_a_newer_kind_is_refused_and_nothing_in_it_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "cache"
    root.mkdir(mode=0o700)
    newer_library(root, schema=2)
    (root / "v1").mkdir()
    before = tree(root)
    for call in (
        lambda: Cache(root).open("s3://lab/a.tar"),
        lambda: Cache(root).clean(everything=True),
        lambda: Cache(root).remove(URL),
    ):
        with pytest.raises(ConfigError, match=r"shardcache 9\.0.*schema 2.*Upgrade"):
            call()
    for command in (["clean", "--all", "-y"], ["prewarm", URL], ["rm", URL, "-y"]):
        assert main(["--dir", str(root), *command]) == 2, command
        assert "Upgrade shardcache" in capsys.readouterr().err
    assert tree(root) == before
