"""The data file of an entry: opened, held, or told for what else is in its place."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from pathlib import Path

import pytest

from shardcache.store.entry import DamagedError, hold, open_data, readable
from shardcache.store.store import Store
from tests.support.storetools import make_store, no_descriptor_left, publish, refusing


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path / "cache")


def open_it(data: Path, size: int = 5):
    return open_data(str(data.parent), str(data), size, None)


def test_what_is_opened_says_what_and_where(store: Store) -> None:
    entry = publish(store)
    with no_descriptor_left():
        opened = open_it(entry.data)
        assert opened is not None
        assert os.pread(opened.fd, 9, 0) == b"shard"
        assert (opened.path, opened.directory) == (str(entry.data), str(entry.path))
        assert (opened.size, opened.stuck) == (5, False)
        opened.close()


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR, errno.ESTALE])
def test_what_is_gone_is_a_miss(store: Store, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    data = publish(store).data
    monkeypatch.setattr(os, "open", refusing(number, real=os.open))
    assert open_it(data) is None


def test_a_file_in_place_of_the_directory_is_a_miss(store: Store) -> None:
    entry = publish(store)
    data = entry.data
    shutil.rmtree(entry.path)
    entry.path.touch()
    assert open_it(data) is None


@pytest.mark.parametrize(
    "number",
    [
        *(errno.EIO, errno.EUCLEAN, errno.EBADMSG),
        *(errno.EREMOTEIO, errno.EILSEQ, errno.ENODATA),
    ],
)
def test_what_the_disk_cannot_read_is_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    data = publish(store).data
    monkeypatch.setattr(os, "open", refusing(number, real=os.open))
    with pytest.raises(DamagedError, match="cannot be opened"):
        open_it(data)
    with pytest.raises(DamagedError, match="cannot be read"), readable():
        raise OSError(number, "as a read would say")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ENODEV, errno.EROFS])
def test_what_the_disk_says_of_itself_is_no_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    entry = publish(store)
    data = entry.data
    with pytest.raises(OSError, match="itself"), readable():
        raise OSError(number, "of itself")
    monkeypatch.setattr(os, "open", refusing(number, real=os.open))
    for call in (lambda: open_it(data), lambda: hold(entry, None).__enter__()):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == number


@pytest.mark.parametrize("kind", ["link", "directory", "socket", "pipe", "longer"])
def test_what_is_planted_is_damage_and_held_by_nobody(store: Store, kind: str) -> None:
    entry = publish(store)
    data = entry.data
    data.unlink()
    if kind == "link":
        data.symlink_to("/etc/hostname")
    elif kind == "directory":
        data.mkdir()
    elif kind == "pipe":
        os.mkfifo(data)
    elif kind == "longer":
        data.write_bytes(b"longer")
    else:
        here = os.open(data.parent, os.O_PATH)  # the address of a socket is short
        with socket.socket(socket.AF_UNIX) as planted:
            planted.bind(f"/proc/self/fd/{here}/{data.name}")
        os.close(here)
    with no_descriptor_left():
        with pytest.raises(DamagedError) as caught:
            open_it(data)
        with hold(entry, None) as free:
            assert free
    del caught  # till here it kept the frames, and whatever they had left open


def test_an_entry_is_held_from_its_readers_and_read_from_its_holder(store: Store) -> None:
    entry = publish(store)
    opened = open_it(entry.data)
    assert opened is not None
    with no_descriptor_left():
        with hold(entry, None) as free:
            assert not free
        opened_again = open_it(entry.data)  # readers do not mind each other
        assert opened_again is not None
        opened_again.close()
    opened.close()
    with hold(entry, None) as free:
        assert free
        late = open_it(entry.data)
        assert late is not None
        assert late.stuck  # somebody has it in hand; it can be read all the same
        assert os.pread(late.fd, 9, 0) == b"shard"
        late.close()
        shutil.rmtree(entry.path)
        assert open_data(str(entry.path), str(entry.path / "a.tar"), 5, None) is None


def test_where_flock_does_not_tell_nothing_is_locked(store: Store) -> None:
    entry = publish(store)
    data = entry.data
    os.utime(entry.path / "meta.json", (1, 1))
    os.utime(data, (1, 1))
    opened = open_data(str(entry.path), str(data), 5, 3600.0)
    assert opened is not None
    with hold(entry, 3600.0) as free:
        assert free  # idle for longer than the grace: a lock would have said no
    with hold(entry, None) as free:
        assert free
    os.utime(data)
    with hold(entry, 3600.0) as free:
        assert not free
    opened.close()
