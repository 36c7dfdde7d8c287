"""What all processes of a node have counted: ``stats.db``, an SQLite database.

It has one row per minute, rank and name; per hour after two hours. After thirty days all that is
older is one row per name, so that sums for Prometheus never fall.

Each call opens the database and closes it before it returns, and a fork waits for that
(`threads.undivided`): a connection never gets into a child. Where each write opens the database, a
write-ahead log would be made and removed each time, so there is none. It is never synced: after a
power loss it may be damaged, and then it is begun anew.

Everywhere ``layout`` is the node's namespace, and what fails raises OSError (the database is
locked, read-only, full or failing), never ``sqlite3.Error``; a missing one is empty.
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

__all__ = ["NO_RANK", "Sample", "add", "compact", "samples", "zero"]

logger = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS counted (
    start INTEGER, seconds INTEGER, rank INTEGER, name TEXT, n INTEGER,
    PRIMARY KEY (start, seconds, rank, name)
) WITHOUT ROWID
"""
_ADD = "INSERT INTO counted VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n"
#: From minutes to hours, and from hours to "long ago"; times in seconds since the epoch.
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
#: Of a process outside any job.
NO_RANK = -1

_HOUR = 3600
#: Seconds for which minutes, and hours, are kept.
_MINUTES_KEPT = 2 * _HOUR
_KEPT = 30 * 86_400
#: Seconds that people wait for a database in use.
_PATIENCE = 5.0


@dataclass(slots=True)
class Sample:
    """What one rank counted in a minute or an hour."""

    start: int  #: seconds since the epoch; 0 for all that is older than what is kept
    seconds: int  #: how long it lasted
    rank: int  #: of the job, or `NO_RANK`
    #: By name (`counters.COUNTERS`); how many waits there were of each length has names such as
    #: ``disk:12`` (`counters.WAITS`, and a bucket of `counters.bucket_range`).
    counters: Counter[str] = field(default_factory=Counter)


def add(layout: Layout, rank: int, minute: int, row: Mapping[str, int], busy: float) -> None:
    """Add what a process counted (name -> how many), or raise and add nothing.

    ``minute`` is its start, in seconds since the epoch; ``busy`` how many seconds to wait for
    other writers.
    """
    _make(layout)
    with _opened(layout, busy, repair=True) as db:
        if db is not None:
            db.execute(_SCHEMA)
            db.executemany(_ADD, [(minute, 60, rank, name, n) for name, n in row.items()])


def samples(layout: Layout, since: float = 0.0, *, ever: bool = False) -> list[Sample]:
    """Everything that was counted, in no order; with ``ever`` also what is older than 30 days.

    What ended before ``since``, in seconds since the epoch, is left out.
    """
    found: dict[tuple[int, int, int], Sample] = {}
    with _opened(layout, _PATIENCE) as db:
        query = "SELECT * FROM counted WHERE start + seconds > ? AND (start > 0 OR ?)"
        for *key, name, n in db.execute(query, (since, ever)) if db else ():
            found.setdefault(tuple(key), Sample(*key)).counters[name] += n
    return list(found.values())


def compact(layout: Layout, now: float) -> None:
    """Turn minutes into hours, and forget what is too old, ``now`` in seconds since the epoch."""
    ages = {"hour": now - _MINUTES_KEPT, "old": now - _KEPT}
    times = {name: int(time) // _HOUR * _HOUR for name, time in ages.items()}
    with _opened(layout, _PATIENCE) as db:
        for statement in _COMPACT:
            if db is not None:
                db.execute(statement, times)


def zero(layout: Layout) -> None:
    """Begin to count anew."""
    with _opened(layout, _PATIENCE) as db:
        if db is not None:
            db.execute("DELETE FROM counted")


@contextlib.contextmanager
def _opened(
    layout: Layout, busy: float, *, repair: bool = False
) -> Iterator[sqlite3.Connection | None]:
    """The database, open for one transaction; None if nothing was written yet.

    With ``repair`` a damaged one is removed.

    Raises:
        OSError: it cannot be used, or a file of another program has its name.
    """
    import sqlite3  # here: a process that counts nothing does not need it

    path = layout.stats
    if not path.exists() or (path.stat().st_size == 0 and not repair):
        yield None
        return
    for suffix in ("", "-journal", "-wal"):  # SQLite follows links, and waits for pipes
        name = path.with_name(path.name + suffix)
        with contextlib.suppress(FileNotFoundError):
            check_own(name, name.lstat())
    try:
        # Where it cannot be written, SQLite opens it for reading.
        uri = f"{path.absolute().as_uri()}?mode=rw"
        with (
            undivided(),
            contextlib.closing(
                sqlite3.connect(uri, busy, isolation_level="IMMEDIATE", uri=True)
            ) as db,
        ):
            db.execute("PRAGMA synchronous = OFF")
            yield db
            db.commit()
    except sqlite3.DatabaseError as exn:
        # An operational one says locked, read-only or full.
        if repair and not isinstance(exn, sqlite3.OperationalError):
            logger.info("%s is damaged (%s); statistics begin anew", path, exn)
            path.unlink(missing_ok=True)
        raise OSError(errno.EIO, str(exn), str(path)) from exn


def _make(layout: Layout) -> None:
    """Make the file if it is missing, for those who may read it."""
    path = layout.stats
    if layout.grace is not None and layout.local is None:
        raise OSError(errno.ENOTSUP, "it would be shared with other nodes", str(path))
    if layout.modes.group is None and os.lstat(layout.base).st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "the cache belongs to another user", str(layout.base))
    if not path.exists():
        via = layout.partial if layout.local is None else path.parent
        replace_file(path, b"", layout.modes.file, via=via, once=True)
