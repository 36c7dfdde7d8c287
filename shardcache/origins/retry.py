"""The one retry layer.

Nothing below it (botocore, connections) repeats a request, nothing above it does: attempts never
multiply. Origins raise `TransientError` for what is worth another attempt; nothing else is retried.
Some errors end by themselves, such as throttling: they are waited out for ``patience`` (`pace`),
and are no attempts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from shardcache import clock
from shardcache.errors import TransferError, TransferTimeoutError
from shardcache.origins.base import TransientError
from shardcache.origins.pace import RETRY_AFTER_CAP, Pace
from shardcache.units import format_duration
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


class RetryPolicy:
    """How often and for how long a process retries.

    Args:
        attempts: calls in a row without progress.
        deadline: seconds for the whole fetch of one shard; None sets no limit.
        patience: seconds to wait for a place that throttles, or for credentials.
    """

    def __init__(self, attempts: int, deadline: float | None, patience: float) -> None:
        self.attempts = attempts
        self.deadline = deadline
        self.patience = patience
        self._paces: dict[str, Pace] = {}  # by place, one for each bucket or web server

    def started(self, what: str) -> Attempts:
        """Begin the fetch of one shard; ``what`` is its URL, as errors show it."""
        place = "/".join(what.split("/")[:3])
        pace = self._paces.get(place) or self._paces.setdefault(place, Pace(place, self.patience))
        end = None if self.deadline is None else clock.monotonic() + self.deadline
        return Attempts(self, what, pace, end)


class Attempts:
    """The retries of one shard's fetch, shared by all its connections.

    Attributes:
        end: when the deadline is over, on the monotonic clock; None without a deadline.
        retries: attempts that failed and were repeated so far.
    """

    def __init__(self, policy: RetryPolicy, what: str, pace: Pace, end: float | None) -> None:
        self.policy = policy
        self.what = what
        self.end = end
        self.retries = 0
        self._pace = pace

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

    def _is_waited_out(self, exn: TransientError) -> bool:
        return exn.patient and self.policy.patience > 0

    def _is_late(self, pause: float) -> bool:
        return self.end is not None and clock.monotonic() + pause > self.end

    def call(self, function: Callable[[], T], *, sleep: Callable[[float], None]) -> T:
        """Call ``function`` until it succeeds; ``sleep`` waits in between, and may raise to cancel.

        Raises:
            TransferError, TransferTimeoutError: the last attempt failed, too.
            Other errors of ``function`` and ``sleep``, at once.
        """
        failures = 0

        def wait_for_turn(seconds: float) -> None:
            self.check()
            sleep(seconds if self.end is None else min(seconds, self.end - clock.monotonic()))
            self.check()

        def attempt() -> T:
            nonlocal failures
            try:
                with self._pace.turn(wait_for_turn):
                    return function()
            except TransientError as exn:
                failures += not self._is_waited_out(exn)
                raise

        try:
            return attempt()  # mostly succeeds, and then needs no import of tenacity
        except TransientError as exn:
            first = [exn]

        import tenacity

        def is_over(state: RetryCallState) -> bool:
            if self._is_waited_out(_error_of(state)):
                return self._pace.is_over or self._is_late(0)
            return failures >= self.policy.attempts or self._is_late(state.upcoming_sleep)

        jitter = tenacity.wait_random_exponential(multiplier=BASE, max=CAP)

        def pause(state: RetryCallState) -> float:
            exn = _error_of(state)
            if self._is_waited_out(exn):
                return 0.0  # the pace waits
            # The jitter comes on top: it spreads the herd that was given the same number.
            return min(exn.retry_after or 0.0, RETRY_AFTER_CAP) + jitter(state)

        def report(state: RetryCallState) -> None:
            self.retries += 1
            exn = _error_of(state)
            if not self._is_waited_out(exn):  # which the pace announces
                text = "%s: %s; attempt %d of %d failed, next in %.1f s"
                say = {"event": "retry", "shard": self.what, "attempt": failures}
                numbers = failures, self.policy.attempts, state.upcoming_sleep
                logger.warning(text, self.what, redact(str(exn)), *numbers, extra=say)

        def again() -> T:
            if first:
                raise first.pop()
            return attempt()

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(TransientError),
            stop=is_over,
            wait=pause,
            sleep=sleep,
            before_sleep=report,
            reraise=True,
        )
        try:
            return retrying(again)
        except TransientError as exn:
            raise self._final(exn, failures) from exn
        finally:
            # It is part of a cycle, which would keep the fetch, and the lock of its partial.
            retrying.iter_state.reset()

    def _final(self, exn: TransientError, failures: int) -> TransferError:
        late, advice = self._is_late(0), "Check the endpoint and the network, then try again"
        ended = f"{failures} attempt{'s' if failures != 1 else ''} failed"
        if self._is_waited_out(exn) and not late:
            ended = f"for {format_duration(self.policy.patience)}, the patience"
            advice = "Try again later, or raise patience"
        elif failures < self.policy.attempts:
            late, ended = True, f"the deadline of {self.policy.deadline:g} s is over"
        kind = TransferTimeoutError if late or exn.timed_out else TransferError
        return kind(
            f"{self.what} could not be fetched: {redact(str(exn))} ({ended}). "
            f"{advice}; what was fetched is kept.",
            url=self.what,
            attempts=failures,
        )


def _error_of(state: RetryCallState) -> TransientError:
    exn = state.outcome and state.outcome.exception()
    assert isinstance(exn, TransientError)
    return exn
