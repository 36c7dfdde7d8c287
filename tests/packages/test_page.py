"""The blocks of docs/integrations.md that need more packages, and the Ray example."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.trainingtools import EXAMPLES, PLAIN, blocks, run

OTHERS = [b for b in blocks() if b.section not in PLAIN and not b.resumes]


@pytest.mark.parametrize("block", OTHERS, ids=str)
def test_a_block_prints_its_output_and_downloads_each_object_once(block, bench):
    block.check(bench.run(block.here(bench.directory)))
    assert bench.fetched()


def test_the_ray_example_prewarms_and_reads_every_sample(bench):
    command = [sys.executable, str(EXAMPLES / "ray_train.py"), bench.data.spec]
    lines = run([*command, "--dir", str(bench.cache)], 500).stdout.splitlines()
    assert re.fullmatch(r"\S+: 4 shards cached, 0 not", lines[0])
    assert lines[1:] == [f"epoch {n}: 24 samples, 24 different" for n in (1, 2)]
    assert bench.data.once()


def test_the_line_for_boto3_and_awscli_leaves_botocore_as_it_is():
    page = (EXAMPLES.parent / "docs/troubleshooting.md").read_text("utf-8")
    [line] = re.findall(r"^pip install boto3 .*$", page, re.M)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    streams = {"capture_output": True, "text": True, "env": {"PATH": path}}

    def pip(command):
        return subprocess.run(command, shell=True, **streams)

    if pip("pip index versions boto3").returncode:
        pytest.skip("no package index")
    done = pip(f"{line} --dry-run")
    assert done.returncode == 0, done.stderr
    assert "boto3-" in done.stdout and "awscli-" in done.stdout and " botocore-" not in done.stdout
