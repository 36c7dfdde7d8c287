"""examples/demo.py: its figures, and that it leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys

from examples import demo
from tests.support.clitools import Command
from tests.support.storetools import wait_until


def processes_of(directory):
    """Return the other live processes whose command lines mention ``directory``."""
    found = subprocess.run(["ps", "-wweo", "pid=,stat=,args="], capture_output=True, text=True)
    rows = [line.split(maxsplit=2) for line in found.stdout.splitlines() if str(directory) in line]
    return [row for row in rows if int(row[0]) != os.getpid() and row[1][0] != "Z"]


def test_the_demo_counts_the_bytes_of_the_server_and_keeps_the_cache(capsys, monkeypatch, tmp_path):
    # `tests/stress/test_installed.py` runs the whole demo.
    monkeypatch.setattr(demo, "SHARDS", 4)
    monkeypatch.setattr(demo, "SAMPLES", 4)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--dir", str(tmp_path), "--keep", "--json"])
    demo.main()
    answer = json.loads(capsys.readouterr().out)
    half, steps = 2 * answer["summary"]["shard_bytes"], answer["steps"]
    assert half > 2 * 4 * demo.SAMPLE_BYTES
    assert [step["origin_bytes"] for step in steps] == [half, half, 0]
    assert [step["samples"] for step in steps] == [None, 16, 16]
    assert [step["requests"] > 0 for step in steps] == [True, True, False]
    (kept,) = tmp_path.iterdir()
    assert answer["summary"]["dir"] == str(kept)
    assert [path.name for path in kept.iterdir()] == ["cache"]
    assert processes_of(tmp_path) == []


def test_an_interrupted_demo_leaves_nothing(tmp_path):
    python = [sys.executable, demo.__file__]
    with Command("--dir", tmp_path, directory=tmp_path, python=python) as command:
        while "writing" not in command.process.stderr.readline():
            assert command.process.poll() is None
        command.process.send_signal(signal.SIGINT)
        code, output, errors = command.end()
    assert code == 130 and "Traceback" not in output + errors
    wait_until(lambda: processes_of(tmp_path) == [])
    assert list(tmp_path.iterdir()) == []
