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

PREWARMED = {
    "url": str,
    "outcome": str,
    "size": int | NoneType,
    "seconds": NUMBER,
    "received_bytes": int,
    "retries": int,
    "error": str | NoneType,
    "error_type": str | NoneType,
}
OPENS = {"opens": int, "hits": int, "hit_rate": NUMBER, "misses": int, "bytes_origin": int}
TIER = {"tier": int, "dir": str, "shards": int, "bytes": int, "max_size": int | NoneType}
#: Command line -> exit code and what is printed; ``{0}`` and ``{1}`` are URLs of cached shards.
SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "prewarm {0} s3://{bucket}/absent.tar": (
        3,
        {
            "shards": [PREWARMED],
            "summary": {
                "fetched": int,
                "cached": int,
                "failed": int,
                "bytes": int,
                "received_bytes": int,
                "seconds": NUMBER,
                "stopped": str | NoneType,
                "plan": {"shards": int, "to_fetch": int, "free_bytes": int, "missing_bytes": int},
            },
        },
    ),
    "ls": (
        0,
        {
            "shards": [
                {
                    "url": str,
                    "size": int,
                    "used_at": TIME,
                    "fetched_at": TIME,
                    "state": str,
                    "tier": int,
                    "key": str,
                    "version": str,
                    "path": str,
                    "etag": str,
                    "digest": str,
                }
            ],
            "summary": {
                "shards": int,
                "bytes": int,
                "max_size": int | NoneType,
                "evictable_bytes": int,
                "matching": int,
                "shown": int,
            },
        },
    ),
    "ls --partial": (
        0,
        {
            "partials": [{"state": str, "written_bytes": int, "key": str, "dir": str}],
            "summary": {"partials": int, "live": int, "orphans": int, "written_bytes": int},
        },
    ),
    "path {0}": (0, {"url": str, "path": str}),
    "pin {0} s3://lab/absent.tar --for 3d": (
        0,
        {
            "shards": [{"url": str, "state": str}],
            "summary": {"pinned": int, "not_cached": int, "seconds": float},
        },
    ),
    "unpin {0}": (
        0,
        {"shards": [{"url": str, "state": str}], "summary": {"unpinned": int, "not_pinned": int}},
    ),
    "verify": (
        4,
        {
            "findings": [
                {
                    "state": str,
                    "url": str,
                    "reason": str,
                    "size": int,
                    "set_aside": bool,
                    "key": str,
                    "version": str,
                    "dir": str,
                }
            ],
            "summary": {
                "verified": int,
                "verified_bytes": int,
                "ok": int,
                "damaged": int,
                "changed": int,
                "gone": int,
                "unreachable": int,
                "unchecked": int,
                "set_aside": int,
                "seconds": NUMBER,
                "interrupted": bool,
            },
        },
    ),
    "stats": (
        0,
        {
            **OPENS,
            "since": TIME,
            "until": TIME,
            "coalesced": int,
            "bypassed": int,
            "failed": int,
            "bytes_opened": int,
            "bytes_saved": int,
            "evicted": int,
            "errors": int,
            "waits": {"all": {"count": int, "seconds": NUMBER, "p50": NUMBER, "p99": NUMBER}},
        },
    ),
    "stats --by hour": (0, {"hours": [{"hour": TIME, **OPENS}], "summary": OPENS}),
    "stats --by rank": (0, {"ranks": [{"rank": int | NoneType, **OPENS}], "summary": OPENS}),
    "stats --zero": (0, {"zeroed": bool}),
    "top --interval 0.2": (
        0,
        {
            "at": TIME,
            "seconds": NUMBER,
            "processes": int,
            "ranks": list,
            "fetches": list,
            "waits": list,
            "tiers": [TIER],
            "total": {"opens": int},
        },
    ),
    "report": (0, {"tiers": [TIER]}),
    "config": (
        0,
        {
            "options": [{"option": str, "value": str, "source": str, "default": str, "help": str}],
            "summary": {"options": int, "set": int},
        },
    ),
    "dir": (0, {"dir": str}),
    "doctor": (0, {"findings": [{"level": str, "found": str}], "summary": {"fail": int}}),
    "recipe cron": (0, {"kind": str, "files": [{"name": str, "text": str}]}),
    "clean -n --all": (
        0,
        {
            "removals": [{"dir": str, "size": int, "reason": str}],
            "summary": {
                "dry_run": bool,
                "removed": int,
                "removed_bytes": int,
                "kept": int,
                "kept_bytes": int,
                "missing_bytes": int,
                "missing_inodes": int,
            },
        },
    ),
    "rm -n {0} s3://lab/absent.tar": (
        1,
        {
            "shards": [{"url": str, "size": int, "state": str}],
            "summary": {"dry_run": bool, "removed": int, "removed_bytes": int, "not_cached": int},
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
        ("clean --max-size 1B", ["removal"] * 5 + ["summary"]),
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
