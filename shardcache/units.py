"""Sizes, durations and other plain values: from what people write to what they read.

``format_*`` is for eyes: rounded, with a space before the unit. ``exact_*`` and ``str(Limit)`` are
for configuration: what they return parses back to the very same value.

Sizes are ``int`` bytes, durations ``float`` seconds. GB is 10^9, GiB is 2^30.
"""

from __future__ import annotations

import contextlib
import math
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
_SIZE = r"(-?)(?=\.?[0-9])([0-9]*)\.?([0-9]*)(?:e\+?([0-9]{1,2}))?\s*([a-z]*)"
#: Name, spelling, and thousandths of a second, which keep 350ms exact.
_DURATION_UNITS = (
    ("w", "w", 604_800_000),
    ("d", "d", 86_400_000),
    ("h", "h", 3_600_000),
    ("m", "m(?:in)?", 60_000),
    ("s", "s", 1000),
    ("ms", "ms", 1),
)
_DURATION = r"\s*".join(
    rf"(?:(?P<{name}>[0-9]+(?:\.[0-9]+)?)\s*{spelling})?" for name, spelling, _ in _DURATION_UNITS
)
_TRUTHS = dict.fromkeys(("1", "true", "yes", "on"), True)
_TRUTHS |= dict.fromkeys(("0", "false", "no", "off"), False)

_ACCEPT_SIZE = (
    "a whole number of bytes, or a number with KB, MB, GB, TB, PB (powers of 1000) "
    "or KiB, MiB, GiB, TiB, PiB (powers of 1024), for example 800GB or 1.5 TiB"
)
_ACCEPT_PERCENT = "a percentage from 0% to 100%"
_ACCEPT_DURATION = (
    "a number of seconds, or w, d, h, m (minutes), s and ms, largest first, "
    "for example 90, 1h30m, 14d or 350ms"
)


def _refuse(value: object, noun: str, reason: str, accepted: str) -> ConfigError:
    shown = repr(value)
    if len(shown) > _MAX_TEXT + 2:
        shown = f"{shown[:_MAX_TEXT]}..."
    return ConfigError(f"{shown} is not {noun}: {reason}. Accepted: {accepted}.")


def _why_not(value: object, number: float | None, most: float) -> str | None:
    """What is wrong with ``number``, which ``value`` stands for, as a size or a duration."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return f"it is a {type(value).__name__}"
    if number is None:
        empty = not str(value).strip()
        return "it is empty" if empty else "it does not read as a number with a unit"
    if isinstance(number, float) and not math.isfinite(number):
        return "it is not finite"
    if number < 0:
        return "it is negative"
    return "it is too large" if number > most else None


def parse_bytes(value: str | int | float) -> int:
    """Bytes from a number or from text such as ``800GB``, ``1.5 TB``, ``1GiB``, ``512k``.

    Case does not matter; K and KB are 1000, Ki and KiB are 1024. A plain number is
    bytes, also as ``1e12``. A fraction of a unit is rounded down to whole bytes.

    Raises:
        ConfigError: negative, not finite, empty, an unknown unit, a fraction of a
            byte, or more than `MAX_BYTES`.
    """
    number: float | None = value if not isinstance(value, str) else None
    split = False  # whether a byte is
    if isinstance(value, str) and len(value) <= _MAX_TEXT:
        found = re.fullmatch(_SIZE, value.strip(), re.IGNORECASE | re.ASCII)
        if found and (unit := _SIZE_UNITS.get(found[5].lower())):
            # In whole numbers: 9.2EB in floating point would be off by hundreds of bytes.
            digits = int(found[2] + found[3]) * 10 ** int(found[4] or 0) * unit
            number, rest = divmod(digits, 10 ** len(found[3]))
            number = -number if found[1] else number
            split = unit == 1 and rest > 0
    reason = _why_not(value, number, MAX_BYTES)
    if reason is None and (split or number != int(number or 0)):
        reason = "there is no fraction of a byte"
    if reason is not None:
        raise _refuse(value, "a size", reason, _ACCEPT_SIZE)
    return int(number or 0)


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
    texts = []
    for base, units in ((1000, _DECIMAL), (1024, _BINARY)):
        for power, unit in enumerate(units, 1):
            if n and n % base**power == 0:
                texts.append(f"{n // base**power}{unit}")
    # The first of several shortest: a unit reads better than digits.
    return min([*texts, str(n)], key=len)


def parse_duration(value: str | float) -> float:
    """Seconds from a number or from text such as ``90``, ``1h30m``, ``14d``, ``350ms``.

    ``m`` is minutes. Units go from large to small, each at most once.

    Raises:
        ConfigError: negative, not finite, empty, an unknown unit, or above `MAX_SECONDS`.
    """
    number = _seconds_of_text(value.strip()) if isinstance(value, str) else value
    reason = _why_not(value, number, MAX_SECONDS)
    if reason is not None:
        raise _refuse(value, "a duration", reason, _ACCEPT_DURATION)
    # 0.0 + turns -0.0 into 0.0.
    return 0.0 + float(number or 0)


def _seconds_of_text(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        return float(text)
    found = re.fullmatch(_DURATION, text, re.IGNORECASE) if 0 < len(text) <= _MAX_TEXT else None
    if found is None:
        return None
    return sum(float(found[name]) * ms / 1000 for name, _, ms in _DURATION_UNITS if found[name])


def exact_duration(seconds: float) -> str:
    """Text that `parse_duration` reads as exactly ``seconds``: ``1h30m``, ``14d``, ``0.123456``."""
    left = round(seconds * 1000)
    text = ""
    for unit, _, size in _DURATION_UNITS[1:]:
        count, left = divmod(left, size)
        text += f"{count}{unit}" if count else ""
    text = text or "0s"
    return text if parse_duration(text) == seconds else repr(float(seconds))


def format_duration(seconds: float) -> str:
    """``350 ms``, ``1.9 s``, ``2m 08s``, ``1h 30m``, ``14d``: two units at most, for eyes."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
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


def format_clock(seconds: float) -> str:
    """``0:00:39``: hours, minutes, seconds of equal width for a line that is redrawn."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-:--:--"
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}"


def format_age(seconds: float) -> str:
    """``2m ago``; an age below a second, or one from a clock set back, is ``just now``."""
    if not math.isfinite(seconds):
        return "-"
    for name, size in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        if seconds >= size:
            return f"{int(seconds // size)}{name} ago"
    return "just now"


@dataclass(frozen=True, slots=True)
class Limit:
    """A number of bytes or a percentage of some total; one is set. ``str`` of it parses back."""

    bytes: int | None = None
    percent: float | None = None

    def of(self, total_bytes: int) -> int:
        """This limit in bytes where the whole is ``total_bytes``; percentages are rounded."""
        if self.bytes is not None:
            return self.bytes
        assert self.percent is not None
        # Exact, then rounded to nearest: floats lose bytes from 2^53 on, and a plain
        # floor would make 10.1 % of 1000 (stored as 10.0999...) one byte short.
        numerator, denominator = self.percent.as_integer_ratio()
        return (2 * total_bytes * numerator + 100 * denominator) // (200 * denominator)

    def __str__(self) -> str:
        """``800GB`` or ``12.5%``."""
        if self.bytes is not None:
            return exact_bytes(self.bytes)
        return f"{repr(self.percent).removesuffix('.0')}%"


def parse_limit(value: str | int | float | Limit) -> Limit:
    """A `Limit` from a size (see `parse_bytes`) or from a percentage such as ``80%``.

    Raises:
        ConfigError: neither a size nor a percentage from 0 to 100.
    """
    if isinstance(value, Limit):
        return value
    if isinstance(value, str) and value.rstrip().endswith("%"):
        percent = math.nan
        with contextlib.suppress(ValueError):
            percent = float(value.rstrip()[:-1])
        if not 0 <= percent <= 100:
            accepted = f"{_ACCEPT_PERCENT}, or {_ACCEPT_SIZE}"
            raise _refuse(value, "a limit", "it is not within 0% to 100%", accepted)
        return Limit(percent=0.0 + percent)
    return Limit(bytes=parse_bytes(value))


def parse_bool(value: str | bool | int) -> bool:
    """A truth value from 1/0, true/false, yes/no or on/off, in any case.

    Raises:
        ConfigError: anything else.
    """
    text = str(value).strip().lower()
    if isinstance(value, float) or text not in _TRUTHS:
        raise _refuse(value, "a truth value", "it is neither", ", ".join(_TRUTHS))
    return _TRUTHS[text]


def parse_count(value: str | int, least: int, most: int) -> int:
    """A whole number from ``least`` to ``most``, as a number or in decimal digits.

    Raises:
        ConfigError: not a whole number, or out of range.
    """
    text = value.strip() if isinstance(value, str) else str(value)
    digits = text.isascii() and text.isdigit() and len(text) <= _MAX_TEXT
    if not digits or not least <= int(text) <= most:
        accepted = f"a whole number from {least} to {most}"
        raise _refuse(value, "a count", "it is out of range", accepted)
    return int(text)


def parse_choice(value: str, choices: Sequence[str]) -> str:
    """One of ``choices``; case and surrounding space do not matter.

    Raises:
        ConfigError: none of them.
    """
    text = value.strip().lower() if isinstance(value, str) else ""
    if text not in choices:
        raise _refuse(value, "a choice", "it is none of those offered", ", ".join(choices))
    return text
