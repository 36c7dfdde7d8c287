"""What must hold in a storm, and what it is called when it does not."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardcache import Cache
from tests.stress.storm.settings import Settings

__all__ = ["Rules", "Violation", "rules_of"]

#: Seconds that a call may wait for the lock of the budget, by the library's own bound.
_BUDGET_WAIT = 60.0
#: Seconds that everything else may take on a machine that does much else.
_SLACK = 45.0


@dataclass(frozen=True, slots=True)
class Rules:
    """What must hold.

    Attributes:
        max_size: bytes; the budget.
        lock_timeout: seconds, as the cache was told.
        lying: whether flock succeeded for everybody: then entries in use may go, the
            budget may be overshot, and the bound on fetches is the generous one.
        keys: the key of each shard's URL -> its name.
        urls: the URL of each shard, as the library logs it -> its name.
        namespaces: how many namespaces may each hold a copy.
    """

    max_size: int
    lock_timeout: float
    lying: bool = False
    keys: dict[str, str] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)
    namespaces: int = 1

    @property
    def call_bound(self) -> float:
        """Seconds within which a call ends while its process runs."""
        return self.lock_timeout + _BUDGET_WAIT + _SLACK


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that did not hold, and how that was seen."""

    invariant: str
    text: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.text}"


def rules_of(settings: Settings, endpoint_url: str) -> Rules:
    """The rules of a storm over the server at an endpoint, which is part of every key."""
    # It only parses; nothing is made.
    cache = Cache(**settings.options(), endpoint_url=endpoint_url)
    shards = {name: cache.parse(settings.url(name)) for name in settings.names}
    return Rules(
        max_size=settings.max_size,
        lock_timeout=settings.lock_timeout,
        lying=settings.lying,
        keys={shard.key: name for name, shard in shards.items()},
        urls={str(shard): name for name, shard in shards.items()},
        namespaces=2 if settings.workers >= 8 else 1,
    )
