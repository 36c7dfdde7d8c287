"""The only layer that retries.

Neither the layers below it (botocore, connections) nor those above repeat a request, so attempts do
not multiply. It retries a `TransientError`, and no other error. An error that ends by itself, such
as throttling, costs no attempt: `pace` waits for up to ``patience``.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from shardcache import clock
from shardcache.errors import TransferError, TransferTimeoutError
from shardcache.origins.base import TransientError
from shardcache.origins.pace import RETRY_AFTER_CAP, Pace
from shardcache.units import format_duration
from shardcache.urls import redact

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Full jitter between 0 and BASE * 2^attempt seconds, at most CAP: "Exponential
#: Backoff And Jitter", AWS Architecture Blog, which found full jitter to need
#: the fewest calls of all variants.
BASE = 0.25
CAP = 20.0


@dataclass(eq=False)
class RetryPolicy:
    """How often and for how long a process retries."""

    attempts: int  # failures in a row, without progress in between, that end a download
    deadline: float | None  # seconds for the whole download of one shard; None sets no limit
    patience: float  # seconds to wait for an origin that throttles, or for credentials
    _paces: dict[str, Pace] = field(default_factory=dict)  # by bucket or web server

    def started(self, url: str) -> Attempts:
        """Start the clock of one shard's download; ``url`` is its name in errors."""
        server = "/".join(url.split("/")[:3])
        pace = self._paces.get(server) or self._paces.setdefault(
            server, Pace(server, self.patience)
        )
        end = None if self.deadline is None else clock.monotonic() + self.deadline
        return Attempts(self, url, pace, end)


@dataclass(slots=True, eq=False)
class Attempts:
    """The retries of one shard's download, which all its connections share."""

    _policy: RetryPolicy
    _url: str
    _pace: Pace
    end: float | None  # time of the deadline, on the monotonic clock; None without a deadline
    retries: int = 0  # requests that failed and were repeated so far

    def check(self) -> None:
        """Raise TransferTimeoutError if the deadline of the whole download is over."""
        if self._is_late(0):
            raise TransferTimeoutError(
                f"{self._url} was not fetched within the deadline of {self._policy.deadline:g} s. "
                "Raise deadline, or run again: what was fetched is kept.",
                url=self._url,
            )

    def extend(self, seconds: float) -> None:
        """Move the deadline by the time in which the download wanted no data."""
        if self.end is not None:
            self.end += seconds

    def call(self, function: Callable[[], T], *, sleep: Callable[[float], None]) -> T:
        """Call ``function`` until it succeeds; ``sleep`` waits in between, and may raise to cancel.

        Raises:
            TransferError, TransferTimeoutError: the last attempt failed, too.
            Other errors of ``function`` and ``sleep``, at once.
        """

        def wait(seconds: float) -> None:
            self.check()
            sleep(seconds if self.end is None else min(seconds, self.end - clock.monotonic()))
            self.check()

        failures = 0
        while True:
            try:
                with self._pace.turn(wait):
                    return function()
            except TransientError as exn:
                pause = 0.0
                if is_patient := exn.patient and self._policy.patience > 0:
                    ended = self._pace.is_over
                else:
                    failures += 1
                    ended = failures >= self._policy.attempts
                    # The jitter is added, because a server gives many clients the same number.
                    jitter = random.uniform(0, min(CAP, BASE * 2 ** (failures - 1)))  # noqa: S311
                    pause = min(exn.retry_after or 0.0, RETRY_AFTER_CAP) + jitter
                if ended or self._is_late(pause):
                    raise self._final(exn, failures, ended=ended, is_patient=is_patient) from exn
                if not is_patient:
                    logger.warning(
                        "%s: %s; attempt %d of %d failed, next in %.1f s",
                        *(self._url, redact(str(exn)), failures, self._policy.attempts, pause),
                        extra={"event": "retry", "shard": self._url, "attempt": failures},
                    )
            self.retries += 1
            if not is_patient:
                sleep(pause)

    def _is_late(self, pause: float) -> bool:
        return self.end is not None and clock.monotonic() + pause > self.end

    def _final(
        self, exn: TransientError, failures: int, *, ended: bool, is_patient: bool
    ) -> TransferError:
        """Return the error of a download whose attempts, patience or deadline ended."""
        advice = "Check the endpoint and the network, then try again"
        if not ended:
            reason = f"the deadline of {self._policy.deadline:g} s is over"
        elif is_patient:
            reason = f"for {format_duration(self._policy.patience)}, the patience"
            advice = "Try again later, or raise patience"
        else:
            reason = f"{failures} attempt{'s' if failures != 1 else ''} failed"
        late = not ended or exn.timed_out or self._is_late(0)
        return (TransferTimeoutError if late else TransferError)(
            f"{self._url} could not be fetched: {redact(str(exn))} ({reason}). "
            f"{advice}; what was fetched is kept.",
            url=self._url,
            attempts=failures,
        )
