"""What came of work that one rank did for all, as the others are told it.

JSON, never a pickle: what is in a directory could be written by others. A failure is told by
its type, its message and its traceback, without the logins and signatures of URLs in them.
"""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass
from typing import Any

from shardcache.errors import OnceError
from shardcache.sync.runners import Identity
from shardcache.urls import redact

__all__ = ["Outcome", "done", "failed"]

#: Characters of a message and of a traceback, whose end says most.
_TOLD = 20_000


def done(value: Any) -> bytes:
    """A result, as `Outcome.parse` reads it.

    Raises:
        TypeError, ValueError, RecursionError: JSON cannot hold it.
    """
    return json.dumps({"outcome": "done", "by": str(Identity.this()), "value": value}).encode()


def failed(exn: BaseException) -> bytes:
    """A failure, as `Outcome.parse` reads it."""
    text = "".join(traceback.format_exception(exn))[-_TOLD:]
    record = {
        "outcome": "failed",
        "by": str(Identity.this()),
        "type": type(exn).__qualname__,
        "message": redact(str(exn))[:_TOLD],
        "traceback": redact(text),
    }
    return json.dumps(record).encode()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of the work."""

    key: str
    record: dict[str, Any]

    @classmethod
    def parse(cls, key: str, data: bytes, where: str) -> Outcome:
        """What was posted.

        Raises:
            OnceError: it is damaged.
        """
        try:
            record = json.loads(data)
            if record["outcome"] in ("done", "failed") and isinstance(record["by"], str):
                return cls(key, record)
        except (ValueError, TypeError, KeyError, RecursionError):
            pass  # said below, of all that is no record
        raise OnceError(
            f"What came of once({key!r}) cannot be read in {where}. Remove that and run again.",
            key=key,
        )

    def value(self) -> Any:
        """The result.

        Raises:
            OnceError: it failed.
        """
        if self.record["outcome"] == "done":
            return self.record.get("value")
        kind, message, text = (str(self.record.get(x)) for x in ("type", "message", "traceback"))
        raise OnceError(
            f"once({self.key!r}) failed on {self.record['by']}: {kind}: {message}\n"
            f"It is not run again in this job unless again=True is given. There:\n{text}",
            key=self.key,
            type=kind,
            cause=message,
            traceback=text,
            by=self.record["by"],
        )
