"""Sizes, durations and other plain values: from what people write to what they read.

``format_*`` is for eyes: rounded, with a space before the unit. ``exact_*`` and ``str(Limit)`` are
for configuration: what they return parses back to the very same value.

Sizes are ``int`` bytes, durations ``float`` seconds. GB is 10^9, GiB is 2^30.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardcache.errors import ConfigError

#: The largest file offset (a signed 64-bit off_t): no size beyond it can exist.
MAX_BYTES = 2**63 - 1
#: 100 years. Python's locks refuse time-outs from 292 years on (2^63 ns).
MAX_SECONDS = 36_500 * 86_400.0
#: Characters. No size or duration needs more; int() refuses beyond 4300 digits anyway.
_MAX_TEXT = 64

_DECIMAL = ("KB", "MB", "GB", "TB", "PB", "EB")
_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_SIZE_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgtpe", 1):
    _SIZE_UNITS |= dict.fromkeys((_prefix, f"{_prefix}b"), 1000**_power)
    _SIZE_UNITS |= dict.fromkeys((f"{_prefix}i", f"{_prefix}ib"), 1024**_power)
# Patterns are compiled when first used: `import shardcache` stays light.
# The exponent needs a digit behind it, so that 1E stays one exabyte.
_SIZE = r"([0-9]*\.?[0-9]+(?:e\+?[0-9]{1,2})?)\s*([a-z]*)"
#: Spelling, and thousandths of a second, which keep 350ms exact.
_DURATION_UNITS = {
    "w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m(?:in)?": 60_000, "s": 1000, "ms": 1,
}  # fmt: skip
_DURATION = r"\s*".join(rf"(?:([0-9]+(?:\.[0-9]+)?)\s*{unit})?" for unit in _DURATION_UNITS)
#: What ages and exact durations are in.
_SECONDS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
_TRUTHS = dict.fromkeys(("1", "true", "yes", "on"), True)
_TRUTHS |= dict.fromkeys(("0", "false", "no", "off"), False)

_ACCEPT_SIZE = (
    "a number with B, KB, MB, GB, TB, PB (powers of 1000) or KiB, MiB, GiB, TiB, PiB "
    "(powers of 1024), for example 800GB or 1.5 TiB; in Python also an int of bytes"
)
_ACCEPT_DURATION = (
    "a number of seconds, or w, d, h, m (minutes), s and ms, largest first, "
    "for example 90, 1h30m, 14d or 350ms"
)


def _refuse(value: object, noun: str, accepted: str) -> ConfigError:
    shown = repr(value)
    if len(shown) > _MAX_TEXT + 2:
        shown = f"{shown[:_MAX_TEXT]}..."
    return ConfigError(f"{shown} is not {noun}. Accepted: {accepted}.")


def parse_bytes(value: str | int | float) -> int:
    """Bytes from a number or from text such as ``800GB``, ``1.5 TB``, ``1GiB``, ``512k``.

    Case does not matter; K and KB are 1000, Ki and KiB are 1024. Text needs a unit, unless it
    is 0: whoever writes 800 hardly means bytes. A fraction of a unit is rounded down to whole
    bytes. ConfigError for what is negative, not finite, above `MAX_BYTES`, or has no unit.
    """
    number: float = -1
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and len(value) <= _MAX_TEXT:
        found = re.fullmatch(_SIZE, value.strip().lower())
        unit = _SIZE_UNITS.get(found[2]) if found else None
        if found and unit:
            number = (int if found[1].isdigit() else float)(found[1]) * unit
            number = number if unit == 1 else int(number)
    if not 0 <= number <= MAX_BYTES or number % 1:
        raise _refuse(value, "a size", _ACCEPT_SIZE)
    size = int(number)
    if size and isinstance(value, str) and (text := value.strip())[-1].isdigit():
        meant = f"{size}GB" if size < 100_000 else exact_bytes(size)
        raise ConfigError(f"{text} bytes? Write {meant}.")
    return size


def format_bytes(n: float) -> str:
    """``924.3 GB``: decimal units, one digit after the point, whole bytes below 1 KB."""
    size = abs(n)
    sign = "-" if n < 0 else ""
    # Limits half a last digit below the next unit: 999,960 is 1.0 MB, not 1000.0 KB.
    if size < 999.5:
        return f"{sign}{size:.0f} B"
    for unit in _DECIMAL:
        size /= 1000
        if size < 999.95 or unit == _DECIMAL[-1]:
            break
    return f"{sign}{size:.1f} {unit}"


def format_rate(bytes_per_second: float) -> str:
    """``2.9 GB/s``."""
    return f"{format_bytes(bytes_per_second)}/s"


def exact_bytes(n: int) -> str:
    """The shortest text that `parse_bytes` reads as exactly ``n`` bytes: ``16MiB``, ``800GB``."""
    texts = [
        f"{n // base**power}{unit}"
        for base, units in ((1000, _DECIMAL), (1024, _BINARY))
        for power, unit in enumerate(units, 1)
        if n and n % base**power == 0
    ]
    # The first of several shortest: a unit reads better than digits.
    return min([*texts, f"{n}B" if n else "0"], key=len)


def parse_duration(value: str | float) -> float:
    """Seconds from a number or from text such as ``90``, ``1h30m``, ``14d``, ``350ms``.

    ``m`` is minutes. Units go from large to small, each at most once. ConfigError for what is
    negative, not finite, above `MAX_SECONDS`, or no number with a unit.
    """
    number = -1.0
    if isinstance(value, str) and 0 < len(text := value.strip()) <= _MAX_TEXT:
        if found := re.fullmatch(_DURATION, text.lower()):
            parts = zip(found.groups(), _DURATION_UNITS.values(), strict=True)
            number = sum(float(count) * ms / 1000 for count, ms in parts if count)
        else:
            with contextlib.suppress(ValueError):
                number = float(text)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    if not 0 <= number <= MAX_SECONDS:
        raise _refuse(value, "a duration", _ACCEPT_DURATION)
    return float(number)


def exact_duration(seconds: float) -> str:
    """Text that `parse_duration` reads as exactly ``seconds``: ``90m``, ``14d``, ``0.123456``."""
    for unit, size in _SECONDS:
        if seconds % size == 0 and (seconds or size == 1):
            return f"{int(seconds // size)}{unit}"
    return repr(float(seconds))


def format_duration(seconds: float) -> str:
    """``350 ms``, ``1.9 s``, ``2m 08s``, ``1h 30m``, ``14d``: two units at most, for eyes."""
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.{1 if seconds < 0.00995 else 0}f} ms"
    if seconds < 59.5:
        return f"{seconds:.{1 if seconds < 9.95 else 0}f} s"
    # Rounded to the smaller unit before it is split, so that 59.9 min is 1h, not 60m.
    if round(seconds) < 3_600:
        large, small, names = *divmod(round(seconds), 60), "ms"
    elif round(seconds / 60) < 1_440:
        large, small, names = *divmod(round(seconds / 60), 60), "hm"
    else:
        large, small, names = *divmod(round(seconds / 3_600), 24), "dh"
    width = 1 if names == "dh" else 2
    return f"{large}{names[0]}" + (f" {small:0{width}d}{names[1]}" if small else "")


def format_age(seconds: float) -> str:
    """``2m ago``; an age below a second, or one from a clock set back, is ``just now``."""
    ages = (f"{int(seconds // size)}{name} ago" for name, size in _SECONDS if seconds >= size)
    return next(ages, "just now")


@dataclass(frozen=True, slots=True)
class Limit:
    """A number of bytes or a percentage of some total; one is set. ``str`` of it parses back."""

    bytes: int | None = None
    percent: float | None = None

    def of(self, total_bytes: int) -> int:
        """This limit in bytes where the whole is ``total_bytes``."""
        if self.percent is not None:
            return round(total_bytes * self.percent / 100)
        return self.bytes or 0

    def __str__(self) -> str:
        """``800GB`` or ``12.5%``."""
        if self.percent is not None:
            return f"{repr(self.percent).removesuffix('.0')}%"
        return exact_bytes(self.bytes or 0)


def parse_limit(value: str | int | float | Limit) -> Limit:
    """A `Limit` from a size (see `parse_bytes`) or a percentage such as ``80%``."""
    if isinstance(value, Limit):
        return value
    if isinstance(value, str) and value.rstrip().endswith("%"):
        with contextlib.suppress(ValueError):
            percent = float(value.rstrip()[:-1])
            if 0 <= percent <= 100:
                return Limit(percent=percent)
        raise _refuse(value, "a limit", f"a percentage from 0% to 100%, or {_ACCEPT_SIZE}")
    return Limit(bytes=parse_bytes(value))


def parse_choice(value: str, choices: Sequence[str]) -> str:
    """One of ``choices``, whatever its case, or a ConfigError."""
    text = value.strip().lower() if isinstance(value, str) else ""
    if text not in choices:
        raise _refuse(value, "a choice", ", ".join(choices))
    return text


def parse_bool(value: str | bool | int) -> bool:
    """A truth value from 1/0, true/false, yes/no or on/off, in any case, or a ConfigError."""
    return _TRUTHS[parse_choice(str(value), list(_TRUTHS))]


def parse_count(value: str | int, least: int, most: int) -> int:
    """A whole number from ``least`` to ``most``, also in decimal digits, or a ConfigError."""
    text = str(value).strip()
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise _refuse(value, "a count", f"a whole number from {least} to {most}")
    return int(text)
