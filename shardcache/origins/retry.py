"""The one retry layer.

Nothing below it (botocore, connections) repeats a request, nothing above it does: attempts never
multiply. The origin says what is worth another attempt, by raising `TransientError`; nothing else
is retried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from shardcache import clock
from shardcache.errors import TransferError, TransferTimeoutError
from shardcache.origins.base import TransientError
from shardcache.urls import redact

if TYPE_CHECKING:
    from tenacity import RetryCallState

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
    """How often, how long."""

    attempts: int  # calls in a row without progress
    deadline: float | None  # seconds for the whole fetch of one shard

    def started(self, what: str) -> Attempts:
        """Begin the fetch of one shard; ``what`` names it in errors."""
        end = None if self.deadline is None else clock.monotonic() + self.deadline
        return Attempts(self, what, end)


@dataclass(slots=True)
class Attempts:
    """The retries of one shard's fetch, shared by all its connections."""

    policy: RetryPolicy
    what: str
    end: float | None
    retries: int = 0  # attempts that failed and were repeated so far

    def check(self) -> None:
        """Raise TransferTimeoutError if the deadline of the whole fetch is over."""
        if self._is_late(0):
            raise TransferTimeoutError(
                f"{self.what} was not fetched within the deadline of {self.policy.deadline:g} s. "
                "Raise deadline, or run again: what was fetched is kept.",
                url=self.what,
            )

    def extend(self, seconds: float) -> None:
        """Leave time out of the deadline in which nothing was to be received."""
        if self.end is not None:
            self.end += seconds

    def _is_late(self, pause: float) -> bool:
        return self.end is not None and clock.monotonic() + pause > self.end

    def call(self, function: Callable[[], T], *, sleep: Callable[[float], None]) -> T:
        """Call ``function`` until it succeeds; ``sleep`` waits in between, and may raise to cancel.

        Raises:
            TransferError, TransferTimeoutError: the last attempt failed too.
            Whatever else ``function`` or ``sleep`` raises, at once.
        """
        try:
            return function()  # which mostly succeeds, and then needs no import of tenacity
        except TransientError as exn:
            failed = [exn]

        def attempt() -> T:
            if failed:
                raise failed.pop()
            return function()

        import tenacity

        jitter = tenacity.wait_random_exponential(multiplier=BASE, max=CAP)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(TransientError),
            stop=self._is_over,
            # Behind what was asked for: jitter spreads the herd that was told the same number.
            wait=lambda state: _asked(state) + jitter(state),
            sleep=sleep,
            before_sleep=self._report,
            reraise=True,
        )
        try:
            return retrying(attempt)
        except TransientError as exn:
            count = retrying.statistics["attempt_number"]
            late = count < self.policy.attempts
            limit = f"{count} attempt{'s' if count > 1 else ''} failed"
            if late:
                limit = f"the deadline of {self.policy.deadline:g} s is over"
            kind = TransferTimeoutError if late or exn.timed_out else TransferError
            raise kind(
                f"{self.what} could not be fetched: {redact(str(exn))} ({limit}). "
                "Check the endpoint and the network, then try again; what was fetched is kept.",
                url=self.what,
                attempts=count,
            ) from exn
        finally:
            # It is part of a cycle, and would keep the fetch, and the lock of its partial.
            retrying.iter_state.reset()

    def _is_over(self, state: RetryCallState) -> bool:
        return state.attempt_number >= self.policy.attempts or self._is_late(state.upcoming_sleep)

    def _report(self, state: RetryCallState) -> None:
        self.retries += 1
        logger.warning(
            "%s: %s; attempt %d of %d failed, next in %.1f s",
            self.what,
            redact(str(state.outcome and state.outcome.exception())),
            state.attempt_number,
            self.policy.attempts,
            state.upcoming_sleep,
            extra={"event": "retry", "shard": self.what, "attempt": state.attempt_number},
        )


def _asked(state: RetryCallState) -> float:
    """Seconds that the origin asked us to stay away."""
    failed = state.outcome and state.outcome.exception()
    return min(getattr(failed, "retry_after", None) or 0.0, RETRY_AFTER_CAP)
