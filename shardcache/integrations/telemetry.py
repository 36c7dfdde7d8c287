"""Metrics for OpenTelemetry, through its API package alone: ``pip install 'shardcache[otel]'``.

    cache = shardcache.Cache(...)
    shardcache.telemetry.observe(cache)

Where an SDK with an exporter is set up, it reads what the process has counted whenever it
collects; nothing is done before, so a hit costs what it cost. Without an SDK nothing happens.

`observe` may be called from any thread, callbacks come in threads of the SDK. A forked child
exports nothing of its own accord: DataLoader workers are counted with ``node=True``, or by calling
`observe` in each of them.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from shardcache.cache import Cache
from shardcache.config import __version__
from shardcache.errors import ConfigError
from shardcache.stats.counters import BUCKETS, COUNTERS, WAITS, wait_index
from shardcache.stats.summary import OUTCOMES, summed

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

__all__ = ["observe"]

logger = logging.getLogger(__name__)

#: What was counted: counters by the names of `counters`, waits by what was waited for.
_Counts = tuple[Mapping[str, int], Mapping[str, int]]
#: A value, and what it is of.
_Points = Iterable[tuple[float, dict[str, str]]]
#: Caches that are observed, and whether each stands for its node.
_Observed = weakref.WeakKeyDictionary[Cache, bool]

#: By the provider that their metrics go to; None is the global one. Of two instruments of one
#: name, OpenTelemetry drops the second, so all caches share one set.
_observed: dict[MeterProvider | None, _Observed] = {}
_guard = threading.Lock()


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
            takes some milliseconds per collection. One process of a node is to do so.
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
    with _guard:
        known = _observed.get(meter_provider)
        if known is not None:
            known[cache] = node
            return
        caches = _observed[meter_provider] = weakref.WeakKeyDictionary({cache: node})
    meter = get_meter("shardcache", __version__, meter_provider)
    for name, unit, about, points in _METRICS:
        read = functools.partial(_read, caches, points, Observation)
        meter.create_observable_counter(f"shardcache.{name}", [read], unit, about)
    read = functools.partial(_read, caches, None, Observation)
    about = "Shards that the process fetches or waits for."
    meter.create_observable_gauge("shardcache.fetches.active", [read], "{shard}", about)


def _of_process(cache: Cache) -> _Counts:
    values = cache.counted()
    waits = {wait: sum(values[(n := wait_index(wait)) : n + BUCKETS]) for wait in WAITS}
    return dict(zip(COUNTERS, values, strict=False)), waits


def _of_node(cache: Cache) -> _Counts:
    found = summed(cache.samples(ever=True))
    return found.counters, {wait: waits.count for wait, waits in found.waits.items()}


def _read(
    observed: _Observed,
    points: Callable[[_Counts], _Points] | None,
    make: type[Observation],
    options: CallbackOptions,
) -> list[Observation]:
    """The values of a metric; without ``points``, of the fetches that are under way.

    None of a directory whose database cannot be read.
    """
    caches = list(observed.items())
    nodes = {str(cache.dir): cache for cache, node in caches if node}
    found: dict[tuple[tuple[str, str], ...], float] = {}
    for cache, node in caches:
        place = str(cache.dir)
        if place in nodes and (points is None or nodes[place] is not cache):
            continue  # what one process counts is in what its node counts
        try:
            if points is None:
                values: _Points = [(cache.under_way(), {})]
            else:
                values = list(points(_of_node(cache) if node else _of_process(cache)))
        except OSError as exn:
            logger.debug("no metrics: %s", exn)
            continue
        for value, labels in values:
            attributes = (*labels.items(), ("dir", place))
            found[attributes] = found.get(attributes, 0) + value
    return [make(value, dict(attributes)) for attributes, value in found.items()]


def _one(name: str) -> Callable[[_Counts], _Points]:
    return lambda counts: iter([(counts[0][name], {})])


def _each(label: str, names: Mapping[str, str]) -> Callable[[_Counts], _Points]:
    """One value for each of several counters: label -> counter."""
    return lambda counts: ((counts[0][key], {label: value}) for value, key in names.items())


def _prefixed(prefix: str) -> dict[str, str]:
    return {n.removeprefix(prefix): n for n in COUNTERS if n.startswith(prefix)}


def _waits(counts: _Counts) -> _Points:
    return ((count, {"for": wait}) for wait, count in counts[1].items())


def _waited(counts: _Counts) -> _Points:
    return ((counts[0][f"wait_us_{wait}"] / 1e6, {"for": wait}) for wait in WAITS)


_SOURCES = {"origin": "bytes_origin", "upstream": "bytes_upstream"}
#: Name, unit, description, values. Names are for ever: dashboards hang on them.
_METRICS: Sequence[tuple[str, str, str, Callable[[_Counts], _Points]]] = (
    ("opens", "{shard}", "Shards asked for.", _each("outcome", {name: name for name in OUTCOMES})),
    ("opened", "By", "Bytes of shards opened.", _one("bytes_opened")),
    ("received", "By", "Bytes that came over the network.", _each("source", _SOURCES)),
    ("bypassed", "By", "Bytes streamed, not stored.", _one("bytes_bypassed")),
    ("stored", "By", "Bytes of shards stored.", _one("bytes_stored")),
    ("fetches", "{shard}", "Shards fetched.", _one("fetches")),
    ("fetches.failed", "{shard}", "Fetches that failed.", _one("fetches_failed")),
    ("retries", "{request}", "Requests that were repeated.", _one("retries")),
    ("evictions", "{shard}", "Entries evicted or removed.", _each("reason", _prefixed("evicted_"))),
    ("evicted", "By", "Bytes of entries evicted or removed.", _one("bytes_evicted")),
    ("errors", "{error}", "Errors.", _each("kind", _prefixed("errors_"))),
    ("waits", "{wait}", "Waits of readers for a shard.", _waits),
    ("wait.time", "s", "How long readers waited for shards.", _waited),
)
