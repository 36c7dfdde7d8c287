"""The file in which a process keeps what it counts: a header, and a row for each minute.

    4096 bytes   JSON: the names of the counters, and whose file it is
    2048 bytes   a row: 256 numbers of 64 bits, in the machine's own order
                   the minute since the epoch; 0: there is no row yet
                   counters, in the order of the header's names
                   histograms of waiting, one after another, as many numbers each
    ...

The row of the current minute is written again and again in its place, whole, within a page; rows
before it do not change any more. So whoever reads beside a writer, and after one that was killed,
finds whole rows. There is nothing to lock.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcache.files import Modes, is_alone, open_file, settle
from shardcache.layout import read_file

__all__ = ["BUCKETS", "COUNTERS", "ROWS", "WAITS", "Row", "Segment", "StatFile", "bucket_of"]
__all__ += ["bucket_range", "read_segment"]

logger = logging.getLogger(__name__)

#: What is counted. New names go to the end; 39 fit. A file says itself which names it has, so those
#: of older versions lack some, and those of newer ones have some that nobody here asks for.
COUNTERS = (
    "hits",
    "coalesced",
    "linked",
    "misses",
    "bypassed",
    "failed",
    "bytes_opened",
    "bytes_bypassed",
    "fetches",
    "fetches_upstream",
    "fetches_failed",
    "bytes_origin",
    "bytes_upstream",
    "retries",
    "evicted_max_size",
    "evicted_min_free",
    "evicted_inodes",
    "evicted_max_age",
    "evicted_all",
    "evicted_asked",
    "bytes_evicted",
    "errors_origin",
    "errors_integrity",
    "errors_disk",
    "bypassed_full",
    "errors_lock",
    "hits_tier_1",
    "hits_tier_2",
    "hits_tier_3",
    "wait_us_disk",
    "wait_us_lock",
    "wait_us_network",
    "bytes_stored",
)
#: What readers waited for: the disk (a hit), another process's fetch, their own one.
WAITS = ("disk", "lock", "network")
#: Of a histogram: powers of two of a microsecond, each in two halves, up to nineteen hours.
BUCKETS = 72

_SPARE = 39
_HEADER = 4096
_FORMAT = struct.Struct(f"={1 + _SPARE + len(WAITS) * BUCKETS}q")
assert _FORMAT.size == 2048
_SCHEMA = 1
#: Rows of a file: what an hour has.
ROWS = 60


def bucket_of(seconds: float) -> int:
    """The place of a wait in a histogram."""
    microseconds = int(seconds * 1e6)
    if microseconds < 2:
        return max(0, microseconds)
    length = microseconds.bit_length()
    return min(BUCKETS - 1, 2 * (length - 1) + (microseconds >> (length - 2) & 1))


def bucket_range(bucket: int) -> tuple[float, float]:
    """From which wait up to which one, in seconds, all of a bucket are."""
    if bucket < 2:
        return bucket / 1e6, (bucket + 1) / 1e6
    octave, half = divmod(bucket, 2)
    low = (2 + half) * 2 ** (octave - 1)
    return low / 1e6, (low + 2 ** (octave - 1)) / 1e6


@dataclass(frozen=True, slots=True)
class Row:
    """One minute of one process.

    Attributes:
        minute: since the epoch.
        counters: by name, those that are not 0.
        waits: by what was waited for, bucket -> how many.
    """

    minute: int
    counters: Mapping[str, int]
    waits: Mapping[str, Mapping[int, int]]


@dataclass(frozen=True, slots=True)
class Segment:
    """What a file holds.

    Attributes:
        owner: whose it is: host, pid, rank, job, ...
        rows: in order.
    """

    owner: Mapping[str, Any]
    rows: Sequence[Row]


class StatFile:
    """A file as its process writes it; open only for as long as a write takes.

    Args:
        path: of the file; it must not exist yet.
        modes: its permissions.
        owner: what the header says beside the format.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, modes: Modes, owner: Mapping[str, object]) -> None:
        header = {"schema": _SCHEMA, "names": COUNTERS, "waits": WAITS, "buckets": BUCKETS, **owner}
        text = json.dumps(header).encode().ljust(_HEADER - 1) + b"\n"
        if len(text) > _HEADER:
            raise OSError(errno.EOVERFLOW, "the header of a file of statistics is too long")
        self._path = os.fspath(path)
        self._rows = -1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open_file(self._path, io.FileIO, flags, modes.file) as file:
            settle(file.fileno(), modes.file)
            os.pwrite(file.fileno(), text, 0)

    def begin_row(self) -> bool:
        """Begin the next row; False where the file is full, or was removed."""
        if self._rows + 1 >= ROWS or not os.path.lexists(self._path):
            return False
        self._rows += 1
        return True

    def write(self, minute: int, values: Sequence[int]) -> None:
        """Write the current row.

        Args:
            minute: since the epoch.
            values: `_SPARE` counters, then the histograms.

        Raises:
            OSError: the disk fails, or is full; the file was removed.
        """
        with open_file(self._path, io.FileIO, os.O_WRONLY) as file:
            if is_alone(file.fileno()):
                row = _FORMAT.pack(minute, *values)
                os.pwrite(file.fileno(), row, _HEADER + self._rows * _FORMAT.size)


def blank() -> list[int]:
    """The values of a row in which nothing happened."""
    return [0] * (_SPARE + len(WAITS) * BUCKETS)


def wait_index(wait: str) -> int:
    """Where a histogram begins among the values of a row."""
    return _SPARE + WAITS.index(wait) * BUCKETS


def read_segment(path: Path) -> Segment | None:
    """What a file holds; None where it is none, or of a format that is not known here.

    Raises:
        OSError: it cannot be read.
    """
    data = read_file(path, _HEADER + ROWS * _FORMAT.size)
    try:
        header = json.loads(data[:_HEADER])
        names, waits = list(header.pop("names")), list(header.pop("waits"))
        known = header.pop("schema") == _SCHEMA and header.pop("buckets") == BUCKETS
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exn:
        logger.debug("%s: %s", path, exn)
        return None
    if not known or len(names) > _SPARE or len(waits) != len(WAITS):
        return None
    whole = (len(data) - _HEADER) // _FORMAT.size
    body = memoryview(data)[_HEADER : _HEADER + max(0, whole) * _FORMAT.size]
    rows = (_row(values, names, waits) for values in _FORMAT.iter_unpack(body) if values[0] > 0)
    return Segment(header, list(rows))


def _row(values: tuple[int, ...], names: Sequence[str], waits: Sequence[str]) -> Row:
    minute, *rest = values
    counters = {str(name): n for name, n in zip(names, rest, strict=False) if n > 0}
    histograms = {}
    for number, wait in enumerate(waits):
        begin = _SPARE + number * BUCKETS
        found = {i: n for i, n in enumerate(rest[begin : begin + BUCKETS]) if n > 0}
        if found:
            histograms[str(wait)] = found
    return Row(minute, counters, histograms)
