"""Parse and format sizes, durations and other plain values.

``parse_*`` functions raise `ConfigError` for values that they do not accept. ``format_*`` functions
return rounded text for people; ``exact_*`` functions and ``str(Limit)`` return text that parses
back to the same value. Sizes are ``int`` bytes, durations are ``float`` seconds.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from shardcache.errors import ConfigError

MAX_BYTES = 2**63 - 1  #: the largest file offset (a signed 64-bit off_t)
#: 100 years. Python's locks refuse timeouts of 292 years (2^63 ns) or more.
MAX_SECONDS = 36_500 * 86_400.0
_MAX_TEXT = 64  #: characters of parsed text; int() would refuse more than 4300 digits

#: The units of `exact_bytes`, the largest first.
_BYTES = [
    (f"{prefix}{suffix}", base**power)
    for power, prefix in reversed([*enumerate("KMGTPE", 1)])
    for suffix, base in (("iB", 1024), ("B", 1000))
]
_SIZE_UNITS = {"": 1, "b": 1} | {unit.lower(): size for unit, size in _BYTES}
_SIZE_UNITS |= {unit[:-1].lower(): size for unit, size in _BYTES}  # k, ki
# An exponent needs a digit, so that 1E means one exabyte.
_SIZE = r"([0-9]*\.?[0-9]+(?:e\+?[0-9]{1,2})?)\s*([a-z]*)"
#: A pattern for each unit, and the unit in milliseconds: integers keep values like 350ms exact.
_DURATION_UNITS = {
    "w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m(?:in)?": 60_000, "s": 1000, "ms": 1,
}  # fmt: skip
_DURATION = r"\s*".join(rf"(?:([0-9]+(?:\.[0-9]+)?)\s*{unit})?" for unit in _DURATION_UNITS)
#: The units of `format_age` and `exact_duration`, in seconds.
_SECONDS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
_TRUTHS = dict.fromkeys(("1", "true", "yes", "on"), True)
_TRUTHS |= dict.fromkeys(("0", "false", "no", "off"), False)

_SIZES = "a number with a unit, such as 800GB or 1.5 TiB; in Python also an int of bytes"
_DURATIONS = "a number of seconds, or text such as 1h30m, 14d or 350ms"


def _refuse(value: object, noun: str, accepted: str) -> ConfigError:
    quoted = repr(value)
    quoted = quoted if len(quoted) <= _MAX_TEXT + 2 else f"{quoted[:_MAX_TEXT]}..."
    return ConfigError(f"{quoted} is not {noun}. Accepted: {accepted}.")


def parse_bytes(value: str | int | float, likely: str = "GB") -> int:
    """Convert a number, or text such as ``800GB``, ``1.5 TB``, ``1GiB`` or ``512k``, to bytes.

    K and KB are 1000, Ki and KiB are 1024. Text below 100,000 needs a unit, because a user who
    writes 800 rarely means bytes; programs, such as Kubernetes, state larger numbers of bytes.
    The error suggests the ``likely`` unit.
    """
    number: float = -1
    value = getattr(value, "item", lambda: value)()  # a number of numpy
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and len(value) <= _MAX_TEXT:
        match = re.fullmatch(_SIZE, value.strip().lower())
        unit = _SIZE_UNITS.get(match[2]) if match else None
        if match and unit:
            number = (int if match[1].isdigit() else float)(match[1]) * unit
            number = number if unit == 1 else int(number)
    if not 0 <= number <= MAX_BYTES or number % 1:
        raise _refuse(value, "a size", _SIZES)
    size = int(number)
    if 0 < size < 100_000 and isinstance(value, str) and (text := value.strip())[-1].isdigit():
        raise ConfigError(f"{text} has no unit. Write {size}{likely}.")
    return size


def format_bytes(n: float) -> str:
    """Return ``n`` bytes as text such as ``924.3 GB``, in decimal units or whole bytes."""
    if abs(n) < 999.5:
        return f"{n:.0f} B"
    # Use the next unit where rounding would reach 1000: 999,960 is 1.0 MB, not 1000.0 KB.
    power = next((p for p in range(1, 6) if abs(n) < 999.95 * 1000**p), 6)
    return f"{n / 1000**power:.1f} {'KMGTPE'[power - 1]}B"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 shard``, ``1,848 shards``."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def similar(name: str, names: Collection[str]) -> str:
    """Return the one of ``names`` that the user probably meant, or ""."""
    import difflib  # here, because it is rarely needed

    parts = [part for part in name.split("_") if part in names]  # "cache_dir": dir
    return next(iter(parts or difflib.get_close_matches(name, names, n=1)), "")


def format_rate(bytes_per_second: float) -> str:
    """Return a rate as text such as ``2.9 GB/s``."""
    return f"{format_bytes(bytes_per_second)}/s"


def exact_bytes(n: int) -> str:
    """Return text that parses to exactly ``n`` bytes, such as ``16MiB``."""
    fitting = (f"{n // size}{unit}" for unit, size in _BYTES if n and n % size == 0)
    return next(fitting, f"{n}B" if n else "0")


def parse_duration(value: str | float, accepted: str = _DURATIONS) -> float:
    """Convert a number, or text such as ``90``, ``1h30m``, ``14d`` or ``350ms``, to seconds."""
    number = -1.0
    value = getattr(value, "item", lambda: value)()  # a number of numpy
    if isinstance(value, str) and 0 < len(text := value.strip()) <= _MAX_TEXT:
        if match := re.fullmatch(_DURATION, text.lower()):
            parts = zip(match.groups(), _DURATION_UNITS.values(), strict=True)
            number = sum(
                float(count) * (ms // 1000) if ms > 1 else float(count) / 1000
                for count, ms in parts
                if count
            )
        elif re.fullmatch(r"[0-9]*\.?[0-9]+(e-[0-9]+)?", text):
            number = float(text)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    if not 0 <= number <= MAX_SECONDS:
        raise _refuse(value, "a duration", accepted)
    return float(number)


def parse_age(value: str | float) -> float:
    """Convert like `parse_duration`, but text needs a unit: a user who writes 14 may mean days."""
    if isinstance(value, str) and re.fullmatch("[0-9.]*[1-9][0-9.]*", text := value.strip()):
        raise ConfigError(f"{text} has no unit. Write {text}s, {text}m, {text}h or {text}d.")
    return parse_duration(value, "a number with a unit, such as 90s, 1h30m or 14d")


def exact_duration(seconds: float) -> str:
    """Return text that parses to exactly ``seconds``, such as ``90m``, ``14d`` or ``0.25s``."""
    for unit, size in _SECONDS:
        if seconds % size == 0 and (seconds or size == 1):
            return f"{int(seconds // size)}{unit}"
    text = repr(float(seconds))
    return text if "e" in text else f"{text}s"


def format_duration(seconds: float) -> str:
    """Return text such as ``90 us``, ``1.9 s``, ``2m 08s`` or ``14d``, with at most two units."""
    if seconds == 0:
        return "0 s"
    if seconds < 0.0009995:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{seconds * 1000:.{1 if seconds < 0.00995 else 0}f} ms"
    if seconds < 59.5:
        return f"{seconds:.{1 if seconds < 9.95 else 0}f} s"
    # Round to the smaller unit before splitting, so that 59.9 min is 1h, not 60m.
    if round(seconds) < 3_600:
        large, small, names = *divmod(round(seconds), 60), "ms"
    elif round(seconds / 60) < 1_440:
        large, small, names = *divmod(round(seconds / 60), 60), "hm"
    else:
        large, small, names = *divmod(round(seconds / 3_600), 24), "dh"
    width = 1 if names == "dh" else 2
    return f"{large}{names[0]}" + (f" {small:0{width}d}{names[1]}" if small else "")


def format_age(seconds: float) -> str:
    """Return text such as ``2m ago``; ``just now`` below 1 s, also if the clock was set back."""
    ages = (f"{int(seconds // size)}{name} ago" for name, size in _SECONDS if seconds >= size)
    return next(ages, "just now")


class Limit(NamedTuple):
    """Either a number of bytes or a percentage of a filesystem. `parse_limit` accepts its str."""

    bytes: int | None = None
    percent: float | None = None

    def of(self, total_bytes: int) -> int:
        """Return this limit in bytes on a filesystem of ``total_bytes``."""
        if self.percent is not None:
            return round(total_bytes * self.percent / 100)
        return self.bytes or 0

    def __str__(self) -> str:
        if self.percent is not None:
            return f"{repr(self.percent).removesuffix('.0')}%"
        return exact_bytes(self.bytes or 0)


def parse_limit(value: str | int | float | Limit) -> Limit:
    """Convert a size (see `parse_bytes`), or a percentage such as ``80%``, to a `Limit`."""
    if isinstance(value, Limit):
        return value
    if not (isinstance(value, str) and value.rstrip().endswith("%")):
        return Limit(bytes=parse_bytes(value))
    with contextlib.suppress(ValueError):
        if 0 <= (percent := float(value.rstrip()[:-1])) <= 100:
            return Limit(percent=percent)
    raise _refuse(value, "a limit", f"a percentage from 0% to 100%, or {_SIZES}")


def parse_choice(value: str, choices: Sequence[str]) -> str:
    """Return the item of ``choices`` that ``value`` names, ignoring case."""
    text = value.strip().lower() if isinstance(value, str) else ""
    if text not in choices:
        raise _refuse(value, "a choice", ", ".join(choices))
    return text


def parse_bool(value: str | bool | int) -> bool:
    """Convert 1/0, true/false, yes/no or on/off to a bool, ignoring case."""
    return _TRUTHS[parse_choice(str(value), list(_TRUTHS))]


def parse_count(value: str | int, minimum: int, maximum: int) -> int:
    """Convert an int, or text of decimal digits, to an int from ``minimum`` to ``maximum``."""
    text = str(value).strip()
    if not re.fullmatch("[0-9]{1,9}", text) or not minimum <= int(text) <= maximum:
        raise _refuse(value, "a count", f"a whole number from {minimum} to {maximum}")
    return int(text)
