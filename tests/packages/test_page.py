"""The blocks of docs/integrations.md that need more packages, and the Ray example."""

import importlib
import re
import sys

import pytest

from tests.support.trainingtools import EXAMPLES, NEEDS, blocks, run

PLAIN = [block for block in blocks() if NEEDS[block.section] and not block.resumes]


@pytest.mark.parametrize("block", PLAIN, ids=str)
def test_a_block_prints_its_output_and_downloads_each_object_once(block, bench):
    for name in NEEDS[block.section]:
        importlib.import_module(name.partition(".")[0])  # fail early if it is not installed
    block.check(bench.run(block.here(bench.directory)))
    assert bench.fetched()


def test_the_ray_example_prewarms_and_reads_every_sample(bench):
    command = [sys.executable, str(EXAMPLES / "ray_train.py"), bench.data.spec]
    lines = run([*command, "--dir", str(bench.cache)], 500).stdout.splitlines()
    assert re.fullmatch(r"\S+: 4 shards cached, 0 not", lines[0])
    assert lines[1:] == [f"epoch {n}: 24 samples, 24 different" for n in (1, 2)]
    assert bench.data.once()
