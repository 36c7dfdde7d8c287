"""Runs the blocks of docs/integrations.md that need only torch and WebDataset.

`tests/packages` runs the others.
"""

import contextlib
import io
import re
import warnings

import pytest

from shardcache import default_cache
from shardcache.urls import _READERS
from tests.support.trainingtools import NEEDS, PAGE, DataSet, blocks


@pytest.mark.usefixtures("s3_environment")
@pytest.mark.parametrize("block", [b for b in blocks() if not NEEDS[b.section]], ids=str)
def test_a_block_prints_its_output_and_downloads_each_shard_once(
    block, s3, proxy, tmp_path, monkeypatch
):
    s3.create_bucket("bucket")
    data, out = DataSet(s3, "bucket", proxy), io.StringIO()
    monkeypatch.setenv("SHARDCACHE_DIR", str(tmp_path / "shards"))
    monkeypatch.setenv("SHARDCACHE_MIN_FREE", "0")
    default_cache.cache_clear()
    with warnings.catch_warnings(), contextlib.redirect_stdout(out):
        warnings.simplefilter("ignore")  # torch warns of forks
        exec(compile(block.here(tmp_path), str(block), "exec"), {"__name__": "__main__"})  # noqa: S102
    block.check(out.getvalue())
    assert data.once()


def test_every_section_with_code_is_tested():
    assert {block.section for block in blocks()} == set(NEEDS)


def test_the_page_lists_all_supported_commands_and_options():
    rows = re.findall(r"^\| `(\w+) .*?` \| (.*) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    named = {program: set(re.findall(r"`(-.+?)`", options)) for program, options in rows}
    assert named == {name: {*reader.flags, *reader.values} for name, reader in _READERS.items()}
