"""WebDataset pipelines that read through the cache, with real DataLoader workers."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import webdataset as wds
from webdataset import tariterators

import shardcache
from shardcache import Cache, ConfigError, ShardNotFoundError
from shardcache.cli.demo import S3Server
from shardcache.wds.attach import attach, register
from tests.support.fakes import MemoryOrigin
from tests.support.proxy import Proxy
from tests.support.tars import make_tar

SHARDS = 4
MEMBERS = 5
MakeCache = Callable[..., Cache]
SPEC = "s3://lab/train-{0000..0003}.tar"


@pytest.fixture(autouse=True)
def _objects(origin: MemoryOrigin) -> None:
    for seed in range(SHARDS):
        origin.objects[f"s3://lab/train-{seed:04d}.tar"] = make_tar(seed, MEMBERS)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def expected_keys() -> list[str]:
    return sorted(f"{seed:04d}-{n:05d}" for seed in range(SHARDS) for n in range(MEMBERS))


def keys(dataset) -> list[str]:
    return sorted(sample["__key__"] for sample in dataset)


def test_samples_are_the_same_as_without_the_cache(make_cache: MakeCache, tmp_path: Path) -> None:
    for seed in range(SHARDS):
        (tmp_path / f"train-{seed:04d}.tar").write_bytes(make_tar(seed, MEMBERS))
    plain = list(wds.WebDataset(str(tmp_path / "train-{0000..0003}.tar"), shardshuffle=False))
    cache = make_cache()
    dataset = wds.WebDataset(SPEC, shardshuffle=False)
    assert cache.attach(dataset) is dataset
    for is_warm in (False, True):
        cached = list(dataset)
        for name in ("txt", "__key__"):
            assert [sample[name] for sample in plain] == [sample[name] for sample in cached]
        assert [sample["__url__"] for sample in cached] == [
            f"s3://lab/train-{seed:04d}.tar" for seed in range(SHARDS) for _ in range(MEMBERS)
        ]
        # A shard that was on its way when it was opened has no path yet.
        paths = [Path(sample.get("__local_path__", "none")).name for sample in cached]
        assert not is_warm or all(name.startswith("train-") for name in paths)
    assert len(list(cache.entries())) == SHARDS


def test_attach_finds_the_opener_in_any_pipeline_and_keeps_its_handler(
    make_cache: MakeCache, origin: MemoryOrigin, tmp_path: Path
) -> None:
    del origin.objects["s3://lab/train-0002.tar"]
    cache, go_on = make_cache(), wds.ignore_and_continue
    samples = wds.tarfile_to_samples(handler=go_on)
    opener = wds.filters.pipelinefilter(tariterators.url_opener)
    combined = wds.DataPipeline(wds.SimpleShardList(SPEC), wds.split_by_worker, samples)
    stages = opener(handler=go_on), tariterators.tar_file_expander, tariterators.group_by_keys
    options = {"shardshuffle": False, "handler": go_on}
    for dataset in (
        wds.WebDataset(SPEC, **options),
        attach(combined, cache),  # again
        wds.DataPipeline(wds.SimpleShardList(SPEC), *stages),
        wds.WebDataset(SPEC, cache_dir=str(tmp_path), **options),
    ):
        found = keys(attach(dataset, cache))
        assert found == [key for key in expected_keys() if not key.startswith("0002")]
    assert list(tmp_path.glob("*.tar")) == []
    for wrong, told in (
        (wds.DataPipeline(wds.SimpleShardList(SPEC)), "no stage of this pipeline opens URLs"),
        (wds.WebLoader(combined, batch_size=None, num_workers=0), "WebDataset itself"),
        ([1, 2, 3], "takes a WebDataset"),
    ):
        with pytest.raises(ConfigError, match=told):
            cache.attach(wrong)


def test_url_opener_keeps_keys_and_accepts_plain_urls(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "s3://lab/train-0000.tar"
    cache = make_cache(fill="complete")
    monkeypatch.setattr("shardcache.cache._default", cache)
    for opener in (cache.url_opener, shardcache.url_opener):
        with_keys, plain = opener([{"url": url, "__worker__": 3}, url])
        assert with_keys["__worker__"] == 3
        assert with_keys["url"] == plain["url"] == url
        assert plain["stream"].read() == make_tar(0, MEMBERS)
        assert Path(plain["local_path"]).read_bytes() == make_tar(0, MEMBERS)


def test_url_opener_asks_the_handler_with_the_url_in_args(make_cache: MakeCache) -> None:
    seen: list[Exception] = []
    urls = [{"url": "s3://lab/none.tar"}, {"url": "s3://lab/train-0001.tar"}]

    def go_on(exn: Exception) -> bool:
        seen.append(exn)
        return True

    assert len(list(make_cache().url_opener(urls, go_on))) == 1
    assert isinstance(seen[0], ShardNotFoundError)
    assert seen[0].args[-1] == "s3://lab/none.tar"
    assert pickle.loads(pickle.dumps(seen[0])).args == seen[0].args
    assert list(make_cache().url_opener(urls, handler=lambda exn: False)) == []
    with pytest.raises(ShardNotFoundError):
        list(make_cache().url_opener(urls))


def test_register_lets_unchanged_pipelines_read_s3(make_cache: MakeCache) -> None:
    cache = make_cache()
    before = dict(wds.gopen_schemes)
    try:
        register("s3", cache)
        assert keys(wds.WebDataset(SPEC, shardshuffle=False)) == expected_keys()
        with pytest.raises(ConfigError, match="mode 'wb'"):
            wds.gopen("s3://lab/x.tar", "wb")
    finally:
        wds.gopen_schemes.clear()
        wds.gopen_schemes.update(before)
    assert len(list(cache.entries())) == SHARDS


@pytest.mark.locks_work("answers")
def test_a_shard_that_was_dropped_is_not_pinned_while_the_next_is_fetched(
    make_cache: MakeCache, origin: MemoryOrigin
) -> None:
    cache = make_cache(fill="complete", prefetch=0)
    opener = cache.url_opener(wds.SimpleShardList(SPEC))
    pinned: list[bool] = []
    real = origin.open

    def look(url, start, stop, pin=None):
        pinned.extend(cache._here().namespaces.own.is_pinned(e) for e in cache.entries())
        return real(url, start, stop, pin)

    origin.open = look
    for sample in opener:
        sample.clear()
    assert pinned
    assert not any(pinned)
    closed_early = cache.url_opener(wds.SimpleShardList(SPEC))
    stream = next(closed_early)["stream"]
    closed_early.close()
    assert stream.read() == make_tar(0, MEMBERS)  # the consumer's own is not closed
    stream.close()
    assert not any(cache._here().namespaces.own.is_pinned(e) for e in cache.entries())


@pytest.mark.parametrize(
    ("method", "persistent"),
    [("fork", False), ("fork", True), ("spawn", False), ("forkserver", True)],
)
def test_dataloader_workers_share_one_fetch_per_shard(
    method: str,
    persistent: bool,
    s3: S3Server,
    bucket: str,
    proxy: Proxy,
    s3_environment: dict,
    tmp_path: Path,
) -> None:
    for seed in range(SHARDS):
        s3.put(bucket, f"train-{seed:04d}.tar", make_tar(seed, MEMBERS))
    cache = Cache(tmp_path / "cache", min_free=0)
    dataset = wds.WebDataset(f"s3://{bucket}/train-{{0000..0003}}.tar", shardshuffle=False)
    if method == "fork":
        assert list(cache.attach(dataset))  # the parent's clients must not reach the child
    loader = torch.utils.data.DataLoader(
        cache.attach(dataset),
        batch_size=None,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=persistent,
    )
    for _ in range(2):
        assert keys(loader) == expected_keys()
    traffic = proxy.summary()
    assert {path: t.object_fetches for path, t in traffic.items()} == {
        f"{bucket}/train-{seed:04d}.tar": 1 for seed in range(SHARDS)
    }


def test_a_pipeline_composed_further_reads_through_the_cache(
    make_cache: MakeCache, origin: MemoryOrigin
) -> None:
    cache = make_cache()
    dataset = wds.WebDataset(SPEC, shardshuffle=False).to_tuple("__key__").batched(2)
    found = sorted(key for (batch,) in cache.attach(dataset) for key in batch)
    assert found == expected_keys()
    attached = cache.attach(wds.WebDataset(SPEC, shardshuffle=False))
    first = next(iter(attached))["__key__"]
    again = pickle.loads(pickle.dumps(attached))  # pickles after it was iterated
    assert next(iter(again))["__key__"] == first
    other = cache.attach(wds.WebDataset(SPEC, shardshuffle=False))
    assert len(list(wds.RandomMix([attached, other], longest=True))) == 2 * SHARDS * MEMBERS
    assert len(origin.requests) == SHARDS
