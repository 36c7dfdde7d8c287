"""How many connections are worth having, found by trial: more while they add, fewer while it
costs nothing.

    a rate at the present number -> try twice as many -> kept if the rate rises in proportion
                                 -> else half as many -> kept if the rate stays
                                 -> else rest, and try again later: links change

What is read from the cache meanwhile, and everything else on the machine, moves rates up and
down; where the processor may be the limit a rise is believed only if it goes when the
connections go.

Pure: it is told rates and gives a number. What it goes by is measured by `lanes`.
"""

from __future__ import annotations

__all__ = ["Climb"]

#: How much of the gain in proportion more connections must bring. S3 gives nearly all of it, a
#: link or a processor that is full gives none.
_WORTH = 0.5
#: What fewer connections must keep of the rate.
_AS_GOOD = 0.95
#: Seconds of rest after all has been tried; doubled each time that nothing came of it.
_REST = 1.0
_LONGEST_REST = 32.0


class Climb:
    """See the module.

    Args:
        most: never more.

    Attributes:
        limit: how many connections to have now.
        least: no fewer.
        doubtful: whether a rise has to be confirmed.
        rest_until: until then `told` need not be called.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.limit = most
        self.least = 1
        self.doubtful = True
        self.rest_until = 0.0
        self._rest = _REST
        self._base: tuple[int, float] | None = None  # the best so far, in this climb
        self._risen: tuple[int, float] | None = None  # what is to be confirmed

    def start(self, limit: int, *, doubtful: bool = True) -> None:
        """Begin anew, with so many."""
        self.limit = self.least = max(1, min(self.most, limit))
        self.doubtful = doubtful
        self._base = self._risen = None

    @property
    def trying(self) -> bool:
        """Whether there are more connections than known to be good."""
        return self._base is not None and self.limit > self._base[0]

    def told(self, rate: float, now: float, *, wanted: bool) -> None:
        """Draw conclusions from what all ``limit`` connections brought together.

        Args:
            rate: bytes per second; 0 if there was not enough to do for so many.
            now: seconds.
            wanted: whether more would have found something to do.
        """
        if self._base is None:
            self._base = (self.limit, rate)
            self._go(now, up=wanted, down=True)
        elif self._risen is not None:
            risen, self._risen = self._risen, None
            if self._is_worth(risen, (self.limit, rate)):
                self._keep(risen)
                self._go(now, up=wanted, down=False)
            else:
                self._go(now, up=False, down=True)
        elif self.limit > self._base[0]:
            self._judge_more((self.limit, rate), now, wanted)
        elif rate >= self._base[1] * _AS_GOOD:
            self._keep((self.limit, rate))
            self._go(now, up=False, down=True)
        else:
            self.limit = self._base[0]
            self._go(now, up=False, down=False)

    def _judge_more(self, found: tuple[int, float], now: float, wanted: bool) -> None:
        assert self._base is not None
        if not self._is_worth(found, self._base):
            self.limit = self._base[0]
            self._go(now, up=False, down=True)
        elif self.doubtful:
            self._risen = found
            self.limit = self._base[0]
        else:
            self._keep(found)
            self._go(now, up=wanted, down=False)

    @staticmethod
    def _is_worth(more: tuple[int, float], fewer: tuple[int, float]) -> bool:
        return more[1] > fewer[1] * (1 + _WORTH * (more[0] / fewer[0] - 1))

    def _keep(self, found: tuple[int, float]) -> None:
        self._base = found
        self.limit = found[0]
        self._rest = _REST

    def _go(self, now: float, *, up: bool, down: bool) -> None:
        """To the next trial, or to rest."""
        if up and self.limit < self.most:
            self.limit = min(self.most, 2 * self.limit)
        elif down and self.limit > self.least:
            self.limit = max(self.least, self.limit // 2)
        else:
            self._base = None
            self.rest_until = now + self._rest
            self._rest = min(_LONGEST_REST, 2 * self._rest)
