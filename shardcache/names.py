"""The grammar of names on disk: of what a name is, and what it says.

A name that does not match was not made by the library and is never touched. Where each
stands, and how it is made, is in `layout`. All is pure: a name is judged by its text alone,
and whoever goes by it looks at what has the name first.
"""

from __future__ import annotations

import re

__all__ = [
    "is_evicted_name",
    "is_key",
    "is_lease_name",
    "is_lock_name",
    "is_pin_name",
    "is_quarantined_name",
    "is_rank_name",
    "is_temporary_name",
    "is_unnamed",
    "is_uses_name",
    "is_wait_name",
    "parse_entry_name",
    "parse_partial_name",
]

_KEY = re.compile(r"[0-9a-f]{32}\Z")
_ENTRY = re.compile(r"([0-9a-f]{24})-(0|[1-9a-f][0-9a-f]{0,15})\Z")
_PARTIAL = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{24})\.([0-9a-f]{32})\Z")
_EVICTED = re.compile(r"evict\.([0-9a-f]{32})\.([0-9a-f]{32})\Z")
_LOCK = re.compile(r"([0-9a-f]{32})\.lock\Z")
_USES = re.compile(r"[0-9a-f]{32}\.uses\Z")
_WAIT = re.compile(r"[0-9a-f]{32}\.wait\Z")
_PIN = re.compile(r"[0-9a-f]{32}\.pin\Z")
_LEASE = re.compile(r"[0-9a-f]{32}\.(lease|holder)\Z")
_TEMPORARY = re.compile(r"\.[A-Za-z0-9.]+\.[0-9a-f]{32}\Z")
# What `ranks.safe_name` makes.
_RANK = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z")
_QUARANTINED = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{24})-([0-9a-f]{1,16})\.([0-9a-f]{32})\Z")


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


def is_temporary_name(name: str) -> bool:
    """Whether ``name`` is that of a file that `layout.replace_file` is writing."""
    return _TEMPORARY.match(name) is not None


def is_key(name: str) -> bool:
    """Whether ``name`` is a key."""
    return _KEY.match(name) is not None


def is_lock_name(name: str) -> bool:
    """Whether ``name`` is that of a key's lock file."""
    return _LOCK.match(name) is not None


def is_lease_name(name: str) -> bool:
    """Whether ``name`` is that of a key's lease or of the record beside it."""
    return _LEASE.match(name) is not None


def is_pin_name(name: str) -> bool:
    """Whether ``name`` is that of a shard's pin."""
    return _PIN.match(name) is not None


def is_uses_name(name: str) -> bool:
    """Whether ``name`` is that of a job's map of uses."""
    return _USES.match(name) is not None


def is_wait_name(name: str) -> bool:
    """Whether ``name`` is that of the note of somebody who waits."""
    return _WAIT.match(name) is not None


def is_unnamed(name: str) -> bool:
    """Whether ``name`` is that of a directory on its way to its own, see `modes`."""
    return name.startswith(".new.") and is_temporary_name(name)


def is_rank_name(name: str) -> bool:
    """Whether ``name`` is that of a rank's or a job's namespace."""
    return _RANK.match(name) is not None
