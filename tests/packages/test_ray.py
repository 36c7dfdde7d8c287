"""The Ray example on a cluster of its own."""

from __future__ import annotations

import re
import sys

from tests.packages.conftest import Bench
from tests.support.trainingtools import EXAMPLES, run


def test_the_ray_example_prewarms_and_reads_every_sample(bench: Bench) -> None:
    command = [sys.executable, str(EXAMPLES / "ray_train.py"), bench.data.spec]
    done = run([*command, "--dir", str(bench.cache)], 170)
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"\S+: 4 shards cached, 0 not", lines[0])
    assert lines[1:] == [f"epoch {n}: 24 samples, 24 different" for n in (1, 2)]
    assert bench.data.once()
