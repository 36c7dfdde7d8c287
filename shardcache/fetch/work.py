"""The threads that fetch one shard: begun, called off together, waited for.

The first error of any of them ends the work of all, at once: whoever waits for bytes finds its
connection aborted, everybody else finds out at the next look (`Work.check_stopped`).
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable

from shardcache import threads
from shardcache.errors import FetchCancelledError
from shardcache.fetch.blocks import FetchStatus
from shardcache.origins.base import Body
from shardcache.urls import ShardURL

__all__ = ["CancelledError", "Work"]

logger = logging.getLogger(__name__)


class CancelledError(Exception):
    """Another worker of the same fetch failed."""


class Work:
    """See the module.

    Args:
        url: what is fetched.
        status: says whether it was called off from outside.

    Attributes:
        guard: of what the threads share.
        stop: set when all are to end.
        error: the first, or None.
        bodies: answers that are being received.
        threads: beside the caller's.
    """

    def __init__(self, url: ShardURL, status: FetchStatus) -> None:
        self.url = url
        self.status = status
        self.stop = threading.Event()
        self.guard = threading.Lock()
        self.error: BaseException | None = None
        self.bodies: set[Body] = set()
        self.threads: list[threading.Thread] = []

    def spawn(self, function: Callable[[], None]) -> bool:
        """Let a thread do it; False if the process must not have more."""
        name = f"shardcache-{self.url.key[:8]}"
        try:
            thread = threads.start(functools.partial(self._guarded, function), name)
        except RuntimeError as exn:  # a limit of processes; those there are do it all
            count = len(self.threads) + 1
            logger.info("%s: fetching with %d threads: %s", self.url, count, exn)
            return False
        self.threads.append(thread)
        return True

    def _guarded(self, function: Callable[[], None]) -> None:
        try:
            function()
        except CancelledError:
            logger.debug("%s: a worker was called off", self.url)
        except BaseException as exn:  # noqa: BLE001 - handed to the caller's thread, which raises it
            self.fail(exn)

    def cancel(self) -> None:
        """Call the fetch off, from any thread."""
        self.fail(
            FetchCancelledError(
                f"{self.url}: the fetch was called off; what was fetched is kept. Run it again.",
                url=str(self.url),
            )
        )

    def fail(self, exn: BaseException) -> None:
        """End the work of all with this, if it is the first; from any thread."""
        with self.guard:
            if self.error is None:
                self.error = exn
            self.stop.set()
            bodies = list(self.bodies)
        for body in bodies:
            body.abort()

    def check_stopped(self) -> None:
        """See whether to go on.

        Raises:
            CancelledError: the work was called off, by anybody.
        """
        if self.status.called_off and not self.stop.is_set():
            self.cancel()
        if self.stop.is_set():
            raise CancelledError

    def sleep(self, seconds: float) -> None:
        """Wait, unless the work is called off.

        Raises:
            CancelledError: it was.
        """
        if self.stop.wait(seconds):
            raise CancelledError
