"""Retry failed requests. No other layer does.

Neither the layers below (botocore, connections) nor those above repeat a request, so attempts do
not multiply. Only a `TransientError` is retried. If it is patient, as after throttling, it does not
count as an attempt: the request is repeated for up to ``patience`` seconds, at the rate of `pace`.
"""

from __future__ import annotations

import logging
import math
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

#: A pause before a retry is random: between 0 and BASE * 2^attempt seconds, at most CAP. This is
#: the full jitter of "Exponential Backoff And Jitter" (AWS Architecture Blog), which found that it
#: needs the fewest calls of all variants.
BASE = 0.25
CAP = 20.0
#: Bytes that an attempt must receive to count as progress.
PROGRESS = 64 * 1024


class RetryPolicy:
    """How often and for how long a process retries.

    Args:
        attempts: number of failures in a row, without progress in between, that ends a download.
        deadline: seconds for the whole download of one shard; None sets no limit.
        patience: seconds to wait for an origin that throttles, or for credentials.
    """

    def __init__(self, attempts: int, deadline: float | None, patience: float) -> None:
        self.attempts = attempts
        self.deadline = deadline
        self.patience = patience
        self._paces: dict[str, Pace] = {}  # by bucket or web server

    def started(self, url: str, attempts: int | None = None) -> Attempts:
        """Return the `Attempts` of a download that starts now.

        Args:
            url: the shard's URL, which errors quote.
            attempts: replaces the ``attempts`` of this policy.
        """
        server = "/".join(url.split("/")[:3])
        pace = self._paces.get(server) or self._paces.setdefault(
            server, Pace(server, self.patience)
        )
        end = None if self.deadline is None else clock.monotonic() + self.deadline
        return Attempts(self, url, pace, end, attempts or self.attempts)


class Attempts:
    """The retries of one shard's download, which all its connections share.

    Attributes:
        end: when the deadline passes, on the monotonic clock; None without a deadline.
        most: number of failures in a row that ends the download.
        retries: number of requests that failed and were repeated so far.
    """

    def __init__(
        self, policy: RetryPolicy, url: str, pace: Pace, end: float | None, most: int
    ) -> None:
        self.policy = policy
        self.url = url
        self.end = end
        self.most = most
        self.retries = 0
        self._pace = pace

    def check(self) -> None:
        """Raise TransferTimeoutError if the deadline of the whole download has passed."""
        if self._is_late(0):
            raise TransferTimeoutError(
                f"{self.url} was not downloaded within the deadline of {self.policy.deadline:g} s. "
                "Raise deadline, or run again to continue.",
                url=self.url,
            )

    def forgives(self, received: int) -> bool:
        """Return whether an attempt that failed after some bytes is repeated without counting."""
        self.retries += received >= PROGRESS
        return received >= PROGRESS

    def extend(self, seconds: float) -> None:
        """Extend the deadline by ``seconds`` that the download did not spend on its origin."""
        if self.end is not None:
            self.end += seconds

    def call(self, function: Callable[[], T], *, sleep: Callable[[float], None]) -> T:
        """Call ``function`` until it succeeds, and return its result.

        ``sleep`` is called with the seconds to wait between attempts, and may raise to cancel.

        Raises:
            TransferError, TransferTimeoutError: the last attempt also failed.
            Exceptions of ``function`` other than TransientError, and of ``sleep``, at once.
        """
        try:
            return self._attempt(function, sleep)
        except TransientError as exn:
            failed = [exn]

        # Imported after a failure only: the import takes 40 ms, and most first attempts succeed.
        import tenacity

        def repeat() -> T:
            if failed:
                raise failed.pop()  # so that tenacity counts the attempt above
            return self._attempt(function, sleep)

        jitter = tenacity.wait_random_exponential(multiplier=BASE, max=CAP)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(self._is_repeated),
            stop=self._is_over,
            # The jitter is added to Retry-After, because many clients get the same number.
            wait=lambda state: (
                min(_error_of(state).retry_after or 0.0, RETRY_AFTER_CAP) + jitter(state)
            ),
            sleep=sleep,
            before_sleep=self._report,
            reraise=True,
        )
        try:
            return retrying(repeat)
        except TransientError as exn:
            raise self._final(exn, retrying.statistics["attempt_number"]) from exn
        finally:
            # `iter_state` refers to `retrying`. This cycle would keep the download's frames alive.
            retrying.iter_state.reset()

    def _attempt(self, function: Callable[[], T], sleep: Callable[[float], None]) -> T:
        """Call ``function`` once, or repeatedly as long as its errors are patient ones."""

        def wait(seconds: float) -> None:
            self.check()
            left = math.inf if self.end is None else self.end - clock.monotonic()
            sleep(max(0.0, min(seconds, left)))
            self.check()

        while True:
            try:
                with self._pace.turn(wait):
                    return function()
            except TransientError as exn:
                if self._is_repeated(exn) or self._pace.is_over or self._is_late(0):
                    raise
            self.retries += 1

    def _is_late(self, pause: float) -> bool:
        return self.end is not None and clock.monotonic() + pause > self.end

    def _is_repeated(self, exn: BaseException) -> bool:
        """Return whether an error counts as a failed attempt. Patient errors are waited out."""
        return isinstance(exn, TransientError) and not (exn.patient and self.policy.patience > 0)

    def _is_over(self, state: RetryCallState) -> bool:
        return state.attempt_number >= self.most or self._is_late(state.upcoming_sleep)

    def _report(self, state: RetryCallState) -> None:
        self.retries += 1
        logger.warning(
            "%s: %s; attempt %d of %d failed, next in %.1f s",
            self.url,
            redact(str(_error_of(state))),
            state.attempt_number,
            self.most,
            state.upcoming_sleep,
            extra={"event": "retry", "shard": self.url, "attempt": state.attempt_number},
        )

    def _final(self, exn: TransientError, attempts: int) -> TransferError:
        late, advice = self._is_late(0), "Check the endpoint and the network, then try again"
        failures = attempts if self._is_repeated(exn) else attempts - 1
        ended = f"{failures} attempt{'s' if failures != 1 else ''} failed"
        if not late and not self._is_repeated(exn):
            ended = f"for {format_duration(self.policy.patience)}, the limit set by patience"
            advice = "Try again later, or raise patience"
        elif failures < self.most:
            late, ended = True, f"the deadline of {self.policy.deadline:g} s has passed"
        kind = TransferTimeoutError if late or exn.timed_out else TransferError
        return kind(
            f"{self.url} could not be downloaded: {redact(str(exn))} ({ended}). {advice}.",
            url=self.url,
        )


def _error_of(state: RetryCallState) -> TransientError:
    exn = state.outcome and state.outcome.exception()
    assert isinstance(exn, TransientError)
    return exn
