"""The rate limit of a prewarm, which all its connections share."""

import contextlib
import json
import threading
from pathlib import Path

import pytest

from shardcache.download import connections as module
from shardcache.download.connections import Throttle, parse_rate
from shardcache.errors import ConfigError
from shardcache.prewarm import Stopped
from tests.support.tars import make_tar


def test_a_throttle_allows_a_short_burst_and_saves_nothing_up(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    throttle = Throttle(1_000_000)
    assert throttle.spend(100_000) == pytest.approx(0.0, abs=1e-6)
    assert throttle.spend(500_000) == pytest.approx(0.5)
    assert throttle.spend(500_000) == pytest.approx(1.0)
    now[0] += 1.0
    assert throttle.spend(0) == pytest.approx(0.0, abs=1e-6)
    now[0] += 3600.0
    assert throttle.spend(1_000_000) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        *[("50MB", 50_000_000), ("1MiB/s", 1 << 20), (" 64kB ", 64_000), (200_000, 200_000)],
        *[(text, None) for text in ("", "/s", "63kB", "-1MB", "fast", "1MB/h", 63_999)],
    ],
)
def test_a_rate_is_a_size_with_or_without_seconds(text, rate):
    with contextlib.nullcontext() if rate else pytest.raises(ConfigError):
        assert parse_rate(text) == rate


def test_a_prewarm_keeps_its_rate(run, shop, monkeypatch):
    monkeypatch.setenv("SHARDCACHE_CACHE_LOCAL", "1")
    total = len(shop.urls) * shop.size  # the bytes of half a second
    code, out, _ = run("prewarm", *shop.urls, "--json", "--limit-rate", f"{2 * total}B")
    summary = json.loads(out)["summary"]
    assert (code, summary["fetched"], summary["received_bytes"]) == (0, 8, total)
    assert summary["seconds"] >= 0.35  # the burst has the bytes of a tenth of a second


def test_a_download_that_waits_for_the_rate_can_be_stopped(shop, monkeypatch):
    Path(shop.urls[0]).write_bytes(make_tar(1, 3000, 700))
    stop, calls = threading.Event(), []

    def take(self, count):
        calls.append(count)
        stop.set()
        return 1e6

    monkeypatch.setattr(Throttle, "spend", take)
    with shop.cache(fill="complete") as cache:
        report = cache.prewarm(shop.urls[0], limit_rate="64kB", stop=stop)
    assert report.stopped is Stopped.REQUESTED and len(calls) == 1
