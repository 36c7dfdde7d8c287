"""``shardcache demo``: the promise, shown; and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "shardcache"]


def processes_of(directory: Path) -> list[str]:
    """Command lines of live processes that mention ``directory``, ours excepted."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except (OSError, UnicodeDecodeError):
                continue
            if str(directory) in line and state != "Z":
                found.append(line)
    return found


def wait_for(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not come to pass within a minute"
        time.sleep(0.05)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}


def test_the_demo_keeps_the_promise_and_leaves_nothing(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    done = subprocess.run(
        [*COMMAND, "demo", "--json"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    report = answer["summary"]
    assert report["ok"] is True
    assert (report["fewest_fetches"], report["most_fetches"]) == (1, 1)
    assert report["shards"] >= 16
    assert report["shard_bytes"] >= 32_000_000
    prewarm, first, second = answer["steps"]
    half = report["shards"] // 2 * report["shard_bytes"]
    assert [s["origin_bytes"] for s in (prewarm, first, second)] == [half, half, 0]
    assert first["samples"] == second["samples"] == report["shards"] * 320
    assert first["complete"] and second["complete"]
    assert list(tmp_path.iterdir()) == []
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "code", "after"),
    [(signal.SIGINT, 130, "writing"), (signal.SIGINT, 130, "epoch 1"), (signal.SIGTERM, 143, "s3")],
)
def test_an_interrupted_demo_leaves_nothing(
    tmp_path: Path, environment: dict[str, str], number: signal.Signals, code: int, after: str
) -> None:
    process = subprocess.Popen(
        [*COMMAND, "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    try:
        assert process.stderr is not None
        said = ""
        while after not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == code, said + errors
    assert "Traceback" not in errors + output
    wait_for(lambda: processes_of(tmp_path) == [])
    assert list(tmp_path.iterdir()) == []


def test_a_killed_demo_takes_its_processes_along(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    process = subprocess.Popen(
        [*COMMAND, "demo"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert process.stderr is not None
    while "epoch 1" not in process.stderr.readline():
        assert process.poll() is None
    process.kill()
    process.wait()
    process.stderr.close()
    wait_for(lambda: processes_of(tmp_path) == [])
