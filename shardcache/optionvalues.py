"""Options that are more than a number or a word: tables, and what of them may be seen.

A table of storage options may hold credentials under any name, and a URL between its scheme
and its host. They are never printed, and leave the process only on the way into one that
multiprocessing is spawning. All values are immutable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardcache.units import Limit

__all__ = ["StorageOptions", "TierOption", "Upstream", "names_only", "redact"]

#: Names of storage options that hold credentials in s3fs, gcsfs, adlfs, botocore and
#: aiohttp, and of HTTP headers that do.
_SECRET = re.compile(
    r"(key$|key_?id$|secret|token|passw|passphrase|credential|sas|connection_string|cookie|"
    r"signature|(^|[_-])auth($|[_-]|oriz))",
    re.I,
)

_HIDDEN = "***"
# Greedy up to the last @: a password may hold / and @ of its own.
USERINFO = re.compile(r"^([a-z][a-z0-9+.-]*://)?.*@", re.IGNORECASE | re.DOTALL)


class StorageOptions(Mapping[str, object]):
    """Options for fsspec or S3 (key, secret, token, ...) that never print their values.

    An immutable copy of the mapping it is made from; equal to any mapping with the
    same items. ``dict(options)`` gives what fsspec takes, in clear.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, object] | None = None) -> None:
        self._items = dict(items or {})

    def __getitem__(self, key: str) -> object:
        """The value itself, in clear."""
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._items)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._items)

    def __hash__(self) -> int:
        """By names only: values need not be hashable."""
        return hash(frozenset(self._items))

    def __reduce__(self) -> tuple[Any, ...]:
        """In clear for a process that multiprocessing is spawning, else without secrets.

        A spawned worker has to read the same bucket and its pickle goes through a
        pipe to a child; any other pickle may end up in a file or on a wire. This is
        how `multiprocessing.process.AuthenticationString` tells the two apart.
        """
        from multiprocessing.context import get_spawning_popen

        if get_spawning_popen() is not None:
            return StorageOptions, (self._items,)
        return StorageOptions, (_without_secrets(self._items),)

    def __repr__(self) -> str:
        """Names, with every value hidden."""
        return f"StorageOptions({names_only(self)})"


@dataclass(frozen=True, slots=True)
class TierOption:
    """A directory in front of ``dir``, with limits of its own; see `tier`.

    Attributes:
        dir: where.
        max_size: most it may hold.
        min_free: space that stays free on its filesystem.
    """

    dir: Path
    max_size: Limit | None = None
    min_free: Limit = Limit(percent=5.0)  # noqa: RUF009 - immutable

    def __str__(self) -> str:
        return str(self.dir) if self.max_size is None else f"{self.dir}={self.max_size}"


@dataclass(frozen=True, slots=True)
class Upstream:
    """Where copies of shards are, or are to be kept; see `upstreams`.

    Attributes:
        url: a directory, or ``scheme://...`` of a store.
        write_back: whether what was fetched is copied there.
        endpoint_url: of an S3 store that is not AWS.
        storage_options: its own, for S3 or fsspec.
    """

    url: str
    write_back: bool = False
    endpoint_url: str | None = None
    storage_options: StorageOptions = field(default_factory=StorageOptions)

    def __str__(self) -> str:
        return redact(self.url) + (" (write_back)" if self.write_back else "")


def _without_secrets(items: Mapping[Any, object]) -> dict[Any, object]:
    kept: dict[Any, object] = {}
    for name, value in items.items():
        if isinstance(name, str) and _SECRET.search(name):
            _say_left_out(name)
        else:
            kept[name] = _public(name, value)
    return kept


def _public(name: object, value: object) -> object:
    """A value without the credentials inside it: those of tables, lists and URLs."""
    if isinstance(value, Mapping):
        return _without_secrets(value)
    if type(value) is list or type(value) is tuple:
        items = [_public(name, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, str) and "://" in value:  # of a proxy, an endpoint
        public = re.sub(r"[?#].*", "", USERINFO.sub(r"\1", value), flags=re.DOTALL)
        if public != value:
            _say_left_out(f"{name}, in part,")
        return public
    return value


def _say_left_out(name: str) -> None:
    import logging  # `import shardcache.config` stays light

    logging.getLogger(__name__).warning(
        "storage option %s is left out of a pickle; who reads it needs credentials of its own "
        "(environment, profile, role)",
        name,
    )


def names_only(items: Mapping[str, object]) -> str:
    """The names in a table, with every value hidden."""
    return ", ".join(f"{key}={_HIDDEN}" for key in items)


def redact(text: str) -> str:
    """``text`` without what stands before an ``@``, and a URL without its query."""
    shown = USERINFO.sub(rf"\1{_HIDDEN}@", text)
    return re.sub(r"[?#].*", f"?{_HIDDEN}", shown, flags=re.DOTALL) if "://" in shown else shown
