"""The names on disk (a tree of them is in docs/design.md): how each is made, and what it says.

This module alone makes and recognizes them. A name that does not match was not made by the library
and is never touched. Version and size stand in the names of entries and partials, so that neither
a hit nor a scan nor the budget has to read a file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardcache.files import PRIVATE, Modes, open_file, random_token, write_new
from shardcache.threads import lazy
from shardcache.urls import SIDE_FILES

_KEY = _RANDOM = "[0-9a-f]{32}"
_VERSION = "[0-9a-f]{24}"
_SIZE = "0|[1-9a-f][0-9a-f]{0,15}"
_ENTRY = re.compile(rf"({_VERSION})-({_SIZE})")
_PARTIAL = re.compile(rf"({_KEY})\.({_VERSION})(?:-({_SIZE}))?\.{_RANDOM}")


def parse_entry_name(name: str) -> tuple[str, int] | None:
    """(version, size in bytes) of an entry's directory name, or None."""
    match = _ENTRY.fullmatch(name)
    return (match[1], int(match[2], 16)) if match else None


def parse_partial_name(name: str) -> tuple[str, str, int | None] | None:
    """(key, version, size in bytes if known) of a partial's directory name, or None."""
    match = _PARTIAL.fullmatch(name)
    return (match[1], match[2], int(match[3], 16) if match[3] else None) if match else None


# Each says whether a name is that of ...
#: a key;
is_key = re.compile(_KEY).fullmatch
#: a key's lock file;
is_lock_name = re.compile(rf"{_KEY}\.lock").fullmatch
#: a key's lease, or of the record beside it;
is_lease_name = re.compile(rf"{_KEY}\.(lease|holder)").fullmatch
#: a shard's pin;
is_pin_name = re.compile(rf"{_KEY}\.pin").fullmatch
#: an entry on its way out, or a damaged one;
is_evicted_name = re.compile(rf"evict\.{_KEY}\.{_RANDOM}").fullmatch
#: a file or a directory (`Modes.new_directory`) on its way to its own name;
is_temporary_name = re.compile(rf"\.[A-Za-z0-9.]+\.{_RANDOM}").fullmatch
#: the namespace of a rank or a job, as `ranks.safe_name` makes it.
is_rank_name = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}").fullmatch


def is_side_file(name: str) -> bool:
    """Whether shardcache writes a file of this name beside the data of a shard."""
    return name in SIDE_FILES or is_temporary_name(name) is not None


META = "meta.json"
PROGRESS = "progress"
MANIFEST = "manifest.json"
#: A manifest has about 150 bytes.
_MAX_MANIFEST = 64 * 1024

#: Seconds without a use after which, where flock does not tell, an entry may be evicted and
#: a fetch counts as dead. A live fetch writes its progress with every block and gives a
#: connection up after ``timeout``, half a minute; an hour also covers clocks of two nodes
#: that differ. Wrongly taken for dead, a fetch starts over and a reader asks the origin.
IDLE_GRACE = 3600.0


def _inside(name: str) -> lazy[Path]:
    return lazy(lambda layout: layout.base / name)


def _on_node(name: str) -> lazy[Path]:
    return lazy(lambda layout: (layout.local or layout.base) / name)


@dataclass(frozen=True)
class Layout:
    """The paths of one namespace: the node's (``<root>/v1``) or a rank's below it."""

    base: Path
    #: Directory on this node for sessions and the locks of the namespace itself; None where they
    #: are in the namespace (see `shardcache.locks.mounts`).
    local: Path | None = None
    #: Seconds without a use after which an entry or a partial counts as free, and leases say who
    #: fetches; None where flock tells both.
    grace: float | None = None
    modes: Modes = PRIVATE

    objects = _inside("objects")
    partial = _inside("partial")  #: fetches in flight and entries on their way out
    pins = _inside("pins")  #: what users want to keep; made with the first one
    ranks = _inside("ranks")  #: the namespaces of ranks and jobs
    locks = _on_node("locks")
    sessions = _on_node("sessions")  #: live processes
    usage = _on_node("usage")  #: how many bytes the cache holds; see `space.budget`
    limits = _on_node("limits")  #: those of the ended session that began last; see `sessions`
    stats = _on_node("stats.db")  #: what processes counted; made with the first row

    @classmethod
    def of_root(cls, root: Path, modes: Modes = PRIVATE) -> Layout:
        """The node's namespace."""
        return cls(root / "v1", modes=modes)

    def rank(self, name: str) -> Layout:
        """The namespace of one rank or job."""
        local = None if self.local is None else self.local / "ranks" / name
        return replace(self, base=self.ranks / name, local=local)

    def key_dir(self, key: str) -> Path:
        """The directory of all versions of one key."""
        return Path(f"{self.base}/objects/{key[:2]}/{key}")

    def entry(self, key: str, version: str, size: int) -> Path:
        """The directory of an entry."""
        return Path(f"{self.base}/objects/{key[:2]}/{key}/{version}-{size:x}")

    def new_partial(self, key: str, version: str, size: int | None) -> Path:
        """A name for a fetch in flight that nobody else has."""
        length = "" if size is None else f"-{size:x}"
        return Path(f"{self.base}/partial/{key}.{version}{length}.{random_token()}")

    def new_evicted(self, key: str) -> Path:
        """A name for an entry that readers no longer find."""
        return self.partial / f"evict.{key}.{random_token()}"

    def pin(self, key: str) -> Path:
        """The note that one key is to be kept."""
        return self.pins / f"{key}.pin"

    def key_lock(self, key: str) -> Path:
        """The lock file of one key."""
        return Path(f"{self.local or self.base}/locks/{key[:2]}/{key}.lock")

    def lease(self, key: str) -> Path:
        """The marker by which the nodes that share the directory agree who fetches a key."""
        return self.base / "locks" / key[:2] / f"{key}.lease"

    def holder(self, key: str) -> Path:
        """Who fetches a key, for people: the lock file itself, or the record beside the lease."""
        return self.key_lock(key) if self.grace is None else self.lease(key).with_suffix(".holder")

    def named_lock(self, name: str) -> Path:
        """A lock file of the namespace itself: ``budget``, ``private-0``, ..."""
        return self.locks / f"{name}.lock"

    @lazy
    def directories(self) -> tuple[Path, ...]:
        """Every directory of the namespace, outer ones first."""
        outer = (self.base.parent, self.base) if self.base.parent.name == "ranks" else (self.base,)
        return *outer, self.objects, self.partial, self.locks, self.sessions

    def make(self) -> None:
        """Make the directories of this namespace."""
        for path in self.directories:
            self.modes.make_directory(path, levels=9)

    def linked(self) -> Path | None:
        """A directory of the namespace that is a symbolic link, if there is one."""
        return next((path for path in self.directories if os.path.islink(path)), None)  # noqa: PTH114


# -- what is found on disk -----------------------------------------------------------------


def open_directory(path: Path | str) -> int:
    """Open a directory, not a link to one; returns the descriptor."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def list_names(directory: Path | str) -> list[str]:
    """The names in a directory; none if it is missing, or a symbolic link, which is not ours."""
    try:
        fd = open_directory(directory)
    except OSError as exn:
        if exn.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return []
        raise
    try:
        return os.listdir(fd)  # noqa: PTH208 - names are enough
    finally:
        os.close(fd)


def is_directory(path: Path | str) -> bool:
    """Whether ``path`` is a directory itself, not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def is_idle(path: Path, grace: float = IDLE_GRACE) -> bool:
    """Whether a file, or what is in a directory, was not written for ``grace`` seconds."""
    latest = 0.0
    for each in [path / name for name in list_names(path)] or [path]:
        with contextlib.suppress(FileNotFoundError):
            found = each.lstat()
            # A clock that is ahead can state no future change.
            latest = max(latest, min(found.st_mtime, found.st_ctime))
    return time.time() - latest > grace


def remove_old(path: Path, age: float = IDLE_GRACE) -> None:
    """Remove a file, or an empty directory, that was not written for long."""
    with contextlib.suppress(OSError):  # it has its name by now
        if is_idle(path, age):
            path.rmdir() if is_directory(path) else path.unlink()


def read_file(path: Path | str, limit: int) -> bytes:
    """The first ``limit`` bytes of a file; never through a link, waiting for nobody."""
    with open_file(path) as file:
        return os.read(file.fileno(), limit)


def read_manifest(root: Path) -> dict[str, Any]:
    """What the manifest of a root says; empty if there is none that makes sense."""
    try:
        manifest = json.loads(read_file(root / MANIFEST, _MAX_MANIFEST))
    except (OSError, ValueError, RecursionError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def replace_file(path: Path, data: bytes, mode: int, *, via: Path, once: bool = False) -> None:
    """Make ``path`` hold ``data``, all at once; where that fails, no file is left.

    Args:
        path: the file.
        data: what it shall hold.
        mode: its mode, whatever the umask.
        via: where it is written before it has its name. A process may be killed in between, and
            sweepers look in `Layout.partial` alone.
        once: leave a file that exists: of several makers one wins.
    """
    temporary = via / f".{path.name}.{random_token()}"
    try:
        write_new(temporary, data, mode)
        if once:
            try:
                os.link(temporary, path)
                return
            except FileExistsError:  # or it is ours, and the answer was lost (NFS)
                return
            except OSError:  # a filesystem without hard links: the last maker wins
                pass
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):  # it was renamed
            temporary.unlink()
