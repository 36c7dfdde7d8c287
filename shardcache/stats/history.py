"""What all processes of a node have counted: read as one, and kept small.

    processes' files (`statfile`), a row per minute
      | two hours after the last row
    one document, a row per hour and rank, which names the files it is made of
      | thirty days
    one row for all that is older

A document is written whole, beside what it is made of, and given its name by one rename; then the
files go. Whoever is killed in between leaves both, and a file that a document names is not
counted again. So every event is counted once, whoever reads and whenever.

Safe beside writers and other readers. Two who compact at once would each write a document: they
take turns by the lock of those who clean. So does who begins to count anew (`forget`).
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardcache.files import random_token
from shardcache.layout import Layout, is_temporary_name, list_names, read_file, replace_file
from shardcache.stats.counters import SUFFIX
from shardcache.stats.statfile import ROWS, Segment, read_segment

__all__ = ["Sample", "compact", "forget", "samples"]

logger = logging.getLogger(__name__)

_DOCUMENT = ".hours"
_MARK = "begin"
_SCHEMA = 1
#: Seconds after the last write to a process's file when it counts as closed. A process begins
#: another one after an hour at most (`counters`); twice that, for clocks that were set.
_CLOSED = 2 * ROWS * 60.0
_KEPT = 30 * 86_400.0
_HOUR = 3600
#: Documents that are merged into one: more would make reading slow.
_MANY = 24
_MAX_DOCUMENT = 64 << 20
#: Others may compact while we read.
_READINGS = 5


@dataclass(slots=True)
class Sample:
    """What one rank counted from some moment on.

    Attributes:
        start: seconds since the epoch; 0 for all that is older than what is kept.
        seconds: how long it lasted: a minute or an hour.
        rank: of the job; None outside any.
        job: its id; None outside any.
        counters: by name (`statfile.COUNTERS`).
        waits: by what was waited for, bucket (`statfile.bucket_range`) -> how many.
    """

    start: int
    seconds: int
    rank: int | None
    job: str | None
    counters: Counter[str] = field(default_factory=Counter)
    waits: dict[str, Counter[int]] = field(default_factory=dict)

    def add(self, counters: Mapping[str, int], waits: Mapping[str, Mapping[int, int]]) -> None:
        """Add what was counted elsewhere."""
        self.counters.update(counters)
        for wait, found in waits.items():
            self.waits.setdefault(wait, Counter()).update(found)


def samples(layout: Layout, since: float = 0.0, *, ever: bool = False) -> list[Sample]:
    """Everything that was counted, in no order.

    Args:
        layout: the node's namespace.
        since: what ended before that is left out; seconds since the epoch.
        ever: also what is too old to be kept by the hour, for sums that must never fall.

    Raises:
        OSError: the directory cannot be read; a missing one is empty.
    """
    found: list[Sample] = []
    for _ in range(_READINGS):
        before = _names(layout, _DOCUMENT)
        found = list(_read(layout, before))
        if _names(layout, _DOCUMENT) == before:  # or files went while they were read
            break
    found = [sample for sample in found if sample.start + sample.seconds > since]
    return found if ever else [sample for sample in found if sample.start]


def _read(layout: Layout, documents: Iterable[str]) -> Iterator[Sample]:
    files = _names(layout, SUFFIX)
    mark = _Mark.of(layout)
    read = {name: _document(layout.stats / name) for name in documents}
    merged = {name for found in read.values() if found for name in found.sources}
    for name, document in read.items():
        if document is not None and name not in merged:
            yield from document.samples
    for name in files:
        if name not in merged:
            yield from _of_file(layout.stats / name, mark)


def compact(layout: Layout, now: float) -> int:
    """Merge the files of processes that have ended, and forget what is too old.

    Args:
        layout: the node's namespace.
        now: seconds since the epoch.

    Returns:
        How many files went.

    Raises:
        OSError: the filesystem is read-only or failing.
    """
    documents = {
        name: found
        for name in _names(layout, _DOCUMENT)
        if (found := _document(layout.stats / name)) is not None
    }
    merged = {name for found in documents.values() for name in found.sources}
    closed = [n for n in _names(layout, SUFFIX) if _is_older(layout.stats / n, now - _CLOSED)]
    fresh = [name for name in closed if name not in merged]
    whole = {name: found for name, found in documents.items() if name not in merged}
    taken = {
        name: found
        for name, found in whole.items()
        if len(whole) > _MANY or found.ended < now - _KEPT
    }
    if fresh or taken:
        rows = [sample for found in taken.values() for sample in found.samples]
        mark = _Mark.of(layout)
        rows += [sample for name in fresh for sample in _of_file(layout.stats / name, mark)]
        kept = list(_by_hour(rows, now - _KEPT))
        # Names of what is gone already need not be remembered.
        there = {*_names(layout, SUFFIX), *documents}
        sources = {name for found in taken.values() for name in found.sources} & there
        if kept or sources:
            _write(layout, _Document([*fresh, *taken, *sorted(sources)], kept))
    gone = [*(name for name in closed if name in merged), *fresh, *taken]
    gone += [name for name in documents if name in merged]
    gone += [
        name
        for name in list_names(layout.stats)
        if is_temporary_name(name) and _is_older(layout.stats / name, now - _CLOSED)
    ]
    for name in gone:
        (layout.stats / name).unlink(missing_ok=True)
    return len(gone)


@dataclass(slots=True)
class _Document:
    """Hours of many processes.

    Attributes:
        sources: names of the files and documents it is made of.
        samples: one per hour, rank and job.
    """

    sources: list[str]
    samples: list[Sample]

    @property
    def ended(self) -> float:
        return max((sample.start + sample.seconds for sample in self.samples), default=0.0)


def _names(layout: Layout, suffix: str) -> list[str]:
    found = sorted(name for name in list_names(layout.stats) if name.endswith(suffix))
    return [name for name in found if not name.startswith(".")]


def _is_older(path: Path, then: float) -> bool:
    try:
        return os.lstat(path).st_mtime < then
    except FileNotFoundError:
        return False


def forget(layout: Layout, now: float) -> None:
    """Begin to count anew.

    Raises:
        OSError: the filesystem is read-only or failing.
    """
    written: dict[str, list[Any]] = {}
    for name in _names(layout, SUFFIX):
        segment = _segment(layout.stats / name)
        if segment is not None and segment.rows:
            last = segment.rows[-1]
            waits = {wait: dict(found) for wait, found in last.waits.items()}
            written[name] = [last.minute, dict(last.counters), waits]
    text = json.dumps({"schema": _SCHEMA, "minute": int(now // 60), "written": written})
    replace_file(layout.stats / _MARK, text.encode(), layout.modes.file)
    for name in _names(layout, _DOCUMENT):
        (layout.stats / name).unlink(missing_ok=True)


@dataclass(slots=True)
class _Mark:
    """What was counted before somebody began anew.

    Attributes:
        minute: when that was.
        written: file -> its last row at that time: minute, counters, waits.
    """

    minute: int = 0
    written: dict[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, layout: Layout) -> _Mark:
        try:
            found = json.loads(read_file(layout.stats / _MARK, _MAX_DOCUMENT))
            return cls(int(found["minute"]), dict(found["written"]))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as exn:
            logger.debug("%s: %s", layout.stats / _MARK, exn)
            return cls()

    def since(self, name: str, sample: Sample) -> Sample | None:
        """What of a minute was counted after it; None for nothing."""
        minute = sample.start // 60
        if minute < self.minute:
            return None
        known = self.written.get(name)
        if known is not None and known[0] == minute:
            _, counters, waits = known
            sample.counters.subtract(counters)
            for wait, found in waits.items():
                less = {int(bucket): n for bucket, n in found.items()}
                sample.waits.setdefault(wait, Counter()).subtract(less)
        return sample


def _segment(path: Path) -> Segment | None:
    try:
        return read_segment(path)
    except FileNotFoundError:  # merged meanwhile
        return None
    except OSError as exn:
        logger.debug("%s: %s", path, exn)
        return None


def _of_file(path: Path, mark: _Mark) -> Iterator[Sample]:
    segment = _segment(path)
    if segment is None:
        return
    rank, job = segment.owner.get("rank"), segment.owner.get("job")
    for row in segment.rows:
        sample = Sample(row.minute * 60, 60, *_whose(rank, job))
        sample.add(row.counters, row.waits)
        counted = mark.since(path.name, sample)
        if counted is not None:
            yield counted


def _whose(rank: object, job: object) -> tuple[int | None, str | None]:
    known = isinstance(rank, int) and not isinstance(rank, bool)
    return (rank if known else None), (job if isinstance(job, str) else None)  # type: ignore[return-value]


def _by_hour(rows: Iterable[Sample], then: float) -> Iterator[Sample]:
    """One row per hour, rank and job; what ended before ``then`` in one row."""
    hours: dict[tuple[int, int | None, str | None], Sample] = {}
    for row in rows:
        key = row.start // _HOUR * _HOUR, row.rank, row.job
        if row.start + row.seconds <= then:
            key = 0, None, None
        hour = hours.get(key)
        if hour is None:
            hour = hours[key] = Sample(key[0], _HOUR, key[1], key[2])
        hour.add(row.counters, row.waits)
    return iter(hours.values())


def _write(layout: Layout, document: _Document) -> None:
    rows = [
        {
            "start": sample.start,
            "rank": sample.rank,
            "job": sample.job,
            "counters": dict(sample.counters),
            "waits": {wait: dict(found) for wait, found in sample.waits.items()},
        }
        for sample in document.samples
    ]
    text = json.dumps({"schema": _SCHEMA, "sources": document.sources, "rows": rows})
    path = layout.stats / f"{random_token()}{_DOCUMENT}"
    replace_file(path, text.encode(), layout.modes.file)


def _document(path: Path) -> _Document | None:
    try:
        found = json.loads(read_file(path, _MAX_DOCUMENT))
        if found["schema"] != _SCHEMA:
            return None
        return _Document(
            [str(name) for name in found["sources"]], list(map(_sample, found["rows"]))
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exn:
        logger.debug("%s: %s", path, exn)
        return None


def _sample(row: Mapping[str, Any]) -> Sample:
    sample = Sample(int(row["start"]), _HOUR, *_whose(row["rank"], row["job"]))
    sample.add(
        {str(name): int(n) for name, n in row["counters"].items()},
        {
            str(wait): {int(bucket): int(n) for bucket, n in found.items()}
            for wait, found in row["waits"].items()
        },
    )
    return sample
