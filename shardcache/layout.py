"""Names on disk; docs/design.md shows them as a tree.

Only this module makes and parses them. A name that does not match was not made by shardcache and is
never touched. The names of entries and partials hold version and size, so that a hit, a scan and
the budget need not read files.
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
    """Return (version, size in bytes) from the name of an entry's directory, or None."""
    match = _ENTRY.fullmatch(name)
    return (match[1], int(match[2], 16)) if match else None


def parse_partial_name(name: str) -> tuple[str, str, int | None] | None:
    """Return (key, version, size in bytes if known) from the name of a partial, or None."""
    match = _PARTIAL.fullmatch(name)
    return (match[1], match[2], int(match[3], 16) if match[3] else None) if match else None


# Functions that match a name.
is_key = re.compile(_KEY).fullmatch
is_lock_name = re.compile(rf"{_KEY}\.lock").fullmatch
is_lease_name = re.compile(rf"{_KEY}\.(lease|holder)").fullmatch  #: or its record
is_pin_name = re.compile(rf"{_KEY}\.pin").fullmatch
is_evicted_name = re.compile(rf"evict\.{_KEY}\.{_RANDOM}").fullmatch  #: entry that was hidden
#: A file (`replace_file`) or directory (`Modes.new_directory`) before it is renamed.
is_temporary_name = re.compile(rf"\.[A-Za-z0-9.]+\.{_RANDOM}").fullmatch
#: A file that says something about shards or processes, and holds no shard.
is_record_name = re.compile(
    rf"(?:{_KEY}|budget|clean|downloads|[a-z]+-\d+)\.lock|{_KEY}\.(?:lease|holder|pin|session)|"
    rf"{_KEY}\.{_RANDOM}\.wait|[A-Za-z0-9._-]+\.streamed|stats\.db(?:-[a-z]+)?|limits|usage"
).fullmatch
#: The namespace of a rank or a job; made by `ranks.safe_name`.
is_rank_name = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}").fullmatch


def is_side_file(name: str) -> bool:
    """Return whether shardcache writes a file of this name beside a shard."""
    return name in SIDE_FILES or is_temporary_name(name) is not None


META = "meta.json"
PROGRESS = "progress"
MANIFEST = "manifest.json"
#: Most bytes to read of a manifest, which has about 150.
_MAX_MANIFEST = 4096

#: Without flock: seconds without a use after which an entry may be evicted, and without a write
#: after which a download counts as dead. A live one writes its journal with every block and gives
#: up a connection after ``timeout``, half a minute; an hour also covers nodes whose clocks differ.
#: If the guess is wrong, a download starts over, or a reader continues from the origin.
IDLE_GRACE = 3600.0


def _inside(name: str) -> lazy[Path]:
    return lazy(lambda layout: layout.base / name)


def _on_node(name: str) -> lazy[Path]:
    return lazy(lambda layout: (layout.local or layout.base) / name)


@dataclass(frozen=True)
class Layout:
    """The paths of one namespace: the node's (``<root>/v1``) or a rank's below it."""

    base: Path
    #: With leases: a directory on this node for sessions and the namespace's own locks (see
    #: `shardcache.locks.mounts`).
    local: Path | None = None
    #: With leases: seconds without a use after which an entry or a partial counts as free. None
    #: with flock.
    grace: float | None = None
    modes: Modes = PRIVATE

    objects = _inside("objects")  #: entries
    partial = _inside("partial")  #: shards in flight, and hidden entries
    pins = _inside("pins")  #: pins of users; made with the first one
    ranks = _inside("ranks")  #: namespaces of ranks and jobs
    limits = _inside("limits")  #: limits of the last job; see `locks.sessions`
    locks = _on_node("locks")
    sessions = _on_node("sessions")  #: live processes
    usage = _on_node("usage")  #: bytes that the cache holds; see `space.budget`
    stats = _on_node("stats.db")  #: counters; made with the first row

    @classmethod
    def of_root(cls, root: Path, modes: Modes = PRIVATE) -> Layout:
        """Return the node's namespace, locked by flock."""
        return cls(root / "v1", modes=modes)

    def rank(self, name: str) -> Layout:
        """Return the namespace of one rank or job."""
        local = None if self.local is None else self.local / "ranks" / name
        return replace(self, base=self.ranks / name, local=local)

    def key_dir(self, key: str) -> Path:
        """Return the directory of all versions of one key."""
        return Path(f"{self.base}/objects/{key[:2]}/{key}")

    def entry(self, key: str, version: str, size: int) -> Path:
        """Return the directory of an entry."""
        return Path(f"{self.base}/objects/{key[:2]}/{key}/{version}-{size:x}")

    def new_partial(self, key: str, version: str, size: int | None) -> Path:
        """Return a new, unique directory for a shard in flight."""
        length = "" if size is None else f"-{size:x}"
        return Path(f"{self.base}/partial/{key}.{version}{length}.{random_token()}")

    def new_evicted(self, key: str) -> Path:
        """Return a new, unique directory for an entry or partial that is being removed."""
        return self.partial / f"evict.{key}.{random_token()}"

    def pin(self, key: str) -> Path:
        """Return the pin of one key."""
        return self.pins / f"{key}.pin"

    def key_lock(self, key: str) -> Path:
        """Return the lock file of one key."""
        return Path(f"{self.local or self.base}/locks/{key[:2]}/{key}.lock")

    def lease(self, key: str) -> Path:
        """Return the lease of a key. All nodes that share the directory see it."""
        return self.base / "locks" / key[:2] / f"{key}.lease"

    def holder(self, key: str) -> Path:
        """Return the file with the `Holder` of a key: its lock file, or one next to its lease."""
        return self.key_lock(key) if self.grace is None else self.lease(key).with_suffix(".holder")

    def named_lock(self, name: str) -> Path:
        """Return a lock file of the namespace itself: ``budget``, ``private-0``, ..."""
        return self.locks / f"{name}.lock"

    @lazy
    def directories(self) -> tuple[Path, ...]:
        """The directories of the namespace, parents first."""
        outer = (self.base.parent, self.base) if self.base.parent.name == "ranks" else (self.base,)
        return *outer, self.objects, self.partial, self.locks, self.sessions

    def make(self) -> None:
        """Make the directories of this namespace."""
        for path in self.directories:
            self.modes.make_directory(path, levels=9)

    def linked(self) -> Path | None:
        """Return a directory of the namespace that is a symbolic link, or None."""
        return next((path for path in self.directories if os.path.islink(path)), None)  # noqa: PTH114


# -- files and directories -----------------------------------------------------------------


def open_directory(path: Path | str) -> int:
    """Open a directory, but not a link to one; return the descriptor."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def list_names(directory: Path | str) -> list[str]:
    """List the names in a directory; none if it is missing or a symbolic link."""
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
    """Return whether ``path`` is a directory, and not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def is_idle(path: Path, grace: float = IDLE_GRACE) -> bool:
    """Return whether a file, or all files in a directory, were unused for ``grace`` seconds."""
    latest = 0.0
    for each in [path / name for name in list_names(path)] or [path]:
        with contextlib.suppress(FileNotFoundError):
            status = each.lstat()
            # A process may set any modification time, but the kernel sets the change time.
            latest = max(latest, min(status.st_mtime, status.st_ctime))
    return time.time() - latest > grace


def remove_old(path: Path, age: float = IDLE_GRACE) -> None:
    """Remove a file or an empty directory that was unused for ``age`` seconds."""
    with contextlib.suppress(OSError):  # it was renamed
        if is_idle(path, age):
            path.rmdir() if is_directory(path) else path.unlink()


def read_file(path: Path | str, limit: int) -> bytes:
    """Read up to ``limit`` bytes of a file, without following a link and without blocking."""
    with open_file(path) as file:
        return os.read(file.fileno(), limit)


def read_manifest(root: Path) -> dict[str, Any]:
    """Read the manifest of a root; return an empty dict if it is missing or damaged."""
    try:
        manifest = json.loads(read_file(root / MANIFEST, _MAX_MANIFEST))
    except (OSError, ValueError, RecursionError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def replace_file(path: Path, data: bytes, mode: int, *, via: Path, once: bool = False) -> None:
    """Write a file atomically: a reader sees the old content or all of the new one.

    The temporary file is in ``via``: `Layout.partial`, which is swept, because this process may be
    killed before the rename. With ``once``, a file that exists is left.
    """
    temporary = via / f".{path.name}.{random_token()}"
    try:
        write_new(temporary, data, mode)
        if once:
            try:
                os.link(temporary, path)
                return
            except FileExistsError:  # another process made it; or this one, if NFS sent it twice
                return
            except OSError:  # a filesystem without hard links: the last process wins
                pass
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):  # it was renamed
            temporary.unlink()
