"""OpenTelemetry collects the counters of a cache."""

import gc
import sys
import threading
from collections import Counter

import pytest

from shardcache import telemetry
from shardcache.cache import Cache
from shardcache.errors import ConfigError
from tests.support.storetools import forked
from tests.support.tars import make_tar

sdk = pytest.importorskip("opentelemetry.sdk.metrics")
export = pytest.importorskip("opentelemetry.sdk.metrics.export")

URLS = [f"s3://lab/train-{n}.tar" for n in range(4)]
SIZE = len(make_tar(1))


class Collector:
    """An OpenTelemetry SDK that collects on demand."""

    def __init__(self) -> None:
        self.reader = export.InMemoryMetricReader()
        self.provider = sdk.MeterProvider(metric_readers=[self.reader])
        self.dirs: set[str] = set()

    def collect(self) -> dict[tuple[str, str], float]:
        """Return the sums over all caches by name and label value, which may be empty."""
        values: dict[tuple[str, str], float] = Counter()
        found = self.reader.get_metrics_data()
        for resource in found.resource_metrics if found else ():
            for metric in (each for scope in resource.scope_metrics for each in scope.metrics):
                for point in metric.data.data_points:
                    labels = dict(point.attributes)
                    self.dirs.add(labels.pop("dir"))
                    values[metric.name, next(iter(labels.values()), "")] += point.value
        return values


@pytest.fixture
def collector():
    found = Collector()
    yield found
    found.provider.shutdown()


@pytest.fixture
def cache(make_cache, origin):
    origin.objects.update(dict.fromkeys(URLS, make_tar(1)))
    return make_cache(fill="complete")


def read(cache: Cache, times: int = 1) -> None:
    for url in URLS * times:
        cache.open(url).read()


@pytest.mark.parametrize("node", [False, True])
def test_metrics_equal_the_counters(cache, collector, node):
    telemetry.observe(cache, node=node, meter_provider=collector.provider)
    assert set(collector.collect().values()) == {0}
    read(cache, 3)
    cache.remove(URLS[0])
    found = collector.collect()
    expected = {
        ("opens", "misses"): len(URLS),
        ("opens", "hits"): 2 * len(URLS),
        ("opened", ""): 3 * len(URLS) * SIZE,
        ("received", "origin"): len(URLS) * SIZE,
        ("stored", ""): len(URLS) * SIZE,
        ("fetches", ""): len(URLS),
        ("evictions", "asked"): 1,
        ("evicted", ""): SIZE,
        ("waits", "network"): len(URLS),
        ("waits", "disk"): 2 * len(URLS),
    }
    assert {key: found[f"shardcache.{key[0]}", key[1]] for key in expected} == expected
    assert found["shardcache.wait.time", "network"] > 0
    read(cache)
    cache.close()  # must not lower a metric

    def work(parent):
        read(cache)
        cache.close()
        parent.say()

    with forked(work) as child:  # counts for its node but not for its parent
        child.hear()
    hits = (4 if node else 3) * len(URLS) - 1
    assert collector.collect()["shardcache.opens", "hits"] == hits


def test_metrics_of_several_caches(make_cache, cache, collector, tmp_path):
    other, again = (make_cache(dir=tmp_path / "other", fill="complete") for _ in range(2))
    for each in (cache, other, again, cache):
        telemetry.observe(each, meter_provider=collector.provider)
        read(each)
    found = collector.collect()
    assert collector.dirs == {str(cache.dir), str(other.dir)}
    assert found["shardcache.opens", "misses"] == 2 * len(URLS)
    assert found["shardcache.opens", "hits"] == 2 * len(URLS)
    last, gone = Collector(), Cache(tmp_path / "gone", min_free=0)
    telemetry.observe(gone, meter_provider=last.provider)
    assert last.collect()
    del gone
    gc.collect()
    assert last.collect() == {}


def test_running_downloads_are_a_gauge(make_cache, cache, collector):
    gate = threading.Event()
    cache = make_cache(validate=lambda path: gate.wait(60) or None)
    telemetry.observe(cache, meter_provider=collector.provider)
    with cache.open(URLS[0]):
        assert collector.collect()["shardcache.fetches.active", ""] == 1
        gate.set()


def test_errors_of_observe(make_cache, cache, monkeypatch):
    with pytest.raises(ConfigError, match="stats"):
        telemetry.observe(make_cache(stats=False))
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    with pytest.raises(ConfigError, match=r"shardcache\[otel\]"):
        telemetry.observe(cache)
