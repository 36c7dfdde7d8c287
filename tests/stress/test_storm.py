"""Many processes, one cache, every fault at once, on a real S3 server: nothing breaks.

The longer form is ``python -m tests.stress.storm --minutes 30``. What the judge sees is tested
in test_storm_judge.py, test_storm_economy.py and test_storm_shards.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stress.storm.report import show
from tests.stress.storm.run import Outcome, storm

#: Plans the faults; the kernel's scheduler does the rest, differently each time.
SEED = 20


def judge_calmly(outcome: Outcome) -> dict[str, float]:
    show(outcome)  # pytest prints it where the test fails
    assert not outcome.verdict.violations
    return outcome.verdict.figures


@pytest.mark.timeout(300)
def test_a_storm_breaks_no_invariant(tmp_path: Path) -> None:
    figures = judge_calmly(storm(seconds=45, seed=SEED, parent=tmp_path, least_calls=1500))
    # It was a storm: each of these met the others, or the test proves nothing.
    happened = {
        "verified reads": 200,
        "kills": 5,
        "stops": 5,
        "overwrites": 3,
        "lock files deleted": 2,
        "removals": 20,
        "held open": 10,
        "cleaners at once": 1,
        "samples": 20,
        "fetches excused: not completed": 1,
    }
    assert {
        what: figures.get(what, 0)
        for what, least in happened.items()
        if figures.get(what, 0) < least
    } == {}
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(240)
def test_a_storm_in_which_flock_lies_breaks_no_bytes(tmp_path: Path) -> None:
    figures = judge_calmly(
        storm(seconds=15, seed=SEED, parent=tmp_path, lying=True, least_calls=1000)
    )
    assert figures["verified reads"] >= 100
    assert figures["partials lost"] >= 1  # it lied, and that was felt
    assert figures["kills"] >= 1


def test_the_command_writes_json_and_keeps_its_directory_on_request(tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    places = [f"--dir={tmp_path}", f"--json={facts}"]
    options = ["--seconds", "6", "--workers", "2", "--seed", "5", "--no-sabotage", "--keep"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.stress.storm", *options, *places],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(facts.read_text())
    assert told["seed"] == 5 and told["violations"] == []
    assert told["figures"]["verified reads"] > 0
    assert "Every invariant held." in done.stdout
    (kept,) = tmp_path.glob("shardcache-storm-*")
    assert (kept / "history" / "boss.jsonl").stat().st_size > 0
    mounts = Path("/proc/mounts").read_text() if Path("/proc/mounts").exists() else ""
    assert str(kept) not in mounts
