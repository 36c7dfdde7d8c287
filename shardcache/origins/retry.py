"""Repeat requests that failed, in one loop.

    what ended the request           the next one                     at most
    the connection or server failed  comes after a random pause       ``attempts`` in a row
    the server throttles, or there   comes after the pause of `Pace`  for ``patience``
      are no credentials for now
    a RepeatError                    is sent at once, with a remedy   once for each remedy

A TransientError is one of the first two rows: the second, if it is ``patient``. The remedies are:
the region of the bucket, new credentials, the server's time, and a new connection. After a failure,
each may help again. The ``deadline`` limits all of it.

All shards that a process reads from one bucket or web server share a `Pace`. While the server
throttles, it limits their requests by the rules of TCP's congestion control (RFC 5681), so a single
request probes an overloaded store while the others wait.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from shardcache import clock
from shardcache.errors import TransferError, TransferTimeoutError
from shardcache.faults import ignoring
from shardcache.origins.base import RepeatError, TransientError
from shardcache.units import format_duration
from shardcache.urls import redact, server_of

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: A pause before a retry is random: between 0 and BASE * 2^attempt seconds, at most CAP. This is
#: the full jitter of "Exponential Backoff And Jitter" (AWS Architecture Blog), which found that it
#: needs the fewest calls of all variants.
BASE = 0.25
CAP = 20.0
#: Bytes that an attempt must receive to count as progress.
LEAST_PROGRESS = 64 * 1024
#: Length of the first and of the longest pause, in seconds. A process notices at most one longest
#: pause late that a store has recovered.
_FIRST, _LONGEST = 0.25, 8.0
#: Longest pause, in seconds, that a server can request with a Retry-After header.
RETRY_AFTER_CAP = 60.0
#: Seconds without a request after which a refusal is the first one again.
_FORGOTTEN = 2 * RETRY_AFTER_CAP
#: Seconds after which a waiting request checks again whether it may be sent.
_POLL = 0.25
#: Seconds between two touches of a holder's record; a much longer time is `stale_after`.
_TOUCH = 1.0
_ANNOUNCE_EVERY = 60.0


@dataclass(eq=False, repr=False)
class RetryLimits:
    """How often and for how long a process retries."""

    attempts: int  #: failures in a row, without progress in between, that end a download
    deadline: float | None  #: seconds for the whole download of one shard; None sets no limit
    patience: float  #: seconds to wait for an origin that throttles, or for credentials
    _paces: dict[str, Pace] = field(default_factory=dict)  # by bucket or web server

    def started(self, url: str, *, once: bool = False) -> Retries:
        """Return the retries of a download of ``url`` that starts now; ``once`` as for `use`."""
        end = None if self.deadline is None else clock.monotonic() + self.deadline
        retries = Retries(url, end)
        retries.use(self, once=once)
        return retries

    def pace(self, url: str) -> Pace:
        """Return the pace of the bucket or web server of ``url``."""
        server, paces = server_of(url), self._paces
        return paces.get(server) or paces.setdefault(server, Pace(server, self.patience))


@dataclass(eq=False, repr=False)
class Retries:
    """The retries of one shard's download, which all its connections share."""

    _url: str
    end: float | None  #: when the deadline passes, on the monotonic clock; None without one
    retries: int = 0  #: requests that failed and were repeated so far
    _limits: RetryLimits = field(init=False)
    _pace: Pace = field(init=False)
    _most: int = field(init=False)  # attempts in a row
    _record: Path | None = None  # of the lock's holder, touched while the server throttles

    def use(self, limits: RetryLimits, *, once: bool, record: Path | None = None) -> None:
        """Begin with a source, and the limits of this process: a forked child has its own.

        With ``once``, each failure is final, even that of a server that throttles. ``record`` is
        that of the lock's holder, which other processes watch.
        """
        self._limits, self._record, self._most = limits, record, 1 if once else limits.attempts
        self._pace = Pace(server_of(self._url), 0) if once else limits.pace(self._url)

    def check(self) -> None:
        """Raise TransferTimeoutError if the deadline of the whole download has passed."""
        if self._is_late(0):
            raise TransferTimeoutError(
                f"{self._url} was not downloaded within the deadline of "
                f"{self._limits.deadline:g} s. Raise deadline, or run again to continue.",
                url=self._url,
            )

    def note_progress(self, received: int) -> bool:
        """Return whether a failed attempt received enough bytes not to count as a failure."""
        self.retries += received >= LEAST_PROGRESS
        return received >= LEAST_PROGRESS

    def extend(self, seconds: float) -> None:
        """Extend the deadline by ``seconds`` that the download did not spend on its origin."""
        self._touch()
        if self.end is not None:
            self.end += seconds

    def _touch(self) -> None:
        """Show other processes that a download which receives little is not stuck."""
        if self._record is not None:
            with ignoring(OSError):
                os.utime(self._record)

    def call(self, function: Callable[[], T], *, sleep: Callable[[float], None]) -> T:
        """Call ``function`` until it succeeds, and return its result.

        ``sleep`` is called with the seconds to wait between attempts, and may raise to cancel.

        Raises:
            TransferError, TransferTimeoutError: the last attempt also failed.
            Exceptions of ``function`` other than TransientError and RepeatError, and of ``sleep``,
            at once.
        """
        failures, pause = 0, 0.0

        def wait(seconds: float) -> None:
            self.check()
            self._touch()
            left = math.inf if self.end is None else self.end - clock.monotonic()
            sleep(max(0.0, min(seconds, left, _TOUCH)))
            self.check()

        def request() -> T:
            nonlocal failures, pause
            pause = 0.0
            try:
                with self._pace.turn(wait):  # waits if the server throttles
                    return _remedied(function)
            except TransientError as exn:
                is_patient = exn.patient and self._pace.patience > 0
                if not is_patient:
                    # The jitter is added to Retry-After, because many clients get the same number.
                    pause = clock.randomness.uniform(0, min(CAP, BASE * 2**failures))
                    pause += min(exn.retry_after or 0.0, RETRY_AFTER_CAP)
                    failures += 1
                is_last = self._pace.is_over if is_patient else failures >= self._most
                if is_last or self._is_late(pause):
                    raise self._final(exn, failures, is_patient) from exn
                self.retries += 1
                if not is_patient:  # the pace logs the others
                    text = "%s: %s; attempt %d of %d failed, next in %.1f s"
                    values = self._url, redact(str(exn)), failures, self._most, pause
                    extra = {"event": "retry", "shard": self._url, "attempt": failures}
                    logger.warning(text, *values, extra=extra)
                raise

        try:
            return request()
        except TransientError:
            pass
        # Imported after a failure only: the import is slow, and most first requests succeed.
        import tenacity

        sleep(pause)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(TransientError),
            wait=lambda state: pause,
            sleep=sleep,
        )
        try:
            return retrying(request)
        finally:
            # `iter_state` refers to `retrying`. This cycle would keep the download's frames alive.
            retrying.iter_state.reset()

    def _is_late(self, pause: float) -> bool:
        return self.end is not None and clock.monotonic() + pause >= self.end

    def _final(self, exn: TransientError, failures: int, is_patient: bool) -> TransferError:
        late, advice = self._is_late(0), "Check the endpoint and the network, then try again"
        advice = "Run the command in a shell" if self._url.startswith("pipe:") else advice
        ended = f"{failures} attempt{'s' if failures != 1 else ''} failed"
        if not late and is_patient:
            ended = f"for {format_duration(self._limits.patience)}, the limit set by patience"
            advice = "Try again later, or raise patience"
        elif failures < self._most:
            late, ended = True, f"the deadline of {self._limits.deadline:g} s has passed"
        kind = TransferTimeoutError if late or exn.timed_out else TransferError
        return kind(
            f"{self._url} could not be downloaded: {redact(str(exn))} ({ended}). {advice}.",
            url=self._url,
        )


def _remedied(function: Callable[[], T]) -> T:
    """Call ``function``, and again at once with each remedy that it asks for."""
    applied = set[str]()
    while True:
        try:
            return function()
        except RepeatError as exn:
            error = exn.error
            if exn.remedy in applied or exn.apply() is False:
                break
            applied.add(exn.remedy)
    try:
        raise error  # not in the handler: a RepeatError may hold a signed URL
    finally:
        del error  # its traceback refers to this frame, and so to the frames of a download


def try_once(url: str, function: Callable[[], T]) -> T:
    """Call ``function`` without retries after a failure, and without patience."""
    retries = RetryLimits(1, None, 0).started(url, once=True)
    return retries.call(function, sleep=clock.sleep)


class _Turn:
    """A request in flight."""


@dataclass(eq=False, repr=False)
class Pace:
    """Limits the requests of one process to one bucket or web server. Threads may share it."""

    _server: str  # its name in logs, such as ``s3://bucket``
    patience: float  #: seconds to wait for a server that throttles; 0 never limits the requests

    def __post_init__(self) -> None:
        self._guard = threading.Lock()
        # Requests in flight. They leave the set even if a signal handler raises around `turn`.
        self._turns: weakref.WeakSet[_Turn] = weakref.WeakSet()
        self._window = math.inf  # most requests in flight at once
        self._full = 0  # requests in flight when throttling began; a limit this high is lifted
        self._pauses = 0  # pauses in a row, without a served request in between
        self._next = 0.0  # no request is sent before this time (monotonic clock)
        self._since: float | None = None  # when the throttling began; None if not throttled
        self._refused_since: float | None = None  # first refusal since the last served request
        self._refused = 0.0  # the last one
        self._announced = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the server has refused all requests for ``patience`` seconds."""
        since = self._refused_since
        return since is not None and clock.monotonic() - since >= self.patience

    @contextmanager
    def turn(self, sleep: Callable[[float], None]) -> Iterator[None]:
        """Wait until the caller may send a request; ``sleep`` waits, and may raise to cancel."""
        turn = _Turn()
        while True:
            with self._guard:
                seconds = 0.0 if self._since is None else self._wait()
                if seconds <= 0:
                    self._turns.add(turn)
                    break
            sleep(seconds)
        try:
            yield
            if self._since is not None:
                self._speed_up()
        except TransientError as exn:
            if exn.patient and self.patience:
                self._slow_down(exn)
            raise
        finally:
            with self._guard:
                self._turns.discard(turn)

    def _wait(self) -> float:
        """Return the seconds until a throttling server may get a request; 0 or less means now."""
        if self.is_over:
            return 0.0
        if len(self._turns) >= self._window:
            return _POLL * clock.randomness.uniform(0.5, 1.0)
        return self._next - clock.monotonic()

    def _slow_down(self, exn: TransientError) -> None:
        with self._guard:
            now = clock.monotonic()
            if self._since is None:
                self._since, self._full = now, len(self._turns)
            if self._refused_since is None or now - self._refused > _FORGOTTEN:
                self._refused_since, self._pauses = now, 0
            self._refused = now
            if now >= self._next:  # the refusals of one round count once
                self._window = max(1, min(self._window, len(self._turns)) // 2)
                pause = min(_LONGEST, _FIRST * 2**self._pauses) * clock.randomness.uniform(0.5, 1.0)
                self._next = now + max(pause, min(exn.retry_after or 0.0, RETRY_AFTER_CAP))
                self._pauses += 1
            for_now = now - self._since
            if for_now and now - self._announced < _ANNOUNCE_EVERY:
                return
            self._announced = now
        passed = f" ({format_duration(for_now)} so far)" if for_now >= _ANNOUNCE_EVERY else ""
        text = f"{exn}; requests wait for up to {format_duration(self.patience)}{passed}"
        self._log(logging.WARNING, f"is not ready: {text}")

    def _speed_up(self) -> None:
        with self._guard:
            self._pauses, self._refused_since = 0, None
            if self._since is None:
                return
            # Twice as many each round, up to half of the old number; then one more each round.
            self._window += 1 if self._window < self._full / 2 else 1 / self._window
            if self._window < self._full:
                return
            passed = clock.monotonic() - self._since
            # A pause that is left would keep the next refusal from setting a limit.
            self._since, self._next, self._window = None, 0.0, math.inf
        self._log(logging.INFO, f"responds again after {format_duration(passed)}")

    def _log(self, level: int, message: str) -> None:
        extra = {"event": "throttled", "server": self._server}
        logger.log(level, "%s %s", self._server, message, extra=extra)
