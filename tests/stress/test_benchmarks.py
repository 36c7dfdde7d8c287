"""The benchmarks run; docs/benchmarks.md has their results."""

import sys

import pytest

from tests.support.trainingtools import run


@pytest.mark.parametrize("module", ["hits", "growth", "samples", "transfers"])
def test_a_quick_run_ends_in_order(module):
    command = [sys.executable, "-m", f"benchmarks.{module}", "--quick"]
    if module == "transfers":
        command += ["--only", "small,s3-like,shardcache"]
    assert "|" in run(command, 500).stdout  # a table
