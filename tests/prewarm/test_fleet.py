"""A fleet's lines, its rows and its ends; a member's manners. Engines have tests of their own."""
# ruff: noqa: F401, F811  (fixtures are imported, and shadowed by arguments)

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardcache.errors import ConfigError
from shardcache.prewarm.fleet import Ending, Fleet
from shardcache.prewarm.fleetlines import (
    OUTCOMES,
    Closed,
    Complained,
    Ended,
    Fault,
    Joiner,
    Members,
    Said,
    decode,
    encode,
    record_of,
)
from shardcache.prewarm.fleetraydriver import choose
from shardcache.prewarm.fleettext import end_text, exit_code, summary_record, tell_failures
from shardcache.prewarm.report import Outcome
from tests.support.clitools import data, run, slow, spec
from tests.support.storetools import wait_until

PLAN = {
    "schema": 1, "type": "plan", "shards": 3, "cached": 1, "cached_bytes": 10, "to_fetch": 2,
    "to_fetch_bytes": 20, "unknown_sizes": 0, "free_bytes": 100, "evict_bytes": 0,
    "missing_bytes": 0, "left_out": 0, "outdated": 0,
}  # fmt: skip
PROGRESS = {
    "schema": 1, "type": "progress", "done": 1, "total": 2, "done_bytes": 10, "total_bytes": 20,
    "estimated": False, "bytes_per_second": 5.0, "checked": 1, "cached": 1, "failed": 0,
}  # fmt: skip
NODE = {
    "schema": 1, "type": "node", "host": "host", "pid": 7, "dir": "/cache", "library_version": "1",
}  # fmt: skip
SHARD = {
    "schema": 1, "type": "shard", "url": "s3://lab/x.tar", "outcome": "failed", "size": None,
    "seconds": 0.5, "received_bytes": 0, "retries": 0, "error": "x", "error_type": "Error",
}  # fmt: skip


def fleet_of(*codes):
    """Nodes that ended so; None: lost."""
    fleet = Fleet()
    fleet.take(Members(tuple(f"n{number}" for number in range(len(codes)))))
    for number, code in enumerate(codes):
        fleet.take(Said(number, NODE))
        if code is not None:
            fleet.take(Said(number, {"schema": 1, "type": "end", "exit_code": code}))
        else:
            fleet.take(Ended(number, None, "it died"))
    fleet.take(Closed(max(code or 0 for code in codes)))
    return fleet


def ended(summary):
    """How many nodes ended how, without the ways that none did."""
    return {outcome: count for outcome, count in summary["outcomes"].items() if count}


@pytest.mark.parametrize(
    "event",
    [
        Members(("a", "b"), "x"),
        Said(1, PLAN),
        Complained(None, "x"),
        Ended(2, None, "gone"),
        Fault("no", True),
    ],
)
def test_events_pass_through_a_line(event):
    assert decode(encode(event)) == event
    assert "\n" not in encode(event)


@pytest.mark.parametrize(
    "text",
    ["", "x", "[]", "{}", "null", '{"event": "Closed", "code": 1}', '{"event": "Said"}',
     '{"event": ["Said"]}', "[" * 100_000],
)  # fmt: skip
def test_what_is_no_event_is_none(text):
    assert decode(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        "{",
        '{"schema": 2, "type": "node"}',
        '{"schema": 1, "type": "odd"}',
        json.dumps({**PLAN, "cached": "1"}),
        json.dumps({**PLAN, "cached": True}),
        json.dumps({**PLAN, "cached": -1}),
        json.dumps({**PLAN, "cached": 1.5}),
        json.dumps({name: PLAN[name] for name in PLAN if name != "free_bytes"}),
        json.dumps({**NODE, "dir": None}),
        json.dumps({**SHARD, "outcome": "odd"}),
        json.dumps({**SHARD, "outcome": ["failed"]}),
        json.dumps({**SHARD, "error": 3}),
        json.dumps({name: SHARD[name] for name in SHARD if name != "size"}),
        json.dumps({**PROGRESS, "bytes_per_second": float("nan")}),
        json.dumps({**PROGRESS, "bytes_per_second": float("inf")}),
        json.dumps({**PROGRESS, "estimated": 0}),
    ],
)
def test_a_record_of_another_form_is_none(text):
    assert record_of(text) is None


@pytest.mark.parametrize("record", [NODE, PLAN, PROGRESS, SHARD], ids=lambda each: each["type"])
def test_a_record_has_the_fields_that_are_known(record):
    """A later version may say more, but not through us: what we print is in the schemas."""
    assert record_of(json.dumps({**record, "of_later": 1})) == record


def test_lines_have_the_words_of_a_prewarm():
    assert tuple(Outcome) == OUTCOMES


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_record_cut_in_pieces_is_joined(cut):
    text = json.dumps({**SHARD, "error": "x" * 30})
    joiner = Joiner(4)
    pieces = [text[at : at + cut] for at in range(0, len(text), cut)]
    assert [joiner.take(piece) for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert joiner.take(pieces[-1]) == Said(4, json.loads(text))
    assert joiner.take(json.dumps(PROGRESS)) == Said(4, PROGRESS)


def test_half_a_record_does_not_swallow_the_next_one():
    joiner = Joiner(0)
    assert joiner.take('{"schema": 1, "type"') is None
    assert joiner.take(json.dumps(PLAN)) == Said(0, PLAN)
    assert joiner.take("a word") == Complained(0, "a word")


def test_what_no_node_can_have_said_is_passed_over():
    fleet = fleet_of(0)
    fleet.take(Said(7, PLAN))
    fleet.take(Said(-1, PLAN))
    fleet.take(Ended(-1, 3))
    assert [(node.ending, node.plan) for node in fleet.nodes] == [(Ending.DONE, None)]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((0, 0), 0),
        ((0, None), 3),
        ((None, None), 3),
        ((0, 3), 3),
        ((0, 2), 3),
        ((2, 2), 2),
        ((0, 5), 5),
        ((5, None), 3),
        ((0, 4, 0), 4),
        ((4, 5), 3),
        ((1, 1), 1),
        ((0, 1), 3),
    ],
)
def test_the_exit_code_says_what_nodes_have_in_common(codes, expected):
    assert exit_code(fleet_of(*codes)) == expected


def test_a_lost_node_says_how_far_it_was():
    fleet = Fleet()
    fleet.take(Members(("a",)))
    fleet.take(Said(0, NODE))
    fleet.take(Said(0, PLAN))
    fleet.take(Said(0, PROGRESS))
    fleet.take(Ended(0, None, "the node died"))
    fleet.take(Closed(0))
    assert end_text(fleet.nodes[0]) == "lost after 2 of 3 shards"
    found = summary_record(fleet)["nodes"]["a"]
    assert (found["outcome"], found["error"], found["in_cache"]) == ("lost", "the node died", 2)


def test_a_node_that_never_spoke_is_told_with_the_engines_last_word():
    fleet = Fleet()
    fleet.take(Members(("a", "b")))
    fleet.take(Said(0, NODE))
    fleet.take(Said(0, {"schema": 1, "type": "end", "exit_code": 0}))
    fleet.take(Complained(None, "srun: error: Node failure on b"))
    fleet.take(Closed(1))
    assert fleet.nodes[1].ending is Ending.NOT_STARTED
    assert fleet.nodes[1].error == "srun: error: Node failure on b"


def test_the_documentation_names_everything_that_programs_get():
    text = (Path(__file__).resolve().parents[2] / "docs" / "clusters.md").read_text("utf-8")
    summary = summary_record(fleet_of(0))
    names = {*summary, *summary["nodes"]["n0"], *(ending.value for ending in Ending)}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_one_reason_is_told_once_with_all_its_nodes(capsys):
    from shardcache.cli.output import Console

    fleet = fleet_of(3, 3, 0)
    for number in (0, 1):
        for name in ("x", "y"):
            url = f"s3://lab/{name}.tar"
            fleet.take(Said(number, {**SHARD, "url": url, "error": f"{url}: not found"}))
    tell_failures(Console(), fleet)
    assert capsys.readouterr().err.splitlines() == [
        "  failed  n0, n1: s3://lab/x.tar: not found",
        "  failed  1 more for the same reason: y.tar",
    ]


# -- which nodes of Ray ----------------------------------------------------------


def ray_node(name, address, node_id, alive=True):
    return {
        "NodeName": name,
        "NodeManagerAddress": address,
        "NodeManagerHostname": f"host-{name}",
        "NodeID": node_id * 14,
        "Alive": alive,
    }


NODES = [
    ray_node("a", "10.0.0.10", "aaaa"),
    ray_node("c", "10.0.0.9", "cccc"),
    ray_node("dead", "10.0.0.1", "dddd", alive=False),
    ray_node("b", "10.0.0.9", "bbbb"),
]


def test_nodes_are_numbered_by_address_then_name():
    assert [name for name, _ in choose(NODES, [])] == ["b", "c", "a"]


def test_named_nodes_keep_the_order_they_were_named_in():
    assert choose(NODES, ["c", "host-b"]) == [("c", "cccc" * 14), ("b", "bbbb" * 14)]
    assert [name for name, _ in choose(NODES, ["10.0.0.10", "bbbbbbbb"])] == ["a", "b"]


def test_two_nodes_of_one_name_are_told_apart():
    twins = [ray_node("x", "10.0.0.1", "aaaa"), ray_node("x", "10.0.0.1", "bbbb")]
    assert [name for name, _ in choose(twins, [])] == ["x/aaaaaaaa", "x/bbbbbbbb"]


@pytest.mark.parametrize("name", ["dead", "10.0.0.9", "nobody"])
def test_a_name_that_is_not_one_node_is_refused(name):
    with pytest.raises(ConfigError, match="Those there are: b, c, a"):
        choose(NODES, [name])


# -- options -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ray-address", "x"], "--nodes ray"),
        (["--nodes", "slurm", "--ray-nodes", "x"], "--nodes ray"),
        (["--ranks-per-node", "2"], "--shard-by-node"),
        (["--nodes", "ray", "--shard-by-node", "--node-rank", "1", "--node-count", "2"], "told"),
        (["--nodes", "ray", "--member"], "member"),
        (["--nodes", "ray", "--ray-address", "local"], "would start a cluster"),
        (["--nodes", "ray", "s3://b/{1..3"], "Write ranges as"),
        (["--nodes", "slurm"], "SLURM_JOB_ID"),
        (["--shard-by-node"], "which node"),
    ],
)
def test_what_does_not_go_together_is_refused(run, tmp_path, arguments, said):
    code, out, err = run("prewarm", "s3://b/x.tar", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert not (tmp_path / "cache").exists()


def test_without_ray_the_extra_is_named(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run("prewarm", "s3://b/x.tar", "--nodes", "ray")
    assert code == 2
    assert "pip install 'shardcache[ray]'" in err


def test_one_node_alone_can_prewarm_its_part(run, spec, bucket, monkeypatch):
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.setenv("SLURM_NNODES", "2")
    assert run("prewarm", spec, "--shard-by-node")[0] == 0
    assert sorted(line.split()[0] for line in run("ls", "--format", "tsv")[1].splitlines()[1:]) == [
        f"s3://{bucket}/train-0001.tar",
        f"s3://{bucket}/train-0003.tar",
    ]


# -- members -----------------------------------------------------------------------


def test_a_member_writes_whole_lines_of_one_protocol(run, spec):
    code, out, _ = run("--format", "jsonl", "prewarm", "--member", spec)
    records = [record_of(line) for line in out.splitlines()]
    kinds = [record["type"] for record in records]
    assert code == 0
    assert (kinds[:2], kinds[-2:]) == (["node", "plan"], ["summary", "end"])
    assert (kinds.count("shard"), kinds.count("progress")) == (4, 1)
    last = next(record for record in records if record["type"] == "progress")
    assert (last["done"], last["total"], last["failed"]) == (4, 4, 0)
    assert last["done_bytes"] == last["total_bytes"] > 0


OWNER = """
import sys, time
from shardcache.prewarm.fleetrayactor import NodePrewarm
node = NodePrewarm()
node.start(["--format", "jsonl"], [], sys.argv[1:])
seen = 0
while True:
    for kind, text in node.lines(seen, 60):
        seen += 1
        print(text, flush=True)
"""


def test_a_member_does_not_outlive_its_owner(slow, tmp_path):
    """As when Ray's worker is killed: no process is left, and what was fetched is resumed."""
    environment = {**os.environ, "SHARDCACHE_DIR": str(tmp_path / "cache")}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, slow], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        for line in owner.stdout:
            record = record_of(line)
            if record["type"] == "node":
                pid = record["pid"]
            if record["type"] == "progress" and record["done_bytes"]:
                break
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    try:
        wait_until(lambda: not is_running(pid))
    finally:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
    assert list((tmp_path / "cache").rglob("progress"))


def is_running(pid):
    """A zombie that its adopter has not waited for is gone, too."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
