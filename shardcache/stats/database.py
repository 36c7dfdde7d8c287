"""Store the counts of all processes of a node in ``stats.db``, an SQLite database.

A row holds what one rank counted under one name in ten seconds, for the charts of a short job.
After an hour, a cleaning adds it to the row of its ten minutes, and after thirty days to the row
for all earlier time, so that the totals for Prometheus never fall. The file is never synced to
disk: a power failure may damage it, and then counting starts again from zero.

Each function opens the database of the node's namespace ``layout`` and closes it before it returns.
A missing one counts as empty. If it cannot be used, they raise OSError, never ``sqlite3.Error``.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from shardcache.files import check_own, write_new
from shardcache.layout import Layout
from shardcache.threads import no_fork

if TYPE_CHECKING:
    import sqlite3

logger = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS counts (
    start INTEGER, rank INTEGER, name TEXT, n INTEGER, PRIMARY KEY (start, rank, name)
) WITHOUT ROWID
"""
_ADD = "INSERT INTO counts {} ON CONFLICT DO UPDATE SET n = n + excluded.n"
#: Length in seconds of the period of a row: short enough for the charts of a day, and a month of a
#: node with eight ranks has half a million rows.
PERIOD = 600
#: Length in seconds of the period of a row of the last hour, and the age at which it is merged.
STEP, RECENT = 10, 3600
#: The rank of a process outside any job.
NO_RANK = -1

#: Age in seconds at which a row is merged with all earlier ones.
_KEPT = 30 * 86_400
#: Seconds that a command waits while another process uses the database.
_COMMAND_BUSY = 5.0


class Sample(NamedTuple):
    """The counts of one rank in a period: ten minutes, or ten seconds of the last hour."""

    start: int  #: seconds since the epoch; 0 for everything older than 30 days
    rank: int  #: rank in the job, or `NO_RANK`
    counters: Counter[str]  #: counts by name


def add(layout: Layout, rank: int, now: float, row: Mapping[str, int], busy: float) -> None:
    """Add counts by name to the period of ``now``. Waits ``busy`` seconds for other writers."""
    with _opened(layout, busy, repair=True) as db:
        start = int(now // STEP) * STEP
        rows = [(start, rank, name, n) for name, n in row.items()]
        db.executemany(_ADD.format("VALUES (?, ?, ?, ?)"), rows)


def samples(
    layout: Layout, since: float = 0.0, *, ever: bool = False, period: int = PERIOD
) -> list[Sample]:
    """Return the samples that end after ``since`` (seconds since the epoch), in no special order.

    With ``ever``, also return the sample that sums up everything older than 30 days. ``period`` is
    the length of the samples: `PERIOD`, or `STEP` for those of the last hour.
    """
    by_period = defaultdict[tuple[int, int], Counter[str]](Counter)
    with _opened(layout, _COMMAND_BUSY) as db:
        query = "SELECT start / ? * ?, rank, name, n FROM counts WHERE start >= ? OR start = ?"
        first = max(1, int(since // period) * period)
        for start, rank, name, n in db.execute(query, (period, period, first, 0 if ever else -1)):
            by_period[start, rank][name] += n
    return [Sample(*key, counters) for key, counters in by_period.items()]


def expire(layout: Layout, now: float) -> None:
    """Merge the rows that are older than an hour or thirty days. ``now`` is a Unix timestamp."""
    with _opened(layout, _COMMAND_BUSY) as db:
        for merged, rows, age in (
            (f"start / {PERIOD} * {PERIOD}, rank", f"start % {PERIOD} AND", RECENT),
            (f"0, {NO_RANK}", "", _KEPT),
        ):
            rows = f"FROM counts WHERE {rows} start BETWEEN 1 AND {int(now - age)}"
            db.execute(_ADD.format(f"SELECT {merged}, name, sum(n) {rows} GROUP BY 1, 2, name"))
            db.execute(f"DELETE {rows}")


def zero(layout: Layout) -> None:
    """Delete all counts."""
    with _opened(layout, _COMMAND_BUSY) as db:
        db.execute("DELETE FROM counts")


@contextlib.contextmanager
def _opened(layout: Layout, busy: float, *, repair: bool = False) -> Iterator[sqlite3.Connection]:
    """Open the database for one transaction, which is committed when the body ends.

    With ``repair``, a missing database is created, unless other nodes would share it, and a damaged
    one is removed. Without it, an empty one in memory replaces a missing one. A fork waits until
    the database is closed, so no child inherits a connection.
    """
    path = layout.stats
    try:
        import sqlite3  # not at the top, because a process that counts nothing does not need it
    except ImportError as exn:  # Python was built without it, or finds another libsqlite3
        raise OSError(errno.ENOSYS, str(exn), str(path)) from exn
    if repair and layout.grace is not None and layout.local is None:
        raise OSError(errno.ENOTSUP, "other nodes would share it", str(path))
    if repair and layout.modes.group is None and os.lstat(layout.base).st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "the cache belongs to another user", str(layout.base))
    if repair and not path.exists():
        # Not by a link, because the file must not have a second name at any moment: see below.
        with no_fork(), contextlib.suppress(FileExistsError):  # another process created it
            write_new(path, b"", layout.modes.file)
    for suffix in ("", "-journal", "-wal"):  # SQLite would follow links and wait for pipes
        name = path.with_name(path.name + suffix)
        with contextlib.suppress(FileNotFoundError):
            check_own(name, name.lstat())
    try:
        # mode=rw does not fail for a read-only file: SQLite then opens it for reading.
        is_empty = not path.exists() or path.stat().st_size == 0
        uri = ":memory:" if is_empty and not repair else f"{path.absolute().as_uri()}?mode=rw"
        with (
            no_fork(),
            contextlib.closing(
                sqlite3.connect(uri, timeout=busy, isolation_level="IMMEDIATE", uri=True)
            ) as db,
        ):
            db.execute("PRAGMA synchronous = OFF")
            db.execute(_SCHEMA)
            yield db
            db.commit()
    except sqlite3.DatabaseError as exn:
        # An OperationalError means locked, read-only or full; any other error means damage.
        if repair and not isinstance(exn, sqlite3.OperationalError):
            logger.info("%s is damaged (%s); counting starts again from zero", path, exn)
            path.unlink(missing_ok=True)
        raise OSError(errno.EIO, str(exn), str(path)) from exn
