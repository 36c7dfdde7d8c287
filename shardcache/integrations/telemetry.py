"""Export metrics to OpenTelemetry. ``pip install 'shardcache[otel]'`` installs the API package.

    cache = shardcache.Cache(...)
    shardcache.telemetry.observe(cache)

The program's OpenTelemetry SDK reads the counters in its own threads, so hits do not become slower.
Without an SDK, nothing is exported. A forked child exports nothing, so for DataLoader workers use
``node=True``, or call `observe` in each worker.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardcache.cache import Cache
from shardcache.config import __version__
from shardcache.errors import ConfigError
from shardcache.stats.counters import WAITS
from shardcache.stats.metrics import SUMS, Metric
from shardcache.stats.summary import stats_of, summed

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

logger = logging.getLogger(__name__)

_METRICS = (
    *SUMS,
    Metric("waits", "{wait}", "Waits of readers for a shard.", "for",
           {wait: f"waits_{wait}" for wait in WAITS}),
    Metric("wait.time", "s", "How long readers waited for shards.", "for",
           {wait: f"wait_s_{wait}" for wait in WAITS}),
    Metric("fetches.active", "{shard}", "Shards that the process fetches or waits for.", "",
           {"": "active"}),
)  # fmt: skip
#: For each meter provider (None is the global one), its caches, and for each cache whether it
#: exports the whole node. All caches of a provider share one set of instruments, because
#: OpenTelemetry ignores a second instrument with the same name.
_observed: dict[MeterProvider | None, weakref.WeakKeyDictionary[Cache, bool]] = {}


def observe(
    cache: Cache, *, node: bool = False, meter_provider: MeterProvider | None = None
) -> None:
    """Export the counters of a cache as observable metrics named ``shardcache.*``.

    Each value has an attribute ``dir``, the directory of the cache. The values of caches with the
    same directory are added up. The metrics do not keep the cache alive.

    Args:
        cache: the cache to observe.
        node: export the counters of all processes of this node, not only of this process. Each
            collection then reads the directory's database, which takes a few milliseconds. Use
            this in one process per node, and with one cache per directory.
        meter_provider: the provider of the metrics; None uses the global one.

    Raises:
        ConfigError: the package ``opentelemetry-api`` is missing, or the option ``stats`` is off.
    """
    try:
        from opentelemetry.metrics import get_meter
    except ImportError:
        raise ConfigError(
            "Metrics need the package opentelemetry-api. Run: pip install 'shardcache[otel]'"
        ) from None
    if not cache.config.stats:
        raise ConfigError("The option stats of this cache is off. Set stats=True to use metrics.")
    if meter_provider in _observed:
        _observed[meter_provider][cache] = node
        return
    caches = _observed[meter_provider] = weakref.WeakKeyDictionary({cache: node})
    meter = get_meter("shardcache", __version__, meter_provider)
    for metric in _METRICS:
        read = functools.partial(_read, caches, metric)
        is_gauge = metric.name == "fetches.active"
        make = meter.create_observable_gauge if is_gauge else meter.create_observable_counter
        make(f"shardcache.{metric.name}", [read], metric.unit, metric.about)


def _counted(cache: Cache, node: bool) -> dict[str, float]:
    """Return counters by name, including those of waits (``waits_*``, ``wait_s_*``)."""
    counts: dict[str, float] = {}
    if node:
        found = summed(cache.samples(ever=True))
    else:
        process = vars(cache).get("process")
        found = stats_of(process.counters.snapshot() if process else {})
        counts["active"] = len(process.downloads.unfinished()) if process else 0
    for wait, waits in found.waits.items():
        counts |= {f"waits_{wait}": waits.count, f"wait_s_{wait}": waits.seconds}
    return counts | found.counters


def _read(
    caches: Mapping[Cache, bool], metric: Metric, options: CallbackOptions
) -> list[Observation]:
    """Return the values of a metric; skip caches whose database cannot be read."""
    from opentelemetry.metrics import Observation

    found: Counter[tuple[str, str]] = Counter()
    for cache, node in list(caches.items()):
        try:
            counts = _counted(cache, node)
        except OSError as exn:
            logger.debug("no metrics: %s", exn)
            continue
        for value, counter in metric.counters.items():
            if counter in counts:
                found[value, str(cache.dir)] += counts[counter]  # type: ignore[assignment]
    return [
        Observation(number, {"dir": directory, **({metric.label: value} if metric.label else {})})
        for (value, directory), number in found.items()
    ]
