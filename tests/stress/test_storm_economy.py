"""The bound on fetches in a storm: sound, and tight enough to see what two fetched at once."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardcache
from tests.stress.storm.economy import AGAIN, EVICTED, LOST, SWEPT
from tests.stress.storm.judge import DAMAGED
from tests.stress.storm.rules import Rules
from tests.stress.stormtools import HALF, LYING, Tale, broken, good


def test_a_fetch_that_nothing_explains_is_a_violation() -> None:
    tale = Tale().put().call().call().served(2).present(1)
    (violation,) = tale.judged().violations
    assert violation.invariant == "economy"
    assert "a 2, explained 1" in violation.text


EXPLANATIONS = {
    "evicted": lambda t: t.log("eviction", "evicted %s, %d bytes (%s)", "key-a", "10", "x"),
    "removed": lambda t: t.call("remove", gone=1),
    "perhaps removed": lambda t: t.begin("remove", "a", 1.0) and t,
    "refused": lambda t: t.error("CacheFullError", "fetch"),
    "interrupted": lambda t: t.call("fetch", outcome="interrupted"),
    "unfinished": lambda t: t.begin("read", "a", 1.0) and t,
    "passed by": lambda t: t.log("coordination", "%s: %s; fetching it here too", "s3://storm/a"),
    "full": lambda t: t.log(
        "coordination", "%s: the disk is full (%s); making room", "s3://storm/a", ""
    ),
    "changed": lambda t: t.log(
        "transfer", "%s changed while it was fetched; starting over", "s3://storm/a"
    ),
    "repeated": lambda t: t.log(
        "retry", "%s: %s; attempt %d of %d failed, next in %.1f s", "s3://storm/a", "", "1"
    ),
    "for nobody": lambda t: t.log(
        "fetching", "%s: not fetched in the background: %s", "s3://storm/a", ""
    ),
    "in the background, killed": lambda t: t.call("leave", background=["a"]),
    "ahead, killed": lambda t: t.begin("opener", "b", 1.0, ahead=["a"]) and t,
    "unlocked": lambda t: t.unlock("key-a.lock", "budget.lock"),
    "half removed": lambda t: t.log("space", "removed %s, %d bytes", HALF, "10"),
    "half removed, swept": lambda t: t.call("clean", None, swept=[HALF, "other"]),
    "half removed, left": lambda t: t.boss_saw("before-sweep", names=[HALF, "x.session"]),
    "killed": lambda t: t.kill(),
}


@pytest.mark.parametrize("why", EXPLANATIONS)
def test_each_explanation_is_good_for_one_fetch(why: str) -> None:
    def tale() -> Tale:
        return EXPLANATIONS[why](Tale().put().call().present(1))

    assert broken(tale().served(2)) == []
    assert broken(tale().served(3)) == ["economy"]


def test_a_stream_explains_the_first_request_and_itself() -> None:
    def tale(fetches: int) -> Tale:
        return Tale().put().call(place="stream").served(fetches)

    assert broken(tale(2)) == []
    assert broken(tale(3)) == ["economy"]


def test_what_happened_to_one_shard_explains_no_fetch_of_another() -> None:
    tale = Tale().put().put("b").call("remove", "b", gone=1).present(1).served(2)
    assert broken(tale) == ["economy"]


def test_what_two_fetched_at_once_is_a_violation_although_it_was_removed_since() -> None:
    tale = Tale().put().call().call(who="1.0").call("remove", gone=1).served(2)
    assert broken(tale) == ["economy"]


def test_a_removal_cut_short_may_have_emptied_every_namespace() -> None:
    rules = Rules(max_size=1, lock_timeout=1.0, namespaces=2)
    for fetches, invariants in ((2, []), (3, ["economy"])):
        tale = Tale().put().call().served(fetches)
        tale.begin("remove", "a", 3.0)
        assert broken(tale, rules) == invariants


def test_a_live_partial_that_was_lost_is_a_violation_unless_locks_lie() -> None:
    def tale() -> Tale:
        return Tale().put().call().log("coordination", "%s: %s; starting over", "s3://storm/a", "")

    assert broken(tale()) == ["economy"]
    assert broken(tale(), LYING) == []


def test_where_locks_lie_a_call_makes_one_fetch() -> None:
    assert broken(Tale().put().call().call("fetch").served(2), LYING) == []
    assert broken(Tale().put().call().call("fetch").served(3), LYING) == ["economy"]


def test_a_log_line_about_an_unknown_shard_is_told() -> None:
    tale = good().log("eviction", "evicted %s, %d bytes (%s)", "key-of-nobody", "10", "x")
    assert broken(tale) == ["history"]


def test_a_deleted_lock_that_nobody_held_explains_nothing() -> None:
    tale = Tale().put().call().present(1).served(2)
    assert broken(tale.boss_saw("unlock", files=["key-a.lock"], held=[])) == ["economy"]


def test_fifty_kills_may_hide_one_removal_and_no_more() -> None:
    for kills, fetches, invariants in ((1, 2, []), (1, 3, ["economy"]), (50, 3, [])):
        tale = Tale().put().call().present(1).served(fetches)
        for _ in range(kills):
            tale.kill()
        assert broken(tale) == invariants


@pytest.mark.parametrize("line", [*AGAIN, EVICTED, LOST, SWEPT, DAMAGED])
def test_the_library_still_logs_what_the_judge_reads(line: str) -> None:
    sources = Path(shardcache.__file__).parent.rglob("*.py")
    assert any(f'"{line}' in source.read_text("utf-8") for source in sources)
