"""Sizes, durations and limits: parsing, refusals and formats."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from shardcache import units
from shardcache.errors import ConfigError
from shardcache.units import Limit

count = partial(units.parse_count, minimum=1, maximum=256)
choice = partial(units.parse_choice, choices=("node", "rank"))
READ: dict[Callable[..., Any], dict[Any, Any]] = {
    units.parse_bytes: {
        "0": 0, " 7 B ": 7, "512k": 512_000, "512KiB": 524_288, "800GB": 8 * 10**11,
        "1.5 TB": 15 * 10**11, "1.5GiB": 3 * 2**29, ".5kb": 500, "0.3KiB": 307, "1e12B": 10**12,
        "1E": 10**18, "1e3KB": 10**6, f"{2**63 - 1}B": 2**63 - 1, 4096: 4096, 8e9: 8 * 10**9,
    },
    units.parse_duration: {
        "0": 0.0, "90": 90.0, "90s": 90.0, "1.5": 1.5, "1h 30m": 5400.0, "1H30M": 5400.0,
        "2m 08s": 128.0, "5min": 300.0, "1.5h": 5400.0, "1w2d": 777_600.0, "350 ms": 0.35,
        "1m5ms": 60.005, 90: 90.0, 0.25: 0.25,
    },
    units.parse_limit: {
        " 12.5 % ": Limit(percent=12.5), "1TB": Limit(bytes=10**12), 7: Limit(bytes=7),
        Limit(percent=3.0): Limit(percent=3.0),
    },
    units.parse_bool: {"ON": True, "0": False, True: True},
    count: {" 256 ": 256, 1: 1},
    choice: {" Node ": "node"},
}  # fmt: skip
SHOWN: dict[Callable[..., str], dict[Any, str]] = {
    units.format_bytes: {
        0: "0 B", 999: "999 B", 999.6: "1.0 KB", 999_949: "999.9 KB", 999_960: "1.0 MB",
        924_300_000_000: "924.3 GB", 2**63: "9.2 EB", -1500: "-1.5 KB",
    },
    units.format_duration: {
        0: "0 s", 0.0002: "200 us", 0.002: "2.0 ms", 0.35: "350 ms", 0.9996: "1.0 s", 1.9: "1.9 s",
        9.96: "10 s", 59.6: "1m", 128: "2m 08s", 3599.6: "1h", 5400: "1h 30m", 86_399: "1d",
        1.2204e6: "14d 3h",
    },
    units.format_age: {-5: "just now", 0.9: "just now", 1: "1s ago", 125: "2m ago", 9e4: "1d ago"},
    str: {Limit(percent=12.5): "12.5%", Limit(percent=80.0): "80%", Limit(bytes=10**12): "1TB"},
    units.exact_bytes: {0: "0", 1000: "1KB", 16 << 20: "16MiB", 1001: "1001B"},
    units.exact_duration: {0: "0s", 90: "90s", 1800: "30m", 1_209_600: "14d", 0.25: "0.25s"},
}  # fmt: skip
REFUSED: dict[Callable[..., Any], list[Any]] = {
    units.parse_bytes: [
        "", "-1GB", -1, math.nan, math.inf, "nan", "5 parsecs", "5iB", "GB", "1.2.3GB", "1,5GB",
        "9" * 5000, "1.5", 1.5, "9223372036854775808", "1e99EB", True, None, b"1GB",
    ],
    units.parse_duration: [
        "", "-3", -0.5, "nan", "inf", math.nan, math.inf, "30m1h", "1h1h", "5 fortnights", "h",
        "1:30:00", "101w5300d" * 20, "36501d", 10**400, True, None, "1e1", "1_0",
    ],
    units.parse_limit: ["120%", "-1%", "nan%", "%", "many%", "5 parsecs", "", -1],
    units.parse_bool: ["", "maybe", 2, 1.0, None],
    count: ["", "0", 0, 257, "1.0", 1.0, "+1", "1_0", "\N{ARABIC-INDIC DIGIT ONE}", True, None],
    choice: ["", "nod", None, 1],
}  # fmt: skip


@pytest.mark.parametrize("parse", READ)
def test_valid_text_is_parsed(parse):
    for text, value in READ[parse].items():
        found = parse(text)
        assert (found, type(found)) == (value, type(value)), text


@pytest.mark.parametrize("parse", REFUSED)
def test_invalid_values_are_refused(parse):
    for value in REFUSED[parse]:
        with pytest.raises(ConfigError, match=r"is not .*\. Accepted: ") as caught:
            parse(value)
        assert len(str(caught.value)) < 400


def test_a_number_without_a_unit_is_refused():
    assert units.parse_bytes("10737418240") == 10 << 30  # as Kubernetes states a limit
    advices = {units.parse_bytes: "14GB", units.parse_limit: "14GB"}
    for parse, advice in {**advices, units.parse_age: "14s, 14m, 14h or 14d"}.items():
        with pytest.raises(ConfigError, match=f"^14 has no unit. Write {advice}.$"):
            parse("14")
    assert units.parse_bytes(np.int64(10**9)) == 10**9 and units.parse_duration(np.float32(2)) == 2
    with pytest.raises(ConfigError, match="with a unit, such as 90s"):
        units.parse_age("forever")


@pytest.mark.parametrize("show", SHOWN)
def test_values_are_rounded_and_carry_into_the_next_unit(show):
    assert {value: show(value) for value in SHOWN[show]} == SHOWN[show]
