"""Store the counts of all processes of a node in ``stats.db``, an SQLite database.

There is one row per minute, rank and name. After two hours minutes become hours, and after thirty
days all rows of a name become one, so that sums for Prometheus never fall.

Each function opens the database and closes it before it returns, and a fork waits for that
(`threads.undivided`), so no child inherits a connection. The database is never synced: a power
failure may damage it, and then counting starts again from zero.

In all functions, ``layout`` is the node's namespace. Errors (the database is locked, read-only,
full or failing) are OSError, never ``sqlite3.Error``. A missing database is empty.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardcache.files import check_own
from shardcache.layout import Layout, replace_file
from shardcache.threads import undivided

if TYPE_CHECKING:
    import sqlite3

logger = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS counted (
    start INTEGER, seconds INTEGER, rank INTEGER, name TEXT, n INTEGER,
    PRIMARY KEY (start, seconds, rank, name)
) WITHOUT ROWID
"""
_ADD = "INSERT INTO counted VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n"
#: Turn minutes into hours, and hours into one row. Times are in seconds since the epoch.
_COMPACT = (
    """
    INSERT INTO counted SELECT start / 3600 * 3600, 3600, rank, name, sum(n) FROM counted
    WHERE seconds = 60 AND start < :hour GROUP BY 1, 3, 4
    ON CONFLICT DO UPDATE SET n = n + excluded.n
    """,
    "DELETE FROM counted WHERE seconds = 60 AND start < :hour",
    """
    INSERT INTO counted SELECT 0, 3600, -1, name, sum(n) FROM counted
    WHERE start > 0 AND start < :old GROUP BY name
    ON CONFLICT DO UPDATE SET n = n + excluded.n
    """,
    "DELETE FROM counted WHERE start > 0 AND start < :old",
)
#: The rank of a process outside any job.
NO_RANK = -1

#: Seconds after which minutes become hours, and hours one row.
_MINUTES_KEPT = 2 * 3600
_KEPT = 30 * 86_400
#: Seconds that a command waits for a database in use.
_PATIENCE = 5.0


@dataclass(slots=True)
class Sample:
    """The counts of one rank in a minute or an hour."""

    start: int  #: seconds since the epoch; 0 for everything older than 30 days
    seconds: int  #: 60 or 3600
    rank: int  #: rank in the job, or `NO_RANK`
    #: Counts by name (`counters.COUNTERS`). The number of waits in a bucket has a name such as
    #: ``disk:12``: one of `counters.WAITS` and the bucket (`counters.bucket_range`).
    counters: Counter[str] = field(default_factory=Counter)


def add(layout: Layout, rank: int, minute: int, row: Mapping[str, int], busy: float) -> None:
    """Add the counts of a process (``row``, by name) to a minute, all of them or none.

    ``minute`` is its start in seconds since the epoch. Waits ``busy`` seconds for other writers.
    """
    _make(layout)
    with _opened(layout, busy, repair=True) as db:
        db.executemany(_ADD, [(minute, 60, rank, name, n) for name, n in row.items()])


def samples(layout: Layout, since: float = 0.0, *, ever: bool = False) -> list[Sample]:
    """Return the samples that ended after ``since`` (seconds since the epoch), in no order.

    With ``ever``, the sample of everything older than 30 days is among them.
    """
    found: dict[tuple[int, int, int], Sample] = {}
    with _opened(layout, _PATIENCE) as db:
        query = "SELECT * FROM counted WHERE start + seconds > ? AND (start > 0 OR ?)"
        for *key, name, n in db.execute(query, (since, ever)):
            found.setdefault(tuple(key), Sample(*key)).counters[name] += n
    return list(found.values())


def compact(layout: Layout, now: float) -> None:
    """Turn old minutes into hours, and old hours into one row; ``now`` is a time of the epoch."""
    ages = {"hour": now - _MINUTES_KEPT, "old": now - _KEPT}
    times = {name: int(time) // 3600 * 3600 for name, time in ages.items()}
    with _opened(layout, _PATIENCE) as db:
        for statement in _COMPACT:
            db.execute(statement, times)


def zero(layout: Layout) -> None:
    """Delete all counts."""
    with _opened(layout, _PATIENCE) as db:
        db.execute("DELETE FROM counted")


@contextlib.contextmanager
def _opened(layout: Layout, busy: float, *, repair: bool = False) -> Iterator[sqlite3.Connection]:
    """Open the database for one transaction.

    Waits ``busy`` seconds for other processes. With ``repair``, removes a damaged database. Without
    it, opens an empty one in memory if none was written yet.

    Raises:
        OSError: the database cannot be used, or a file of another program has its name.
    """
    import sqlite3  # not at the top: a process that counts nothing does not need it

    path = layout.stats
    for suffix in ("", "-journal", "-wal"):  # SQLite follows links, and waits for pipes
        name = path.with_name(path.name + suffix)
        with contextlib.suppress(FileNotFoundError):
            check_own(name, name.lstat())
    try:
        # If the file is read-only, SQLite opens it for reading all the same.
        is_empty = not path.exists() or path.stat().st_size == 0
        uri = ":memory:" if is_empty and not repair else f"{path.absolute().as_uri()}?mode=rw"
        with (
            undivided(),
            contextlib.closing(
                sqlite3.connect(uri, timeout=busy, isolation_level="IMMEDIATE", uri=True)
            ) as db,
        ):
            db.execute("PRAGMA synchronous = OFF")
            db.execute(_SCHEMA)
            yield db
            db.commit()
    except sqlite3.DatabaseError as exn:
        # An OperationalError means locked, read-only or full.
        if repair and not isinstance(exn, sqlite3.OperationalError):
            logger.info("%s is damaged (%s); counting starts again from zero", path, exn)
            path.unlink(missing_ok=True)
        raise OSError(errno.EIO, str(exn), str(path)) from exn


def _make(layout: Layout) -> None:
    """Create the file with the cache's mode if it is missing, and if this user may own it."""
    path = layout.stats
    if layout.grace is not None and layout.local is None:
        raise OSError(errno.ENOTSUP, "other nodes would share it", str(path))
    if layout.modes.group is None and os.lstat(layout.base).st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "the cache belongs to another user", str(layout.base))
    if not path.exists():
        via = layout.partial if layout.local is None else path.parent
        replace_file(path, b"", layout.modes.file, via=via, once=True)
