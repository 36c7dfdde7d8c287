"""Sizes, durations and limits: what is read, what is refused, what survives a round trip."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache import units
from shardcache.errors import ConfigError
from shardcache.units import Limit

SIZES = st.integers(0, units.MAX_BYTES)
SECONDS = st.floats(0, units.MAX_SECONDS)
PERCENTS = st.floats(0, 100)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        (" 7 B ", 7),
        ("512k", 512_000),
        ("512kb", 512_000),
        ("512KiB", 524_288),
        ("512kib", 524_288),
        ("800GB", 800 * 10**9),
        ("1.5 TB", 1_500_000_000_000),
        ("1GiB", 2**30),
        ("1.5GiB", 3 * 2**29),
        (".5kb", 500),
        ("0.3KiB", 307),
        ("1e12", 10**12),
        ("1.5e3", 1500),
        ("1E", 10**18),
        ("1e3KB", 10**6),
        ("9223372036854775807", 2**63 - 1),
        (4096, 4096),
        (8e9, 8 * 10**9),
    ],
)
def test_a_size_reads_as_the_bytes_it_says(text: str | int | float, size: int) -> None:
    assert units.parse_bytes(text) == size
    assert type(units.parse_bytes(text)) is int


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "empty"),
        ("-1GB", "negative"),
        (-1, "negative"),
        ("nan", "does not read"),
        (math.nan, "not finite"),
        (math.inf, "not finite"),
        ("5 parsecs", "does not read"),
        ("5iB", "does not read"),
        ("GB", "does not read"),
        ("1.2.3GB", "does not read"),
        ("1,5GB", "does not read"),
        ("1.5", "fraction of a byte"),
        (1.5, "fraction of a byte"),
        ("9223372036854775808", "too large"),
        ("1e99EB", "too large"),
        ("9" * 5000, "does not read"),
        (True, "bool"),
        (None, "NoneType"),
        (b"1GB", "bytes"),
    ],
)
def test_a_size_that_means_nothing_is_refused_with_what_is_accepted(
    value: object, reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        units.parse_bytes(value)  # type: ignore[arg-type]
    assert reason in str(caught.value)
    assert "Accepted: a whole number of bytes" in str(caught.value)
    assert "800GB" in str(caught.value)
    assert len(str(caught.value)) < 400


@given(SIZES, SECONDS)
def test_exact_text_reads_as_the_very_same_value(size: int, seconds: float) -> None:
    assert units.parse_bytes(units.exact_bytes(size)) == size
    assert units.parse_duration(units.exact_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1.0 KB"),
        (1000, "1.0 KB"),
        (999_949, "999.9 KB"),
        (999_960, "1.0 MB"),
        (924_300_000_000, "924.3 GB"),
        (10**12, "1.0 TB"),
        (2**63, "9.2 EB"),
        (-1500, "-1.5 KB"),
    ],
)
def test_format_bytes_reads_like_the_command_line(size: float, text: str) -> None:
    assert units.format_bytes(size) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("90", 90.0),
        ("90s", 90.0),
        ("1.5", 1.5),
        ("1h30m", 5400.0),
        ("1h 30m", 5400.0),
        ("1H30M", 5400.0),
        ("2m 08s", 128.0),
        ("5min", 300.0),
        ("1.5h", 5400.0),
        ("14d", 1_209_600.0),
        ("1w2d", 777_600.0),
        ("350ms", 0.35),
        ("350 ms", 0.35),
        ("1m5ms", 60.005),
        (90, 90.0),
        (0.25, 0.25),
    ],
)
def test_a_duration_reads_as_the_seconds_it_says(text: str | float, seconds: float) -> None:
    assert units.parse_duration(text) == seconds
    assert type(units.parse_duration(text)) is float


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "empty"),
        ("-3", "negative"),
        (-0.5, "negative"),
        ("nan", "not finite"),
        ("inf", "not finite"),
        (math.nan, "not finite"),
        (math.inf, "not finite"),
        ("30m1h", "does not read"),
        ("1h1h", "does not read"),
        ("5 fortnights", "does not read"),
        ("h", "does not read"),
        ("1:30:00", "does not read"),
        ("101w5300d" * 20, "does not read"),
        ("36501d", "too large"),
        (10**400, "too large"),
        (True, "bool"),
        (None, "NoneType"),
    ],
)
def test_a_duration_that_means_nothing_is_refused_with_what_is_accepted(
    value: object, reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        units.parse_duration(value)  # type: ignore[arg-type]
    assert reason in str(caught.value)
    assert "Accepted: a number of seconds" in str(caught.value)
    assert "1h30m" in str(caught.value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0002, "0.2 ms"),
        (0.35, "350 ms"),
        (0.9996, "1.0 s"),
        (1.9, "1.9 s"),
        (9.96, "10 s"),
        (59.6, "1m"),
        (128, "2m 08s"),
        (1800, "30m"),
        (3599.6, "1h"),
        (5400, "1h 30m"),
        (86_399, "1d"),
        (1_209_600, "14d"),
        (1_220_400, "14d 3h"),
        (-5, "-5.0 s"),
        (math.inf, "-"),
        (math.nan, "-"),
    ],
)
def test_format_duration_carries_into_the_next_unit(seconds: float, text: str) -> None:
    assert units.format_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "just now"),
        (0.9, "just now"),
        (1, "1s ago"),
        (125, "2m ago"),
        (23_000, "6h ago"),
        (90_000, "1d ago"),
        (math.nan, "-"),
    ],
)
def test_format_age_never_speaks_of_the_future(seconds: float, text: str) -> None:
    assert units.format_age(seconds) == text


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
