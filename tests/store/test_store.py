"""The store: publishing, opening, damaged entries, listing and eviction."""

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardcache.files import try_flock
from shardcache.layout import META
from shardcache.store.directory import DamagedError, remove_free
from shardcache.store.entry import Entry, Store, set_aside
from shardcache.store.partial import in_flight
from shardcache.urls import parse_url
from tests.support.storetools import (
    BLOCK,
    begun,
    make_store,
    metadata_for,
    no_descriptor_left,
    payload,
    publish,
    read,
    refusing,
    tree,
)

URL = "s3://lab/a.tar"
KEY = parse_url(URL).key
NAME = "a.tar"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path / "cache")


def again(store: Store) -> Store:
    """The same store, as another process sees it."""
    return Store(store.layout)


def test_an_entry_is_visible_to_all_processes_once_it_is_published(store: Store) -> None:
    partial = begun(store.layout)
    partial.seal(metadata := partial.metadata, store.layout.modes, sync=False)
    assert read(store) is None and list(store.entries()) == list(store.entries_of(KEY)) == []
    partial.discard()
    entry = publish(store, data=b"shard")
    with no_descriptor_left():
        assert read(store) == read(again(store)) == read(store) == b"shard"
    assert entry.path == store.layout.entry(KEY, entry.version, 5)
    assert sorted(os.listdir(entry.path)) == [NAME, META]
    assert entry.data == entry.path / NAME
    assert stat.S_IMODE(entry.data.stat().st_mode) == 0o400
    assert entry.metadata() == metadata
    before = tree(entry.path)
    assert publish(store) == entry  # the same version twice
    assert tree(entry.path) == before
    assert list(store.layout.partials.iterdir()) == []
    stating(a_field_of_a_later_version=1)(entry.path)
    assert read(again(store)) == b"shard" and entry.metadata() == metadata


def test_with_sync_the_data_is_on_disk_before_the_name(store, monkeypatch):
    synced: list[str] = []
    note = lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: E731
    monkeypatch.setattr(os, "fsync", note)
    partial = begun(store.layout)
    before = partial.path
    path = store.publish(partial, partial.metadata, [], sync=True)
    partial.close()
    inside = [str(before / META), str(before / NAME), str(before)]
    assert synced == [*inside, str(path.parent), str(path.parent.parent)]


def stating(**changes: Any) -> Callable[[Path], object]:
    """Return a function that changes the sidecar."""

    def harm(path: Path) -> None:
        record = json.loads((path / META).read_bytes())
        (path / META).write_text(json.dumps(record | changes))

    return harm


def planted(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return a function that replaces the data file."""
    return lambda path: ((path / NAME).rename(path.parent / "moved"), make(path / NAME))


OTHER = metadata_for(data=b"shard", etag="x").encode()
DAMAGE: list[tuple[str, Callable[[Path], object]]] = [
    ("its data file is missing", lambda path: (path / NAME).unlink()),
    ("has 3 bytes, not 5", lambda path: os.truncate(path / NAME, 3)),
    ("no sidecar", lambda path: (path / META).unlink()),
    ("cannot be read", lambda path: (path / META).write_bytes(b"\0" * 100)),
    ("cannot be read", lambda path: (path / META).write_bytes(b"[" * 60_000)),
    ("cannot be read", stating(url="a" * 100_000)),
    ("another type", stating(url=1)),
    ("another schema", stating(schema=2)),
    ("another shard", stating(size=1)),
    ("another shard", lambda path: (path / META).write_bytes(OTHER)),
    ("symbolic links", planted(lambda path: path.symlink_to(path.parents[1] / "moved"))),
    ("a directory", planted(Path.mkdir)),
    ("bytes, not 5", planted(os.mkfifo)),
]


@pytest.mark.parametrize(
    ("message", "harm", "known"), [*((*each, False) for each in DAMAGE), (*DAMAGE[1], True)]
)
def test_a_damaged_entry_is_set_aside_and_can_be_published_again(store, message, harm, known):
    entry = publish(store)
    if known:
        assert read(store) == b"shard"
    harm(entry.path)
    with no_descriptor_left():
        with pytest.raises(DamagedError, match=message) as caught:
            read(store)
        assert caught.value.directory == entry.directory
        assert not store.in_use(entry)
        assert set_aside(entry.path, "test")
        assert not set_aside(entry.path, "test")
    assert read(store) is None
    [aside] = in_flight(store.layout)
    assert remove_free(aside.path, None)
    harm(publish(store).path)
    entry = publish(again(store))
    assert read(again(store)) == b"shard"
    [aside] = in_flight(store.layout)
    harm(entry.path)
    with no_descriptor_left():
        assert store.evict(entry)
    assert [left.path for left in in_flight(store.layout)] == [aside.path]


@pytest.mark.parametrize(
    ("name", "number"),
    [(NAME, errno.EIO), (META, errno.EIO), (NAME, errno.ENODEV), (NAME, errno.EMFILE)],
)
def test_a_read_error_is_damage_and_other_faults_are_errors(store, monkeypatch, name, number):
    entry = publish(store)
    concerns = lambda path, *a, **k: str(path) == str(entry.path / name)  # noqa: E731
    monkeypatch.setattr(os, "open", refusing(number, when=concerns, real=os.open))
    with no_descriptor_left(), pytest.raises((DamagedError, OSError)) as caught:
        read(store)
    assert isinstance(caught.value, DamagedError) == (number == errno.EIO)
    assert entry.path.exists()


def reboot(entry: Entry) -> None:
    (entry.path / META).write_bytes(entry.metadata()._replace(boot="another boot").encode())


def test_an_entry_of_another_boot_is_hashed_once(store: Store) -> None:
    data = payload(BLOCK + 5)
    entry = publish(store, data=data)
    before = entry.data.stat().st_mtime_ns, entry.metadata()
    reboot(entry)
    assert read(again(store)) == data
    assert (entry.data.stat().st_mtime_ns, entry.metadata()) == before
    # The hash detects bytes that were lost in a power failure.
    entry.data.chmod(0o600)
    with open(entry.data, "r+b") as file:
        file.seek(BLOCK)
        file.write(b"\0")
    assert read(again(store)) != data  # entries of this boot are not hashed
    reboot(entry)
    with no_descriptor_left(), pytest.raises(DamagedError, match="changed"):
        read(again(store))


def test_only_entries_in_their_own_directories_are_listed(store: Store, tmp_path: Path) -> None:
    entry = publish(store, used=1234.0)
    objects, key_dir = store.layout.objects, entry.path.parent
    (objects / "model.ckpt").touch()
    (objects / "backup").mkdir()
    shutil.copytree(key_dir, objects / "backup" / KEY)
    shutil.copytree(key_dir, objects / KEY[:2] / "copy")
    shutil.copytree(entry.path, key_dir / "old")
    (key_dir / ("0" * 24 + "-5")).symlink_to(entry.path)
    (key_dir / ("1" * 24 + "-5")).touch()
    (objects / "zz").symlink_to(objects / KEY[:2])
    assert list(store.entries()) == [entry] == list(store.entries_of(KEY))
    assert entry.used == 1234.0
    assert read(again(store)) == b"shard"


@pytest.mark.parametrize("theirs", ["older", "the same"])
def test_a_late_publication_replaces_only_older_entries(store, theirs):
    def publish_theirs() -> Entry:
        entry = publish(store, data=b"theirs")
        os.utime(entry.path, (1, 1))  # the time must not matter
        return entry

    with no_descriptor_left():
        partial = begun(store.layout, data=b"ours")
        entry = publish_theirs() if theirs == "older" else publish(store, data=b"ours")
        path = store.publish(partial, partial.metadata, [entry.path])
        partial.close()
    assert (path == entry.path) == (theirs != "older")
    newest_first = [found.path for found in again(store).entries_of(KEY)]
    assert newest_first == ([path, entry.path] if theirs == "older" else [path])
    assert os.listdir(store.layout.partials) == []
    assert read(again(store)) == b"ours"


def test_an_entry_that_was_published_again_during_its_eviction_stays(store, monkeypatch):
    entry = publish(store)

    def late(fd: int, *, shared: bool = False) -> bool | None:
        monkeypatch.undo()
        assert again(store).evict(entry)
        publish(store)
        return try_flock(fd, shared=shared)

    monkeypatch.setattr("shardcache.files.try_flock", late)
    assert not store.evict(entry)
    assert entry.data.exists()


def test_an_entry_that_is_evicted_while_it_is_opened_is_a_miss(store, monkeypatch):
    entry = publish(store)
    real = fcntl.flock

    def late(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        assert store.evict(entry)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with no_descriptor_left():
        assert read(store) is None


def test_a_stopped_evictor_causes_no_miss(store: Store) -> None:
    """Nor does a writer that was stopped between publishing and unlocking."""
    entry = publish(store)
    fd = os.open(entry.data, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    opened = store.open(KEY, NAME)  # after a bounded wait
    assert opened.stuck
    entry.path.rename(store.layout.new_hidden(KEY))  # the evictor continues
    with opened.file as file:
        assert file.read() == b"shard"
    assert read(store) is None
    os.close(fd)
