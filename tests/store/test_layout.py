"""Names on disk, and the making of roots."""

from __future__ import annotations

import errno
import json
import shutil
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import ConfigError
from shardcache.layout import (
    MANIFEST,
    Layout,
    is_directory,
    is_evicted_name,
    is_key,
    is_lock_name,
    parse_entry_name,
    parse_partial_name,
    replace_file,
)
from shardcache.store.root import is_cache, make_root
from tests.support.storetools import (
    Parent,
    crowd,
    no_descriptor_left,
    refusing,
)

KEY = "0123456789abcdef" * 2
hexes = st.text("0123456789abcdef", min_size=32, max_size=32)

# -- grammar -------------------------------------------------------------------


@given(key=hexes, version=hexes, size=st.integers(0, 2**64 - 1))
def test_every_name_that_is_made_is_understood(key: str, version: str, size: int) -> None:
    layout, version = Layout(Path("/cache/v1")), version[:24]
    entry = layout.entry(key, version, size)
    assert parse_entry_name(entry.name) == (version, size)
    assert entry.parent == layout.key_dir(key) and is_key(entry.parent.name)
    assert parse_partial_name(layout.new_partial(key, version, size).name) == (key, version, size)
    assert is_evicted_name(layout.new_evicted(key).name)
    assert is_lock_name(layout.key_lock(key).name)
    assert layout.key_lock(key).parent.name == entry.parent.parent.name == key[:2]


# -- making a root -------------------------------------------------------------


def test_a_root_says_what_it_is_and_is_mended(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "cache"
    assert not is_cache(root)
    layout = make_root(root, "1.2")
    assert layout == Layout.of_root(root)
    assert is_cache(root)
    assert (root / "CACHEDIR.TAG").read_bytes()[:43] == (
        b"Signature: 8a477f597d28d172789f06886806bc55"
    )
    assert "clean" in (root / "README.txt").read_text()
    manifest = json.loads((root / MANIFEST).read_text())
    assert manifest["layouts"] == ["v1"] and manifest["library"] == "1.2"
    shutil.rmtree(layout.base)
    assert make_root(root, "1.3") == layout
    assert all(is_directory(path) for path in layout.directories)
    assert json.loads((root / MANIFEST).read_text()) == manifest


def test_many_processes_may_make_one_root_at_once(tmp_path: Path) -> None:
    def make(parent: Parent, number: int) -> None:
        parent.hear()
        make_root(tmp_path / "deep" / "cache", str(number))
        parent.say(is_cache(tmp_path / "deep" / "cache"))

    with crowd(12, make) as children:
        for child in children:
            child.tell()
        assert all(child.hear() for child in children)
    root = tmp_path / "deep" / "cache"
    assert {p.name for p in root.iterdir()} == {MANIFEST, "CACHEDIR.TAG", "README.txt", "v1"}
    assert json.loads((root / MANIFEST).read_text())["schema"] == 1


def test_a_directory_with_other_things_keeps_them_and_its_backups(tmp_path: Path) -> None:
    (tmp_path / "README.txt").write_text("my project")
    (tmp_path / "model.ckpt").write_text("weights")
    layout = make_root(tmp_path, "1")
    assert (tmp_path / "README.txt").read_text() == "my project"
    assert not (tmp_path / "CACHEDIR.TAG").exists()
    assert (layout.base / "CACHEDIR.TAG").exists()
    assert is_cache(tmp_path)


def test_a_root_half_made_on_a_fresh_filesystem_is_the_caches_alone(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    make_root(tmp_path, "1")
    (tmp_path / MANIFEST).unlink()
    (tmp_path / f".manifest.json.{KEY}").touch()  # killed before the rename
    make_root(tmp_path, "1")
    assert is_cache(tmp_path) and (tmp_path / "CACHEDIR.TAG").exists()
    assert not (tmp_path / "v1" / "CACHEDIR.TAG").exists()


# -- refusals ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "objects", "partial"])
def test_a_directory_that_leads_elsewhere_is_refused_and_nothing_is_cleaned(
    tmp_path: Path, name: str
) -> None:
    layout = make_root(tmp_path / "cache", "1")
    moved = layout.base / name if name else layout.base
    target = tmp_path / "elsewhere"
    moved.rename(target)
    moved.symlink_to(target)
    assert not is_cache(tmp_path / "cache")
    with pytest.raises(ConfigError, match="symbolic link"):
        make_root(tmp_path / "cache", "1")


# -- files and listings --------------------------------------------------------


def test_a_file_is_replaced_all_at_once_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "meta.json"
    replace_file(path, b"one", 0o640, via=tmp_path)
    with open(path, "rb") as reader:
        replace_file(path, b"two", 0o600, via=tmp_path)
        assert reader.read() == b"one"
    assert path.read_bytes() == b"two" and stat.S_IMODE(path.stat().st_mode) == 0o600
    replace_file(path, b"three", 0o600, via=tmp_path, once=True)  # of several makers one wins
    (tmp_path / "full").mkdir()  # no file is renamed to it
    with no_descriptor_left(), pytest.raises(OSError):
        replace_file(tmp_path / "full", b"new", 0o600, via=tmp_path)
    monkeypatch.setattr("shardcache.files.set_mode", refusing(errno.EIO, real=None))
    with no_descriptor_left(), pytest.raises(OSError):
        replace_file(path, b"new", 0o600, via=tmp_path)
    assert path.read_bytes() == b"two"
    assert {p.name for p in tmp_path.iterdir()} == {"meta.json", "full"}
