"""What all processes of a node have counted: ``stats.db``, an SQLite database.

    counts    one row per minute, rank, job and name; per hour after two hours
    fetches   one row per shard that was fetched

After thirty days all that is older is one row per name, so that sums for Prometheus never fall.

Each call opens the database and closes it before it returns, and a fork waits for that
(`threads.undivided`): a connection never gets into a child. The database is in write-ahead mode, so
readers and writers do not wait for each other; writers wait for each other up to ``busy`` seconds.
It is never synced: after a power loss it may be damaged, and then it is begun anew.

Raises OSError throughout, never ``sqlite3.Error``.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardcache.layout import Layout, refuse_links, temporary_name, write_new
from shardcache.threads import undivided

if TYPE_CHECKING:
    import sqlite3

__all__ = ["Fetch", "Sample", "add", "compact", "fetches", "samples", "zero"]

logger = logging.getLogger(__name__)

_VERSION = 1
_SCHEMA = f"""
CREATE TABLE counts (
    start INTEGER, seconds INTEGER, rank INTEGER, job TEXT, name TEXT, n INTEGER,
    PRIMARY KEY (start, seconds, rank, job, name)
) WITHOUT ROWID;
CREATE TABLE fetches (at REAL, size INTEGER, seconds REAL, rank INTEGER, url TEXT);
PRAGMA user_version = {_VERSION};
"""
#: Where the header says that a database is in write-ahead mode (sqlite.org/fileformat2.html).
#: Switching to that mode takes a lock that many processes which start at once would fight for.
_WRITE_AHEAD, _WRITE_AHEAD_VERSIONS = slice(18, 20), b"\2\2"
_ADD = """
INSERT INTO counts VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n
"""
#: From minutes to hours, and from hours to "long ago"; ? is a time in seconds since the epoch.
_MERGE = (
    """
    INSERT INTO counts SELECT start / 3600 * 3600, 3600, rank, job, name, sum(n) FROM counts
    WHERE seconds = 60 AND start < ? GROUP BY 1, 3, 4, 5
    ON CONFLICT DO UPDATE SET n = n + excluded.n
    """,
    "DELETE FROM counts WHERE seconds = 60 AND start < ?",
)
_FORGET = (
    """
    INSERT INTO counts SELECT 0, 3600, -1, '', name, sum(n) FROM counts
    WHERE start > 0 AND start < ? GROUP BY name
    ON CONFLICT DO UPDATE SET n = n + excluded.n
    """,
    "DELETE FROM counts WHERE start > 0 AND start < ?",
    "DELETE FROM fetches WHERE at < ? OR rowid <= (SELECT max(rowid) FROM fetches) - 100000",
)
#: Stand for "none" in the key of `counts`.
_NO_RANK, _NO_JOB = -1, ""

_HOUR = 3600
#: Seconds for which minutes, and hours, are kept.
_MINUTES_KEPT = 2 * _HOUR
_KEPT = 30 * 86_400
#: Seconds that people wait for a database in use.
_PATIENCE = 5.0


@dataclass(frozen=True, slots=True)
class Fetch:
    """A shard that was fetched.

    Attributes:
        at: when the fetch ended, seconds since the epoch.
        size: bytes of the shard.
        seconds: how long it took.
        rank: who fetched it; None outside any job.
        url: of the shard, without credentials.
    """

    at: float
    size: int
    seconds: float
    rank: int | None
    url: str


@dataclass(slots=True)
class Sample:
    """What one rank counted in a minute or an hour.

    Attributes:
        start: seconds since the epoch; 0 for all that is older than what is kept.
        seconds: how long it lasted.
        rank: of the job; None outside any.
        job: its id; None outside any.
        counters: by name (`counters.COUNTERS`).
        waits: by what was waited for, bucket (`counters.bucket_range`) -> how many.
    """

    start: int
    seconds: int
    rank: int | None
    job: str | None
    counters: Counter[str] = field(default_factory=Counter)
    waits: dict[str, Counter[int]] = field(default_factory=dict)


def add(
    layout: Layout,
    rank: int | None,
    job: str | None,
    rows: Mapping[int, Mapping[str, int]],
    fetched: Sequence[Fetch],
    *,
    busy: float,
) -> None:
    """Add what a process counted.

    Args:
        layout: the node's namespace.
        rank: who counted it.
        job: likewise.
        rows: start of a minute in seconds since the epoch -> name -> how many.
        fetched: what was fetched.
        busy: seconds to wait for other writers.

    Raises:
        OSError: the database is locked, read-only, full or failing; nothing was added.
    """
    whose = _NO_RANK if rank is None else rank, job or _NO_JOB
    values = [(m, 60, *whose, name, n) for m, row in rows.items() for name, n in row.items()]
    fetches = [(f.at, f.size, f.seconds, f.rank, f.url) for f in fetched]
    with _opened(layout, busy, create=True) as db:
        assert db is not None
        db.execute("BEGIN IMMEDIATE")
        db.executemany(_ADD, values)
        db.executemany("INSERT INTO fetches VALUES (?, ?, ?, ?, ?)", fetches)
        db.execute("COMMIT")


def samples(layout: Layout, since: float = 0.0, *, ever: bool = False) -> list[Sample]:
    """Everything that was counted, in no order.

    Args:
        layout: the node's namespace.
        since: what ended before that is left out; seconds since the epoch.
        ever: also what is too old to be kept by the hour.

    Raises:
        OSError: the database cannot be read; a missing one is empty.
    """
    found: dict[tuple[int, int, int, str], Sample] = {}
    with _opened(layout, _PATIENCE) as db:
        query = "SELECT * FROM counts WHERE start + seconds > ? AND (start > 0 OR ?)"
        for *key, name, n in db.execute(query, (since, ever)) if db else ():
            start, seconds, rank, job = key
            sample = found.setdefault(
                (start, seconds, rank, job),
                Sample(start, seconds, None if rank == _NO_RANK else rank, job or None),
            )
            wait, _, bucket = name.partition(":")
            if bucket:
                sample.waits.setdefault(wait, Counter())[int(bucket)] += n
            else:
                sample.counters[name] += n
    return list(found.values())


def fetches(layout: Layout, since: float = 0.0) -> list[Fetch]:
    """The latest shards that were fetched, oldest first.

    Args:
        layout: the node's namespace.
        since: what ended before that is left out; seconds since the epoch.

    Raises:
        OSError: the database cannot be read; a missing one is empty.
    """
    with _opened(layout, _PATIENCE) as db:
        query = "SELECT * FROM fetches WHERE at >= ? ORDER BY at"
        return [Fetch(*row) for row in db.execute(query, (since,))] if db else []


def compact(layout: Layout, now: float) -> None:
    """Turn minutes into hours, and forget what is too old.

    Args:
        layout: the node's namespace.
        now: seconds since the epoch.

    Raises:
        OSError: the database is locked, read-only or failing.
    """
    hour = int(now - _MINUTES_KEPT) // _HOUR * _HOUR
    old = int(now - _KEPT) // _HOUR * _HOUR
    with _opened(layout, _PATIENCE, write=True) as db:
        if db is None:
            return
        db.execute("BEGIN IMMEDIATE")
        for statement in _MERGE:
            db.execute(statement, (hour,))
        for statement in _FORGET:
            db.execute(statement, (old,))
        db.execute("COMMIT")


def zero(layout: Layout) -> None:
    """Begin to count anew.

    Raises:
        OSError: the database is locked, read-only or failing.
    """
    with _opened(layout, _PATIENCE, write=True) as db:
        if db is not None:
            db.execute("DELETE FROM counts")


@contextlib.contextmanager
def _opened(
    layout: Layout, busy: float, *, create: bool = False, write: bool = False
) -> Iterator[sqlite3.Connection | None]:
    """The database, open for as long as it is needed; None if there is none."""
    import sqlite3  # here: a process that counts nothing does not need it

    path = layout.stats
    with undivided():
        if not path.exists() and not create:
            yield None
            return
        refuse_links(*layout.directories, path)
        try:
            if create:
                _make(layout, path)
            mode = "rw" if create or write else "ro"
            with contextlib.closing(_connect(path, mode, busy)) as db:
                yield db
        except sqlite3.OperationalError as exn:  # locked, read-only, full
            raise OSError(errno.EIO, str(exn), str(path)) from exn
        except sqlite3.DatabaseError as exn:
            if create or write:
                logger.info("%s is damaged (%s); statistics begin anew", path, exn)
                for suffix in ("", "-wal", "-shm"):
                    Path(f"{path}{suffix}").unlink(missing_ok=True)
            raise OSError(errno.EIO, str(exn), str(path)) from exn


def _connect(path: Path, mode: str, busy: float) -> sqlite3.Connection:
    import sqlite3

    uri = f"{path.absolute().as_uri()}?mode={mode}"
    db = sqlite3.connect(uri, busy, uri=True, isolation_level=None)
    try:
        try:
            (version,) = db.execute("PRAGMA user_version").fetchone()
        except sqlite3.OperationalError:
            if mode != "ro" or Path(f"{path}-wal").exists():
                raise
            # On a disk that is read-only now the shared memory of readers cannot be made.
            db.close()
            db = sqlite3.connect(f"{uri}&immutable=1", busy, uri=True, isolation_level=None)
            (version,) = db.execute("PRAGMA user_version").fetchone()
        db.execute("PRAGMA synchronous = OFF")
        if version != _VERSION:
            raise OSError(errno.EPROTO, "another version of the library made it", str(path))
    except BaseException:
        db.close()
        raise
    return db


def _make(layout: Layout, path: Path) -> None:
    """Make the database if it is missing: complete under another name, then under its own."""
    import sqlite3

    if layout.grace is not None and layout.local is None:
        raise OSError(errno.ENOTSUP, "it would be shared with other nodes", str(path))
    if layout.modes.group is None and os.lstat(layout.base).st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "the cache belongs to another user", str(layout.base))
    if path.exists():
        return
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.executescript(_SCHEMA)
        data = bytearray(db.serialize())
    data[_WRITE_AHEAD] = _WRITE_AHEAD_VERSIONS
    via = path.parent if layout.local is not None else layout.partial
    temporary = temporary_name(via, path)
    write_new(temporary, bytes(data), layout.modes.file)
    try:
        with contextlib.suppress(FileExistsError):  # another process was quicker
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
