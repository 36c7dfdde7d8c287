"""What cannot work is refused before anything is touched."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardcache import sync
from shardcache.errors import ConfigError

ONCE = partial(sync.once, "k", print)
BARRIER = partial(sync.barrier, world_size=2)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        *((ONCE, options) for options in ({"per": "rank"}, {"lease": 0.1}, {"job": ""})),
        (partial(sync.once, " ", print), {}),
        *((BARRIER, options) for options in ({"name": ""}, {"rank": 2}, {"rank": -1})),
        (BARRIER, {"world_size": 0}),
        *((each, {"timeout": t}) for each in (ONCE, BARRIER) for t in (-1, "soon", True)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else value.func.__name__,
)
def test_ranks_do_not_meet(
    tmp_path: Path, function: Callable[..., object], options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        function(dir=tmp_path, **options)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("timeout", [-1, "soon", float("nan"), True])
def test_nobody_waits(tmp_path: Path, timeout: Any) -> None:
    with pytest.raises(ConfigError):
        sync.makedirs(tmp_path / "x", timeout=timeout)
    with pytest.raises(ConfigError):
        sync.wait_for(tmp_path / "x", timeout=timeout)
    with pytest.raises(ConfigError, match="no path"):
        sync.wait_for([])
    assert os.listdir(tmp_path) == []
