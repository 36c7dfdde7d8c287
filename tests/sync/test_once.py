"""`sync.once`: one rank works, the others get its result or failure, or take over if it dies."""

import os
import signal
import threading
import time

import pytest

from shardcache import sync, threads
from shardcache.errors import ConfigError
from tests.support.storetools import PATIENCE, crowd, forked, together


@pytest.fixture
def ran(tmp_path):
    """A function that counts its calls in all processes; ``ran.count()`` returns the number."""

    def work(value=None):
        with open(tmp_path / "ran", "a") as file:
            file.write("x")
        return value

    work.count = lambda: len((tmp_path / "ran").read_text()) if (tmp_path / "ran").exists() else 0
    return work


def test_one_rank_works_and_all_get_its_result(tmp_path, ran):
    def rank(number):
        value = {"from": number, "pair": (1, 2)}
        options = {"dir": tmp_path, "job": "j", "again": True}
        return [sync.once("unpack", ran, value, **options) for _ in range(4)]

    results = together(8, rank)  # the n-th calls of all ranks are one run
    assert ran.count() == 4 and results == [results[0]] * 8
    assert results[0][0]["pair"] == [1, 2] and results[0][0]["from"] in range(8)


def test_all_ranks_see_a_failure_which_is_not_retried(tmp_path, ran):
    def fail():
        ran()
        raise KeyError("s3://KEY:secret@lab/model.tar?X-Amz-Signature=canary is gone")

    def rank(parent, number):
        for _ in range(2):
            try:
                sync.once("model", fail, dir=tmp_path, job="j", timeout=PATIENCE)
            except KeyError:
                parent.say("KeyError")
            except sync.OnceError as exn:
                parent.say({**exn.__dict__, "text": str(exn)})

    with crowd(4, rank) as children:
        found = [child.hear() for child in children * 2]
    assert ran.count() == 1 and found.count("KeyError") == 1
    for error in (each for each in found if isinstance(each, dict)):
        assert error["type"] == "KeyError" and "is gone" in error["cause"]
        assert "once('model') failed on" in error["text"] and "in fail" in error["text"]
        assert "secret" not in error["text"] and "canary" not in error["text"]
    assert sync.once("model", ran, "mended", dir=tmp_path, job="j", again=True) == "mended"
    for kind in (TypeError, sync.OnceError):  # raised by the call itself, then recorded
        with pytest.raises(kind, match="not JSON serializable"):
            sync.once("k", lambda: {1, 2}, dir=tmp_path)


def test_a_key_runs_again_only_with_again(tmp_path, ran):
    def call(key="k", **options):
        return sync.once(key, ran, ran.count() + 1, dir=tmp_path, **options)

    assert [call(), call(), call()] == [1, 1, 1]
    assert [call(again=True), call(), call(again=True), call()] == [2, 2, 3, 3]
    assert [call("other"), call("k" * 300), call("../k/..")] == [4, 5, 6]
    assert call("k" * 299) == 7 and call("k" * 300) == 5
    assert call() == 3
    assert {p.name for p in tmp_path.iterdir()} == {".shardcache-sync", "ran"}


def at_work(parent, directory, lease, value, again=False):
    """Call `sync.once` with a function that runs until the test continues it."""

    def work():
        parent.say("at work")
        if parent.hear() == "fail":
            raise ValueError
        return value

    parent.say(sync.once("k", work, dir=directory, job="j", lease=lease, again=again))


@pytest.mark.parametrize("late", [None, "return", "fail"], ids=["killed", "returns", "fails"])
def test_another_rank_takes_over_from_one_without_a_heartbeat(tmp_path, late):
    with forked(at_work, tmp_path, 60.0, "first") as first:
        assert first.hear() == "at work"
        with forked(at_work, tmp_path, 60.0, "patient") as patient:
            assert not patient.speaks(0.2)
            first.kill(signal.SIGSTOP if late else signal.SIGKILL)
            with forked(at_work, tmp_path, 1.0, "heir") as heir:
                assert heir.hear() == "at work"
                assert not patient.speaks(0.2)
                heir.tell()
                assert heir.hear() == patient.hear() == "heir"
        if late:
            first.kill(signal.SIGCONT)
            first.tell(late)
            assert first.hear() == "heir"  # the first outcome counts


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, RuntimeError])
def test_another_rank_takes_over_from_an_interrupted_one(tmp_path, monkeypatch, kind):
    def interrupted():
        raise kind

    where, real = {"dir": tmp_path, "job": "j", "timeout": PATIENCE / 3}, threads.start
    early = kind is RuntimeError  # raised by a signal handler after the first heartbeat
    if early:
        monkeypatch.setattr(threads, "start", lambda *args: (real(*args), interrupted()))
    with pytest.raises(kind):
        sync.once("k", print if early else interrupted, **where)
    monkeypatch.undo()
    assert sync.once("k", lambda: "done", **where) == "done"


def test_a_late_heartbeat_does_not_hide_that_its_runner_gave_up(tmp_path, monkeypatch):
    begun, post = threading.Event(), sync.FileStore.set

    def slowly(store, name, text):
        if text != "gave up":
            begun.set()
            time.sleep(0.2)
        post(store, name, text)

    def interrupted():
        assert begun.wait(PATIENCE)
        raise KeyboardInterrupt

    monkeypatch.setattr(sync, "_BEATS", 100)
    monkeypatch.setattr(sync.FileStore, "set", slowly)
    where = {"dir": tmp_path, "job": "j", "lease": 30}
    with pytest.raises(KeyboardInterrupt):
        sync.once("k", interrupted, **where)
    time.sleep(0.5)  # until the heartbeat would have come
    assert sync.once("k", lambda: "done", timeout=10, **where) == "done"


@pytest.mark.parametrize("which", ["claim.0", "claim.0.beat"])
def test_a_deleted_lock_file_admits_no_second_rank(tmp_path, which):
    with forked(at_work, tmp_path, 60.0, "first") as first:
        assert first.hear() == "at work"
        (found,) = (p for p in tmp_path.rglob(which) if p.name == which)
        found.unlink()
        with forked(at_work, tmp_path, 60.0, "second") as second:
            assert not second.speaks(0.8)
            first.tell()
            assert first.hear() == second.hear() == "first"


def test_a_timeout_names_the_runner_and_a_retry_joins_the_run(tmp_path):
    where = {"dir": tmp_path, "job": "j", "again": True}
    with forked(at_work, tmp_path, 3.0, "slow", True) as first:
        assert first.hear() == "at work"
        with pytest.raises(sync.WaitTimeoutError) as caught:  # it sends heartbeats
            sync.once("k", print, timeout=4, lease=3, **where)
        assert f"process {first.pid} on {os.uname().nodename}" in str(caught.value)
        assert "for once('k')" in str(caught.value) and caught.value.waited >= 4
        first.tell()
        assert first.hear() == "slow"
    assert sync.once("k", lambda: "a new run", **where) == "slow"  # joins the run that timed out
    assert sync.once("k", lambda: "a new run", **where) == "a new run"


def test_ranks_on_several_nodes_need_a_job_and_a_directory(set_variables, tmp_path, ran):
    set_variables(RANK=3, WORLD_SIZE=16, LOCAL_WORLD_SIZE=8)
    with pytest.raises(ConfigError, match="no name in common.*set SHARDCACHE_JOB"):
        sync.once("k", ran)
    set_variables(SHARDCACHE_JOB=f"job-{os.getpid()}")
    with pytest.raises(ConfigError, match="store. Pass dir=, or set SHARDCACHE_SYNC_DIR"):
        sync.once("k", ran)
    assert ran.count() == 0
    set_variables(SHARDCACHE_SYNC_DIR=tmp_path / "shared")
    assert sync.once("k", ran, 1) == 1
    assert (tmp_path / "shared" / ".shardcache-sync").is_dir()


def test_work_runs_if_no_thread_can_start(tmp_path, ran, no_threads):
    assert sync.once("k", ran, 1, dir=tmp_path) == 1


def test_once_per_node_runs_on_each_node(monkeypatch, set_variables, tmp_path, ran):
    monkeypatch.setattr("shardcache.sync.node_directory", lambda name: tmp_path / "node")
    set_variables(SHARDCACHE_JOB="job", WORLD_SIZE=16, LOCAL_RANK=1)

    def rank(number):
        os.environ["RANK"] = str(number)
        return sync.once("unpack", ran, number, per="node")

    results = together(3, rank)
    assert results == [results[0]] * 3 and ran.count() == 1
    for node in ("11111111-aaaa", "22222222-bbbb"):
        monkeypatch.setattr("shardcache.sync.boot_id", lambda node=node: node)
        for _ in range(2):
            sync.once("unpack", ran, per="node", dir=tmp_path, job="j")
    assert ran.count() == 3
