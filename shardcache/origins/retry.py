"""The one retry layer.

Everything below it (SDK, HTTP pool) is told not to retry, everything above it
does not: attempts never multiply. What is worth another attempt is said by the
origin, by raising `TransientError`; nothing else is retried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeVar

from shardcache.clock import Clock
from shardcache.errors import TransferError, TransferTimeoutError
from shardcache.origins.base import TransientError
from shardcache.urls import redact

if TYPE_CHECKING:
    from tenacity import RetryCallState

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
        try:
            return function()
        except TransientError as exn:
            failed = [exn]
        from tenacity import Retrying, retry_if_exception_type

        def attempt() -> T:
            if failed:  # the first, which needed none of what follows
                raise failed.pop()
            return ours[0][0]()

        # Tenacity's objects refer to each other and go with the next collection of garbage.
        # They must not keep the fetch, whose partial is locked for as long as it lives.
        ours = [(function, sleep)]
        retrying = Retrying(
            retry=retry_if_exception_type(TransientError),
            stop=self._exhausted,
            wait=_pause,
            sleep=lambda seconds: ours[0][1](seconds),
            before_sleep=self._note,
            retry_error_callback=self._give_up,
        )
        try:
            return retrying(attempt)
        finally:
            ours.clear()

    def _exhausted(self, state: RetryCallState) -> bool:
        return state.attempt_number >= self.policy.attempts or self._expired(state)

    def _expired(self, state: RetryCallState) -> bool:
        if self.end is None:
            return False
        return self.policy.clock.monotonic() + state.upcoming_sleep > self.end

    def _note(self, state: RetryCallState) -> None:
        self.retries += 1
        pause = state.next_action.sleep if state.next_action else 0.0
        logger.warning(
            "%s: %s; attempt %d of %d failed, next in %.1f s",
            self.what,
            redact(str(_cause(state))),
            state.attempt_number,
            self.policy.attempts,
            pause,
            extra={"event": "retry", "shard": self.what, "attempt": state.attempt_number},
        )

    def _give_up(self, state: RetryCallState) -> NoReturn:
        cause = _cause(state)
        count = state.attempt_number
        timed_out = isinstance(cause, TransientError) and cause.timed_out
        if self.end is not None and self._expired(state):
            kind: type[TransferError] = TransferTimeoutError
            limit = f"the deadline of {self.policy.deadline:g} s is over"
        else:
            kind = TransferTimeoutError if timed_out else TransferError
            limit = f"{count} attempt{'s' if count > 1 else ''} failed"
        raise kind(
            f"{self.what} could not be fetched: {redact(str(cause))} ({limit}). "
            "Check the endpoint and the network, then try again; what was fetched is kept.",
            url=self.what,
            attempts=count,
        ) from cause


def _cause(state: RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome else None


def _pause(state: RetryCallState) -> float:
    from tenacity import wait_random_exponential

    jitter: float = wait_random_exponential(multiplier=BASE, max=CAP)(state)
    cause = _cause(state)
    asked = cause.retry_after if isinstance(cause, TransientError) else None
    # Spread the herd that was told the same number of seconds.
    return jitter if asked is None else min(asked, RETRY_AFTER_CAP) + jitter
