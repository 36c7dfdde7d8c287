"""What dead processes leave behind: finding it, and removing it safely.

A directory in ``partial`` is live while somebody holds the flock on its data file; no clock and no
process id is asked, unless the filesystem does not do flock at all. Removal takes that flock
itself, renames the directory and only then deletes: of several sweepers and resumers exactly one
wins. A writer whose directory is removed before it has its lock starts over.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardcache.files import open_file
from shardcache.layout import (
    IDLE_GRACE,
    Layout,
    is_directory,
    is_evicted_name,
    is_key,
    is_lease_name,
    is_lock_name,
    is_temporary_name,
    last_change,
    list_names,
    parse_partial_name,
)
from shardcache.locks.flock import read_holder, try_flock
from shardcache.store.entry import GONE, NOT_DATA, data_file, hold


@dataclass(frozen=True, slots=True)
class InFlight:
    """A directory of ``partial``."""

    path: Path
    key: str  #: the shard's; empty for an entry on its way out
    live: bool  #: whether a process holds it
    occupied: int  #: bytes of data on disk now
    size: int | None  #: bytes it will have, where the origin said so

    @property
    def is_measured(self) -> bool:
        """Whether it is known how many bytes it will have, if it is to have more."""
        return not self.live or not self.key or self.size is not None

    @property
    def reserved(self) -> int:
        """Bytes it will occupy in the end, as far as known."""
        if self.live and not self.key:
            return 0  # somebody removes it right now
        return max(self.occupied, (self.live and self.size) or 0)


def in_flight(layout: Layout) -> Iterator[InFlight]:
    """Everything in ``partial`` that bears a name of ours; changes nothing."""
    for name in list_names(layout.partial):
        parsed = parse_partial_name(name)
        path = layout.partial / name
        if not (parsed or is_evicted_name(name)) or not is_directory(path):
            continue  # gone meanwhile, or nothing of ours
        # A writer holds its lock exclusively, so a shared one tells whether it
        # lives, and two who look do not disturb each other. An entry on its
        # way out is held by its readers, who share.
        with hold(path, layout.grace, shared=parsed is not None) as free:
            pass
        key, _, size = parsed or ("", "", None)
        yield InFlight(path, key, not free, _occupied(path), size)


def _occupied(path: Path) -> int:
    data = data_file(path)  # entries do not count their sidecars either
    if data is not None:
        with suppress(FileNotFoundError):
            found = os.lstat(data)
            return min(found.st_blocks * 512, found.st_size)
    return 0


def remove_leftover(layout: Layout, path: Path) -> bool:
    """Remove a directory of ``partial`` whose process is dead; False if it is live or gone."""
    parsed = parse_partial_name(path.name)
    if not (parsed or is_evicted_name(path.name)) or not is_directory(path):
        return False
    with hold(path, layout.grace) as free:
        if not free:
            return False
        doomed = path
        if parsed is not None:
            doomed = layout.new_evicted(parsed[0])
            try:
                path.rename(doomed)
            except FileNotFoundError:  # another sweeper was faster, or who resumes it
                return False
        shutil.rmtree(doomed, ignore_errors=True)
        return not doomed.exists()


def remove_locks(layout: Layout) -> int:
    """Remove lock files and leases of keys that nobody fetches; returns how many.

    They cost an inode for every shard that was ever fetched. A lock file is unlinked only under
    its own lock, and stays as long as the partial of a killed fetch that it names. A live lease is
    touched every half a minute; one that is wrongly taken for dead costs a second fetch.
    """
    removed = 0
    for place in {layout.locks, layout.base / "locks"}:
        for prefix in list_names(place):
            directory = place / prefix
            if not is_key(prefix * 16) or not is_directory(directory):
                continue
            for name in list_names(directory):
                if name.startswith(prefix):
                    if is_lock_name(name):
                        removed += _remove_free_lock(layout, directory / name)
                    elif is_lease_name(name):
                        removed += _remove_old(directory / name, layout.grace or IDLE_GRACE)
            with suppress(OSError):  # not empty: in use
                directory.rmdir()
    return removed


def _remove_free_lock(layout: Layout, path: Path) -> bool:
    left = read_holder(path)
    if left is not None and left.partial and is_directory(layout.partial / left.partial):
        return False
    try:
        with open_file(path, os.O_RDWR) as file:
            # The name may be that of a newer file by now, which somebody holds.
            free = try_flock(file.fileno()) is not False and os.fstat(file.fileno()).st_nlink
            if free:
                path.unlink()
            return bool(free)
    except OSError as exn:
        if exn.errno in NOT_DATA | GONE | {errno.EACCES}:
            return False
        raise


def remove_unnamed(layout: Layout) -> int:
    """Remove files and directories whose makers died before naming them; returns how many."""
    names = filter(is_temporary_name, list_names(layout.partial))
    return sum(_remove_old(layout.partial / name) for name in names)


def _remove_old(path: Path, age: float = IDLE_GRACE) -> bool:
    """Remove a file, or an empty directory, that was not written for long."""
    with suppress(OSError):  # it has its name by now
        if time.time() - last_change(path) > age:
            path.rmdir() if is_directory(path) else path.unlink()
            return True
    return False
