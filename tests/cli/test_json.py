"""``--json`` and ``--format jsonl``: the keys and types that scripts rely on, of every command."""

from __future__ import annotations

import json
import os
import re
from types import NoneType
from typing import Any

import pytest

from shardcache.cache import Cache
from shardcache.cli.main import _COMMANDS

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00")
NUMBER = int | float

KINDS = {
    "text": str,
    "maybe_text": str | NoneType,
    "whole": int,
    "maybe_whole": int | NoneType,
    "number": NUMBER,
    "flag": bool,
    "time": TIME,
}


def keys(**names: str) -> dict[str, Any]:
    """Names of keys by the kind of their values."""
    return {name: KINDS[kind] for kind, each in names.items() for name in each.split()}


PREWARMED = keys(
    text="url outcome",
    maybe_text="error error_type",
    whole="received_bytes retries",
    maybe_whole="size",
    number="seconds",
)
PLAN = keys(whole="shards to_fetch free_bytes missing_bytes")
OPENS = keys(whole="opens hits misses bytes_origin", number="hit_rate")
TIER = keys(whole="tier shards bytes", text="dir", maybe_whole="max_size")
#: Command line -> exit code and what is printed; ``{0}`` and ``{1}`` are URLs of cached shards.
SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "prewarm {0} s3://{bucket}/absent.tar": (
        3,
        {
            "shards": [PREWARMED],
            "summary": {
                **keys(whole="fetched cached failed bytes received_bytes", maybe_text="stopped"),
                "seconds": NUMBER,
                "plan": PLAN,
            },
        },
    ),
    "ls": (
        0,
        {
            "shards": [
                keys(
                    text="url state key version path etag digest",
                    whole="size tier",
                    time="used_at fetched_at",
                )
            ],
            "summary": keys(
                whole="shards bytes evictable_bytes matching shown", maybe_whole="max_size"
            ),
        },
    ),
    "ls --partial": (
        0,
        {
            "partials": [keys(text="state key dir", whole="written_bytes")],
            "summary": keys(whole="partials live orphans written_bytes"),
        },
    ),
    "path {0}": (0, keys(text="url path")),
    "pin {0} s3://lab/absent.tar --for 3d": (
        0,
        {
            "shards": [keys(text="url state")],
            "summary": keys(whole="pinned not_cached", number="seconds"),
        },
    ),
    "unpin {0}": (
        0,
        {"shards": [keys(text="url state")], "summary": keys(whole="unpinned not_pinned")},
    ),
    "verify": (
        4,
        {
            "findings": [
                keys(text="state url reason key version dir", whole="size", flag="set_aside")
            ],
            "summary": keys(
                whole="verified verified_bytes ok damaged changed gone unreachable unchecked "
                "set_aside",
                number="seconds",
                flag="interrupted",
            ),
        },
    ),
    "stats": (
        0,
        {
            **OPENS,
            **keys(whole="coalesced bypassed failed bytes_opened bytes_saved evicted errors"),
            **keys(time="since until"),
            "waits": {"all": keys(whole="count", number="seconds p50 p99")},
        },
    ),
    "stats --by hour": (0, {"hours": [{"hour": TIME, **OPENS}], "summary": OPENS}),
    "stats --by rank": (0, {"ranks": [{"rank": int | NoneType, **OPENS}], "summary": OPENS}),
    "stats --zero": (0, keys(flag="zeroed")),
    "top --interval 0.2": (
        0,
        {
            **keys(time="at", number="seconds", whole="processes"),
            **dict.fromkeys(("ranks", "fetches", "waits"), list),
            "tiers": [TIER],
            "total": keys(whole="opens"),
        },
    ),
    "report": (0, {"tiers": [TIER]}),
    "config": (
        0,
        {
            "options": [keys(text="option value source default help")],
            "summary": keys(whole="options set"),
        },
    ),
    "dir": (0, keys(text="dir")),
    "doctor": (0, {"findings": [keys(text="level found")], "summary": keys(whole="fail")}),
    "recipe cron": (0, {"kind": str, "files": [keys(text="name text")]}),
    "clean -n --all": (
        0,
        {
            "removals": [keys(text="dir reason", whole="size")],
            "summary": keys(
                flag="dry_run",
                whole="removed removed_bytes kept kept_bytes missing_bytes missing_inodes",
            ),
        },
    ),
    "rm -n {0} s3://lab/absent.tar": (
        1,
        {
            "shards": [keys(text="url state", whole="size")],
            "summary": keys(flag="dry_run", whole="removed removed_bytes not_cached"),
        },
    ),
}


def check(found: Any, shape: Any, place: str) -> None:
    """Raise AssertionError where ``found`` lacks something that ``shape`` has."""
    if isinstance(shape, dict):
        assert isinstance(found, dict) and shape.keys() <= found.keys(), (place, found)
        for name, inner in shape.items():
            check(found[name], inner, f"{place}.{name}")
    elif isinstance(shape, list):
        assert found, place
        for each in found:
            check(each, shape[0], f"{place}[]")
    elif isinstance(shape, re.Pattern):
        assert shape.fullmatch(found), (place, found)
    else:
        assert isinstance(found, shape), (place, found)
        assert shape is not int or not isinstance(found, bool), (place, found)


@pytest.fixture
def used(run, warm, tmp_path):
    """A cache with something to say: read, damaged, and with the partial of a dead process."""
    with Cache(tmp_path / "cache", min_free=0) as cache:
        with cache.open(warm[0]) as stream:
            stream.read()
        damaged = cache.entry(warm[3]).data
    damaged.chmod(0o600)
    damaged.write_bytes(b"y" * damaged.stat().st_size)
    partial = tmp_path / "cache/v1/partial" / f"{'a' * 32}.{'b' * 24}.{'c' * 32}"
    partial.mkdir()
    (partial / "x.tar").write_bytes(b"x")
    return warm


def test_every_command_has_a_shape():
    assert {line.split()[0] for line in SHAPES} == set(_COMMANDS) - {"demo"}


def test_json_has_the_keys_and_types_that_scripts_rely_on(run, used, bucket):
    for line, (expected, shape) in SHAPES.items():
        words = [word.format(*used, bucket=bucket) for word in line.split()]
        code, out, err = run(*words, "--json")
        assert code == expected, (line, err)
        (text,) = out.splitlines()
        check(json.loads(text), {"schema": int, "command": str, **shape}, line)
        assert os.environ["AWS_SECRET_ACCESS_KEY"] not in out + err


@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        ("ls", ["shard"] * 4 + ["summary"]),
        ("ls --partial", ["partial", "summary"]),
        ("prewarm {0}", ["plan", "shard", "summary"]),
        ("prewarm --check {0}", ["shard", "summary"]),
        ("verify --repair", ["finding", "summary"]),
        ("clean --max-size 1B", ["removal"] * 4 + ["summary"]),
        ("rm -y {0}", ["shard", "summary"]),
        ("top --count 2 --interval 0.2", ["activity"] * 2),
    ],
)
def test_json_lines_are_one_for_each_thing_and_a_summary(run, used, line, kinds):
    words = [word.format(*used) for word in line.split()]
    _, out, _ = run(*words, "--format", "jsonl")
    lines = [json.loads(text) for text in out.splitlines()]
    assert [(found["schema"], found["type"]) for found in lines] == [(1, kind) for kind in kinds]
    _, whole, _ = run("ls", "--json")
    assert set(json.loads(whole)) == {"schema", "command", "shards", "summary"}


def test_where_nothing_was_cached_machines_still_get_an_object(run, tmp_path):
    for line in ("ls", "ls --partial", "clean", "verify", "stats", "top --interval 0.2"):
        code, out, _ = run(*line.split(), "--json")
        assert code == 0 and json.loads(out)["schema"] == 1, line
    assert not (tmp_path / "cache").exists()
