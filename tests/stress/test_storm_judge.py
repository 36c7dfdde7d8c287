"""The judge of a storm: a good history passes, and every way to break an invariant is seen.

Its bound on fetches is tested in test_storm_economy.py.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.stress.storm.history import Log, read, read_all
from tests.stress.stormtools import LYING, RULES, WHO, Tale, broken, good


def test_a_good_history_passes() -> None:
    verdict = good().judged()
    assert verdict.violations == []
    assert verdict.figures["verified reads"] == 6
    assert verdict.figures["kills"] == 1
    assert verdict.figures["overwrites"] == 1
    assert verdict.figures["fetches"] == 3
    assert broken(good(), LYING) == []


# -- 1: bytes ------------------------------------------------------------------


@pytest.mark.parametrize("op", ["read", "hold", "pinned", "plain", "opener"])
def test_wrong_bytes_are_a_violation_and_are_named(op: str) -> None:
    tale = good().call(op, outcome="wrong", text="at 4096: zeros")
    (violation,) = tale.judged().violations
    assert violation.invariant == "bytes"
    assert "at 4096: zeros" in violation.text and WHO in violation.text
    assert tale.judged().figures["wrong bytes"] == 1


def test_a_digest_of_no_version_is_a_violation() -> None:
    assert broken(good().call(digest="of what?")) == ["bytes"]


def test_the_bytes_of_another_shard_are_a_violation() -> None:
    assert broken(good().call(name="b", digest="a0")) == ["bytes"]


def test_a_version_that_says_it_is_another_is_a_violation() -> None:
    assert broken(good().call(version=1)) == ["bytes"]


def test_a_version_that_was_stored_after_the_read_is_a_violation() -> None:
    assert broken(good().call(began=1.0, ended=2.9, version=1, digest="a1")) == ["bytes"]


# -- 2: visibility, and what is in use ------------------------------------------


def test_a_published_path_that_changes_is_a_violation() -> None:
    tale = good().boss_saw(
        "sample", 6.0, path="p/0", name="a", inode=7, version=1, digest="a1", wrong=None
    )
    (violation,) = tale.judged().violations
    assert violation.invariant == "visibility"
    assert "version 0 and then 1" in violation.text


def test_a_published_path_with_a_hole_or_of_no_version_is_a_violation() -> None:
    facts = {"path": "p/9", "name": "a", "inode": 7, "version": 0}
    hole = good().boss_saw("sample", digest="x", wrong="at 8192: zeros", **facts)
    assert broken(hole) == ["visibility"]
    strange = good().boss_saw("sample", digest="x", wrong=None, **facts)
    assert broken(strange) == ["visibility"]


def test_an_entry_that_the_library_finds_damaged_is_a_violation() -> None:
    tale = good().log("store", "set aside a damaged entry: %s (%s)", "v-1", "size")
    assert broken(tale) == ["visibility"]


def test_what_is_evicted_while_in_use_is_a_violation_unless_locks_lie() -> None:
    for facts in ({"op": "hold", "links": 0}, {"op": "pinned", "same": False}):
        assert broken(good().call(**facts)) == ["in use"]
        assert broken(good().call(**facts), LYING) == []


# -- 4: bounded wait ----------------------------------------------------------------


def test_a_call_past_its_bound_is_a_violation() -> None:
    bound = RULES.call_bound
    assert broken(good().call(began=1.0, ended=bound)) == []
    tale = good().call(began=1.0, ended=bound + 2.0)
    assert broken(tale) == ["bounded wait"]
    assert tale.judged().figures["stuck callers"] == 1
    assert broken(good().call("fork", None, 1.0, bound + 2.0, calls=2)) == []


def test_time_while_stopped_does_not_count() -> None:
    end = RULES.call_bound + 2.0
    tale = good().boss_saw("stop", 3.0, worker=WHO).boss_saw("cont", 5.0, worker=WHO)
    assert broken(tale.call(began=1.0, ended=end)) == []
    assert broken(tale.call(began=1.0, ended=end, who="1.0")) == ["bounded wait"]
    assert tale.judged().figures["stops"] == 1


def test_a_worker_that_does_not_end_is_a_violation_that_says_where() -> None:
    tale = good().boss_saw("stuck", 99.0, worker=WHO, pid=1, wchan="flock_lock_inode_wait")
    tale.begin("fetch", "b", 50.0)
    (violation,) = tale.judged().violations
    assert violation.invariant == "bounded wait"
    assert "fetch of b" in violation.text and "flock_lock_inode_wait" in violation.text


# -- 5: nothing left, and the budget --------------------------------------------------


@pytest.mark.parametrize(
    ("event", "facts", "invariant"),
    [
        ("swept", {"left": ["v1/partial/x"], "occupied": 0}, "nothing left"),
        ("swept", {"left": [], "occupied": 1001}, "budget"),
        ("emptied", {"left": ["v1/objects/aa/.meta.json.x"], "entries": 0}, "nothing left"),
        ("emptied", {"left": [], "entries": 1}, "nothing left"),
        ("clean-command", {"status": 1, "said": "no"}, "nothing left"),
        ("read-all", {"status": 1, "said": "no"}, "nothing left"),
    ],
)
def test_what_the_end_must_not_look_like(event: str, facts: dict, invariant: str) -> None:
    assert broken(good().boss_saw(event, 99.0, **facts)) == [invariant]


def over_budget(tale: Tale, looks: int = 3) -> Tale:
    for number in range(looks):
        tale.boss_saw("budget", 10.0 + number, occupied=1001, dead=0)
    return tale


def test_the_budget_may_not_be_exceeded_for_longer_than_a_moment() -> None:
    assert broken(over_budget(good(), looks=2)) == []
    assert broken(over_budget(good())) == ["budget"]
    between = over_budget(good(), looks=2).boss_saw("budget", 11.5, occupied=1000, dead=0)
    assert broken(over_budget(between, looks=2)) == []


def test_the_budget_is_excused_without_its_lock_and_while_somebody_is_stopped() -> None:
    assert broken(over_budget(good()), LYING) == []
    assert broken(over_budget(good().unlock("budget.lock", at=9.0))) == []
    assert broken(over_budget(good().unlock("key-a.lock", at=9.0))) == ["budget"]
    assert broken(over_budget(good().boss_saw("stop", 9.0, worker=WHO))) == []


# -- 6: errors -------------------------------------------------------------------------


def test_an_error_that_the_origin_gives_no_reason_for_is_a_violation() -> None:
    tale = good().error("TransferError", text="it went")
    (violation,) = tale.judged().violations
    assert violation.invariant == "errors" and "it went" in violation.text


def test_a_stream_may_end_because_its_object_was_replaced_and_only_then() -> None:
    text = "s3://storm/a was replaced while it was streamed"
    assert broken(Tale().put(at=1.2).error("TransferError", text=text)) == []
    assert broken(Tale().put(at=-8.0).error("TransferError", text=text)) == []
    assert broken(Tale().put(at=-9.5).error("TransferError", text=text)) == ["errors"]
    assert broken(Tale().put(at=9.0).error("TransferError", text=text)) == ["errors"]


def test_a_fetch_may_end_because_its_object_changed_four_times() -> None:
    text = "s3://storm/a changed 4 times while it was fetched"
    for count, invariants in ((3, ["errors"]), (4, [])):
        tale = Tale()
        for number in range(count):
            tale.put(version=number, at=1.0 + number / 10)
        assert broken(tale.error("TransferError", text=text)) == invariants


def test_only_who_needs_a_path_may_be_refused_for_want_of_room() -> None:
    assert broken(good().error("CacheFullError", "fetch")) == []
    assert broken(good().error("CacheFullError", "pinned")) == []
    assert broken(good().error("CacheFullError", "read")) == ["errors"]


def test_a_full_disk_is_a_reason_while_it_is_full() -> None:
    facts = {"op": "fetch", "errno": errno.ENOSPC, "family": ["OSError"]}
    assert broken(good().error("OSError", **facts)) == ["errors"]
    full = good().boss_saw("fill", 1.5).boss_saw("free", 1.6)
    assert broken(full.error("OSError", **facts)) == []
    earlier = good().boss_saw("fill", 0.2).boss_saw("free", 0.9)
    assert broken(earlier.error("OSError", **facts)) == ["errors"]


def test_waiting_may_end_in_an_error_after_its_time_and_not_before() -> None:
    late = good().error("LockTimeoutError", "fetch", began=1.0, ended=11.0)
    assert broken(late) == []
    early = good().error("LockTimeoutError", "fetch", began=1.0, ended=10.0)
    assert broken(early) == ["errors"]


def test_where_locks_lie_a_path_may_go_but_no_read_may_fail() -> None:
    for tale in (
        good().error("FileNotFoundError", "pinned"),
        good().error("OSError", "fetch", errno=errno.EBUSY),
    ):
        assert broken(tale, LYING) == []
        assert broken(tale) == ["errors"]
    assert broken(good().error("OSError", errno=errno.EBUSY), LYING) == ["errors"]


def test_a_worker_ends_as_it_was_asked_to() -> None:
    for number, status in ((9, -9), (15, 143), (2, 143), (15, -15)):
        tale = Tale().kill("1.0", number).boss_saw("died", worker="1.0", status=status)
        assert broken(tale) == []
    assert broken(Tale().boss_saw("died", worker="1.0", status=-11)) == ["errors"]
    assert broken(Tale().kill("1.0").boss_saw("died", worker="1.0", status=1)) == ["errors"]


def test_a_crash_is_told_with_its_traceback() -> None:
    tale = Tale()
    tale.workers.append({"event": "crash", "at": 1.0, "who": WHO, "text": "Traceback: boom"})
    (violation,) = tale.judged().violations
    assert violation.invariant == "errors" and "boom" in violation.text


# -- the history itself ------------------------------------------------------------------


def test_only_kills_may_tear_lines() -> None:
    torn = {"event": "torn", "who": WHO, "at": 0.0}
    tale = Tale().kill()
    tale.workers.append(torn)
    assert broken(tale) == []
    tale.workers.append(torn)
    assert broken(tale) == ["history"]


def test_a_history_is_read_back_with_the_line_that_a_kill_tore(tmp_path: Path) -> None:
    Log(tmp_path / "boss.jsonl", "boss").write("kill", worker=WHO, signal=9)
    log = Log(tmp_path / "worker-0.0.jsonl", WHO)
    log.write("begin", n=0, op="read", name="a", calls=1)
    log.write("end", n=0, op="read", name="a", outcome="absent")
    log.write("begin", n=1, op="fetch", name="b", calls=1)
    with open(tmp_path / "worker-0.0.jsonl", "ab") as file:
        file.write(b'{"at":1.0,"who":"0.0","ev')
    assert [event["event"] for event in read(tmp_path / "worker-0.0.jsonl")][-1] == "torn"
    history = read_all(tmp_path)
    assert [(c.op, c.outcome) for c in history.calls] == [
        ("read", "absent"),
        ("fetch", "unfinished"),
    ]
    assert history.torn == 1
    assert history.calls[0].ended is not None
