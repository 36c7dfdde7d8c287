"""Sizes, durations and limits: what is read, what is refused, what survives a round trip."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache import units
from shardcache.errors import ConfigError
from shardcache.units import Limit

SIZES = st.integers(0, units.MAX_BYTES)
SECONDS = st.floats(0, units.MAX_SECONDS)
PERCENTS = st.floats(0, 100)


READ = {
    units.parse_bytes: {
        "0": 0,
        "512": 512,
        " 7 B ": 7,
        "512k": 512_000,
        "512kb": 512_000,
        "512KiB": 524_288,
        "512kib": 524_288,
        "800GB": 800 * 10**9,
        "1.5 TB": 1_500_000_000_000,
        "1GiB": 2**30,
        "1.5GiB": 3 * 2**29,
        ".5kb": 500,
        "0.3KiB": 307,
        "1e12": 10**12,
        "1.5e3": 1500,
        "1E": 10**18,
        "1e3KB": 10**6,
        "9223372036854775807": 2**63 - 1,
        4096: 4096,
        8e9: 8 * 10**9,
    },
    units.parse_duration: {
        "0": 0.0,
        "90": 90.0,
        "90s": 90.0,
        "1.5": 1.5,
        "1h30m": 5400.0,
        "1h 30m": 5400.0,
        "1H30M": 5400.0,
        "2m 08s": 128.0,
        "5min": 300.0,
        "1.5h": 5400.0,
        "14d": 1_209_600.0,
        "1w2d": 777_600.0,
        "350ms": 0.35,
        "350 ms": 0.35,
        "1m5ms": 60.005,
        90: 90.0,
        0.25: 0.25,
    },
}
SHOWN = {
    units.format_bytes: {
        0: "0 B",
        999: "999 B",
        999.6: "1.0 KB",
        1000: "1.0 KB",
        999_949: "999.9 KB",
        999_960: "1.0 MB",
        924_300_000_000: "924.3 GB",
        10**12: "1.0 TB",
        2**63: "9.2 EB",
        -1500: "-1.5 KB",
    },
    units.format_duration: {
        0: "0 s",
        0.0002: "0.2 ms",
        0.35: "350 ms",
        0.9996: "1.0 s",
        1.9: "1.9 s",
        9.96: "10 s",
        59.6: "1m",
        128: "2m 08s",
        1800: "30m",
        3599.6: "1h",
        5400: "1h 30m",
        86_399: "1d",
        1_209_600: "14d",
        1_220_400: "14d 3h",
        -5: "-5.0 s",
        math.inf: "-",
        math.nan: "-",
    },
    units.format_age: {
        -5: "just now",
        0.9: "just now",
        1: "1s ago",
        125: "2m ago",
        23_000: "6h ago",
        90_000: "1d ago",
        math.nan: "-",
    },
}


def test_text_reads_as_what_it_says() -> None:
    for parse, cases in READ.items():
        for text, value in cases.items():
            found = parse(text)
            assert (found, type(found)) == (value, type(value)), text


def test_values_are_shown_rounded_and_carry_into_the_next_unit() -> None:
    for show, cases in SHOWN.items():
        assert {value: show(value) for value in cases} == cases


REFUSED = {
    units.parse_bytes: {
        "is empty": [""],
        "is negative": ["-1GB", -1],
        "is not finite": [math.nan, math.inf],
        "does not read": ["nan", "5 parsecs", "5iB", "GB", "1.2.3GB", "1,5GB", "9" * 5000],
        "fraction of a byte": ["1.5", 1.5],
        "too large": ["9223372036854775808", "1e99EB"],
        "is a ": [True, None, b"1GB"],
    },
    units.parse_duration: {
        "is empty": [""],
        "is negative": ["-3", -0.5],
        "is not finite": ["nan", "inf", math.nan, math.inf],
        "does not read": ["30m1h", "1h1h", "5 fortnights", "h", "1:30:00", "101w5300d" * 20],
        "too large": ["36501d", 10**400],
        "is a ": [True, None],
    },
}


@pytest.mark.parametrize("parse", REFUSED, ids=["size", "duration"])
def test_what_means_nothing_is_refused_with_what_is_accepted(parse: Callable[..., float]) -> None:
    accepted = {units.parse_bytes: "800GB", units.parse_duration: "1h30m"}[parse]
    for reason, values in REFUSED[parse].items():
        for value in values:
            with pytest.raises(
                ConfigError, match=f"{reason}.*Accepted: a.* number .*{accepted}"
            ) as e:
                parse(value)
            assert len(str(e.value)) < 400


@given(SIZES, SECONDS)
def test_exact_text_reads_as_the_very_same_value(size: int, seconds: float) -> None:
    assert units.parse_bytes(units.exact_bytes(size)) == size
    assert units.parse_duration(units.exact_duration(seconds)) == seconds


@given(SIZES)
def test_a_limit_in_bytes_round_trips_and_ignores_the_total(size: int) -> None:
    limit = Limit(bytes=size)
    assert units.parse_limit(str(limit)) == limit
    assert units.parse_limit(size) == limit
    assert limit.of(0) == limit.of(units.MAX_BYTES) == size


@pytest.mark.parametrize(
    ("percent", "total", "part"),
    [(0, 10**12, 0), (5, 10**12, 5 * 10**10), (10.1, 1000, 101), (100, 2**63 - 1, 2**63 - 1)],
)
def test_a_percentage_is_exact_where_floats_are_not(percent: float, total: int, part: int) -> None:
    assert Limit(percent=percent).of(total) == part


@pytest.mark.parametrize(
    ("value", "text"),
    [("80%", "80%"), (" 12.5 % ", "12.5%"), ("-0%", "0%"), ("1TB", "1TB"), ("1024", "1KiB")],
)
def test_a_limit_prints_as_people_write_it(value: str, text: str) -> None:
    assert str(units.parse_limit(value)) == text


@pytest.mark.parametrize(
    "value", ["120%", "-1%", "nan%", "inf%", "%", "many%", "5 parsecs", "", -1]
)
def test_a_limit_that_means_nothing_is_refused_with_what_is_accepted(value: str | int) -> None:
    with pytest.raises(ConfigError, match=r"Accepted: .*800GB"):
        units.parse_limit(value)


@pytest.mark.parametrize("value", ["", "maybe", 2, 1.0, None, "truefalse"])
def test_anything_else_is_neither_true_nor_false(value: object) -> None:
    with pytest.raises(ConfigError, match="Accepted: 1, true, yes, on, 0"):
        units.parse_bool(value)  # type: ignore[arg-type]


@given(st.integers(1, 256))
def test_a_count_reads_from_digits_and_numbers(count: int) -> None:
    assert units.parse_count(f" {count} ", 1, 256) == units.parse_count(count, 1, 256) == count


@pytest.mark.parametrize(
    "value",
    ["", "0", 0, "257", 257, "1.0", 1.0, "+1", "1_0", "\N{ARABIC-INDIC DIGIT ONE}", True, None],
)
def test_a_count_out_of_range_or_shape_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="Accepted: a whole number from 1 to 256"):
        units.parse_count(value, 1, 256)  # type: ignore[arg-type]


def test_a_choice_is_matched_whatever_its_case_and_others_are_refused() -> None:
    assert units.parse_choice(" Node ", ("node", "rank")) == "node"
    for value in ("", "nod", None, 1):
        with pytest.raises(ConfigError, match="Accepted: node, rank"):
            units.parse_choice(value, ("node", "rank"))  # type: ignore[arg-type]
