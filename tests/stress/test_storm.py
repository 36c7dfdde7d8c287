"""The judge of the storm finds what breaks an invariant; the storm itself is a command."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from tests.stress.storm.judge import judge
from tests.stress.storm.plan import Storm

STORM = Storm(Path("/nowhere"), "http://h", 60, 1)
NAME = STORM.names[0]


def call(at: float = 10.0, took: float = 1.0, **told: Any) -> dict[str, Any]:
    usual = {"op": "read", "name": NAME, "who": "1.0", "outcome": "ok", "version": 0, "size": 9}
    return {"event": "end", "at": at, "began": at - took, **usual, **told}


def error(name: str, **told: Any) -> dict[str, Any]:
    return call(outcome="error", error=name, text="", errno=None, trace="", **told)


def event(kind: str, at: float = 5.0, **facts: Any) -> dict[str, Any]:
    return {"event": kind, "at": at, **facts}


def sample(digest: str, wrong: str | None = None) -> dict[str, Any]:
    return event("sample", path="p", digest=digest, wrong=wrong)


SWEPT: dict[str, Any] = {"left": [], "bytes": 0, "limit": 0}
STOP = event("stop", 11.0, who="1.0")
OVER = [event("budget", bytes=STORM.max_size + 1)] * 3
BROKEN = {
    "wrong bytes": ("bytes", [call(outcome="wrong", text="a hole")]),
    "a version that was stored later": (
        "bytes",
        [call(version=1), event("put", 20.0, name=NAME, version=1)],
    ),
    "published, then changed": ("visibility", [sample("a"), sample("b")]),
    "published, and wrong": ("visibility", [sample("a", "a hole")]),
    "pinned, and gone": ("in use", [call(op="pinned", stayed=False)]),
    "a cold shard twice": ("economy", [event("crowd", fetches={"a": 2})]),
    "fetches by nobody": ("economy", [event("served", fetches={"a": 2})]),
    "a long call": ("bounded wait", [call(300.0, 290.0)]),
    "a stuck worker": ("bounded wait", [event("stuck", who="1.0", stack="")]),
    "a partial after the sweep": ("nothing left", [event("swept", **SWEPT | {"left": ["p"]})]),
    "too much after the sweep": ("budget", [event("swept", **SWEPT | {"bytes": 1})]),
    "too much meanwhile": ("budget", OVER),
    "an error": ("errors", [error("OSError")]),
    "an error for a replaced object, unreplaced": ("errors", [error("TransferError")]),
    "a crash": ("errors", [event("crash", who="1.0", text="")]),
    "a death by nobody": ("errors", [event("died", who="1.0", status=-11)]),
}
RIGHT = {
    "a read": [call()],
    "a long call of a stopped process": [STOP, event("cont", 290.0, who="1.0"), call(300.0, 290.0)],
    "too much while somebody was stopped": [event("stop", 4.0, who="1.0"), *OVER],
    "too much once the lock was gone": [event("unlock", 1.0, files=["budget.lock"]), *OVER],
    "a replaced object": [event("put", 9.5, name=NAME, version=1), error("IntegrityError")],
    "no room for a path": [error("CacheFullError", op="pinned")],
    "a full disk": [error("OSError", op="fetch") | {"errno": errno.ENOSPC}],
    "a killed worker": [event("kill", who="1.0", signal=9), event("died", who="1.0", status=-9)],
}


@pytest.mark.parametrize(("invariant", "events"), BROKEN.values(), ids=BROKEN)
def test_what_breaks_an_invariant_is_found(invariant: str, events: list[dict[str, Any]]) -> None:
    (violation,) = judge(STORM, events).violations
    assert violation.startswith(f"{invariant}:")


@pytest.mark.parametrize("events", RIGHT.values(), ids=RIGHT)
def test_what_may_happen_is_no_violation(events: list[dict[str, Any]]) -> None:
    assert judge(STORM, events).violations == []


@pytest.mark.parametrize(
    "bend",
    [
        lambda data, other: data[:-1],
        lambda data, other: data + b"\0",
        lambda data, other: data[:5000] + bytes(100) + data[5100:],
        lambda data, other: data[:8192] + other[8192:],
        lambda data, other: b"<html>not found</html>",
    ],
    ids=["a lost tail", "a byte too many", "a hole", "two versions", "a page"],
)
def test_a_shard_says_what_is_wrong_with_it(bend: Any) -> None:
    data, other = STORM.data(NAME, 0), STORM.data(NAME, 1)
    assert STORM.examine(NAME, data) == (0, None) and STORM.examine(NAME, other) == (1, None)
    assert STORM.examine(NAME, bend(data, other))[1] is not None
