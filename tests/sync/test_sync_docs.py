"""docs/sync.md tells the truth: every Python block in it is run, by the ranks of a job."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from benchmarks import races
from shardcache import sync
from tests.support.fuseshim import REPOSITORY
from tests.support.racestories import STORIES
from tests.support.storetools import Parent, crowd

TEXT = (REPOSITORY / "docs" / "sync.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
RANKS = 3


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_block_runs_on_all_ranks_of_a_job(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDCACHE_JOB", f"docs-{tmp_path.name}")
    monkeypatch.setenv("SHARDCACHE_SYNC_DIR", str(tmp_path / "meet"))
    (tmp_path / "home" / "me" / "project").mkdir(parents=True)
    (tmp_path / "home" / "me" / "project" / "train.py").write_text("import model\n")
    for place in ("/nfs/", "/local/", "/home/"):
        block = block.replace(f'"{place}', f'"{tmp_path}{place}')

    def rank(parent: Parent, number: int) -> None:
        os.environ |= {"RANK": str(number), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(number)}
        exec(compile(block, "docs/sync.md", "exec"), {"__name__": "docs"})  # noqa: S102 - our own
        parent.say("done")

    with crowd(RANKS, rank) as children:
        assert [child.hear() for child in children] == ["done"] * RANKS


def test_there_is_a_recipe_for_every_story_and_a_row_in_the_table() -> None:
    rows = re.findall(r"^\| (.+?) \| (\d+)/(\d+) \| .* \| (\d+)/(\d+) \|$", TEXT, re.MULTILINE)
    assert [name for name, *_ in rows] == list(STORIES)
    for _, failed, runs, failed_after, runs_after in rows:
        assert int(runs) == int(runs_after) >= 10 and int(failed) > int(failed_after) == 0
    assert f"python -m {races.__name__} --runs" in TEXT


def test_everything_that_is_public_is_described() -> None:
    for name in sync.__all__:
        if name != "Once":
            assert re.search(rf"`{name}\b", TEXT), name
