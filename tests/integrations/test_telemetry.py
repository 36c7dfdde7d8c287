"""What OpenTelemetry collects is what was counted."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardcache import telemetry
from shardcache.cache import Cache
from shardcache.errors import ConfigError
from tests.support.fakes import MemoryOrigin
from tests.support.storetools import Parent, forked
from tests.support.tars import make_tar

sdk = pytest.importorskip("opentelemetry.sdk.metrics")
export = pytest.importorskip("opentelemetry.sdk.metrics.export")

URLS = [f"s3://lab/train-{n}.tar" for n in range(4)]
DATA = make_tar(1)
MakeCache = Callable[..., Cache]
Values = dict[tuple[str, str], float]


class Collector:
    """An SDK that is read on demand."""

    def __init__(self) -> None:
        self.reader = export.InMemoryMetricReader()
        self.provider = sdk.MeterProvider(metric_readers=[self.reader])
        self.dirs: set[str] = set()

    def collect(self) -> Values:
        """(name, value of the label or "") -> value, of all caches together."""
        found = self.reader.get_metrics_data()
        if found is None:
            return {}
        values: Values = Counter()
        for resource in found.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        labels = dict(point.attributes)
                        self.dirs.add(labels.pop("dir"))
                        values[metric.name, next(iter(labels.values()), "")] += point.value
        return values


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.provider.shutdown()


@pytest.fixture
def cache(make_cache: MakeCache, origin: MemoryOrigin) -> Cache:
    origin.objects.update(dict.fromkeys(URLS, DATA))
    return make_cache(fill="complete")


def read(cache: Cache, times: int = 1) -> None:
    for _ in range(times):
        for url in URLS:
            cache.open(url).read()


@pytest.mark.parametrize("node", [False, True])
def test_it_is_what_was_counted_at_the_moment_of_the_collection(
    cache: Cache, collector: Collector, node: bool
) -> None:
    telemetry.observe(cache, node=node, meter_provider=collector.provider)
    assert set(collector.collect().values()) == {0}
    read(cache, 3)
    cache.remove(URLS[0])
    found = collector.collect()
    expected = {
        ("opens", "misses"): len(URLS),
        ("opens", "hits"): 2 * len(URLS),
        ("opened", ""): 3 * len(URLS) * len(DATA),
        ("received", "origin"): len(URLS) * len(DATA),
        ("stored", ""): len(URLS) * len(DATA),
        ("fetches", ""): len(URLS),
        ("evictions", "asked"): 1,
        ("evicted", ""): len(DATA),
        ("waits", "network"): len(URLS),
        ("waits", "disk"): 2 * len(URLS),
    }
    assert {key: found[f"shardcache.{key[0]}", key[1]] for key in expected} == expected
    assert found["shardcache.wait.time", "network"] > 0
    read(cache)
    cache.close()  # nothing falls

    def work(parent: Parent) -> None:
        read(cache)
        cache.close()
        parent.say()

    with forked(work) as child:  # it counts for its node and not for its parent
        child.hear()
    hits = (4 if node else 3) * len(URLS) - 1
    assert collector.collect()["shardcache.opens", "hits"] == hits


def test_all_caches_of_a_process_are_counted_each_by_its_directory(
    make_cache: MakeCache, cache: Cache, collector: Collector, tmp_path: Path
) -> None:
    other = make_cache(dir=tmp_path / "other", fill="complete")
    again = make_cache(dir=tmp_path / "other", fill="complete")
    for each in (cache, other, again, cache):
        telemetry.observe(each, meter_provider=collector.provider)
        read(each)
    found = collector.collect()
    assert collector.dirs == {str(cache.dir), str(other.dir)}
    assert found["shardcache.opens", "misses"] == 2 * len(URLS)
    assert found["shardcache.opens", "hits"] == 2 * len(URLS)


def test_fetches_in_hand_are_a_gauge(
    make_cache: MakeCache, origin: MemoryOrigin, collector: Collector
) -> None:
    origin.objects[URLS[0]] = DATA
    gate = threading.Event()
    cache = make_cache(validate=lambda path: gate.wait(60) or None)
    telemetry.observe(cache, meter_provider=collector.provider)
    with cache.open(URLS[0]):
        assert collector.collect()["shardcache.fetches.active", ""] == 1
        gate.set()


def test_a_cache_that_is_gone_is_not_kept(tmp_path: Path, collector: Collector) -> None:
    cache = Cache(tmp_path / "other", min_free=0)
    telemetry.observe(cache, meter_provider=collector.provider)
    collector.collect()
    del cache
    gc.collect()
    assert collector.collect() == {}


def test_what_cannot_be_observed_says_why(
    make_cache: MakeCache, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="stats"):
        telemetry.observe(make_cache(stats=False))
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    with pytest.raises(ConfigError, match=r"shardcache\[otel\]"):
        telemetry.observe(cache)
