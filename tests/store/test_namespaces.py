"""Namespaces: who shares a copy, and that nobody's is forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.config import Config
from shardcache.layout import Layout, is_rank_name
from shardcache.ranks import Ranks, safe_name
from shardcache.store.root import make_root
from shardcache.store.store import Namespaces, own_layout
from tests.support.storetools import make_store, publish


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


@given(st.text(min_size=1), st.integers(0, 10**6))
def test_every_name_that_is_made_is_found_again(job: str, rank: int) -> None:
    assert is_rank_name(safe_name(job))
    assert is_rank_name(safe_name(f"{job}-{rank}"))


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


def test_our_own_comes_first_and_once(tmp_path: Path) -> None:
    make_root(tmp_path, "test")
    for n in range(3):
        make_store(tmp_path / "v1" / "ranks" / f"j-{n}")
        Layout.of_root(tmp_path).rank(f"j-{n}").make()
    found = Namespaces(config(tmp_path, "rank"), Ranks(rank=1, job="j"))
    stores = found.all()
    assert stores[0] is found.own
    bases = [store.layout.base for store in stores]
    assert sorted(bases) == sorted(
        [tmp_path / "v1", *(tmp_path / "v1" / "ranks" / f"j-{n}" for n in range(3))]
    )
    # The same objects again: they remember what they opened.
    assert [id(s) for s in found.all()] == [id(s) for s in found.all()]
    Layout.of_root(tmp_path).rank("late").make()
    assert len(found.all()) == 5


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


def test_without_ranks_there_are_no_siblings(tmp_path: Path) -> None:
    found = Namespaces(config(tmp_path), Ranks())
    assert found.all() == [found.own] and found.siblings() == []


@pytest.mark.parametrize(("fsync", "verify"), [("verify-after-boot", True), ("none", False)])
def test_the_fsync_policy_reaches_every_store(tmp_path: Path, fsync: str, verify: bool) -> None:
    make_root(tmp_path, "test")
    Layout.of_root(tmp_path).rank("j").make()
    for store in Namespaces(config(tmp_path, fsync=fsync), Ranks()).all():
        assert bool(store._quarantine._boot) == verify
