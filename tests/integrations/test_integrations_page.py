"""docs/integrations.md tells the truth: what needs torch and WebDataset alone runs here.

The rest runs in `tests/integrations`.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path

import pytest

from shardcache.cli.demo import S3Server
from tests.support.pagetools import NEEDS, Block, blocks
from tests.support.proxy import Proxy
from tests.support.trainingtools import DataSet


@pytest.fixture
def data(
    s3: S3Server,
    s3_environment: dict[str, str],
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> DataSet:
    """The bucket of the page, by its name."""
    s3.create_bucket("bucket")
    monkeypatch.setenv("SHARDCACHE_DIR", str(tmp_path / "shards"))
    monkeypatch.setenv("SHARDCACHE_MIN_FREE", "0")
    monkeypatch.setattr("shardcache.cache._default", None)
    return DataSet(s3, "bucket", proxy)


@pytest.mark.parametrize("block", [b for b in blocks() if not NEEDS[b.section]], ids=str)
def test_a_block_prints_what_it_says_and_fetches_each_shard_once(
    block: Block, data: DataSet, tmp_path: Path
) -> None:
    out = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(out):
        warnings.simplefilter("ignore")  # torch's, of what forks
        exec(compile(block.here(tmp_path), str(block), "exec"), {"__name__": "__main__"})  # noqa: S102
    block.check(out.getvalue())
    assert data.once()


def test_every_section_with_code_is_run_somewhere() -> None:
    assert {block.section for block in blocks()} == set(NEEDS)
    assert sum(not needs for needs in NEEDS.values()) == 3
