"""examples/demo.py: its figures, and that it leaves nothing behind."""

import json
import signal
import subprocess
import sys

from examples import demo
from tests.support.clitools import Command
from tests.support.storetools import wait_until


def processes_of(directory):
    """Return the live processes whose command lines mention ``directory``."""
    found = subprocess.run(["pgrep", "-f", str(directory)], capture_output=True, text=True)
    return found.stdout.split()


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
