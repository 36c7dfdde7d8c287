"""The names on disk, and the making of a root.

    <root>/  manifest.json  CACHEDIR.TAG  README.txt (in v1 where the root holds other things)
      v1/  objects/<aa>/<key>/<version>-<size>/   an entry: <basename>, meta.json
           partial/<key>.<version>.<random>/      a fetch in flight, the same files growing
           partial/evict.<key>.<random>/          an entry on its way out
           locks/<aa>/<key>.lock  quarantine/  sessions/  ranks/<name>/ (a tree like this one)

This module alone knows these names; `store` and `partials` ask it. A name that
does not match the grammar here was not made by the library and is never
touched. Version and size stand in an entry's name, so that neither a hit nor a
scan has to read a sidecar.

Everything here may run in any number of processes at once: directories are made
idempotently, files appear by rename.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from shardcache.errors import ConfigError

__all__ = ["Layout", "make_root", "parse_entry_name", "parse_partial_name", "replace_file"]

DIRECTORY_MODE = 0o700
META = "meta.json"
PROGRESS = "progress"
MANIFEST = "manifest.json"
_TAG_NAME = "CACHEDIR.TAG"
_README_NAME = "README.txt"
#: What may be in a directory that is the cache's alone; lost+found is mkfs's.
_ROOT_NAMES = frozenset({"v1", MANIFEST, _TAG_NAME, "lost+found"})

_KEY = re.compile(r"[0-9a-f]{32}\Z")
_ENTRY = re.compile(r"([0-9a-f]{24})-([0-9a-f]{1,16})\Z")
_PARTIAL = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{24})\.([0-9a-f]{32})\Z")
_EVICTED = re.compile(r"evict\.([0-9a-f]{32})\.([0-9a-f]{32})\Z")
_LOCK = re.compile(r"([0-9a-f]{32})\.lock\Z")
_TEMPORARY = re.compile(r"\.[A-Za-z.]+\.[0-9a-f]{32}\Z")
# What `ranks.safe_name` makes.
_RANK = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z")
_QUARANTINED = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{24})-([0-9a-f]{1,16})\.([0-9a-f]{32})\Z")

# https://bford.info/cachedir/: the first 43 bytes are the signature that backup
# programs look for.
_CACHEDIR_TAG = """Signature: 8a477f597d28d172789f06886806bc55
# This directory is a shardcache root: copies of training shards that can be
# fetched again. Backups may leave it out.
"""
_README = """Copies of training shards, kept by shardcache.

v1/objects   one directory per shard: the shard and meta.json, complete and read-only
v1/partial   fetches in flight; what a killed process leaves is resumed or swept
v1/locks     empty lock files; harmless to keep, harmless to delete when nothing runs

Look with     shardcache --dir THIS ls
Make room     shardcache --dir THIS clean --max-size 500GB
Remove all    shardcache --dir THIS clean --all -y
Deleting any entry by hand is safe too: the next reader fetches it again.
"""


def random_token() -> str:
    """128 random bits as hex: no two nodes, pids or restarts ever share a name."""
    return secrets.token_hex(16)


def parse_entry_name(name: str) -> tuple[str, int] | None:
    """(version, size in bytes) of an entry's directory name, or None."""
    match = _ENTRY.match(name)
    return (match.group(1), int(match.group(2), 16)) if match else None


def parse_partial_name(name: str) -> tuple[str, str] | None:
    """(key, version) of a partial's directory name, or None."""
    match = _PARTIAL.match(name)
    return (match.group(1), match.group(2)) if match else None


def is_evicted_name(name: str) -> bool:
    """Whether the directory is an entry on its way out."""
    return _EVICTED.match(name) is not None


def is_quarantined_name(name: str) -> bool:
    """Whether the directory is a damaged entry that was set aside."""
    return _QUARANTINED.match(name) is not None


def is_key(name: str) -> bool:
    """Whether ``name`` is a key."""
    return _KEY.match(name) is not None


def is_lock_name(name: str) -> bool:
    """Whether ``name`` is that of a key's lock file."""
    return _LOCK.match(name) is not None


def is_rank_name(name: str) -> bool:
    """Whether ``name`` is that of a rank's or a job's namespace."""
    return _RANK.match(name) is not None


def list_names(directory: Path | str) -> list[str]:
    """The names in a directory; none if it is missing, or a symbolic link, which is not ours.

    Raises:
        OSError: it cannot be listed.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(directory, flags)
    except OSError as exn:
        if exn.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return []
        raise
    try:
        return os.listdir(fd)  # noqa: PTH208 - names only
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Make a directory that others make and remove at the same time; it may be gone again.

    Raises:
        OSError: it cannot be made.
    """
    with contextlib.suppress(FileNotFoundError, FileExistsError):
        path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)


def is_directory(path: Path | str) -> bool:
    """Whether ``path`` is a directory itself, not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of one namespace: the node's (``<root>/v1``) or a rank's below it."""

    base: Path

    @classmethod
    def of_root(cls, root: Path) -> Layout:
        """The node's namespace."""
        return cls(root / "v1")

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
        return self.base / "locks"

    @property
    def sessions(self) -> Path:
        """Where live processes are registered."""
        return self.base / "sessions"

    @property
    def ranks(self) -> Path:
        """Where the namespaces of ranks and jobs live."""
        return self.base / "ranks"

    def rank(self, name: str) -> Layout:
        """The namespace of one rank or job."""
        return Layout(self.ranks / name)

    def key_dir(self, key: str) -> Path:
        """The directory of all versions of one key."""
        return self.objects / key[:2] / key

    def entry(self, key: str, version: str, size: int) -> Path:
        """The directory of an entry."""
        return self.key_dir(key) / f"{version}-{size:x}"

    def new_partial(self, key: str, version: str) -> Path:
        """A name for a fetch in flight that nobody else has."""
        return self.partial / f"{key}.{version}.{random_token()}"

    def new_evicted(self, key: str) -> Path:
        """A name for an entry on its way out."""
        return self.partial / f"evict.{key}.{random_token()}"

    def new_quarantined(self, entry: Path) -> Path:
        """A name for a damaged entry."""
        return self.quarantine / f"{entry.parent.name}.{entry.name}.{random_token()}"

    def key_lock(self, key: str) -> Path:
        """The lock file of one key."""
        return self.locks / key[:2] / f"{key}.lock"

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
        linked = self.linked()
        if linked is not None:
            raise NotADirectoryError(errno.ENOTDIR, "is a symbolic link", str(linked))
        # Each by name: mkdir gives parents that it makes the mode of the umask.
        for path in self.directories:
            path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)

    def linked(self) -> Path | None:
        """A directory of the namespace that is a symbolic link, if there is one."""
        return next((path for path in self.directories if path.is_symlink()), None)


def make_root(root: Path, library: str) -> Layout:
    """Make ``root`` a cache, or check that it is one that may be used.

    Raises:
        ConfigError: ``root`` is not a directory, belongs to somebody else,
            anybody may write to it, or it leads elsewhere.
        OSError: it cannot be made or written (EACCES, EROFS, ENOSPC, ...).
    """
    try:
        root.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as exn:
        raise ConfigError(
            f"{exn.filename} is not a directory; point dir at a directory for the cache", dir=root
        ) from exn
    check_root(root)
    layout = Layout.of_root(root)
    linked = layout.linked()
    if linked is not None:
        raise ConfigError(
            f"{linked} is a symbolic link, and the cache removes nothing behind links; "
            "point dir at the place itself",
            dir=root,
        )
    layout.make()
    if not (root / MANIFEST).exists():
        # Backups skip what the tag is in: it must not be in a directory that holds
        # other things as well, and their README is not ours to replace.
        alone = all(_is_ours(root, name) for name in list_names(root.resolve()))
        manifest = {"schema": 1, "layouts": ["v1"], "id": random_token(), "library": library}
        home = root if alone else layout.base
        replace_file(home / _TAG_NAME, _CACHEDIR_TAG.encode(), 0o600)
        replace_file(home / _README_NAME, _README.encode(), 0o600)
        # Last: its presence says that the rest is there.
        replace_file(root / MANIFEST, (json.dumps(manifest) + "\n").encode(), 0o600)
    return layout


def _is_ours(root: Path, name: str) -> bool:
    """Whether something directly in a root without manifest is what `make_root` makes."""
    if name == _README_NAME:
        try:
            return (root / name).read_text("utf-8") == _README
        except (OSError, UnicodeDecodeError):
            return False
    return name in _ROOT_NAMES or _TEMPORARY.match(name) is not None


def check_root(root: Path) -> None:
    """Refuse a root that somebody else could tamper with.

    Raises:
        ConfigError: with the command that mends it.
        OSError: ``root`` cannot be looked at.
    """
    link = root.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{root} is a symbolic link that user {link.st_uid} made; use a directory of your own",
            dir=root,
        )
    found = root.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{root} is not a directory; point dir at a directory", dir=root)
    if found.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"{root} can be written by every user, who could plant shards in it; "
            f"use a directory of your own below it, such as {root / 'shards'}",
            dir=root,
        )
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{root} belongs to user {found.st_uid} and this process is user {os.geteuid()}; "
            "use a directory of your own",
            dir=root,
        )


def is_cache(root: Path) -> bool:
    """Whether ``root`` bears our manifest and leads nowhere else.

    Nothing may be removed where it does not.
    """
    try:
        manifest = (root / MANIFEST).lstat()
    except OSError:
        return False
    return stat.S_ISREG(manifest.st_mode) and Layout.of_root(root).linked() is None


def replace_file(path: Path, data: bytes, mode: int, *, sync: bool = False) -> None:
    """Make ``path`` hold ``data``, all at once; with ``sync``, on the disk before its name.

    Raises:
        OSError: the disk is full, read-only or failing; no temporary file is left.
    """
    temporary = path.with_name(f".{path.name}.{random_token()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(temporary, flags, mode)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # its directory went away; the first error counts
            temporary.unlink()
        raise
