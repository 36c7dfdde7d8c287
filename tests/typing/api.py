"""The whole public API, as users write it: checked by pyright and mypy, run by nobody.

``assert_type`` says what a checker must find. What is wrong on purpose has its error ignored, and
an ignored error that is none is an error of its own: so a misspelt name must stay one.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, assert_type

import fsspec
from webdataset.compat import WebDataset
from webdataset.pipeline import DataPipeline
from webdataset.shardlists import SimpleShardList

import shardcache
from shardcache import Cache, ShardCacheError, wds
from shardcache.config import Config
from shardcache.fetch.status import FetchStatus
from shardcache.results import Event, Finished, Outcome, Planned, PrewarmReport, ShardResult
from shardcache.space.clean import CleanReport
from shardcache.space.eviction import Reason, Removal
from shardcache.stats.summary import Stats, Waits
from shardcache.store.entry import Entry
from shardcache.store.verify import Finding, State, VerifyStatus

# -- making one ------------------------------------------------------------------------

cache = Cache("/local/nvme/shards", max_size="800GB", min_free="5%", max_age="14d", prefetch=4)
Cache()
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
with Cache("/local/nvme/shards") as inner:
    assert_type(inner, Cache)
assert_type(cache.dir, Path)
assert_type(cache.config, Config)
assert_type(cache.config.max_age, float | None)
assert_type(shardcache.default_cache(), Cache)
assert_type(shardcache.__version__, str)

# -- reading ---------------------------------------------------------------------------

assert_type(cache.open("s3://lab/a.tar"), BinaryIO)
assert_type(cache.open("s3://lab/a.tar").read(), bytes)
with cache.pinned("s3://lab/a.tar") as path:
    assert_type(path, Path)
assert_type(cache.fetch("s3://lab/a.tar", FetchStatus()), Entry)
assert_type(cache.fetch("s3://lab/a.tar").size, int)
assert_type(cache.path("s3://lab/a.tar"), Path | None)
assert_type(cache.entry("s3://lab/a.tar"), Entry | None)
assert_type("s3://lab/a.tar" in cache, bool)
cache.prepare("s3://lab/a.tar")
cache.pin("s3://lab/a.tar", 3600.0)
assert_type(cache.unpin("s3://lab/a.tar"), bool)
assert_type(cache.remove("s3://lab/a.tar", dry_run=True), tuple[int, int])

# -- before a job ----------------------------------------------------------------------


def told(event: Event) -> None:
    if isinstance(event, Planned):
        assert_type(event.plan.fetch_bytes, int)
    elif isinstance(event, Finished):
        assert_type(event.result, ShardResult)
        assert_type(event.result.error, Exception | None)


report = cache.prewarm("s3://lab/{00..99}.tar", jobs=16, deadline=300.0, on_event=told)
assert_type(report, PrewarmReport)
assert_type(report.fetched, int)
assert_type(report.count(Outcome.FAILED), int)
cache.prewarm(["s3://lab/a.tar"], check=True, stop=threading.Event())

# -- looking after it ------------------------------------------------------------------

assert_type(cache.entries(), Iterator[Entry])
cleaned = cache.clean(max_size="500GB", max_age="7d", dry_run=True)
assert_type(cleaned, CleanReport)
assert_type(cleaned.removed, tuple[Removal, ...])
assert_type(cleaned.removed[0].reason, Reason)
for finding in cache.verify(lambda url: "train" in url, quick=True, status=VerifyStatus()):
    assert_type(finding, Finding)
    assert_type(finding.state, State)
stats = cache.stats("24h")
assert_type(stats, Stats)
assert_type(stats.hits, int)
assert_type(stats.bytes_origin, int)
assert_type(stats.hit_rate, float | None)
assert_type(stats.all_waits, Waits)
assert_type(stats.all_waits.percentile(0.99), float | None)
assert_type(stats.as_dict(), dict[str, Any])

# -- ways in ---------------------------------------------------------------------------

dataset = cache.attach(WebDataset("s3://lab/{00..99}.tar", shardshuffle=100), fast_tar=False)
assert_type(dataset, WebDataset)
urls = [{"url": "s3://lab/a.tar"}]


def keep_going(exn: Exception) -> bool:
    return True


assert_type(cache.url_opener(urls, keep_going), Iterator[dict[str, Any]])
assert_type(shardcache.url_opener(urls), Iterator[dict[str, Any]])
wds.register("s3", cache)
DataPipeline(SimpleShardList(["s3://lab/a.tar"]), cache.url_opener, wds.tar_samples)
fsspec.filesystem("shardcache")

# -- errors ----------------------------------------------------------------------------

try:
    cache.open("s3://lab/a.tar")
except shardcache.ShardNotFoundError as exn:
    assert_type(exn.message, str)
    as_file: FileNotFoundError = exn
except shardcache.AccessDeniedError as exn:
    as_permission: PermissionError = exn
except shardcache.TransferTimeoutError as exn:
    as_timeout: TimeoutError = exn
    as_transfer: shardcache.TransferError = exn
except shardcache.CacheFullError as exn:
    full: bool = exn.errno == errno.ENOSPC
except (shardcache.IntegrityError, shardcache.LockTimeoutError) as exn:
    base: ShardCacheError = exn
except shardcache.ConfigError as exn:
    as_value: ValueError = exn
