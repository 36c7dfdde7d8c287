"""All entries of a namespace, however many look for them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcache import forks
from shardcache.layout import Layout
from shardcache.store import scanning
from shardcache.store.entry import Entry
from shardcache.store.scanning import scan
from shardcache.store.store import Store
from tests.support.storetools import children, no_descriptor_left, publish


@pytest.fixture
def store(tmp_path: Path) -> Store:
    layout = Layout.of_root(tmp_path)
    tmp_path.joinpath("v1").mkdir()
    layout.make()
    store = Store(layout)
    for number in range(300):
        publish(store, f"s3://lab/{number}.tar", bytes(number))
    return store


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = children()
    with no_descriptor_left():
        yield
    assert children() <= before


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes look from the first moment on."""
    monkeypatch.setattr(forks, "is_harmless", lambda native: True)
    monkeypatch.setattr(forks, "processors", lambda: 3)
    monkeypatch.setattr(scanning, "_TELLING", -1.0)
    monkeypatch.setattr(scanning, "_WORTH", 1e-9)
    monkeypatch.setattr(time, "thread_time", iter(map(float, range(1_000_000))).__next__)


def by_process(monkeypatch: pytest.MonkeyPatch, notes: Path, broken: tuple[str, ...] = ()) -> None:
    """Note which process looks at what; a child finds that it cannot."""
    real, mine = scanning.below, os.getpid()

    def noted(objects: Path, prefix: str) -> list[Entry]:
        if os.getpid() != mine and prefix in broken:
            raise MemoryError
        with notes.open("a") as file:
            file.write(f"{os.getpid()} {prefix}\n")
        return real(objects, prefix)

    monkeypatch.setattr(scanning, "below", noted)


def noted(notes: Path) -> tuple[dict[str, set[str]], list[str]]:
    """{process: what it looked at}, and all that was looked at."""
    lines = [line.split() for line in notes.read_text().splitlines()]
    processes: dict[str, set[str]] = {}
    for pid, prefix in lines:
        processes.setdefault(pid, set()).add(prefix)
    return processes, [prefix for _, prefix in lines]


def test_all_that_was_published_is_found(store: Store) -> None:
    found = sorted(scan(store.layout))
    assert len(found) == 300 and {entry.size for entry in found} == set(range(300))
    assert found == sorted(Entry.at(entry.path) for entry in found)


def test_a_disk_that_is_waited_for_is_asked_for_several_directories_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_by_one = list(scan(store.layout))
    threads = set()
    real = scanning.below

    def noted(objects: Path, prefix: str) -> list[Entry]:
        threads.add(threading.current_thread().name.partition("_")[0])
        return real(objects, prefix)

    monkeypatch.setattr(scanning, "below", noted)
    monkeypatch.setattr(scanning, "_SLOW", 0.0)
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    assert list(scan(store.layout)) == one_by_one
    assert threads == {"MainThread", "shardcache-scan"}
    some = scan(store.layout)
    assert [next(some) for _ in range(20)] == one_by_one[:20]
    some.close()  # and leaves no thread, see conftest


def test_several_processors_share_the_directories(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forked: None
) -> None:
    expected = sorted(scan(store.layout))
    by_process(monkeypatch, tmp_path / "notes")
    assert sorted(scan(store.layout)) == expected
    processes, prefixes = noted(tmp_path / "notes")
    assert len(processes) == 3
    assert len(prefixes) == len(set(prefixes)) == len({entry.key[:2] for entry in expected})
    counts = sorted(map(len, processes.values()))
    assert counts[-1] - counts[0] <= 2


def test_what_a_process_did_not_answer_is_looked_at_here(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forked: None
) -> None:
    expected = sorted(scan(store.layout))
    by_process(monkeypatch, tmp_path / "notes", tuple(entry.key[:2] for entry in expected))
    assert sorted(scan(store.layout)) == expected
    assert set(noted(tmp_path / "notes")[0]) == {str(os.getpid())}


def test_without_processes_to_be_had_one_looks_at_all(
    store: Store, monkeypatch: pytest.MonkeyPatch, forked: None
) -> None:
    expected = sorted(scan(store.layout))

    def refused() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refused)
    assert sorted(scan(store.layout)) == expected


def test_what_cannot_be_read_is_an_error_whoever_meets_it(
    store: Store, monkeypatch: pytest.MonkeyPatch, forked: None
) -> None:
    real = scanning.below
    last = max(entry.key for entry in scan(store.layout))[:2]

    def failing(objects: Path, prefix: str) -> list[Entry]:
        if prefix == last:
            raise PermissionError(13, "closed", prefix)
        return real(objects, prefix)

    monkeypatch.setattr(scanning, "below", failing)
    with pytest.raises(PermissionError, match="closed"):
        list(scan(store.layout))


def test_who_has_seen_enough_leaves_no_process(store: Store, forked: None) -> None:
    before = children()
    some = scan(store.layout)
    for _ in range(20):
        next(some)
    assert len(children() - before) == 2
    some.close()
    assert children() <= before


@pytest.mark.parametrize(
    ("prefixes", "seconds", "processors", "harmless", "shares"),
    [
        (200, 0.001, 8, True, 4),
        (200, 0.001, 3, True, 3),
        (200, 0.001, 1, True, 1),
        (200, 0.001, 8, False, 1),
        (149, 0.001, 8, True, 2),  # a fork for less than so much is not worth it
        (49, 0.001, 8, True, 0),
        (0, 0.001, 8, True, 0),
    ],
)
def test_how_many_share_what_is_left(
    monkeypatch: pytest.MonkeyPatch, prefixes, seconds, processors, harmless, shares
) -> None:
    monkeypatch.setattr(forks, "is_harmless", lambda native: harmless and native)
    monkeypatch.setattr(forks, "processors", lambda: processors)
    assert scanning._shares(["00"] * prefixes, seconds) == shares


def test_a_small_cache_is_looked_at_by_one_process(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "is_harmless", lambda native: True)
    monkeypatch.setattr(forks, "processors", lambda: 8)
    monkeypatch.setattr(forks, "Fork", None)
    monkeypatch.setattr(scanning, "_WORTH", 60.0)
    monkeypatch.setattr(scanning, "_TELLING", -1.0)
    assert len(list(scan(store.layout))) == 300
