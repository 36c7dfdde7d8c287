"""Where locks are kept is decided once, without touching what may hang."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.layout import IDLE_GRACE, MANIFEST, Layout
from shardcache.locks import mode as locking
from shardcache.locks.mode import Answer, Locking, decide, probe
from shardcache.locks.mounts import Mount
from shardcache.store.root import make_root
from shardcache.store.store import Store
from tests.support.fakes import MemoryOrigin
from tests.support.storetools import metadata_for, needs_root, payload
from tests.support.tars import make_tar

URL = "s3://lab/a.tar"


@pytest.fixture(autouse=True)
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for lock files that is this test's alone."""
    place = tmp_path / "node"
    place.mkdir()
    monkeypatch.setattr(locking, "_NODE_DIRECTORIES", (str(place),))
    return place


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "cache"
    make_root(root, "1")
    return root


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Says which filesystem the cache is on."""

    def change(kind: str) -> None:
        real = locking.mount_of

        def found(path: Path | str) -> Mount | None:
            if "cache" in Path(path).name:
                return Mount("/", kind, "source", frozenset())
            return real(path)

        monkeypatch.setattr(locking, "mount_of", found)

    return change


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Answer]:
    """What the probe says next; counts how often it is asked."""
    given: list[Answer] = []
    monkeypatch.setattr(locking, "probe", lambda path: given.pop(0))
    return given


# -- the probe -------------------------------------------------------------------


def test_a_local_disk_has_flock(root: Path) -> None:
    assert probe(root / MANIFEST) is Answer.WORKS


def test_a_lock_in_the_way_proves_that_locks_work(root: Path) -> None:
    with open(root / MANIFEST) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert probe(root / MANIFEST) is Answer.WORKS


@pytest.mark.parametrize(
    ("flock", "answer"),
    [
        ("lambda *_: None", Answer.LIES),
        ("lambda *_: (_ for _ in ()).throw(OSError(38, 'ENOSYS'))", Answer.REFUSED),
        ("lambda *_: __import__('time').sleep(60)", Answer.HANGS),
    ],
)
def test_each_fault_has_its_answer(
    root: Path, monkeypatch: pytest.MonkeyPatch, flock: str, answer: Answer
) -> None:
    monkeypatch.setattr(locking, "_PROBE", f"import fcntl; fcntl.flock = {flock}\n{locking._PROBE}")
    begun = time.monotonic()
    assert probe(root / MANIFEST, seconds=2.0) is answer
    assert time.monotonic() - begun < 30  # the child that hangs is killed


def test_a_probe_that_cannot_start_says_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probe(root / "absent") is Answer.UNKNOWN
    monkeypatch.setattr(sys, "executable", "/absent/python")
    assert probe(root / MANIFEST) is Answer.UNKNOWN


# -- the decision ----------------------------------------------------------------


def test_a_local_disk_keeps_its_locks_in_the_cache(root: Path) -> None:
    found = decide(root, "auto", 600.0)
    assert (found.local, found.grace, found.reason) == (None, None, "")
    assert found.layout(root) == Layout.of_root(root)


def test_what_works_is_asked_once_per_boot(
    root: Path, answers: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers += [Answer.WORKS]
    assert not decide(root, "auto", 600.0).reason
    assert not decide(root, "auto", 600.0).reason  # an empty list would raise
    monkeypatch.setattr(locking, "boot_id", lambda: "another")
    answers += [Answer.LIES, Answer.WORKS]
    assert decide(root, "auto", 600.0).reason
    assert not decide(root, "auto", 600.0).reason  # a fault is not remembered
    assert not answers


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b"{}"])
def test_a_damaged_note_is_asked_again(root: Path, answers: list[Answer], note: bytes) -> None:
    (root / "v1" / "flock.json").write_bytes(note)
    answers += [Answer.WORKS]
    assert not decide(root, "auto", 600.0).reason
    assert not answers
    assert json.loads((root / "v1" / "flock.json").read_bytes())["answer"] == "works"


@pytest.mark.parametrize("answer", [Answer.LIES, Answer.REFUSED, Answer.HANGS])
def test_where_flock_fails_locks_are_on_the_node(
    root: Path, node: Path, answers: list[Answer], answer: Answer
) -> None:
    answers += [answer]
    found = decide(root, "auto", 600.0)
    assert found.grace == IDLE_GRACE and answer.value in found.reason
    assert found.local is not None and found.local.parent == node
    assert found.local.stat().st_mode & 0o777 == 0o700


def test_no_answer_is_no_fault(root: Path, answers: list[Answer]) -> None:
    answers += [Answer.UNKNOWN]
    assert decide(root, "auto", 600.0) == Locking(decide(root, "flock", 600.0).filesystem)


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "gpfs", "fuse.juicefs", "beegfs", "9p"])
def test_a_network_filesystem_is_not_even_asked(
    root: Path, on: Callable[[str], None], answers: list[Answer], kind: str
) -> None:
    on(kind)
    found = decide(root, "auto", 600.0)
    assert found.filesystem == kind and kind in found.reason
    assert found.local is not None and found.grace == IDLE_GRACE


def test_the_grace_covers_two_touches(root: Path) -> None:
    assert decide(root, "node", 600.0).grace == IDLE_GRACE
    assert decide(root, "node", IDLE_GRACE).grace == 2 * IDLE_GRACE


def test_the_option_overrules_what_is_found(root: Path, on: Callable[[str], None]) -> None:
    on("nfs4")
    assert decide(root, "flock", 600.0) == Locking("nfs4")
    on("ext4")
    assert decide(root, "node", 600.0).local is not None
    assert decide(root, "lease", 600.0).local is not None


def test_all_who_share_a_root_share_its_directory(root: Path, tmp_path: Path) -> None:
    first = decide(root, "node", 600.0).local
    link = tmp_path / "cache-link"
    link.symlink_to(root)
    assert decide(link, "node", 600.0).local == first
    make_root(tmp_path / "cache2", "1")
    assert decide(tmp_path / "cache2", "node", 600.0).local != first
    assert decide(tmp_path / "cache3", "node", 600.0).local is None  # not made yet


def test_a_directory_that_was_planted_is_not_used(
    root: Path, node: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "other-node"
    other.mkdir()
    monkeypatch.setattr(locking, "_NODE_DIRECTORIES", (str(node), str(other)))
    planted = decide(root, "node", 600.0).local
    assert planted is not None and planted.parent == node
    planted.chmod(0o777)
    fallback = decide(root, "node", 600.0).local
    assert fallback is not None and fallback.parent == other
    planted.rmdir()
    planted.symlink_to(tmp_path)
    assert decide(root, "node", 600.0).local == fallback
    planted.unlink()
    planted.write_text("a file")
    assert decide(root, "node", 600.0).local == fallback


@needs_root
def test_a_directory_of_another_user_is_not_used(root: Path, node: Path) -> None:
    found = decide(root, "node", 600.0).local
    assert found is not None
    os.chown(found, 12345, 12345)
    assert decide(root, "node", 600.0).local is None


# -- what follows from it ----------------------------------------------------------


@pytest.fixture
def store(root: Path) -> Store:
    layout = decide(root, "node", 600.0).layout(root)
    layout.make()
    return Store(layout)


def publish(store: Store) -> Path:
    from shardcache.store.partial import Partial

    data = payload(1000)
    metadata = metadata_for(URL, data)
    partial = Partial.create(store.layout, metadata, "a.tar")
    partial.write(0, memoryview(data))
    entry = store.publish(partial, metadata)
    partial.close()
    return entry


def aged(path: Path, seconds: float = 2 * IDLE_GRACE) -> None:
    past = time.time() - seconds
    for file in path.iterdir():
        os.utime(file, (past, past))


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Fails the test if anything inside the cache is locked with flock."""
    real = fcntl.flock

    def guarded(fd: object, operation: int) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()  # type: ignore[attr-defined]
        name = os.readlink(f"/proc/self/fd/{number}")
        assert not name.startswith(str(tmp_path / "cache")), f"flock on {name}"
        real(fd, operation)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", guarded)
    yield


@pytest.mark.usefixtures("no_flock")
def test_nothing_in_the_cache_is_locked(
    make_cache: Callable[..., Cache], origin: MemoryOrigin, root: Path, node: Path
) -> None:
    origin.objects[URL] = make_tar(1)
    cache = make_cache(dir=root, locks="node", max_size="1MB")
    with cache.open(URL) as stream:
        assert stream.read() == make_tar(1)
    assert cache.clean(everything=True).removed == ()  # used a moment ago
    assert list(node.glob("*/sessions/*.session"))
    assert not list((root / "v1" / "sessions").iterdir())
    assert not list((root / "v1" / "locks").iterdir())
    [entry] = cache.entries()
    aged(entry.path)
    assert len(cache.clean(everything=True).removed) == 1
    assert cache.path(URL) is None


@pytest.mark.usefixtures("no_flock")
def test_an_entry_is_evicted_only_after_the_grace(store: Store) -> None:
    publish(store)
    [entry] = store.entries()
    assert store.is_pinned(entry) and not store.evict(entry)
    aged(entry.path, IDLE_GRACE / 2)
    assert store.is_pinned(entry) and not store.evict(entry)
    aged(entry.path)
    assert not store.is_pinned(entry) and store.evict(entry)


@pytest.mark.usefixtures("no_flock")
def test_a_partial_is_left_alone_until_the_grace_is_over(store: Store) -> None:
    from shardcache.store.partial import Partial
    from shardcache.store.sweeping import in_flight, remove_leftover

    metadata = metadata_for(URL, payload(1000))
    partial = Partial.create(store.layout, metadata, "a.tar")
    [found] = in_flight(store.layout)
    assert found.live and found.reserved == 1000
    assert Partial.claim(store.layout, partial.path, "a.tar") is None
    assert not remove_leftover(store.layout, partial.path)
    aged(partial.path)
    claimed = Partial.claim(store.layout, partial.path, "a.tar")
    assert claimed is not None
    aged(claimed.path)
    [found] = in_flight(store.layout)
    assert not found.live
    assert remove_leftover(store.layout, claimed.path)
    partial.close()
    claimed.close()


def test_it_is_said_once(
    make_cache: Callable[..., Cache],
    origin: MemoryOrigin,
    root: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    origin.objects[URL] = origin.objects["s3://lab/b.tar"] = make_tar(1)
    with caplog.at_level(logging.WARNING, "shardcache"):
        cache = make_cache(dir=root, locks="node")
        cache.open(URL).close()
        cache.open("s3://lab/b.tar").close()
    [record] = caplog.records
    assert "locks = 'node'" in record.getMessage() and "1h" in record.getMessage()


def test_ranks_have_locks_of_their_own_on_the_node(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "v1", local=tmp_path / "node", grace=1.0).rank("job-0")
    assert layout.locks == tmp_path / "node" / "ranks" / "job-0" / "locks"
    assert layout.objects == tmp_path / "v1" / "ranks" / "job-0" / "objects"
    assert layout.grace == 1.0
