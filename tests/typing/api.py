"""The public API as users write it. Pyright and mypy check this file; it is never run.

A checker must infer the types of ``assert_type``, and refuse the mistakes in `wrong.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, assert_type

from torch.utils.data import Sampler
from webdataset.compat import WebDataset
from webdataset.pipeline import DataPipeline
from webdataset.shardlists import SimpleShardList

import shardcache
from shardcache import Cache, wds
from shardcache.prewarm import Event, Finished, Planned, PrewarmReport
from shardcache.space.eviction import CleanReport
from shardcache.stats.summary import Stats
from shardcache.store.entry import Entry
from shardcache.store.verify import Finding, VerifyStatus
from shardcache.urls import ShardURL

URL = "s3://lab/a.tar"


cache = Cache("/local/nvme/shards", max_size="800GB", min_free="5%", max_age="14d", prefetch=4)
Cache(Path("/local/nvme/shards"), max_size=800_000_000_000, timeout=1.5, policy="lru")
Cache(
    dir="/local/nvme/shards",
    tiers=["/dev/shm/shards=50GB"],
    upstreams=[{"url": "s3://shards/cache", "write_back": True}],
    storage_options={"profile": "lab"},
    allow_schemes=["pipe"],
    validate=lambda path: None,
    strict=True,
    shared_group="lab",
)
with Cache() as inner:
    assert_type(inner, Cache)
assert_type(cache.dir, Path)
assert_type(cache.config.max_age, float | None)
assert_type(shardcache.default_cache(), Cache)
assert_type(shardcache.__version__, str)


assert_type(cache.open(URL), BinaryIO)
with cache.pinned(URL) as path:
    assert_type(path, Path)
assert_type(cache.fetch(URL), Entry)
assert_type(cache.add(URL, "a.tar"), Entry)
assert_type(cache.path(URL), Path | None)
assert_type(cache.entry(URL), Entry | None)
assert_type(URL in cache, bool)
cache.prepare(URL)
assert_type(cache.select(["s3://lab/val/", cache.parse(URL)]), list[ShardURL])
assert_type(cache.pin(URL, 3600.0), list[ShardURL])
assert_type(cache.unpin("s3://lab/*.tar"), list[ShardURL])
assert_type(cache.remove(URL, dry_run=True), tuple[int, int])


def on_event(event: Event) -> None:
    if isinstance(event, Planned):
        assert_type(event.plan.fetch_bytes, int)
    elif isinstance(event, Finished):
        assert_type(event.result.error, Exception | None)


report = cache.prewarm("s3://lab/{00..99}.tar", jobs=16, deadline=300.0, on_event=on_event)
assert_type(report, PrewarmReport)
assert_type(report.fetched, int)
cache.prewarm([URL], check=True, stop=threading.Event())
assert_type(cache.entries(), Iterator[Entry])
assert_type(cache.clean(max_size="500GB", max_age="7d", dry_run=True), CleanReport)
for finding in cache.verify("train-*.tar", quick=True, status=VerifyStatus()):
    assert_type(finding, Finding)
stats = cache.stats("24h")
assert_type(stats, Stats)
assert_type(stats.hits, int)
assert_type(stats.hit_rate, float | None)
assert_type(stats.all_waits.mean, float | None)
assert_type(stats.as_dict(), dict[str, Any])


dataset = cache.attach(WebDataset("s3://lab/{00..99}.tar", shardshuffle=100), fast_tar=False)
assert_type(dataset, WebDataset)
assert_type(shardcache.attach(dataset), WebDataset)


def keep_going(exn: Exception) -> bool:
    return True


assert_type(cache.url_opener([{"url": URL}], keep_going), Iterator[dict[str, Any]])
assert_type(shardcache.url_opener([{"url": URL}]), Iterator[dict[str, Any]])
wds.register("s3", cache)
samples = shardcache.TarDataset([URL], cache=cache, stages=[iter], handler=keep_going)
assert_type(len(shardcache.TarDataset(Path("train.json"))), int)
assert_type(samples.select(range(3)), shardcache.TarDataset)
assert_type(samples.split([0.9, 0.1], seed=1), list[shardcache.TarDataset])
mixture = shardcache.Mixture({"a": (samples, 1), "b": (samples, {0: 0.5, 3: 1})}, samples=9)
assert_type(shardcache.ShardBatchSampler(mixture, 3).epoch, int)
assert_type(samples.shards, tuple[ShardURL, ...])
assert_type(samples.locate(3), tuple[str, int])
assert_type(samples.__getitems__([1, 2]), list[Any])
assert_type(samples.cache, Cache)
sampler = shardcache.ShardBatchSampler(samples, 64, shuffle=10, lanes=1, seed=3, drop_last=False)
assert_type(sampler.state_dict(batch=3), dict[str, int | str])
assert_type(list(sampler), list[list[int]])
assert_type((sampler.batch_size, sampler.drop_last), tuple[int, bool])
torch_sampler: Sampler[list[int]] = sampler
DataPipeline(SimpleShardList([URL]), cache.url_opener, wds.tar_samples)
