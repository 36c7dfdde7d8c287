"""docs/sync.md tells the truth: every Python block in it is run, by the ranks of a job."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from shardcache import sync
from tests.support.storetools import crowd

TEXT = (Path(__file__).parents[2] / "docs" / "sync.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
RANKS = 3


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_block_runs_on_all_ranks_of_a_job(block, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDCACHE_JOB", f"docs-{tmp_path.name}")
    monkeypatch.setenv("SHARDCACHE_SYNC_DIR", str(tmp_path / "meet"))
    (project := tmp_path / "home" / "me" / "project").mkdir(parents=True)
    (project / "train.py").write_text("import model\n")
    for place in ("/nfs/", "/local/", "/home/"):
        block = block.replace(f'"{place}', f'"{tmp_path}{place}')

    def rank(parent, number):
        os.environ |= {"RANK": str(number), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(number)}
        exec(compile(block, "docs/sync.md", "exec"), {"__name__": "docs"})  # noqa: S102 - our own
        parent.say("done")

    with crowd(RANKS, rank) as children:
        assert [child.hear() for child in children] == ["done"] * RANKS


def test_everything_that_is_public_is_described() -> None:
    for name in sync.__all__:
        assert re.search(rf"`{name}\b", TEXT), name
