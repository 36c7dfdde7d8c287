"""The names on disk: how each is made, and what a name that is found says.

    <root>/  manifest.json  CACHEDIR.TAG  README.txt (in v1 where the root holds other things)
      v1/  objects/<aa>/<key>/<version>-<size>/   an entry: <basename>, meta.json
           partial/<key>.<version>.<random>/      a fetch in flight: <basename>, progress
           partial/evict.<key>.<random>/          an entry on its way out
           partial/.<name>.<random>               a file on its way to its name
           locks/<aa>/<key>.lock  quarantine/  ranks/<name>/ (a tree like this one)
           sessions/<random>.session  sessions/<random>.wait  pins/<key>.pin

This module alone makes and recognizes these names. A name that does not match was not made by
the library and is never touched. Version and size stand in an entry's name, so that neither a
hit nor a scan has to read a sidecar.

Everything here may run in any number of processes at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from dataclasses import dataclass, replace
from pathlib import Path

from shardcache.files import PRIVATE, Modes, open_file, random_token, settle

_KEY = _RANDOM = "[0-9a-f]{32}"
_VERSION = "[0-9a-f]{24}"
_ENTRY = re.compile(rf"({_VERSION})-(0|[1-9a-f][0-9a-f]{{0,15}})")
_PARTIAL = re.compile(rf"({_KEY})\.({_VERSION})\.{_RANDOM}")


def parse_entry_name(name: str) -> tuple[str, int] | None:
    """(version, size in bytes) of an entry's directory name, or None."""
    match = _ENTRY.fullmatch(name)
    return (match[1], int(match[2], 16)) if match else None


def parse_partial_name(name: str) -> tuple[str, str] | None:
    """(key, version) of a partial's directory name, or None."""
    match = _PARTIAL.fullmatch(name)
    return (match[1], match[2]) if match else None


# Each says whether a name is that of ...
#: a key;
is_key = re.compile(_KEY).fullmatch
#: a key's lock file;
is_lock_name = re.compile(rf"{_KEY}\.lock").fullmatch
#: a key's lease, or of the record beside it;
is_lease_name = re.compile(rf"{_KEY}\.(lease|holder)").fullmatch
#: a shard's pin;
is_pin_name = re.compile(rf"{_KEY}\.pin").fullmatch
#: an entry on its way out;
is_evicted_name = re.compile(rf"evict\.{_KEY}\.{_RANDOM}").fullmatch
#: a damaged entry that was set aside;
is_quarantined_name = re.compile(rf"{_KEY}\.{_VERSION}-[0-9a-f]{{1,16}}\.{_RANDOM}").fullmatch
#: a file or a directory (`Modes.new_directory`) on its way to its own name;
is_temporary_name = re.compile(rf"\.[A-Za-z0-9.]+\.{_RANDOM}").fullmatch
#: the namespace of a rank or a job, as `ranks.safe_name` makes it.
is_rank_name = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}").fullmatch

META = "meta.json"
PROGRESS = "progress"
MANIFEST = "manifest.json"

#: Seconds without a use after which, where flock does not tell, an entry may be evicted and
#: a fetch counts as dead. A live fetch writes its progress with every block and gives a
#: connection up after ``timeout``, half a minute; an hour also covers clocks of two nodes
#: that differ. Wrongly taken for dead, a fetch starts over and a reader asks the origin.
IDLE_GRACE = 3600.0


def is_idle(path: Path, grace: float = IDLE_GRACE) -> bool:
    """Whether nothing in a directory was written or touched for ``grace`` seconds."""
    latest = 0.0
    for name in list_names(path):
        with contextlib.suppress(FileNotFoundError):
            latest = max(latest, last_change(path / name))
    return time.time() - latest > grace


def last_change(path: Path) -> float:
    """When a file was last written or touched; a clock that is ahead can state no future one."""
    found = path.lstat()
    return min(found.st_mtime, found.st_ctime)


def list_names(directory: Path | str) -> list[str]:
    """The names in a directory; none if it is missing, or a symbolic link, which is not ours."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exn:
        if exn.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return []
        raise
    try:
        return os.listdir(fd)  # noqa: PTH208 - names are enough
    finally:
        os.close(fd)


def read_file(path: Path | str, limit: int) -> bytes:
    """The first ``limit`` bytes of a file; never through a link, waiting for nobody."""
    with open_file(path) as file:
        return os.read(file.fileno(), limit)


def is_directory(path: Path | str) -> bool:
    """Whether ``path`` is a directory itself, not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


class _Path:
    """An attribute of a `Layout`: a path in its namespace, or on this node."""

    def __init__(self, name: str, *, on_node: bool = False) -> None:
        self._name = name
        self._on_node = on_node

    def __get__(self, layout: Layout, owner: object = None) -> Path:
        return ((self._on_node and layout.local) or layout.base) / self._name


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of one namespace: the node's (``<root>/v1``) or a rank's below it.

    What is asked for with every shard is made in one piece: joining paths costs more.
    """

    base: Path
    #: Directory on this node for sessions and the locks of the namespace itself; None where they
    #: are in the namespace (see `shardcache.locks.mounts`).
    local: Path | None = None
    #: Seconds without a use after which an entry or a partial counts as free, and leases say who
    #: fetches; None where flock tells both.
    grace: float | None = None
    modes: Modes = PRIVATE

    objects = _Path("objects")
    partial = _Path("partial")  #: fetches in flight and entries on their way out
    quarantine = _Path("quarantine")  #: damaged entries that were set aside
    pins = _Path("pins")  #: what users want to keep; made with the first one
    ranks = _Path("ranks")  #: the namespaces of ranks and jobs
    locks = _Path("locks", on_node=True)
    sessions = _Path("sessions", on_node=True)  #: live processes
    usage = _Path("usage", on_node=True)  #: how many bytes the cache holds; see `space.budget`
    stats = _Path("stats.db", on_node=True)  #: what processes counted; made with the first row

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

    def new_partial(self, key: str, version: str) -> Path:
        """A name for a fetch in flight that nobody else has."""
        return Path(f"{self.base}/partial/{key}.{version}.{random_token()}")

    def new_evicted(self, key: str) -> Path:
        """A name for an entry on its way out."""
        return self.partial / f"evict.{key}.{random_token()}"

    def new_quarantined(self, entry: Path) -> Path:
        """A name for a damaged entry."""
        return self.quarantine / f"{entry.parent.name}.{entry.name}.{random_token()}"

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

    @property
    def directories(self) -> tuple[Path, ...]:
        """Every directory of the namespace, outer ones first."""
        outer = (self.base.parent, self.base) if self.base.parent.name == "ranks" else (self.base,)
        inner = (self.objects, self.partial, self.quarantine, self.locks, self.sessions)
        return outer + inner

    def make(self) -> None:
        """Make the directories of this namespace."""
        refuse_links(*self.directories)
        for path in self.directories:
            self.modes.make_directory(path)

    def linked(self) -> Path | None:
        """A directory of the namespace that is a symbolic link, if there is one."""
        return next((path for path in self.directories if os.path.islink(path)), None)  # noqa: PTH114


def refuse_links(*paths: Path) -> None:
    """Refuse what is a link to elsewhere: nothing is written through those (NotADirectoryError)."""
    for path in paths:
        if os.path.islink(path):  # noqa: PTH114 - where it cannot be seen, no
            raise NotADirectoryError(
                errno.ENOTDIR, f"{path} is a symbolic link, which the cache does not follow"
            )


# -- new files -----------------------------------------------------------------------------
# ``mode`` is a file's mode whatever the umask. ``via`` is where it is written before it has its
# name: a process may be killed in between, and sweepers look in `Layout.partial` alone. Where the
# disk is full, read-only or failing (OSError) no file is left.


def replace_file(path: Path, data: bytes, mode: int, *, via: Path) -> None:
    """Make ``path`` hold ``data``, all at once."""
    temporary = _temporary(path, data, mode, via)
    try:
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # its directory went away; the first error counts
            temporary.unlink()
        raise


def make_once(path: Path, data: bytes, mode: int, *, via: Path) -> None:
    """Make ``path`` hold ``data`` unless it is there: of several makers one wins."""
    temporary = _temporary(path, data, mode, via)
    try:
        with contextlib.suppress(FileExistsError):  # or ours, and the answer was lost (NFS)
            os.link(temporary, path)
    except OSError:  # a filesystem without hard links: the last maker wins
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):  # it was renamed
            temporary.unlink()


def _temporary(path: Path, data: bytes, mode: int, via: Path) -> Path:
    temporary = Path(f"{via}/.{path.name}.{random_token()}")
    write_new(temporary, data, mode)
    return temporary


def write_new(path: Path, data: bytes, mode: int, *, sync: bool = False) -> None:
    """Make a file that is not there; with ``sync``, on the disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, mode)
    try:
        with open(fd, "wb", buffering=0) as file:
            settle(fd, mode)
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, "the disk is full", str(path))
            if sync:
                os.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):  # its directory went away; the first error counts
            path.unlink()
        raise
