"""The benchmarks run; docs/benchmarks.md has their results."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("module", ["hits", "growth", "samples", "transfers"])
def test_a_quick_run_ends_in_order(module):
    command = [sys.executable, "-m", f"benchmarks.{module}", "--quick"]
    if module == "transfers":
        command += ["--only", "small,s3-like,shardcache"]
    home = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "|" in done.stdout  # a table
