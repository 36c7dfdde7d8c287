"""The names of files and directories in a cache. docs/design.md shows the tree.

shardcache never touches a file with another name. Sessions and the root name their own files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardcache.faults import ignoring, system_error
from shardcache.files import ABSENT, PRIVATE, Modes, list_names, random_token, read_file, write_new
from shardcache.threads import lazy
from shardcache.urls import SIDE_FILES

_KEY = _RANDOM = "[0-9a-f]{32}"
_VERSION = "[0-9a-f]{24}"
_SIZE = "0|[1-9a-f][0-9a-f]{0,15}"
_ENTRY = re.compile(rf"({_VERSION})-({_SIZE})")
#: Also the temporary names that filelock uses while it breaks an expired lease.
_LEASE = rf"{_KEY}\.(?:holder|lease(?:\.[a-z]+\.\d+\.{_RANDOM})?)"
_PARTIAL = re.compile(rf"({_KEY})\.({_VERSION})(?:-({_SIZE}))?\.{_RANDOM}")


def parse_entry_name(name: str) -> tuple[str, int] | None:
    """Return (version, size in bytes) from the name of an entry, or None for any other name."""
    match = _ENTRY.fullmatch(name)
    return (match[1], int(match[2], 16)) if match else None


def parse_partial_name(name: str) -> tuple[str, str, int | None] | None:
    """Return (key, version, size in bytes or None) from the name of a partial; None for others."""
    match = _PARTIAL.fullmatch(name)
    return (match[1], match[2], int(match[3], 16) if match[3] else None) if match else None


# Functions that return a match if a name has the form in question, and None otherwise.
is_key = re.compile(_KEY).fullmatch
is_lock_name = re.compile(rf"{_KEY}\.lock").fullmatch
is_lease_name = re.compile(_LEASE).fullmatch  #: a lease or its record
is_pin_name = re.compile(rf"{_KEY}\.pin").fullmatch
is_hidden_name = re.compile(rf"evict\.{_KEY}\.{_RANDOM}").fullmatch  #: an entry being removed
#: A file (`Layout.write`) or directory (`Modes.new_directory`) that does not have its name yet.
is_temporary_name = re.compile(rf"\.[A-Za-z0-9.]+\.{_RANDOM}").fullmatch
#: A file that says something about shards or processes, and holds no shard.
is_record_name = re.compile(
    rf"(?:{_KEY}|budget|clean|downloads|[a-z]+-\d+)\.lock|{_LEASE}|{_KEY}\.(?:pin|session)|"
    rf"[A-Za-z0-9._-]+\.streamed|stats\.db(?:-[a-z]+)?|limits|usage|refusal"
).fullmatch
#: The namespace of a rank or a job, named by `ranks.safe_name`.
is_namespace_name = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}").fullmatch


def is_side_file(name: str) -> bool:
    """Return whether shardcache writes files of this name next to the data file of a shard."""
    return name in SIDE_FILES or is_temporary_name(name) is not None


META = "meta.json"
JOURNAL = "progress"
INDEX = "samples.idx"
#: Second names of the data file, once this or another namespace has replaced the version. They look
#: like temporary names, so that older versions of the library remove them, too.
REPLACED, OUTDATED = f".replaced.{'0' * 32}", f".outdated.{'0' * 32}"
MANIFEST = "manifest.json"


def _inside(name: str) -> lazy[Path]:
    return lazy(lambda layout: layout.base / name)


def _on_node(name: str) -> lazy[Path]:
    return lazy(lambda layout: (layout.local or layout.base) / name)


@dataclass(frozen=True)
class Layout:
    """The paths of one namespace: the node's (``<root>/v1``), or below it that of a rank or job."""

    base: Path
    #: With leases (see `shardcache.locks.mounts`): a directory on this node for the sessions,
    #: counters and locks, except the leases of keys. None with flock, or if it cannot be created.
    local: Path | None = None
    #: With leases: seconds after which an unused entry or partial is free. None with flock.
    grace: float | None = None
    modes: Modes = PRIVATE

    objects = _inside("objects")  #: entries
    partials = _inside("partial")  #: partials, and entries that are being removed
    pins = _inside("pins")  #: pins of users; created with the first pin
    ranks = _inside("ranks")  #: namespaces of ranks and jobs
    limits = _inside("limits")  #: limits of the last job; see `tiers`
    locks = _on_node("locks")
    sessions = _on_node("sessions")  #: one file for each live process
    usage = _on_node("usage")  #: bytes that the cache holds; see `space.budget`
    refusal = _on_node("refusal")  #: why a shard found no room; see `space.budget`
    stats = _on_node("stats.db")  #: counters; created with the first row

    @classmethod
    def of_root(cls, root: Path, modes: Modes = PRIVATE) -> Layout:
        return cls(root / "v1", modes=modes)

    def namespace(self, name: str) -> Layout:
        local = None if self.local is None else self.local / "ranks" / name
        return replace(self, base=self.ranks / name, local=local)

    def key_dir(self, key: str) -> str:
        return f"{self.base}/objects/{key[:2]}/{key}"

    def entry(self, key: str, version: str, size: int) -> Path:
        return Path(f"{self.key_dir(key)}/{version}-{size:x}")

    def new_partial(self, key: str, version: str, size: int | None) -> Path:
        length = "" if size is None else f"-{size:x}"
        return Path(f"{self.base}/partial/{key}.{version}{length}.{random_token()}")

    def new_hidden(self, key: str) -> Path:
        """Return a new, unique directory for an entry or partial that is being removed."""
        return self.partials / f"evict.{key}.{random_token()}"

    def pin(self, key: str) -> Path:
        return self.pins / f"{key}.pin"

    def key_lock(self, key: str) -> Path:
        return Path(f"{self.local or self.base}/locks/{key[:2]}/{key}.lock")

    def lease(self, key: str) -> Path:
        """Return the lease file of a key. All nodes that share the directory see it."""
        return self.base / "locks" / key[:2] / f"{key}.lease"

    def holder(self, key: str) -> Path:
        """Return the file with a key's `Holder`: the lock file, or a file next to the lease."""
        return self.key_lock(key) if self.grace is None else self.lease(key).with_suffix(".holder")

    def named_lock(self, name: str) -> Path:
        """Return a lock file of the namespace, not of a key: ``budget``, ``private-0``, ..."""
        return self.locks / f"{name}.lock"

    def namespaces(self) -> list[Layout]:
        """Return this namespace of a node, and those of its ranks and jobs."""
        # Symbolic links, and directories with other names, belong to other programs.
        ranks = map(self.namespace, filter(is_namespace_name, list_names(self.ranks)))
        return [self, *(rank for rank in ranks if rank.first_symlink() is None)]

    @lazy
    def directories(self) -> tuple[Path, ...]:
        """The directories of the namespace, parents first."""
        outer = (self.base.parent, self.base) if self.base.parent.name == "ranks" else (self.base,)
        return *outer, self.objects, self.partials, self.locks, self.sessions

    def make(self) -> None:
        for path in self.directories:
            self.modes.make_directory(path, levels=9)

    def first_symlink(self) -> Path | None:
        """Return the first directory of the namespace that is a symbolic link, or None."""
        return next((path for path in self.directories if os.path.islink(path)), None)  # noqa: PTH114

    def write(self, path: Path, data: bytes, *, once: bool = False) -> None:
        """Write a file in place of an existing one (unless ``once``), by renaming another."""
        temporary = self.partials / f".{path.name}.{random_token()}"
        try:
            write_new(temporary, data, self.modes.file)
            if once:
                with ignoring(OSError):  # a filesystem without hard links: the last process wins
                    with contextlib.suppress(FileExistsError):  # NFS may have resent the request
                        os.link(temporary, path)
                    return
            temporary.replace(path)
        finally:
            with ignoring(OSError):  # after the rename, there is no temporary file
                temporary.unlink()


def hidden_path(directory: Path) -> Path:
    """Return a new, unique directory for an entry or partial that is to be removed."""
    if is_key(directory.parent.name):  # <namespace>/objects/<aa>/<key>/<entry>
        return Layout(directory.parents[3]).new_hidden(directory.parent.name)
    # <namespace>/partial/<name>
    return Layout(directory.parents[1]).new_hidden(directory.name.removeprefix("evict.")[:32])


def read_manifest(root: Path) -> dict[str, Any]:
    """Return the manifest of a root, or an empty dict if the manifest is missing or damaged.

    Raises OSError if it cannot be read: it states the kind of lock and names the node's directory.
    """
    manifest = None
    try:
        with contextlib.suppress(ValueError, RecursionError):
            manifest = json.loads(read_file(root / MANIFEST))
    except system_error() as exn:
        if exn.errno not in ABSENT:
            raise
    return manifest if isinstance(manifest, dict) else {}
