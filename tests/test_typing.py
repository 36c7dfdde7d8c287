"""What type checkers are told is what there is. `make lint` has them read tests/typing."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardcache import options
from shardcache.cache import Cache
from shardcache.config import Config, TierOption, Upstream
from shardcache.prewarm import run as prewarm
from shardcache.results import Event

#: What the annotations of `options` name and only checkers import.
NAMES = {"TierOption": TierOption, "Upstream": Upstream, "Event": Event}
OPTIONS = typing.get_type_hints(options.Options, None, NAMES)


def test_checkers_know_the_options_of_a_cache() -> None:
    assert list(OPTIONS) == [field.name for field in dataclasses.fields(Config)][1:]
    real = typing.get_type_hints(Config)
    for name, kind in OPTIONS.items():
        if typing.get_origin(real[name]) is typing.Literal:
            assert typing.get_args(kind)[0] == real[name]


#: One value for each form that `options.Options` says an option may have.
FORMS: dict[Any, list[Any]] = {
    int: [3],
    float: [1.5],
    str: ["1"],
    bool: [True],
    type(None): [None],
}


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_every_form_that_checkers_let_pass_is_accepted(name: str, tmp_path: Path) -> None:
    special: dict[str, list[Any]] = {
        "tiers": ["/t=1GB", ["/t=1GB"], [{"dir": "/t", "max_size": "1GB"}], None],
        "upstreams": ["/nas", ["/nas"], [{"url": "/nas"}], [Path("/nas")], None],
        "allow_schemes": ["pipe", ["pipe"], {"pipe"}, None],
        "storage_options": [{"profile": "lab"}, None],
        "validate": [lambda path: None, None],
        "endpoint_url": ["http://127.0.0.1:9", None],
        "shared_group": [0, "0", None],
        "part_size": ["8MiB", 8 << 20, None],
    }
    values = special.get(name, [])
    if not values:
        for part in typing.get_args(OPTIONS[name]):
            if typing.get_origin(part) is typing.Literal:
                values += typing.get_args(part)
            else:
                values += FORMS[part]
    for value in values:
        Cache(tmp_path / "cache", **{name: value})  # type: ignore[misc]


def test_checkers_know_the_options_of_a_prewarm() -> None:
    told = typing.get_type_hints(options.PrewarmOptions, None, NAMES)
    real = inspect.signature(prewarm.prewarm).parameters
    keywords = [name for name, p in real.items() if p.kind is p.KEYWORD_ONLY and name != "share"]
    names = vars(prewarm) | {"Cache": Cache, "Callable": Callable}
    hints = typing.get_type_hints(prewarm.prewarm, names)
    assert {name: told.get(name) for name in told} == {name: hints[name] for name in keywords}
