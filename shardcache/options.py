"""What `Cache` and `Cache.prewarm` take as keyword arguments, for type checkers and editors.

The options are `config.Config`'s, in every form that is accepted there: a size is a number of
bytes or text such as ``"800GB"`` or ``"80%"``, a duration seconds or text such as ``"1h30m"``.
Tests compare them with the fields of `Config`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from shardcache.config import TierOption, Upstream
    from shardcache.results import Event

__all__ = ["Handler", "Options", "PrewarmOptions"]

#: What WebDataset asks about an error: True goes on, False stops.
Handler = Callable[[Exception], bool]

Size = int | str
Duration = float | str
Place = str | os.PathLike[str]


class Options(TypedDict, total=False):
    """Of `Cache`. None is the default of each."""

    max_size: Size | None
    min_free: Size | None
    ephemeral_limit: Size | None
    max_age: Duration | None
    tiers: str | Sequence[str | Path | Mapping[str, Any] | TierOption] | None
    policy: Literal["working-set", "lru", "fifo"] | None
    protect_for: Duration | None
    isolation: Literal["node", "rank", "job"] | None
    fill: Literal["follow", "complete"] | None
    prefetch: int | None
    connections: int | None
    part_size: Size | None
    attempts: int | None
    deadline: Duration | None
    timeout: Duration | None
    lock_timeout: Duration | None
    stale_after: Duration | None
    strict: bool | None
    validate: Callable[[Path], None] | None
    fsync: Literal["verify-after-boot", "fsync", "none"] | None
    locks: Literal["auto", "flock", "lease"] | None
    touch_interval: Duration | None
    stats: bool | None
    allow_schemes: str | Collection[str] | None
    upstreams: str | Sequence[str | Path | Mapping[str, Any] | Upstream] | None
    cache_local: bool | None
    storage_options: Mapping[str, object] | None
    endpoint_url: str | None
    shared_group: int | str | None


class PrewarmOptions(TypedDict, total=False):
    """Of `Cache.prewarm`; see `prewarm.prewarm`."""

    jobs: int
    check: bool
    dry_run: bool
    deadline: float | None
    max_failures: int | None
    best_effort: bool
    limit_rate: Size | None
    refresh: bool
    processes: int
    on_event: Callable[[Event], None] | None
    stop: threading.Event | None
