"""once: one rank works, the others get its result or its failure, and death hands it on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardcache import sync
from shardcache.errors import ConfigError
from shardcache.sync.board import FileBoard
from shardcache.sync.job import has_ended, identity
from tests.support.storetools import PATIENCE, Parent, age, crowd, forked, refusing, wait_until


@pytest.fixture
def ran(tmp_path: Path) -> Callable[..., int]:
    """Call it to work; its ``count`` says how often that was done."""

    def work(value: Any = None) -> Any:
        with open(tmp_path / "ran", "a") as file:
            file.write("x")
        return value

    work.count = lambda: len((tmp_path / "ran").read_text()) if (tmp_path / "ran").exists() else 0  # type: ignore[attr-defined]
    return work


# -- one runs, all get the result ----------------------------------------------------------


def test_of_many_ranks_one_works_and_all_get_its_result(tmp_path: Path, ran: Any) -> None:
    def rank(parent: Parent, number: int) -> None:
        parent.hear()
        work = lambda: ran({"from": os.getpid(), "pair": (1, 2)})  # noqa: E731
        parent.say(sync.once("unpack", work, dir=tmp_path, job="j", timeout=PATIENCE))

    with crowd(8, rank) as children:
        for child in children:
            child.tell()
        results = [child.hear() for child in children]
    assert ran.count() == 1
    assert results == [results[0]] * 8 and results[0]["pair"] == [1, 2]
    assert results[0]["from"] in [child.pid for child in children]


def test_a_failure_is_seen_by_all_and_not_tried_again(tmp_path: Path, ran: Any) -> None:
    def fail() -> None:
        ran()
        raise KeyError("s3://KEY:secret@lab/model.tar?X-Amz-Signature=0123 is gone")

    def rank(parent: Parent, number: int) -> None:
        for _ in range(2):
            try:
                sync.once("model", fail, dir=tmp_path, job="j", timeout=PATIENCE)
            except KeyError:
                parent.say("raised as it is")
            except sync.OnceError as exn:
                parent.say({**exn.__dict__, "text": str(exn)})

    with crowd(4, rank) as children:
        found = [child.hear() for child in children * 2]
    assert ran.count() == 1 and found.count("raised as it is") == 1
    for told in (each for each in found if isinstance(each, dict)):
        assert told["type"] == "KeyError" and "is gone" in told["cause"]
        assert "once('model') failed on" in told["text"] and "in fail" in told["text"]
        assert "secret" not in told["text"] and "0123" not in told["text"]
    assert sync.once("model", ran, "mended", dir=tmp_path, job="j", again=True) == "mended"


def test_it_runs_again_only_when_asked(tmp_path: Path, ran: Any) -> None:
    def call(key: str = "k", **options: Any) -> Any:
        return sync.once(key, ran, ran.count() + 1, dir=tmp_path, **options)

    assert [call(), call(), call()] == [1, 1, 1]
    assert [call(again=True), call(), call(again=True), call()] == [2, 2, 3, 3]
    assert [call("other"), call("k" * 300), call("../k/..")] == [4, 5, 6]
    assert call("k" * 299) == 7 and call("k" * 300) == 5
    assert call() == 3
    assert {p.name for p in tmp_path.iterdir()} == {".shardcache-sync", "ran"}


def test_the_nth_again_of_all_ranks_is_one_run(tmp_path: Path, ran: Any) -> None:
    def rank(parent: Parent, number: int) -> None:
        results = []
        for _ in range(4):
            parent.hear()
            results.append(sync.once("epoch", ran, os.getpid(), dir=tmp_path, job="j", again=True))
            parent.say(None)
        parent.say(results)

    with crowd(3, rank) as children:
        for _ in range(4):
            for child in children:
                child.tell()
            for child in children:
                child.hear()
        results = [child.hear() for child in children]
    assert ran.count() == 4 and results == [results[0]] * 3


def test_the_block_says_who_works_and_the_decorator_needs_no_block(
    tmp_path: Path, ran: Any
) -> None:
    def rank(parent: Parent, number: int) -> None:
        with sync.once("block", dir=tmp_path, job="j") as mine:
            if mine:
                ran()
        parent.say(mine)

        @sync.once("decorated", dir=tmp_path, job="j")
        def work(value: int, more: int = 0) -> int:
            """Documented."""
            return ran(value + more)

        parent.say([work(1, more=2), work.__doc__])

    with crowd(3, rank) as children:
        assert sorted(child.hear() for child in children) == [False, False, True]
        assert [child.hear() for child in children] == [[3, "Documented."]] * 3
    assert ran.count() == 2


def test_a_block_that_fails_is_a_failure_and_one_that_is_interrupted_is_not(
    tmp_path: Path,
) -> None:
    where: dict[str, Any] = {"dir": tmp_path, "job": "j", "timeout": PATIENCE / 3}
    with pytest.raises(SystemExit), sync.once("k", **where) as mine:
        assert mine
        raise SystemExit(1)
    with pytest.raises(KeyboardInterrupt):
        sync.once("k", lambda: (_ for _ in ()).throw(KeyboardInterrupt), **where)
    with pytest.raises(ValueError, match="bad"), sync.once("k", **where) as mine:
        assert mine
        raise ValueError("bad")
    with pytest.raises(sync.OnceError, match="ValueError: bad"), sync.once("k", **where):
        raise AssertionError("not reached")


@pytest.mark.parametrize("value", [object(), {1, 2}])
def test_a_result_that_cannot_be_told_is_a_failure_for_all(tmp_path: Path, value: object) -> None:
    for _ in range(2):
        with pytest.raises(sync.OnceError, match="Return None, or what JSON can hold"):
            sync.once("k", lambda: value, dir=tmp_path)


# -- death ---------------------------------------------------------------------------------


def at_work(parent: Parent, directory: Path, lease: float, value: str, again: bool = False) -> None:
    """Says when it begins, and ends when it is told to."""

    def work() -> str:
        parent.say("at work")
        parent.hear()
        return value

    parent.say(sync.once("k", work, dir=directory, job="j", lease=lease, again=again))


def test_when_the_runner_is_killed_another_one_takes_over(tmp_path: Path) -> None:
    with forked(at_work, tmp_path, 60.0, "first") as first:
        assert first.hear() == "at work"
        with (
            forked(at_work, tmp_path, 60.0, "second") as second,
            forked(at_work, tmp_path, 60.0, "third") as third,
        ):
            assert not second.speaks(0.4) and not third.speaks(0.1)
            first.kill()
            wait_until(lambda: second.speaks(0.01) or third.speaks(0.01))
            heir, other = (second, third) if second.speaks(0) else (third, second)
            assert heir.hear() == "at work"
            assert not other.speaks(0.4)
            heir.tell()
            result = heir.hear()
            assert other.hear() == result == ("second" if heir is second else "third")


def test_a_dead_runner_that_nobody_has_waited_for_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        before = identity(child.pid)
        assert not has_ended(before)
        child.kill()
        wait_until(lambda: has_ended(before))
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("which", ["claim.0", "claim.0.beat"])
def test_a_lock_file_that_vanishes_lets_nobody_else_in(tmp_path: Path, which: str) -> None:
    with forked(at_work, tmp_path, 60.0, "first") as first:
        assert first.hear() == "at work"
        (found,) = (p for p in tmp_path.rglob(which) if p.name == which)
        found.unlink()
        with forked(at_work, tmp_path, 60.0, "second") as second:
            assert not second.speaks(0.8)
            first.tell()
            assert first.hear() == second.hear() == "first"


def test_an_again_that_got_no_outcome_does_not_count(tmp_path: Path) -> None:
    where: dict[str, Any] = {"dir": tmp_path, "job": "j", "again": True}
    with forked(at_work, tmp_path, 60.0, "slow", True) as first:
        assert first.hear() == "at work"
        with pytest.raises(sync.WaitTimeoutError):
            sync.once("k", print, timeout=0, **where)
        first.tell()
        assert first.hear() == "slow"
    # The same run as the one it timed out on; a new one would call the function.
    assert sync.once("k", lambda: "a new run", **where) == "slow"
    assert sync.once("k", lambda: "a new run", **where) == "a new run"


# -- errors ----------------------------------------------------------------------------------


def test_a_wait_that_is_over_names_the_runner(tmp_path: Path) -> None:
    with forked(at_work, tmp_path, 60.0, "first") as first:
        assert first.hear() == "at work"
        with pytest.raises(sync.WaitTimeoutError) as caught:
            sync.once("k", print, dir=tmp_path, job="j", timeout=0.8)
        text = str(caught.value)
        assert f"process {first.pid} on {os.uname().nodename}" in text
        assert "has been running it for" in text and "for once('k')" in text
        assert caught.value.key == "k" and caught.value.waited >= 0.8


def test_ranks_on_several_nodes_without_a_place_are_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ran: Any
) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="no name in common.*set SHARDCACHE_JOB"):
        sync.once("k", ran)
    monkeypatch.setenv("SHARDCACHE_JOB", f"job-{os.getpid()}")
    with pytest.raises(
        ConfigError, match="no place to meet. Give dir=, or set SHARDCACHE_SYNC_DIR"
    ):
        sync.once("k", ran)
    assert ran.count() == 0
    monkeypatch.setenv("SHARDCACHE_SYNC_DIR", str(tmp_path / "shared"))
    assert sync.once("k", ran, 1) == 1
    assert (tmp_path / "shared" / ".shardcache-sync").is_dir()


def test_what_was_posted_and_cannot_be_read_is_said_to_be_so(tmp_path: Path) -> None:
    assert sync.once("k", lambda: 1, dir=tmp_path, job="j") == 1
    (found,) = tmp_path.rglob("outcome")
    for damage in (b"", b"\xff", b"[]", b"{}", b'{"by": "x"}', b"[" * 10**5):
        found.chmod(0o600)
        found.write_bytes(damage)
        with pytest.raises(sync.OnceError, match=f"cannot be read in {tmp_path}.*Remove that"):
            sync.once("k", lambda: 2, dir=tmp_path, job="j")


# -- once per node -----------------------------------------------------------------------------


def test_once_per_node_needs_no_shared_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ran: Any
) -> None:
    monkeypatch.setattr("shardcache.sync.board.node_directory", lambda name: tmp_path / name)
    monkeypatch.setenv("SHARDCACHE_JOB", "job")
    for name, value in {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)

    def rank(parent: Parent, number: int) -> None:
        os.environ["RANK"] = str(number)
        parent.say(sync.once("unpack", ran, number, per="node"))

    with crowd(3, rank) as children:
        results = [child.hear() for child in children]
    assert results == [results[0]] * 3 and ran.count() == 1


def test_what_jobs_left_on_a_node_long_ago_is_removed_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ran: Any
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    precious = tmp_path / "precious"
    precious.mkdir()
    (place / "link").symlink_to(precious)
    monkeypatch.setattr("shardcache.sync.board.node_directory", lambda name: place)

    def work_of(job: str) -> None:
        monkeypatch.setenv("SHARDCACHE_JOB", job)
        sync.once("k", ran, per="node")

    work_of("old")
    work_of("used")
    for path in (place / "old", place / "used", precious):
        age(path, 40 * 86400.0)
    os.utime(place / "link", (1, 1), follow_symlinks=False)
    work_of("used")
    work_of("new")
    assert sorted(os.listdir(place)) == ["link", "new", "used"] and precious.is_dir()
    assert ran.count() == 3


def test_nodes_that_share_a_directory_work_once_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ran: Any
) -> None:
    for node in ("11111111-aaaa", "22222222-bbbb"):
        monkeypatch.setattr("shardcache.sync.board.boot_id", lambda node=node: node)
        for _ in range(2):
            sync.once("unpack", ran, per="node", dir=tmp_path, job="j")
    assert ran.count() == 2


@pytest.mark.parametrize("call", ["write_bytes", "hardlink_to"])
def test_a_disk_that_is_full_has_no_half_of_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(Path, call, refusing(errno.ENOSPC, real=getattr(Path, call)))
    board = FileBoard(tmp_path)
    with pytest.raises(OSError, match="ENOSPC"):
        board.create("r/x", b"1")
    assert board.get("r/x") is None and os.listdir(tmp_path / "r") == []
