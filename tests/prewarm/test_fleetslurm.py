"""``prewarm --nodes slurm`` against stand-ins of srun and scontrol that run real prewarms."""
# ruff: noqa: F401, F811  (fixtures are imported, and shadowed by arguments)

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from shardcache.errors import ConfigError
from shardcache.prewarm.fleet import Order
from shardcache.prewarm.fleetlines import Complained, Ended, Said
from shardcache.prewarm.fleetslurm import SlurmEngine
from tests.prewarm.test_fleet import ended, is_running
from tests.support.clitools import Screen, data, run, slow, spec
from tests.support.storetools import PATIENCE, wait_until

STANDINS = Path(__file__).resolve().parents[1] / "support" / "standins"
NODES = ["gpu01", "gpu02"]


@pytest.fixture
def allocation(monkeypatch, tmp_path):
    """The environment of a batch script; gives where the nodes' caches are."""
    root = tmp_path / "nodes"
    root.mkdir()
    for name, value in {
        "PATH": f"{STANDINS}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "gpu[01-02]",
        "SLURM_NNODES": "2",
        "STANDIN_ROOT": str(root),
        "STANDIN_LOG": str(tmp_path / "srun.json"),
        "SHARDCACHE_MIN_FREE": "0",
    }.items():
        monkeypatch.setenv(name, value)
    return root


@pytest.fixture
def engine(allocation):
    return SlurmEngine(Order(["s3://lab/{a,b}.tar"]))


def cached(root, name):
    return sorted(path.name for path in (root / name).glob("v1/objects/*/*/*/*.tar"))


# -- the command -------------------------------------------------------------------


def test_the_dry_run_prints_a_command_that_a_shell_can_run(run, allocation):
    code, out, _ = run(
        "prewarm", "s3://lab/it's {0..3}.tar", "--nodes", "slurm", "-n", "--best-effort", "-j", "7"
    )
    words = shlex.split(out)
    assert code == 0
    assert words[0] == str(STANDINS / "srun")
    options = [word for word in words[1 : words.index("-m")] if word.startswith("-")]
    assert options == [
        "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--distribution=block", "--label",
        "--wait=0", "--kill-on-bad-exit=0", "--no-kill", "--overlap", "--cpu-bind=none",
        "--disable-status", "--input=none", "--job-name=shardcache-prewarm",
    ]  # fmt: skip
    assert words[words.index("prewarm") :] == [
        "prewarm", "--member", "--jobs", "7", "--best-effort", "s3://lab/it's {0..3}.tar",
    ]  # fmt: skip
    assert not (allocation.parent / "srun.json").exists()


def test_the_dry_run_as_json(run, allocation):
    found = json.loads(run("prewarm", "s3://lab/x.tar", "--nodes", "slurm", "-n", "--json")[1])
    assert found["nodes"] == NODES
    assert shlex.split(found["command_line"])[-1] == "s3://lab/x.tar"


def test_signed_and_many_shards_are_not_arguments(allocation):
    """Command lines are there for everybody to see."""
    signed = "https://host/x.tar?X-Amz-Signature=0123456789abcdef0123456789abcdef"
    many = [f"s3://lab/some-rather-long-prefix/{n:08d}.tar" for n in range(1000)]
    for specs in ([signed], many, ["-x"]):
        engine = SlurmEngine(Order(specs))
        command = list(engine.command())
        assert command[-2:] == ["-f", "-"]
        assert "--input=all" in command
        assert not set(specs) & set(command)
        assert engine.feed() == ("".join(f"{spec}\n" for spec in specs), False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"SLURM_JOB_ID": ""}, "allocation"),
        ({"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is not set"),
        ({"SLURM_JOB_NODELIST": "a b"}, "Invalid hostlist"),
        ({"PATH": "/nonexistent"}, "srun is not in PATH"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}, "one of 3 tasks"),
    ],
)
def test_elsewhere_than_in_a_batch_script_it_is_refused(allocation, changes, said):
    with pytest.raises(ConfigError, match=said):
        SlurmEngine(Order(["s3://lab/x.tar"]), {**os.environ, **changes})


def test_a_batch_script_is_a_step_of_another_kind(allocation):
    environ = {**os.environ, "SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": "3"}
    assert SlurmEngine(Order(["s3://lab/x.tar"]), environ).names == NODES


def test_the_stand_in_refuses_what_srun_would(allocation):
    for options in (["--no-such-option"], ["--label=x"], ["--wait=soon"], ["--nodes=3"]):
        done = subprocess.run(
            [STANDINS / "srun", *options, "true"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1, options
        assert "srun: " in done.stderr


@pytest.mark.parametrize(
    ("line", "events"),
    [
        ('1: {"schema": 1, "type": "end", "exit_code": 0}', [(Said, 1)]),
        (" 1: warning: x", [(Complained, 1)]),
        ("9: who", [(Complained, None)]),
        ("no label", [(Complained, None)]),
    ],
)
def test_labels_tell_whose_line_it_is(engine, line, events):
    assert [(type(event), event.member) for event in engine.heard(line)] == events


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("srun: error: gpu02: task 1: Killed", [(1, None)]),
        ("srun: error: gpu[01-02]: tasks 0-1: Exited with exit code 3", [(0, 3), (1, 3)]),
        ("srun: error: gpu[01-02]: tasks 0,1: Terminated", [(0, None), (1, None)]),
        ("srun: error: x: task 7: Killed", []),
    ],
)
def test_what_srun_says_of_tasks_is_understood(engine, line, expected):
    found = list(engine.complained(line))
    assert all(isinstance(event, Ended) for event in found)
    assert [(event.member, event.code) for event in found] == expected


# -- runs ----------------------------------------------------------------------------


def test_one_command_prewarms_all_nodes_and_a_second_finds_all_cached(
    run, allocation, spec, bucket, proxy
):
    code, out, err = run("prewarm", spec, "--nodes", "slurm", "--json", "--no-progress")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert list(found["summary"]["nodes"]) == NODES
    for name in NODES:
        node = found["summary"]["nodes"][name]
        assert (node["outcome"], node["exit_code"], node["fetched"]) == ("done", 0, 4)
        assert node["dir"] == str(allocation / name)
        assert len(cached(allocation, name)) == 4
    assert len(found["shards"]) == 8
    assert all(traffic.object_fetches == 2 for traffic in proxy.summary().values())
    code, out, _ = run("prewarm", spec, "--nodes", "slurm")
    assert code == 0
    assert out.splitlines()[-1].startswith("Warmed 2 of 2 nodes: all 8 shards cached in ")
    assert all(traffic.object_fetches == 2 for traffic in proxy.summary().values())


def test_each_node_gets_the_shards_of_its_ranks(run, allocation, spec):
    code, out, _ = run("--format", "jsonl", "prewarm", spec, "--nodes", "slurm", "--shard-by-node",
                       "-f", "/dev/null")  # fmt: skip
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert lines[0]["nodes"] == ["gpu01", "gpu02"]
    assert (lines[-1]["type"], ended(lines[-1])) == ("summary", {"done": 2})
    assert {line["type"] for line in lines} == {
        "nodes", "node", "plan", "shard", "progress", "end", "summary",
    }  # fmt: skip
    assert cached(allocation, "gpu01") == ["train-0000.tar", "train-0002.tar"]
    assert cached(allocation, "gpu02") == ["train-0001.tar", "train-0003.tar"]


def test_a_node_that_fails_is_named_and_the_others_go_on(run, allocation, spec, bucket):
    (allocation / "gpu02").write_text("no directory")
    signed = f"s3://{bucket}/absent.tar?X-Amz-Signature=0123456789abcdef0123456789abcdef"
    code, out, err = run("prewarm", spec, signed, "--nodes", "slurm", "--max-failures", "1")
    assert code == 3
    assert "gpu02  failed" in out
    assert out.splitlines()[-1].startswith("Warmed 1 of 2 nodes: 4 shards")
    assert f"failed  gpu02: {allocation / 'gpu02'} is not a directory" in err
    assert f"failed  gpu01: s3://{bucket}/absent.tar: not found" in err
    assert "0123456789abcdef" not in out + err
    assert "0123456789abcdef" not in (allocation.parent / "srun.json").read_text()
    assert len(cached(allocation, "gpu01")) == 4


def test_what_all_nodes_have_in_common_is_the_exit_code(run, allocation, spec, monkeypatch):
    monkeypatch.setenv("SHARDCACHE_MAX_SIZE", "50KB")
    code, _, err = run("prewarm", spec, "--nodes", "slurm")
    assert code == 5
    assert err.count("more than there is room for in") == 2


def test_what_each_node_leaves_out_is_told(run, allocation, spec, monkeypatch):
    monkeypatch.setenv("SHARDCACHE_MAX_SIZE", "150KB")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu01")
    code, out, _ = run("prewarm", spec, "--nodes", "slurm", "--best-effort", "--json")
    node = json.loads(out)["summary"]["nodes"]["gpu01"]
    assert code == 0
    assert (node["fetched"], node["left_out"]) == (2, 2)


def test_without_a_step_the_reason_is_sruns(run, allocation, monkeypatch):
    monkeypatch.setattr("shardcache.prewarm.fleetslurm.SlurmEngine.command",
                        lambda self: [self._srun, "--nodes=9", "true"])  # fmt: skip
    code, _, err = run("prewarm", "s3://lab/x.tar", "--nodes", "slurm")
    assert code == 1
    assert "Only allocated 2 nodes asked for 9" in err


# -- ends ------------------------------------------------------------------------------


class Batch:
    """A prewarm of all nodes whose link hangs, by its JSON lines."""

    def __init__(self, spec, **options):
        import sys

        arguments = [sys.executable, "-m", "shardcache", "--format", "jsonl", "prewarm"]
        self.process = subprocess.Popen(
            [*arguments, "--nodes", "slurm", spec],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.pids = {}
        self.lines = []

    def __enter__(self):
        at_work = set()
        while at_work != set(NODES):
            line = self.process.stdout.readline()
            assert line, self.process.communicate()
            self.lines.append(json.loads(line))
            if self.lines[-1]["type"] == "node":
                self.pids[self.lines[-1]["node"]] = self.lines[-1]["pid"]
            if self.lines[-1]["type"] == "progress" and self.lines[-1]["done_bytes"]:
                at_work.add(self.lines[-1]["node"])
        return self

    def __exit__(self, *exc):
        self.process.kill()
        self.process.communicate()
        for pid in self.pids.values():
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)

    def end(self):
        out, err = self.process.communicate(timeout=PATIENCE)
        self.lines += [json.loads(line) for line in out.splitlines()]
        return self.process.returncode, self.lines[-1], err


def test_an_interrupt_ends_all_tasks_in_order(allocation, slow):
    with Batch(slow) as batch:
        batch.process.send_signal(signal.SIGINT)
        code, summary, err = batch.end()
        assert (code, ended(summary)) == (130, {"interrupted": 2})
        assert "run the same command again" in err
        assert not any(is_running(pid) for pid in batch.pids.values())


def test_a_task_that_is_killed_is_named_and_a_second_run_resumes(allocation, slow, proxy, run):
    with Batch(slow) as batch:
        os.kill(batch.pids["gpu02"], signal.SIGKILL)
        proxy.resume()
        code, summary, err = batch.end()
    assert code == 3
    assert ended(summary) == {"done": 1, "lost": 1}
    assert "lost  gpu02: Slurm says: Killed" in err
    assert len(cached(allocation, "gpu01")) == 3
    code, out, _ = run("prewarm", slow, "--nodes", "slurm", "--json")
    nodes = json.loads(out)["summary"]["nodes"]
    assert code == 0
    assert (nodes["gpu01"]["cached"], nodes["gpu02"]["fetched"]) == (3, 3)


def test_tasks_do_not_outlive_the_command(allocation, slow):
    with Batch(slow) as batch:
        batch.process.kill()
        wait_until(lambda: not any(is_running(pid) for pid in batch.pids.values()))


def displayed(text):
    """What a terminal shows of it in the end: lines, after the cursor moves that rich makes."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\??\d*(?:;\d+)*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", text):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[1A":
            row = max(0, row - 1)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith("\x1b"):
            lines[row] = (
                f"{lines[row]:<{column}}"[:column] + part + lines[row][column + len(part) :]
            )
            column += len(part)
    return [line.rstrip() for line in lines if line.strip()]


def test_on_a_terminal_there_is_a_row_for_each_node(allocation, slow, proxy):
    arguments = ("prewarm", slow, "--nodes", "slurm")
    with Screen(*arguments, directory=allocation / "unused") as screen:
        row = r"gpu0{}  [^\n]*0/3   *[\d.]+ MB of [\d.]+ MB  "
        screen.read("".join(row.format(number) + r"[^\n]*\n[^\n]*" for number in (1, 2)))
        proxy.resume()
        shown = displayed(screen.read())
    # The rows are gone, and what was said while they were there has stayed.
    assert shown[0].startswith("Prewarming 2 nodes of Slurm job 4711")
    ends = sorted(line.partition(" in ")[0] for line in shown[1:-1])
    assert [end.partition(" (")[0] for end in ends] == [
        "gpu01  Warmed 3 of 3 shards",
        "gpu02  Warmed 3 of 3 shards",
    ]
    assert shown[-1].startswith("Warmed 2 of 2 nodes: 6 shards")
