"""The names on disk: how each is made, and what a name that is found says.

    <root>/  manifest.json  CACHEDIR.TAG  README.txt (in v1 where the root holds other things)
      v1/  objects/<aa>/<key>/<version>-<size>/   an entry: <basename>, meta.json
           partial/<key>.<version>.<random>/      a fetch in flight, the same files growing
           partial/evict.<key>.<random>/          an entry on its way out
           partial/.<name>.<random>               a file on its way to its name
           locks/<aa>/<key>.lock  quarantine/  sessions/  ranks/<name>/ (a tree like this one)
           sessions/<random>.session  sessions/<random>.wait
           pins/<key>.pin

This module alone makes and recognizes these names. A name that does not match was not made
by the library and is never touched. Version and size stand in an entry's name, so that
neither a hit nor a scan has to read a sidecar.

Everything here may run in any number of processes at once: directories are made
idempotently, files appear by rename.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from shardcache.files import PRIVATE, Modes, list_directory, open_file, random_token, settle

_KEY = "[0-9a-f]{32}"
_RANDOM = "[0-9a-f]{32}"
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


def _recognizer(pattern: str) -> Callable[[str], bool]:
    compiled = re.compile(pattern)
    return lambda name: compiled.fullmatch(name) is not None


# Each says whether a name is that of ...
#: a key;
is_key = _recognizer(_KEY)
#: a key's lock file;
is_lock_name = _recognizer(rf"{_KEY}\.lock")
#: a key's lease, or of the record beside it;
is_lease_name = _recognizer(rf"{_KEY}\.(lease|holder)")
#: a shard's pin;
is_pin_name = _recognizer(rf"{_KEY}\.pin")
#: the note of somebody who waits;
is_wait_name = _recognizer(rf"{_RANDOM}\.wait")
#: an entry on its way out;
is_evicted_name = _recognizer(rf"evict\.{_KEY}\.{_RANDOM}")
#: a damaged entry that was set aside;
is_quarantined_name = _recognizer(rf"{_KEY}\.{_VERSION}-[0-9a-f]{{1,16}}\.{_RANDOM}")
#: a file that `replace_file` is writing;
is_temporary_name = _recognizer(rf"\.[A-Za-z0-9.]+\.{_RANDOM}")
#: a directory on its way to its own name, see `files.Modes.new_directory`;
is_unnamed = _recognizer(rf"\.new\.{_RANDOM}")
#: the namespace of a rank or a job, as `ranks.safe_name` makes it.
is_rank_name = _recognizer(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")

META = "meta.json"
PROGRESS = "progress"
MANIFEST = "manifest.json"

#: A sweeper may remove a file before it has its name, not this often in a row.
_REPLACE_ATTEMPTS = 100
#: Seconds without a use after which, where flock does not tell, an entry may be evicted and
#: a fetch counts as dead. A live fetch writes its progress with every block and gives a
#: connection up after ``timeout``, half a minute; an hour also covers clocks of two nodes
#: that differ. Wrongly taken for dead, a fetch starts over and a reader asks the origin.
IDLE_GRACE = 3600.0


def is_idle(path: Path, grace: float = IDLE_GRACE) -> bool:
    """Whether nothing in a directory was written or touched for ``grace`` seconds.

    Raises:
        OSError: it cannot be looked at.
    """
    times = []
    for name in list_names(path):
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(path / name)
            # Anybody whose clock is ahead can state a use in the future, but no change then.
            times.append(min(found.st_mtime, found.st_ctime))
    return time.time() - max(times, default=0.0) > grace


def list_names(directory: Path | str) -> list[str]:
    """The names in a directory; none if it is missing, or a symbolic link, which is not ours.

    Raises:
        OSError: it cannot be listed.
    """
    try:
        return list_directory(directory)
    except OSError as exn:
        if exn.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return []
        raise


def read_file(path: Path | str, limit: int) -> bytes:
    """The first ``limit`` bytes of a plain file; never through a link, never waiting.

    Raises:
        OSError: it is gone or cannot be read; ELOOP where something else is in its place:
            a link, a pipe, a socket, a device, a directory.
    """
    try:
        file = open_file(path, io.FileIO)
    except OSError as exn:
        if exn.errno not in (errno.ENXIO, errno.EISDIR):
            raise
        raise _not_plain(path) from exn
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _not_plain(path)
        return os.read(file.fileno(), limit)


def _not_plain(path: Path | str) -> OSError:
    return OSError(errno.ELOOP, f"{path} is not a plain file; remove it")


def is_directory(path: Path | str) -> bool:
    """Whether ``path`` is a directory itself, not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def is_link(path: Path) -> bool:
    """Whether ``path`` is a symbolic link; False where that cannot be seen."""
    try:
        return stat.S_ISLNK(os.lstat(path).st_mode)
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of one namespace: the node's (``<root>/v1``) or a rank's below it.

    What is asked for with every shard is made in one piece: joining paths costs more.

    Attributes:
        base: where it is.
        local: directory on this node for sessions and the locks of the namespace itself; None
            where they are in the namespace (see `shardcache.locks.mounts`).
        grace: seconds without a use after which an entry or a partial counts as free, and
            leases say who fetches; None where flock tells both.
        modes: the permissions of what is made in it.
    """

    base: Path
    local: Path | None = None
    grace: float | None = None
    modes: Modes = PRIVATE

    @classmethod
    def of_root(cls, root: Path, modes: Modes = PRIVATE) -> Layout:
        """The node's namespace."""
        return cls(root / "v1", modes=modes)

    @property
    def objects(self) -> Path:
        """Where entries live."""
        return self.base / "objects"

    @property
    def partial(self) -> Path:
        """Where fetches in flight and entries on their way out live."""
        return self.base / "partial"

    @property
    def quarantine(self) -> Path:
        """Where damaged entries are set aside."""
        return self.base / "quarantine"

    @property
    def locks(self) -> Path:
        """Where lock files live."""
        return (self.local or self.base) / "locks"

    @property
    def sessions(self) -> Path:
        """Where live processes are registered."""
        return (self.local or self.base) / "sessions"

    @property
    def usage(self) -> Path:
        """How many bytes the cache holds; see `space.budget`."""
        return (self.local or self.base) / "usage"

    @property
    def stats(self) -> Path:
        """The database of what processes count; made with the first row."""
        return (self.local or self.base) / "stats.db"

    @property
    def pins(self) -> Path:
        """Where it is noted what users want to keep; made with the first one."""
        return self.base / "pins"

    def pin(self, key: str) -> Path:
        """The note that one key is to be kept."""
        return self.pins / f"{key}.pin"

    @property
    def ranks(self) -> Path:
        """Where the namespaces of ranks and jobs live."""
        return self.base / "ranks"

    def rank(self, name: str) -> Layout:
        """The namespace of one rank or job."""
        local = None if self.local is None else self.local / "ranks" / name
        return replace(self, base=self.ranks / name, local=local)

    def new_wait(self) -> Path:
        """A name for the note of somebody who waits."""
        return self.sessions / f"{random_token()}.wait"

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

    def key_lock(self, key: str) -> Path:
        """The lock file of one key."""
        return Path(f"{self.local or self.base}/locks/{key[:2]}/{key}.lock")

    def lease(self, key: str) -> Path:
        """The marker by which the nodes that share the directory agree who fetches a key."""
        return self.base / "locks" / key[:2] / f"{key}.lease"

    def holder(self, key: str) -> Path:
        """Who fetches a key, for people: the lock file itself, or the record beside the lease."""
        if self.grace is None:
            return self.key_lock(key)
        return self.base / "locks" / key[:2] / f"{key}.holder"

    def named_lock(self, name: str) -> Path:
        """A lock file of the namespace itself: ``budget``, ``private-0``, ..."""
        return self.locks / f"{name}.lock"

    @property
    def directories(self) -> tuple[Path, ...]:
        """Every directory of the namespace, outer ones first."""
        inner = (self.objects, self.partial, self.quarantine, self.locks, self.sessions)
        outer = (self.base.parent, self.base) if self.base.parent.name == "ranks" else (self.base,)
        return outer + inner

    def make(self) -> None:
        """Make the directories of this namespace.

        Raises:
            OSError: the disk is full, read-only, or not ours to write.
            NotADirectoryError: one of them is a symbolic link.
        """
        refuse_links(*self.directories)
        for path in self.directories:
            self.modes.make_directory(path)

    def mend(self, directory: Path) -> None:
        """Make one of `directories` again that somebody removed.

        Raises:
            FileNotFoundError: the namespace itself is gone, perhaps with the disk that it was
                on; then it is for `root.make_root` to judge what is in its place.
            OSError: as `make`.
        """
        refuse_links(*self.directories)
        self.modes.make_directory(directory, levels=0)

    def linked(self) -> Path | None:
        """A directory of the namespace that is a symbolic link, if there is one."""
        return next((path for path in self.directories if is_link(path)), None)

    def objection(self) -> str | None:
        """Why the namespace must not be used: somebody else could change what is in it.

        Raises:
            OSError: it cannot be looked at.
        """
        for path in self.directories:
            with contextlib.suppress(FileNotFoundError):
                reason = self.modes.objection(path, path.lstat())
                if reason is not None:
                    return reason
        return None


def refuse_links(*directories: Path) -> None:
    """Refuse directories that are links to elsewhere; nothing is written through those.

    Raises:
        NotADirectoryError: one is.
    """
    for path in directories:
        if is_link(path):
            raise NotADirectoryError(
                errno.ENOTDIR, f"{path} is a symbolic link, which the cache does not follow"
            )


def replace_file(
    path: Path, data: bytes, mode: int, *, via: Path | None = None, sync: bool = False
) -> None:
    """Make ``path`` hold ``data``, all at once; with ``sync``, on the disk before its name.

    Args:
        path: the file.
        data: all of it.
        mode: its mode, whatever the umask.
        via: where it is written before it has its name; the default is beside it. A process
            may be killed in between, and sweepers look in `Layout.partial` alone.
        sync: see above.

    Raises:
        OSError: the disk is full, read-only or failing; no temporary file is left.
    """
    for _ in range(_REPLACE_ATTEMPTS):
        if _replace(path, data, mode, path.parent if via is None else via, sync):
            return
    raise FileNotFoundError(errno.ENOENT, "it is swept as fast as it is written", str(path))


def _replace(path: Path, data: bytes, mode: int, via: Path, sync: bool) -> bool:
    """As `replace_file`; False if a sweeper took the file for that of a dead process."""
    temporary = temporary_name(via, path)
    write_new(temporary, data, mode, sync=sync)
    try:
        temporary.replace(path)
    except OSError as exn:
        swept = isinstance(exn, FileNotFoundError) and not os.path.lexists(temporary)
        if swept and is_directory(via) and is_directory(path.parent):
            return False
        with contextlib.suppress(OSError):  # its directory went away; the first error counts
            temporary.unlink()
        raise
    return True


def temporary_name(via: Path, path: Path) -> Path:
    """A name in ``via`` for what is to become ``path``, which sweepers know."""
    return Path(f"{via}/.{path.name}.{random_token()}")


def write_new(path: Path, data: bytes, mode: int, *, sync: bool = False) -> None:
    """Make a file; with ``sync``, on the disk.

    Raises:
        OSError: it is there already, or the disk is full, read-only or failing; then no
            file is left.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, mode)
    try:
        with open(fd, "wb") as file:
            settle(file.fileno(), mode)
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):  # its directory went away; the first error counts
            path.unlink()
        raise
