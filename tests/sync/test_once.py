"""once: one rank works, the others get its result or its failure, and death hands it on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardcache import sync
from shardcache.errors import ConfigError
from shardcache.sync.board import FileBoard, Process, _start_of
from tests.support.storetools import PATIENCE, Parent, age, crowd, forked, wait_until


@pytest.fixture
def ran(tmp_path: Path) -> Callable[..., int]:
    """Call it to work; its ``count`` says how often that was done."""

    def work(value: Any = None) -> Any:
        with open(tmp_path / "ran", "a") as file:
            file.write("x")
        return value

    work.count = lambda: len((tmp_path / "ran").read_text()) if (tmp_path / "ran").exists() else 0  # type: ignore[attr-defined]
    return work


def told(function: Callable[[], Any]) -> Any:
    """What came of it, as something that can be sent."""
    try:
        return function()
    except sync.OnceError as exn:
        return {"type": exn.type, "cause": exn.cause, "by": exn.by, "text": str(exn)}


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
    def rank(parent: Parent, number: int) -> None:
        def fail() -> None:
            ran()
            raise KeyError("s3://KEY:secret@lab/model.tar?X-Amz-Signature=0123 is gone")

        def call() -> Any:
            return sync.once("model", fail, dir=tmp_path, job="j", timeout=PATIENCE)

        try:
            parent.say(told(call))
        except KeyError:
            parent.say("raised as it is")
            parent.say(told(call))
        else:
            parent.say(told(call))

    with crowd(4, rank) as children:
        first = [child.hear() for child in children]
        second = [child.hear() for child in children]
    assert ran.count() == 1 and first.count("raised as it is") == 1
    for found in [each for each in first if isinstance(each, dict)] + second:
        assert found["type"] == "KeyError" and "is gone" in found["cause"]
        assert "once('model') failed on" in found["text"] and "in fail" in found["text"]
        assert "secret" not in found["text"] and "0123" not in found["text"]
    assert sync.once("model", ran, "mended", dir=tmp_path, job="j", again=True) == "mended"


def test_it_runs_again_only_when_asked(tmp_path: Path, ran: Any) -> None:
    def call(key: str = "k", **options: Any) -> Any:
        return sync.once(key, ran, ran.count() + 1, dir=tmp_path, **options)

    assert [call(), call(), call()] == [1, 1, 1]
    assert [call(again=True), call(), call(again=True), call()] == [2, 2, 3, 3]
    assert [call(generation=0), call(generation=1), call(generation=0)] == [4, 5, 4]
    assert [call("other"), call("k" * 300), call("../k/..")] == [6, 7, 8]
    assert call("k" * 299) == 9 and call("k" * 300) == 7
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


def test_a_restarted_job_begins_anew_and_one_that_states_its_name_does_not(
    tmp_path: Path, ran: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(**options: Any) -> Any:
        return sync.once("k", ran, ran.count() + 1, dir=tmp_path, **options)

    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert [call(), call(), call(job="mine")] == [1, 1, 2]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert [call(), call(job="mine")] == [3, 2]
    monkeypatch.setenv("SLURM_STEP_ID", "2")
    assert call() == 4
    monkeypatch.setenv("SLURM_STEP_ID", "4294967291")  # the batch script
    assert call() == 3
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    assert call() == 5
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0" if name == "RANK" else "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert [call(), call()] == [6, 6]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert call() == 7


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


@pytest.mark.parametrize("value", [object(), {1, 2}, "x" * (2 << 20)])
def test_a_result_that_cannot_be_told_is_a_failure_for_all(tmp_path: Path, value: object) -> None:
    for _ in range(2):
        with pytest.raises(sync.OnceError, match="Return None, or what JSON can hold"):
            sync.once("k", lambda: value, dir=tmp_path)


def test_threads_of_one_process_are_told_apart(tmp_path: Path, ran: Any) -> None:
    results: list[Any] = []

    def call() -> None:
        results.append(sync.once("k", lambda: (time.sleep(0.1), ran(7))[1], dir=tmp_path))

    threads = [threading.Thread(target=call) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [7] * 5 and ran.count() == 1


# -- death ---------------------------------------------------------------------------------


def at_work(parent: Parent, directory: Path, lease: float, value: str, again: bool = False) -> None:
    """Says when it begins, and ends when it is told to."""

    def work() -> str:
        parent.say("at work")
        parent.hear()
        return value

    parent.say(told(lambda: sync.once("k", work, dir=directory, job="j", lease=lease, again=again)))


def test_when_the_runner_is_killed_another_one_takes_over(
    tmp_path: Path,
) -> None:
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
        assert _start_of(child.pid) is not None
        child.kill()
        wait_until(lambda: _start_of(child.pid) is None)
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("which", ["claim.0", "claim.0.copy"])
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


@pytest.mark.parametrize(
    "options",
    [
        {"key": " "},
        {"per": "rank"},
        {"again": True, "generation": 1},
        {"lease": 0.1},
        {"job": ""},
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_is_touched(
    tmp_path: Path, options: dict[str, Any], ran: Any
) -> None:
    key = options.pop("key", "k")
    with pytest.raises(ConfigError):
        sync.once(key, ran, dir=tmp_path, **options)
    assert os.listdir(tmp_path) == []


def test_ranks_on_several_nodes_without_a_place_are_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ran: Any
) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="no name in common. Set SHARDCACHE_JOB"):
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
    for damage in (b"", b"\xff", b"[]", b"{}", b'{"outcome": "maybe", "by": "x"}', b"[" * 10**5):
        found.chmod(0o600)
        found.write_bytes(damage)
        with pytest.raises(sync.OnceError, match=f"cannot be read in {tmp_path}.*Remove that"):
            sync.once("k", lambda: 2, dir=tmp_path, job="j")


def test_a_claim_that_says_nothing_sensible_is_nobodys(tmp_path: Path) -> None:
    good = Process.this()
    assert Process.parse(good.encode()) == good and not good.has_ended()
    for damage in (b"", b"null", b"[]", b'{"pid": 1}', b"\x00\xff", b"[" * 10**5):
        assert Process.parse(damage) is None
    fields = json.loads(good.encode())
    assert Process.parse(json.dumps({**fields, "pid": "1"}).encode()) is None
    other = json.dumps({**fields, "machine": "another one", "pid": 2**22 + 1}).encode()
    found = Process.parse(other)
    assert found is not None and not found.has_ended()


# -- once per node -----------------------------------------------------------------------------


def test_once_per_node_needs_no_shared_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ran: Any
) -> None:
    monkeypatch.setenv("SHARDCACHE_JOB", f"job-{os.getpid()}-{time.time_ns()}")
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
    monkeypatch.setattr("shardcache.sync.board._node_directory", lambda: place)

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
        monkeypatch.setattr("shardcache.sync.board._boot_id", lambda node=node: node)
        for _ in range(2):
            sync.once("unpack", ran, per="node", dir=tmp_path, job="j")
    assert ran.count() == 2


def test_a_board_without_hard_links_is_still_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Any
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(1, "no hard links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    board = FileBoard(tmp_path / "b")
    assert [board.create("r/x", b"1"), board.create("r/x", b"2"), board.get("r/x")] == [
        True,
        False,
        b"1",
    ]
    assert [sync.once("k", ran, n, dir=tmp_path) for n in range(3)] == [0, 0, 0]


def test_importing_it_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from shardcache import sync; sync.rank(); sync.once('k', int, dir='.');"
        "print([m for m in ('torch', 'click', 'rich', 's3fs', 'webdataset') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
