"""Waiting with an end: looks that grow rarer, a word every ten seconds, a deadline.

The loops of `shardcache.sync` are all of one form, in which the last look comes after the
last pause, so that whatever arrived in time is found:

    patience = Patience(timeout)
    while not there():
        if patience.over:
            raise WaitTimeoutError(...)
        patience.pause(lambda: "waiting for ...")

A `Patience` is used by one thread, once.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

from shardcache.clock import SYSTEM_CLOCK, Clock
from shardcache.units import format_duration, parse_duration

__all__ = ["DEFAULT_TIMEOUT", "Patience"]

logger = logging.getLogger(__name__)

#: Seconds, where a caller states none: what torch.distributed gives its collectives.
DEFAULT_TIMEOUT = 1800.0
#: Seconds of the first pause; what is nearly there is nearly there.
_FIRST = 0.01
#: Seconds of the longest one. A thousand ranks that look once a second are a thousand
#: requests a second to a file server that has other things to do.
_LONGEST = 1.0
_GROWTH = 1.5
_ANNOUNCE_EVERY = 10.0


class Patience:
    """One wait.

    Args:
        timeout: seconds, or text such as ``10m``; None waits for ever.
        longest: most seconds between two looks.
        clock: whose time that is.

    Raises:
        ConfigError: ``timeout`` is no duration.
    """

    def __init__(
        self,
        timeout: float | str | None,
        *,
        longest: float = _LONGEST,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.timeout = None if timeout is None else parse_duration(timeout)
        self._longest = longest
        self._clock = clock
        self._begun = self._announced = clock.monotonic()
        self._next = min(_FIRST, longest)

    @property
    def waited(self) -> float:
        """Seconds since the wait began."""
        return self._clock.monotonic() - self._begun

    @property
    def over(self) -> bool:
        """Whether there is no time left."""
        return self.timeout is not None and self.waited >= self.timeout

    def __str__(self) -> str:
        return format_duration(self.waited)

    def pause(self, describe: Callable[[], str]) -> None:
        """Sleep until the next look, not past the deadline.

        Args:
            describe: what is waited for, as the end of "... s: "; asked every ten seconds.
        """
        if self._clock.monotonic() - self._announced >= _ANNOUNCE_EVERY:
            self._announced = self._clock.monotonic()
            logger.warning("after %s: %s", self, describe())
        # Jitter: ranks that begin together would ask together, for ever.
        seconds = self._next * random.uniform(0.5, 1.0)  # noqa: S311
        if self.timeout is not None:
            seconds = min(seconds, max(0.0, self.timeout - self.waited))
        self._next = min(self._next * _GROWTH, self._longest)
        self._clock.sleep(seconds)
