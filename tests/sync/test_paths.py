"""makedirs, wait_for and atomic_write on a local disk; `tests/stress` runs them on two nodes."""

import logging
import os
import stat
from functools import partial
from itertools import product

import pytest

from shardcache import sync
from shardcache.errors import ConfigError
from tests.support.storetools import PATIENCE


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_makedirs_creates_parents_and_accepts_existing_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "a" / "b", "a/b", "a/b/c"):
        assert sync.makedirs(path) == tmp_path / path and (tmp_path / path).is_dir()
    assert sync.wait_for("a", timeout=0) == tmp_path / "a"
    assert sync.wait_for(["a", "a/b"], timeout=0) == [tmp_path / "a", tmp_path / "a" / "b"]
    before = os.umask(0o027)
    try:
        sync.makedirs(tmp_path / "c" / "d", 0o705)
    finally:
        os.umask(before)
    assert (mode(tmp_path / "c"), mode(tmp_path / "c" / "d")) == (0o750, 0o700)


@pytest.mark.parametrize("kind", ["file", "file above", "dangling link"])
def test_a_file_in_the_way_is_named_and_kept(tmp_path, kind):
    thing = tmp_path / "thing"
    if kind == "dangling link":
        thing.symlink_to(tmp_path / "nowhere")
    else:
        thing.write_text("precious")
    what = "a symbolic link to" if kind == "dangling link" else "is a file"
    with pytest.raises(FileExistsError, match=f"{thing}.* {what}.* Remove or rename") as caught:
        sync.makedirs(thing / "below" if kind == "file above" else thing, timeout=PATIENCE)
    assert isinstance(caught.value, sync.InTheWayError)
    assert os.path.lexists(thing) and not (tmp_path / "nowhere").exists()


def test_a_wait_is_announced_and_its_end_names_missing_paths(clock, caplog, tmp_path):
    (tmp_path / "run" / "weights").mkdir(parents=True)
    wanted = [tmp_path / "run" / name for name in ("weights", "step-1/rng", "optimizer")]
    with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError) as caught:
        sync.wait_for(wanted, timeout="35s", by="rank 0")
    text = f"for {wanted[1]}, {wanted[2]} (which rank 0 should make): 2 of 3 missing, "
    assert f"{text}{tmp_path / 'run'} exists" in str(caught.value)
    messages = [r.message for r in caplog.records]
    assert len(messages) == 3 and all(f"waiting {text}" in message for message in messages)
    assert 35 < len(clock.naps) < 120 and caught.value.waited == pytest.approx(35, abs=0.01)


def test_invalid_arguments_are_refused_before_anything_is_created(tmp_path, set_variables):
    set_variables(RANK=0, WORLD_SIZE=2)
    once = partial(sync.once, "k", print, dir=tmp_path, job="j")
    barrier = partial(sync.barrier, dir=tmp_path, job="j")
    paths = [partial(call, tmp_path / "x") for call in (sync.makedirs, sync.wait_for)]
    timeouts = product([*paths, once, barrier], ["timeout"], (-1, "soon", float("nan"), True))
    others = [(once, "per", "rank"), (once, "lease", 0.1), (once, "job", ""), (barrier, "job", "")]
    for call, name, value in [*timeouts, *others]:
        with pytest.raises(ConfigError):
            call(**{name: value})
    with pytest.raises(ConfigError):
        sync.once(" ", print, dir=tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_file_appears_complete_or_not_at_all(tmp_path):
    path = tmp_path / "a"
    with sync.atomic_write(path, "w") as file:
        file.write("grün\n")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == "grün\n".encode()
    with pytest.raises(ZeroDivisionError), sync.atomic_write(path) as raw:
        raw.write(b"half")
        raise ZeroDivisionError
    with pytest.raises(ConfigError, match="wb, w"), sync.atomic_write(path, "a"):
        pass
    with pytest.raises(IsADirectoryError), sync.atomic_write(tmp_path):
        pass
    assert path.read_bytes() == "grün\n".encode() and os.listdir(tmp_path) == ["a"]


def test_replacing_a_file_keeps_its_mode_and_its_links(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    with open(link) as reader:
        with sync.atomic_write(link, "w") as file:
            file.write("new")
        assert reader.read() == "old"
    assert link.is_symlink() and target.read_text() == "new"
    assert mode(target) == 0o640
