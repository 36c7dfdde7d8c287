"""Namespaces: who shares a copy, and that nobody's is forgotten."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shardcache.config import Config
from shardcache.layout import Layout
from shardcache.ranks import Ranks
from shardcache.space.tiers import Tier
from shardcache.store.root import make_root
from tests.support.storetools import publish


def tier(
    path: Path, ranks: Ranks | None = None, isolation: str = "node", **options: object
) -> Tier:
    config = Config(path, isolation=isolation, **options)
    return Tier(config, ranks or Ranks(), 0.0, lambda *a: None, lambda removal: None)


@pytest.mark.parametrize(
    ("isolation", "ranks", "name"),
    [
        ("node", Ranks(), "."),
        ("node", Ranks(rank=3, job="job", source="torch"), "."),
        ("rank", Ranks(rank=3, job="j7"), "ranks/j7-3"),
        ("rank", Ranks(), "ranks/local-0"),
        ("job", Ranks(rank=3, job="j7"), "ranks/j7"),
        ("job", Ranks(), "ranks/local"),
    ],
)
def test_a_node_shares_a_namespace_unless_ranks_or_jobs_are_apart(
    tmp_path: Path, isolation: str, ranks: Ranks, name: str
) -> None:
    make_root(tmp_path, "test")
    own = tier(tmp_path, ranks, isolation).store.layout
    assert own.base == tmp_path / "v1" / name


@pytest.mark.parametrize("job", ["j7", "nightly/2026-01-01", "-rf", "..", "x" * 200, "\u00e9"])
def test_everybody_sees_the_namespace_of_every_job(tmp_path: Path, job: str) -> None:
    # Else nobody would count it, clean it, or share its copies.
    make_root(tmp_path, "test")
    mine = tier(tmp_path, Ranks(job=job), "job")
    mine.store.layout.make()
    entry = publish(mine.store)
    node = tier(tmp_path)
    assert [store.layout for store in node.stores()[1:]] == [mine.store.layout]
    assert [e for store in node.stores() for e in store.entries()] == [entry]
    assert [store.layout.base for store in mine.stores()[1:]] == [tmp_path / "v1"]


def test_what_was_not_made_by_us_is_no_namespace(tmp_path: Path) -> None:
    make_root(tmp_path, "test")
    node = Layout.of_root(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    Layout(elsewhere).make()
    node.ranks.mkdir()
    (node.ranks / ".hidden").mkdir()
    (node.ranks / "a b").mkdir()
    (node.ranks / "link").symlink_to(elsewhere)
    node.rank("half").make()
    node.rank("half").objects.rmdir()
    node.rank("half").objects.symlink_to(elsewhere / "objects")
    assert tier(tmp_path).stores()[1:] == []


def test_a_directory_that_another_node_made_and_this_one_does_not_see_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS every rank makes the same directory: EEXIST comes before the name can be seen."""
    parent = tmp_path / "deep"
    parent.mkdir()
    late = iter(range(8))

    def blind(real: Callable[..., bool]) -> Callable[..., bool]:
        def see(path: Path) -> bool:
            return real(path) and (path != parent or next(late, None) is None)

        return see

    for where, name in ((Path, "exists"), (Path, "is_dir"), (os.path, "lexists")):
        monkeypatch.setattr(where, name, blind(getattr(where, name)))
    assert make_root(parent / "cache", "test").base.is_dir()
    assert next(late, None) is None  # it was looked for, again and again
