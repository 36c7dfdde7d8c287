"""docs/integrations.md: every block that needs more than torch and WebDataset."""

from __future__ import annotations

import importlib

import pytest

from tests.packages.conftest import Bench
from tests.support.pagetools import NEEDS, Block, blocks


@pytest.mark.parametrize("block", [b for b in blocks() if NEEDS[b.section]], ids=str)
def test_a_block_prints_what_it_says_and_fetches_each_object_once(
    block: Block, bench: Bench
) -> None:
    for name in NEEDS[block.section]:
        importlib.import_module(name.partition(".")[0])  # or else the extra is not installed
    block.check(bench.run(block.here(bench.directory)))
    assert bench.fetched() == block.objects
