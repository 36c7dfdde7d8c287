"""Locks only save bandwidth: every fault of flock, against everything the cache does.

On a mount whose flock is refused, lies or never answers. Whatever it does: the right
bytes, in bounded time, nothing left behind; all that it may cost is a second fetch.
"""

from __future__ import annotations

import errno
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcache.locks.sessions import oldest_live_session
from tests.stress.fuse.shim import Shim, mounted, needs_fuse
from tests.stress.nettools import (
    ALL_LOCKS,
    DATA,
    SOME_LOCKS,
    URL,
    Locks,
    Read,
    partials,
    reader,
    using,
    wait_for_bytes,
)
from tests.support.fakes import MemoryOrigin
from tests.support.storetools import Parent, age, crowd, forked, wait_until
from tests.support.tars import make_tar

every_lock = pytest.mark.parametrize("locks", ALL_LOCKS, ids=str)
some_locks = pytest.mark.parametrize("locks", SOME_LOCKS, ids=str)


@pytest.fixture(scope="module", autouse=True)
def _fuse() -> None:
    needs_fuse()


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[Shim]:
    with mounted(tmp_path) as found:
        yield found


@pytest.fixture
def root(shim: Shim, locks: Locks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache directory on the mount, whose locks fail."""
    locks.begin(shim, monkeypatch, tmp_path / "node")
    return shim.root / "cache"


@pytest.fixture
def behind(shim: Shim) -> Path:
    """The same directory, seen past the mount."""
    return shim.backing / "cache"


# -- fetching ------------------------------------------------------------------------


@every_lock
def test_four_processes_on_a_cold_shard_all_get_it(
    root: Path, behind: Path, locks: Locks, shim: Shim
) -> None:
    with crowd(4, reader, root, locks.options) as children:
        assert [child.hear() for child in children] == ["ready"] * 4
        for child in children:
            child.tell()
        found: list[Read] = [child.hear() for child in children]
    assert all(read.right for read in found)
    fetches = sum(read.fetches for read in found)
    # Where a lock is given to all, one may take the partial of another, who begins anew.
    assert fetches == 1 if locks.work else 1 <= fetches <= 8
    with using(root, MemoryOrigin(), **locks.options) as cache:
        (entry,) = cache.entries()
        assert entry.data.read_bytes() == DATA
        cache.clean(limits=False)
    assert partials(behind) == []
    if locks.known == "by type":
        assert shim.calls("setlk") == 0


@some_locks
def test_what_a_killed_fetch_left_is_no_burden(root: Path, behind: Path, locks: Locks) -> None:
    gate = multiprocessing.Event()
    with forked(reader, 0, root, locks.options, gate) as child:
        child.hear()
        child.tell()
        wait_for_bytes(behind, 1 << 20)
    origin = MemoryOrigin(objects={URL: DATA})
    with using(root, origin, **locks.options) as cache:
        with cache.open(URL) as stream:
            assert stream.read() == DATA
        if locks.believed and locks.flock in ("working", "lying"):
            assert origin.delivered < len(DATA)  # resumed
        cache.clean(limits=False)
        if partials(behind):
            # Nobody can tell that it is dead but by its age.
            assert locks.graced
            age(behind / "v1" / "partial")
            cache.clean(limits=False)
        assert partials(behind) == []
        assert URL in cache


@some_locks
def test_a_sweep_does_not_harm_a_fetch_under_way(root: Path, behind: Path, locks: Locks) -> None:
    gate = multiprocessing.Event()
    with forked(reader, 0, root, locks.options, gate) as child:
        child.hear()
        child.tell()
        wait_for_bytes(behind, 1 << 20)
        with using(root, **locks.options) as cache:
            cache.clean(limits=False)
            cache.clean(everything=True)
        swept = partials(behind) == []
        gate.set()
        read: Read = child.hear()
        assert read.right
        assert not swept or (locks.believed and locks.flock == "lying")
        assert (read.fetches > 1) == swept
    with using(root, MemoryOrigin(), **locks.options) as cache:
        assert URL in cache
    assert partials(behind) == []


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_refusal_has_three_spellings(
    shim: Shim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    locks = Locks("never", "refused")
    locks.begin(shim, monkeypatch, tmp_path / "node")
    shim.set(flock_error=number)
    with using(shim.root / "cache", **locks.options) as cache, cache.open(URL) as stream:
        assert stream.read() == DATA
        assert stream.name != URL


# -- evicting ------------------------------------------------------------------------


def reads_slowly(parent: Parent, root: Path, options: dict[str, Any]) -> None:
    """Opens the shard, and reads the most of it when told."""
    with using(root, **options) as cache, cache.open(URL) as stream:
        first = stream.read(100)
        parent.say("reading")
        parent.hear()
        parent.say(first + stream.read() == DATA)


@some_locks
def test_an_entry_that_is_read_is_read_to_its_end_whoever_evicts_it(
    root: Path, behind: Path, locks: Locks
) -> None:
    with using(root, **locks.options) as cache:
        cache.fetch(URL)
        with forked(reads_slowly, root, locks.options) as child:
            child.hear()
            _, in_use = cache.remove(URL)
            assert in_use == (locks.graced or locks.flock == "working")
            age(behind / "v1" / "objects")  # however long ago it was opened
            cache.remove(URL)
            assert child.ask()
        wait_until(lambda: cache.remove(URL)[1] == 0)
        assert list(cache.entries()) == []
        cache.clean(limits=False)
    assert partials(behind) == []


@some_locks
def test_cleaning_keeps_to_the_limit_and_to_what_is_in_use(
    root: Path, behind: Path, locks: Locks
) -> None:
    urls = [f"s3://lab/{n}.tar" for n in range(3)]
    shards = {url: make_tar(n) for n, url in enumerate(urls)}
    origin = MemoryOrigin(objects=shards)
    with using(root, origin, **locks.options) as cache:
        for number, url in enumerate(urls):
            entry = cache.fetch(url).path.relative_to(root)
            age(behind / entry, 10 * 86400.0 - number)
    with using(root, origin, **locks.options) as cache:
        with cache.open(urls[0]) as stream:
            report = cache.clean(max_size=len(shards[urls[2]]))
            assert stream.read() == shards[urls[0]]
        kept = [url for url in urls if url in cache]
        assert report.kept == len(kept) == 1
        # The oldest by far, until it was opened: that is a use, and a lock.
        assert kept == [urls[0]]
        age(behind / "v1" / "objects")
        # A mount may tell late that a file was closed.
        wait_until(lambda: cache.clean(everything=True).kept == 0)
        assert list(cache.entries()) == []
    assert partials(behind) == []


@some_locks
def test_a_running_job_is_known_by_its_session(root: Path, behind: Path, locks: Locks) -> None:
    def oldest() -> float | None:
        return oldest_live_session(cache._here().namespaces.node)

    with using(root, **locks.options) as cache:
        cache.fetch(URL)
        ours = oldest()
        with forked(reader, 0, root, {**locks.options}) as child:
            child.hear()
            assert (oldest() is not None) == locks.work
            if locks.work:
                assert oldest() == ours
        cache.close()
        wait_until(lambda: oldest() is None)
        with cache.open(URL) as stream:
            assert stream.read() == DATA
