"""makedirs, wait_for and atomic_write, on a plain disk and on what nodes disagree about."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from shardcache import sync
from shardcache.errors import ConfigError
from shardcache.sync.paths import find
from tests.support.fakes import FakeClock
from tests.support.storetools import PATIENCE, Parent, forked

# -- makedirs ----------------------------------------------------------------------------


def test_a_directory_is_made_with_all_above_it_and_again_without_complaint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "a" / "b", "a/b", "a/b/c"):
        assert sync.makedirs(path) == tmp_path / path and (tmp_path / path).is_dir()
    assert sync.wait_for("a", timeout=0) == tmp_path / "a"
    assert sync.wait_for(["a", "a/b"], timeout=0) == [tmp_path / "a", tmp_path / "a" / "b"]


def test_the_mode_is_that_of_the_last_directory_less_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        sync.makedirs(tmp_path / "a" / "b", 0o705)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o750


@pytest.mark.parametrize("kind", ["file", "file above", "dangling link"])
def test_what_is_in_the_way_is_named_and_left_alone(tmp_path: Path, kind: str) -> None:
    thing = tmp_path / "thing"
    if kind == "dangling link":
        thing.symlink_to(tmp_path / "nowhere")
    else:
        thing.write_text("precious")
    told = "a symbolic link to" if kind == "dangling link" else "is a file"
    with pytest.raises(FileExistsError, match=f"{thing}.* {told}.* Remove or rename") as caught:
        sync.makedirs(thing / "below" if kind == "file above" else thing, timeout=PATIENCE)
    assert isinstance(caught.value, sync.InTheWayError)
    assert os.path.lexists(thing) and not (tmp_path / "nowhere").exists()


def test_asking_makes_nothing(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "l").symlink_to(tmp_path / "d")
    for name in ("x", "l/x", "x/y/z", "d/x"):
        assert find(tmp_path / name) is None
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["d", "l"]
    assert (tmp_path / "l").lstat().st_nlink == 1


# -- wait_for ------------------------------------------------------------------------------


def test_a_wait_that_is_over_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "run" / "weights").mkdir(parents=True)
    wanted = [tmp_path / "run" / name for name in ("weights", "step-1/rng", "optimizer")]
    with pytest.raises(TimeoutError) as caught:
        sync.wait_for(wanted, timeout=0.2, by="rank 0")
    text = f"for {wanted[1]}, {wanted[2]} (which rank 0 should make): 2 of 3 missing, "
    assert f"{text}{tmp_path / 'run'} exists" in str(caught.value)


def test_waiting_is_announced_every_ten_seconds_and_grows_rarer(
    clock: FakeClock, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(sync.WaitTimeoutError) as caught:
        sync.wait_for(tmp_path / "rain", timeout="35s")
    messages = [r.message for r in caplog.records]
    assert len(messages) == 3 and all("waiting for" in text for text in messages)
    assert 35 < len(clock.naps) < 120 and caught.value.waited == pytest.approx(35, abs=0.01)


def test_a_timeout_that_cannot_work_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    for call in (sync.makedirs, sync.wait_for):
        for timeout in (-1, "soon", float("nan"), True):
            with pytest.raises(ConfigError):
                call(tmp_path / "x", timeout=timeout)
    assert os.listdir(tmp_path) == []


# -- atomic_write ----------------------------------------------------------------------------


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with sync.atomic_write(path, "w") as file:
        file.write("grün\n")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == "grün\n".encode()
    with pytest.raises(ZeroDivisionError), sync.atomic_write(path) as raw:
        raw.write(b"half")
        raise ZeroDivisionError
    assert path.read_bytes() == "grün\n".encode() and os.listdir(tmp_path) == ["a"]


def test_what_is_replaced_gives_its_permissions_and_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    with open(link) as reader:
        with sync.atomic_write(link, "w") as file:
            file.write("new")
        assert reader.read() == "old"
    assert link.is_symlink() and target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def write(parent: Parent) -> None:
        with sync.atomic_write(path) as file:
            file.write(b"n" * 100_000)
            file.flush()
            parent.say("half")
            parent.hear()

    with forked(write) as child:
        assert child.hear() == "half"
        child.kill()
    assert path.read_bytes() == b"old"


def test_other_modes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wb, w"), sync.atomic_write(tmp_path / "a", "a"):  # type: ignore[call-overload]
        pass
    with pytest.raises(IsADirectoryError), sync.atomic_write(tmp_path):
        pass
    assert os.listdir(tmp_path) == []
