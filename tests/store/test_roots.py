"""Making the root of a cache, and the namespaces in it."""

import errno
import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardcache.cache import Cache
from shardcache.config import Config
from shardcache.errors import ConfigError
from shardcache.files import is_directory
from shardcache.layout import MANIFEST, Layout
from shardcache.store.root import is_cache, make_root
from tests.support.caches import read
from tests.support.storetools import PATIENCE, begun, layout_of, make_store, publish, together, tree
from tests.support.tars import make_tar

KEY = "0123456789abcdef" * 2
URL = "s3://lab/a.tar"
OBJECTS = {URL: make_tar(1)}


def test_a_root_describes_itself_and_is_completed(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "cache"
    assert not is_cache(root)
    (root / "lost+found").mkdir(parents=True)
    root.chmod(0o700)
    (root / f".{MANIFEST}.{KEY}").touch()  # of a process that was killed before the rename
    layout = make_root(Config(root))
    assert is_cache(root) and layout == layout_of(root)
    tag = (root / "CACHEDIR.TAG").read_bytes()
    assert tag[:43] == b"Signature: 8a477f597d28d172789f06886806bc55"
    assert "clean" in (root / "README.txt").read_text()
    manifest = json.loads((root / MANIFEST).read_text())
    assert manifest["layouts"] == ["v1"] and manifest["locks"] == "flock"
    shutil.rmtree(layout.base)
    assert make_root(Config(root)) == layout
    assert all(is_directory(path) for path in layout.directories)
    assert json.loads((root / MANIFEST).read_text()) == manifest


def test_the_umask_applies_to_directories_above_a_root(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        layout = make_root(Config(tmp_path / "scratch" / "cache"))
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "scratch", layout.base.parent)]
    assert modes == [0o750, 0o700]


def test_a_root_that_another_node_has_made_may_appear_late(tmp_path, monkeypatch, clock) -> None:
    """An NFS client remembers for some seconds that a name was absent."""
    root, mkdir = tmp_path / "cache", Path.mkdir

    def refuse(path: Path, *args: Any, **options: Any) -> None:
        if path == root and not root.exists():
            raise FileExistsError(errno.EEXIST, "it exists", str(path))
        mkdir(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    clock.on_sleep.append(lambda: clock.elapsed > 5 and mkdir(root, 0o700, exist_ok=True))
    make_root(Config(root))
    assert is_cache(root) and clock.elapsed < 10


def test_many_processes_make_one_root_at_once(tmp_path: Path, monkeypatch) -> None:
    root, barrier = tmp_path / "deep" / "cache", multiprocessing.Barrier(12)

    def random_token() -> str:
        return f"{barrier.wait(PATIENCE):032x}"  # once all processes have found no manifest

    def make(_: int) -> bytes:
        make_root(Config(root))
        return (root / MANIFEST).read_bytes()

    monkeypatch.setattr("shardcache.store.root.random_token", random_token)
    assert len(set(together(12, make))) == 1
    assert {p.name for p in root.iterdir()} == {MANIFEST, "CACHEDIR.TAG", "README.txt", "v1"}


@pytest.mark.parametrize("name", ["", "objects", "partial"])
def test_a_root_with_a_symbolic_link_is_refused_and_not_cleaned(tmp_path, name):
    moved = make_root(Config(tmp_path / "cache")).base / name
    moved.rename(tmp_path / "elsewhere")
    moved.symlink_to(tmp_path / "elsewhere")
    assert not is_cache(tmp_path / "cache")
    cache = Cache(tmp_path / "cache")
    calls = [lambda: cache.clean(everything=True), lambda: cache.fetch(URL)]
    for call in (*calls, lambda: Cache(cache.dir, strict=True)):
        with pytest.raises(ConfigError, match="symbolic link"):
            call()


def test_the_layout_of_another_version_of_the_library_is_left_alone(make_cache, tmp_path):
    root, shard = tmp_path / "cache", OBJECTS[URL]
    make_cache(dir=root).close()
    # The subtree of a newer library, with similar names.
    store = make_store(root / "newer")
    publish(store, URL, b"shard of the newer library")
    begun(store.layout, data=b"x" * 5000).close()
    (store.layout.sessions / f"{KEY}.session").touch()
    (store.layout.locks / KEY[:2]).mkdir()
    store.layout.key_lock(KEY).touch()
    store.layout.base.rename(root / "v2")
    (root / "newer").rmdir()
    manifest = {"schema": 1, "layouts": ["v1", "v2"], "id": "f" * 32, "library": "9.0", "more": [1]}
    (root / MANIFEST).write_text(json.dumps(manifest))
    before = tree(root / "v2"), (root / MANIFEST).read_bytes()
    cache = make_cache(dir=root)
    assert read(cache, URL) == shard and len(list(cache.entries())) == 1
    assert cache.remove(URL)[0] == len(shard)
    cache.clean(everything=True, orphans=True)
    assert (tree(root / "v2"), (root / MANIFEST).read_bytes()) == before


def test_other_directories_are_no_namespaces(tmp_path: Path) -> None:
    make_root(Config(tmp_path))
    node = layout_of(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    Layout(elsewhere).make()
    for name in (".hidden", "a b"):
        (node.ranks / name).mkdir(parents=True)
    (node.ranks / "link").symlink_to(elsewhere)
    node.namespace("half").make()
    node.namespace("half").objects.rmdir()
    node.namespace("half").objects.symlink_to(elsewhere / "objects")
    assert Cache(tmp_path).process.last_tier.stores()[1:] == []
