"""How far a fetch is, and who wants to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardcache import clock
from shardcache.errors import FetchCancelledError
from shardcache.origins.base import Body

if TYPE_CHECKING:
    from shardcache.fetch.connections import Throttle

__all__ = ["FetchStatus"]

#: Seconds until a sleeper notices that its fetch was called off.
_SLICE = 0.25


@dataclass(slots=True, eq=False)
class FetchStatus:
    """How far a fetch is, for whoever watches; updated by the engine.

    Attributes:
        own: whether it is this process that fetches, or has begun to.
        size: bytes of the shard, once known.
        written: bytes of it on disk, resumed ones included.
        received: bytes that came over the network for it.
        retries: requests repeated.
        partial: where the shard grows: this process's partial, or that of the process which
            is waited for.
        called_off: whether it is to end; see `cancel`.
        on_cancel: called by `cancel`.
        listener: called, by any thread, when there is more to read; must be quick.
        listed: bytes of the shard by a listing, which may be outdated.
        upstream: whether it comes from an upstream, not from its origin.
        throttle: how fast it may be, together with others.
        outdated: versions that are wanted no longer, even if they are on disk.
        roomless: whether there may be no room for it.
        answers: the origin's first answer, where the shard could not be stored: at most one.
    """

    own: bool = False
    size: int | None = None
    written: int = 0
    received: int = 0
    retries: int = 0
    partial: Path | None = None
    called_off: bool = False
    on_cancel: Callable[[], None] | None = None
    listener: Callable[[], None] | None = None
    listed: int | None = None
    upstream: bool = False
    throttle: Throttle | None = None
    outdated: frozenset[str] = frozenset()
    roomless: bool = False
    answers: list[Body] = field(default_factory=list)

    def grows_in(self, partial: Path) -> None:
        """From now on this is where the shard grows."""
        if partial != self.partial:
            self.partial = partial
            self.notify()

    def offer(self, answer: Body) -> None:
        """Keep an answer for whoever reads the shard past the cache."""
        self.drop_answer()
        self.answers.append(answer)

    def take_answer(self) -> Body | None:
        """The answer that was kept; the caller closes it. One of several threads gets it."""
        try:
            return self.answers.pop()
        except IndexError:
            return None

    def drop_answer(self) -> None:
        """Close the answer that nobody took."""
        if (answer := self.take_answer()) is not None:
            answer.close()

    def cancel(self) -> None:
        """Call off the fetch, or the wait for another process's: `FetchCancelledError`."""
        self.called_off = True
        if (on_cancel := self.on_cancel) is not None:
            on_cancel()

    def check(self, what: str) -> None:
        """Go on, unless the fetch was called off.

        Raises:
            FetchCancelledError: it was; ``what`` names the shard.
        """
        if self.called_off:
            raise FetchCancelledError(
                f"{what}: the fetch was called off; what was fetched is kept. Run it again.",
                url=what,
            )

    def sleep(self, seconds: float, what: str) -> None:
        """Sleep, unless the fetch is called off; raises as `check`."""
        self.check(what)
        while seconds > 0:
            nap = min(seconds, _SLICE)
            clock.sleep(nap)
            seconds -= nap
            self.check(what)

    def notify(self) -> None:
        """Say that there is more."""
        if self.listener is not None:
            self.listener()
