"""What the storm is made of; the storm itself is a command."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stress.origin import Shards

SHARDS = Shards(4, seed=1)
NAME = SHARDS.names[0]


@pytest.mark.parametrize(
    "bend",
    [
        lambda data, other: data[:-1],
        lambda data, other: data + b"\0",
        lambda data, other: data[:5000] + bytes(100) + data[5100:],
        lambda data, other: data[:8192] + other[8192:],
        lambda data, other: b"<html>not found</html>",
    ],
    ids=["a lost tail", "a byte too many", "a hole", "two versions", "a page"],
)
def test_a_shard_says_what_is_wrong_with_it(bend: Any) -> None:
    data, other = SHARDS.data(NAME, 0), SHARDS.data(NAME, 1)
    assert SHARDS.examine(NAME, data) == (0, None) and SHARDS.examine(NAME, other) == (1, None)
    assert SHARDS.examine(NAME, bend(data, other))[1] is not None
