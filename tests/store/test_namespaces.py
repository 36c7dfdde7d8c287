"""Namespaces: who shares a copy, and that nobody's is forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcache.config import Config
from shardcache.layout import Layout
from shardcache.ranks import Ranks
from shardcache.store.root import make_root
from shardcache.store.store import Namespaces, own_layout
from tests.support.storetools import publish


def config(path: Path, isolation: str = "node", **options: object) -> Config:
    return Config(path, isolation=isolation, **options)


def test_by_default_a_node_shares_one_namespace(tmp_path: Path) -> None:
    for ranks in (Ranks(), Ranks(rank=3, job="job", source="torch")):
        assert own_layout(Layout.of_root(tmp_path), config(tmp_path), ranks) == Layout.of_root(
            tmp_path
        )


@pytest.mark.parametrize(
    ("isolation", "ranks", "name"),
    [
        ("rank", Ranks(rank=3, job="j7"), "j7-3"),
        ("rank", Ranks(), "local-0"),
        ("job", Ranks(rank=3, job="j7"), "j7"),
        ("job", Ranks(), "local"),
    ],
)
def test_apart_each_has_its_own(tmp_path: Path, isolation: str, ranks: Ranks, name: str) -> None:
    assert (
        own_layout(Layout.of_root(tmp_path), config(tmp_path, isolation), ranks).base
        == tmp_path / "v1" / "ranks" / name
    )


@pytest.mark.parametrize("job", ["j7", "nightly/2026-01-01", "-rf", "..", "x" * 200, "\u00e9"])
def test_everybody_sees_the_namespace_of_every_job(tmp_path: Path, job: str) -> None:
    # Else nobody would count it, clean it, or share its copies.
    make_root(tmp_path, "test")
    mine = Namespaces(config(tmp_path, "job"), Ranks(job=job))
    mine.own.layout.make()
    entry = publish(mine.own)
    node = Namespaces(config(tmp_path), Ranks())
    assert [store.layout for store in node.siblings()] == [mine.own.layout]
    assert [e for store in node.all() for e in store.entries()] == [entry]
    assert [store.layout.base for store in mine.siblings()] == [tmp_path / "v1"]


def test_what_was_not_made_by_us_is_no_namespace(tmp_path: Path) -> None:
    make_root(tmp_path, "test")
    node = Layout.of_root(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    Layout(elsewhere).make()
    node.ranks.mkdir()
    (node.ranks / "file").touch()
    (node.ranks / ".hidden").mkdir()
    (node.ranks / "a b").mkdir()
    (node.ranks / "link").symlink_to(elsewhere)
    node.rank("half").make()
    node.rank("half").objects.rmdir()
    node.rank("half").objects.symlink_to(elsewhere / "objects")
    assert Namespaces(config(tmp_path), Ranks()).siblings() == []
