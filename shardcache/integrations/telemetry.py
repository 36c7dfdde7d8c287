"""Metrics for OpenTelemetry, through its API package alone: ``pip install 'shardcache[otel]'``.

    cache = shardcache.Cache(...)
    shardcache.telemetry.observe(cache)

Where an SDK with an exporter is set up, it reads what the process has counted whenever it
collects, in threads of its own; a hit costs what it cost. Without an SDK nothing happens. A forked
child exports nothing of its own accord: DataLoader workers are counted with ``node=True``, or by
calling `observe` in each of them.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shardcache.cache import Cache
from shardcache.config import __version__
from shardcache.errors import ConfigError
from shardcache.stats.counters import COUNTERS, WAITS
from shardcache.stats.database import Sample
from shardcache.stats.summary import OUTCOMES, summed

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

logger = logging.getLogger(__name__)

#: Caches, and whether each stands for its node, by the provider that their metrics go to (None is
#: the global one). Of two instruments of one name, OpenTelemetry drops the second, so all caches
#: share one set.
_observed: dict[MeterProvider | None, weakref.WeakKeyDictionary[Cache, bool]] = {}


def observe(
    cache: Cache, *, node: bool = False, meter_provider: MeterProvider | None = None
) -> None:
    """Offer what a cache counts as observable metrics named ``shardcache.*``.

    Each value bears the cache's directory as the attribute ``dir``; caches of one directory are
    added up. The cache is not kept by it.

    Args:
        cache: whose.
        node: all that the processes of this node have counted, by any configuration of the
            directory, and not what this process has: from the directory's database, which
            takes some milliseconds per collection. One process of a node is to do so, with one
            cache of the directory.
        meter_provider: the default is the one that is set globally.

    Raises:
        ConfigError: the package ``opentelemetry-api`` is missing, or the cache counts nothing.
    """
    try:
        from opentelemetry.metrics import Observation, get_meter
    except ImportError:
        raise ConfigError(
            "metrics need the package opentelemetry-api. Run: pip install 'shardcache[otel]'"
        ) from None
    if not cache.config.stats:
        raise ConfigError("this cache counts nothing: its option stats is off. Switch it on.")
    if meter_provider in _observed:
        _observed[meter_provider][cache] = node
        return
    caches = _observed[meter_provider] = weakref.WeakKeyDictionary({cache: node})
    meter = get_meter("shardcache", __version__, meter_provider)
    for name, unit, about, label, keys in _METRICS:
        read = functools.partial(_read, caches, label, keys, Observation)
        is_gauge = name == "fetches.active"
        make = meter.create_observable_gauge if is_gauge else meter.create_observable_counter
        make(f"shardcache.{name}", [read], unit, about)


def _counted(cache: Cache, node: bool) -> dict[str, float]:
    """Counters by their names; ``waits_`` and ``wait_s_`` of each wait; of a process ``active``."""
    process = cache.processes.made()
    samples = cache.samples(ever=True) if node else []
    if process is not None and not node:
        samples = [Sample(0, 0, None, None, process.counters.snapshot())]
    found = summed(samples)
    counts: dict[str, float] = {**found.counters}
    for wait, waits in found.waits.items():
        counts[f"waits_{wait}"] = waits.count
        counts[f"wait_s_{wait}"] = counts[f"wait_us_{wait}"] / 1e6
    if not node:
        counts["active"] = 0 if process is None else process.unfinished()
    return counts


def _read(
    caches: Mapping[Cache, bool],
    label: str,
    keys: Mapping[str, str],
    make: type[Observation],
    options: CallbackOptions,
) -> list[Observation]:
    """The values of a metric; none of a directory whose database cannot be read."""
    found: Counter[tuple[str, str]] = Counter()
    for cache, node in list(caches.items()):
        try:
            counts = _counted(cache, node)
        except OSError as exn:
            logger.debug("no metrics: %s", exn)
            continue
        known = {value: counts[key] for value, key in keys.items() if key in counts}
        for value, number in known.items():
            found[value, str(cache.dir)] += number  # type: ignore[assignment]
    return [
        make(number, {"dir": directory, **({label: value} if label else {})})
        for (value, directory), number in found.items()
    ]


def _all(prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix): name for name in COUNTERS if name.startswith(prefix)}


#: Name, unit, description, label, and for each value of the label what is counted there. Names are
#: for ever: dashboards hang on them.
_METRICS: Sequence[tuple[str, str, str, str, Mapping[str, str]]] = (
    ("opens", "{shard}", "Shards asked for.", "outcome", {name: name for name in OUTCOMES}),
    ("opened", "By", "Bytes of shards opened.", "", {"": "bytes_opened"}),
    ("received", "By", "Bytes that came over the network.", "source",
     {"origin": "bytes_origin", "upstream": "bytes_upstream"}),
    ("bypassed", "By", "Bytes streamed, not stored.", "", {"": "bytes_bypassed"}),
    ("stored", "By", "Bytes of shards stored.", "", {"": "bytes_stored"}),
    ("fetches", "{shard}", "Shards fetched.", "", {"": "fetches"}),
    ("fetches.failed", "{shard}", "Fetches that failed.", "", {"": "fetches_failed"}),
    ("retries", "{request}", "Requests that were repeated.", "", {"": "retries"}),
    ("evictions", "{shard}", "Entries evicted or removed.", "reason", _all("evicted_")),
    ("evicted", "By", "Bytes of entries evicted or removed.", "", {"": "bytes_evicted"}),
    ("errors", "{error}", "Errors.", "kind", _all("errors_")),
    ("waits", "{wait}", "Waits of readers for a shard.", "for", {w: f"waits_{w}" for w in WAITS}),
    ("wait.time", "s", "How long readers waited for shards.", "for",
     {w: f"wait_s_{w}" for w in WAITS}),
    ("fetches.active", "{shard}", "Shards that the process fetches or waits for.", "",
     {"": "active"}),
)  # fmt: skip
