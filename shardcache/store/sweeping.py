"""What dead processes leave behind: finding it, and removing it safely.

A directory in ``partial`` is live while somebody holds the flock on its data
file; no clock and no process id is asked, unless the filesystem does not do
flock at all. Removal takes that flock itself,
renames the directory and only then deletes: of several sweepers, resumers and
a writer that is just starting, exactly one wins, and a writer whose brand-new
directory goes away makes another.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shardcache.files import open_file
from shardcache.layout import (
    IDLE_GRACE,
    META,
    PROGRESS,
    Layout,
    is_directory,
    is_evicted_name,
    is_idle,
    is_key,
    is_lease_name,
    is_lock_name,
    is_quarantined_name,
    is_temporary_name,
    is_unnamed,
    list_names,
    parse_partial_name,
)
from shardcache.locks.flock import is_file, is_free, lock_exclusive
from shardcache.store.partial import Progress, read_progress

logger = logging.getLogger(__name__)

#: What opening a file answers when it is gone or none of ours: a planted symbolic
#: link, a socket.
_NOT_DATA = frozenset({errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO})


@dataclass(frozen=True, slots=True)
class InFlight:
    """A directory of ``partial``.

    Attributes:
        path: the directory.
        key: the shard's key; empty for an entry on its way out.
        live: whether a process holds it.
        occupied: bytes of data on disk now.
        progress: how far the fetch is, where it says so.
    """

    path: Path
    key: str
    live: bool
    occupied: int
    progress: Progress | None

    @property
    def is_measured(self) -> bool:
        """Whether it is known how many bytes it will have, if it is to have more."""
        writes = self.live and self.key
        return not writes or (self.progress is not None and self.progress.total is not None)

    @property
    def reserved(self) -> int:
        """Bytes it will occupy in the end, as far as known."""
        if self.live and not self.key:
            return 0  # somebody removes it right now
        expected = self.progress.total if self.live and self.progress else None
        return max(self.occupied, expected or 0)


def in_flight(layout: Layout) -> Iterator[InFlight]:
    """Everything in ``partial`` that bears a name of ours; only looks.

    Raises:
        OSError: the directory cannot be read; a missing one is empty.
    """
    for name in list_names(layout.partial):
        parsed = parse_partial_name(name)
        if parsed is None and not is_evicted_name(name):
            continue
        path = layout.partial / name
        if not is_directory(path):
            continue  # gone meanwhile, or nothing of ours
        # A writer holds its lock exclusively, so a shared one tells whether it
        # lives, and two who look do not disturb each other. An entry on its
        # way out is held by its readers, who share.
        try:
            with _held(path, layout.grace, shared=parsed is not None) as free:
                pass
            occupied = _occupied(path)
        except PermissionError:  # no directory of a cache that this user may use is closed
            logger.debug("%s is closed to this user", path)
            continue
        yield InFlight(
            path=path,
            key=parsed[0] if parsed else "",
            live=not free,
            occupied=occupied,
            progress=read_progress(path) if parsed else None,
        )


@contextmanager
def _held(path: Path, grace: float | None, *, shared: bool = False) -> Iterator[bool]:
    """Hold the data file of a directory; False if somebody else does, or may do.

    With ``grace`` nothing is locked: free is what was idle for so long.
    """
    if grace is not None:
        yield is_idle(path, grace)
        return
    files: list[io.FileIO] = []
    free = True
    try:
        for name in list_names(path):
            if name in (META, PROGRESS) or name.startswith("."):
                continue
            try:
                files.append(open_file(path / name, io.FileIO))
            except OSError as exn:
                if exn.errno in _NOT_DATA:
                    continue
                if exn.errno != errno.EACCES:
                    raise  # EMFILE for one: not knowing is no reason to remove
                # Another member was killed before it could open its file to the group.
                free = free and is_idle(path)
                continue
            answer = is_free(files[-1].fileno(), shared=shared)
            free = free and (is_idle(path) if answer is None else answer)
        yield free
    finally:
        for file in files:
            file.close()


def _occupied(path: Path) -> int:
    total = 0
    for name in list_names(path):
        if name in (META, PROGRESS):
            continue  # entries do not count theirs either
        with suppress(FileNotFoundError):
            found = os.lstat(path / name)
            total += min(found.st_blocks * 512, found.st_size)
    return total


def remove_leftover(layout: Layout, path: Path) -> bool:
    """Remove a directory of ``partial`` whose process is dead.

    Returns:
        Whether this call removed it; False if it is live or went away.

    Raises:
        OSError: the filesystem is read-only or failing.
    """
    parsed = parse_partial_name(path.name)
    if not (parsed or is_evicted_name(path.name)) or not is_directory(path):
        return False
    with suppress(OSError):
        # Empty: of a writer that was killed, or one that makes its data file
        # just now, which a rename and removal of the whole would take from it.
        path.rmdir()
        return True
    with _held(path, layout.grace) as free:
        if not free or not list_names(path):
            return False
        doomed = path
        if parsed is not None:
            doomed = layout.new_evicted(parsed[0])
            try:
                path.rename(doomed)
            except FileNotFoundError:
                return False
        shutil.rmtree(doomed, ignore_errors=True)
    return not doomed.exists()


def remove_quarantined(layout: Layout, *, dry_run: bool = False) -> Iterator[tuple[Path, int]]:
    """Remove damaged entries that were set aside; yields (directory, bytes freed).

    Raises:
        OSError: the directory cannot be read.
    """
    for name in list_names(layout.quarantine):
        path = layout.quarantine / name
        if is_quarantined_name(name) and is_directory(path):
            size = _occupied(path)
            if not dry_run:
                shutil.rmtree(path, ignore_errors=True)
            if dry_run or not path.exists():
                yield path, size


def remove_free_locks(layout: Layout) -> int:
    """Remove the lock files of keys that nobody fetches; returns how many.

    They cost an inode for every shard that was ever fetched. A lock file is
    unlinked only under its own lock, so nobody holds it; whoever opened it
    before finds, once it has the lock, that the file has no name left, and
    opens anew.

    Raises:
        OSError: the filesystem is read-only or failing.
    """
    removed = 0
    for prefix in list_names(layout.locks):
        directory = layout.locks / prefix
        if not is_key(prefix * 16) or not is_directory(directory):
            continue
        for name in list_names(directory):
            if is_lock_name(name) and name.startswith(prefix):
                removed += _remove_free_lock(directory / name)
        with suppress(OSError):  # not empty: in use
            directory.rmdir()
    return removed


def remove_dead_leases(layout: Layout) -> int:
    """Remove leases that nobody renews, and the records beside them; returns how many.

    A live holder touches its marker every half a minute. One that is wrongly taken for
    dead costs a second fetch.

    Raises:
        OSError: the filesystem is read-only or failing.
    """
    removed = 0
    grace = layout.grace or IDLE_GRACE
    for prefix in list_names(layout.base / "locks"):
        directory = layout.base / "locks" / prefix
        for name in list_names(directory) if is_key(prefix * 16) else ():
            if is_lease_name(name) and name.startswith(prefix):
                with suppress(FileNotFoundError):
                    if time.time() - os.lstat(directory / name).st_mtime > grace:
                        (directory / name).unlink()
                        removed += 1
    return removed


def remove_unnamed(layout: Layout) -> int:
    """Remove directories whose makers died before naming them; returns how many.

    They are empty. One whose maker lives is made again by it.

    Raises:
        OSError: the filesystem is failing.
    """
    if layout.modes.group is None:
        return 0  # only a group's are named when they are ready (`modes`)
    prefixes = [layout.objects / n for n in list_names(layout.objects) if is_key(n * 16)]
    removed = 0
    for directory in (layout.base.parent, layout.ranks, *layout.directories, *prefixes):
        for name in list_names(directory):
            if is_unnamed(name):
                with suppress(OSError):  # it has its name by now
                    (directory / name).rmdir()
                    removed += 1
    return removed


def remove_temporaries(layout: Layout) -> int:
    """Remove files whose writers died before naming them; returns how many.

    A writer that lives makes another (`layout.replace_file`).

    Raises:
        OSError: the filesystem is read-only or failing.
    """
    removed = 0
    for name in list_names(layout.partial):
        path = layout.partial / name
        if is_temporary_name(name):
            with suppress(FileNotFoundError):  # it has its name by now
                if stat.S_ISREG(path.lstat().st_mode):
                    path.unlink()
                    removed += 1
    return removed


def _remove_free_lock(path: Path) -> bool:
    try:
        file = open_file(path, io.FileIO, os.O_RDWR)
    except OSError as exn:
        if exn.errno in _NOT_DATA or exn.errno == errno.EACCES:
            return False
        raise
    with file, suppress(FileNotFoundError):
        # The name may be that of a newer file by now, which somebody holds.
        if lock_exclusive(file.fileno()) and is_file(path, file.fileno()):
            path.unlink()
            return True
    return False
