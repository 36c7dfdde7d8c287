"""The one retry layer.

Everything below it (SDK, HTTP pool) is told not to retry, everything above it
does not: attempts never multiply. What is worth another attempt is said by the
origin, by raising `TransientError`; nothing else is retried.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from shardcache.clock import Clock
from shardcache.errors import TransferError, TransferTimeoutError
from shardcache.origins.base import TransientError
from shardcache.urls import redact

__all__ = ["RetryPolicy"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Full jitter between 0 and BASE * 2^attempt seconds, at most CAP: "Exponential
#: Backoff And Jitter", AWS Architecture Blog, which found full jitter to need
#: the fewest calls of all variants.
BASE = 0.25
CAP = 20.0
#: A server may ask for a longer pause; nobody waits longer than this for it.
RETRY_AFTER_CAP = 60.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, how long.

    Attributes:
        attempts: calls in a row without progress before giving up.
        deadline: seconds for the whole fetch of one shard, or None.
        clock: whose time that is.
    """

    attempts: int
    deadline: float | None
    clock: Clock

    def started(self, what: str) -> Attempts:
        """Begin the fetch of one shard; ``what`` names it in errors."""
        end = None if self.deadline is None else self.clock.monotonic() + self.deadline
        return Attempts(self, what, end)


@dataclass(slots=True)
class Attempts:
    """The retries of one shard's fetch, shared by all its connections.

    Attributes:
        retries: how many attempts failed and were repeated so far.
    """

    policy: RetryPolicy
    what: str
    end: float | None
    retries: int = 0

    def call(self, function: Callable[[], T], *, sleep: Callable[[float], None]) -> T:
        """Call ``function`` until it succeeds, within the policy.

        Args:
            function: one attempt.
            sleep: how to wait in between; may raise to cancel.

        Raises:
            TransferError, TransferTimeoutError: the last attempt failed too.
            Whatever else ``function`` or ``sleep`` raises, at once.
        """
        for attempt in itertools.count(1):
            try:
                return function()
            except TransientError as exn:
                pause = _pause(attempt, exn.retry_after)
                late = self.end is not None and self.policy.clock.monotonic() + pause > self.end
                if late or attempt >= self.policy.attempts:
                    raise self._failure(exn, attempt, late) from exn
                self.retries += 1
                logger.warning(
                    "%s: %s; attempt %d of %d failed, next in %.1f s",
                    self.what,
                    redact(str(exn)),
                    attempt,
                    self.policy.attempts,
                    pause,
                    extra={"event": "retry", "shard": self.what, "attempt": attempt},
                )
            sleep(pause)  # not within the handler: it may raise, which is no part of the failure
        raise AssertionError("unreachable")  # pragma: no cover

    def _failure(self, cause: TransientError, attempts: int, late: bool) -> TransferError:
        limit = f"{attempts} attempt{'s' if attempts > 1 else ''} failed"
        if late:
            limit = f"the deadline of {self.policy.deadline:g} s is over"
        kind = TransferTimeoutError if late or cause.timed_out else TransferError
        return kind(
            f"{self.what} could not be fetched: {redact(str(cause))} ({limit}). "
            "Check the endpoint and the network, then try again; what was fetched is kept.",
            url=self.what,
            attempts=attempts,
        )


def _pause(attempt: int, asked: float | None) -> float:
    """Seconds before the next attempt; ``asked`` by the server, if it did."""
    jitter = random.uniform(0, min(CAP, BASE * 2.0 ** (attempt - 1)))  # noqa: S311 - no secret
    # Spread the herd that was told the same number of seconds.
    return jitter if asked is None else min(asked, RETRY_AFTER_CAP) + jitter
