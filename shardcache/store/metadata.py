"""The sidecar of an entry: what was fetched, from where, and how to check it.

A sidecar is data from a disk that may be damaged: `decode` accepts exactly what
`encode` writes and calls everything else a `DamagedError`, whatever it holds.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardcache.origins.base import ObjectInfo

__all__ = ["MAX_BYTES", "SCHEMA", "DamagedError", "Metadata", "boot_id", "rfc3339"]

SCHEMA = 1
#: A sidecar is about 700 bytes; URLs are at most some kilobytes.
MAX_BYTES = 64 * 1024
#: The year 10000, which `encode` could not write.
_LAST_SECOND = 253_402_300_800
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class DamagedError(Exception):
    """An entry, a partial or a sidecar is not what it should be; the text says how."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """One fetched shard.

    Attributes:
        url: canonical URL, free of credentials.
        key: key of that URL.
        info: the version fetched.
        size: bytes of the data file.
        digest: tree digest of the data (`digests.tree_digest`), hex; empty while
            the shard is in flight.
        checked: the origin's checksum algorithm that the bytes were compared
            with before publishing, or None where it stated none we can compute.
        fetched_at: seconds since the epoch.
        boot: boot during which the bytes were last known good on disk.
        library: version of shardcache that wrote this.
    """

    url: str
    key: str
    info: ObjectInfo
    size: int
    digest: str
    checked: str | None
    fetched_at: float
    boot: str
    library: str

    def encode(self) -> bytes:
        """The sidecar's bytes."""
        record = {
            "schema": SCHEMA,
            "url": self.url,
            "key": self.key,
            "object": self.info.as_record(),
            "size": self.size,
            "digest": self.digest,
            "checked": self.checked,
            "fetched_at": rfc3339(self.fetched_at),
            "boot": self.boot,
            "library": self.library,
        }
        # A line for each field. `indent` would leave the work to json's encoder in Python,
        # and every shard has this written twice.
        lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in record.items())
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()

    @classmethod
    def decode(cls, data: bytes) -> Metadata:
        """Read what `encode` wrote.

        Raises:
            DamagedError: ``data`` is anything else.
        """
        try:
            record = json.loads(data)
            schema = record["schema"]
            if type(schema) is not int or schema != SCHEMA:
                raise DamagedError(f"its sidecar has schema {str(schema)[:20]}, not {SCHEMA}")
            fetched = datetime.fromisoformat(_text(record, "fetched_at"))
            if fetched.tzinfo is None or not 0 <= fetched.timestamp() < _LAST_SECOND:
                raise ValueError("fetched_at has no time zone, or is no time of ours")
            checked = record["checked"]
            size = record["size"]
            if not (checked is None or isinstance(checked, str)):
                raise TypeError("checked")
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise TypeError("size")
            return cls(
                url=_text(record, "url"),
                key=_text(record, "key"),
                info=ObjectInfo.from_record(record["object"]),
                size=size,
                digest=_text(record, "digest"),
                checked=checked,
                fetched_at=fetched.timestamp(),
                boot=_text(record, "boot"),
                library=_text(record, "library"),
            )
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as exn:
            reason = f"{type(exn).__name__}: {exn}"[:200]
            raise DamagedError(f"its sidecar cannot be read ({reason})") from exn

    def trusted_since(self, boot: str) -> Metadata:
        """The same, known good during ``boot``."""
        return replace(self, boot=boot)


def _text(record: dict[str, Any], name: str) -> str:
    value = record[name]
    if not isinstance(value, str):
        raise TypeError(name)
    return value


def rfc3339(seconds: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


@functools.cache
def boot_id() -> str:
    """The kernel's id of this boot; empty where there is none (then boots are not told apart).

    No process outlives a boot.
    """
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
