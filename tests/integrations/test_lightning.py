"""Lightning's hooks, without Lightning: `tests/packages` has them in its trainers."""

from __future__ import annotations

import logging
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from shardcache import Cache, ConfigError, lightning
from tests.support.fakes import MemoryOrigin
from tests.support.tars import make_tar

MakeCache = Callable[..., Cache]
SHARDS = "s3://lab/train-{0000..0003}.tar"
SHARD = make_tar(0)
URLS = [f"s3://lab/train-{n:04d}.tar" for n in range(4)]


@pytest.fixture(autouse=True)
def _objects(origin: MemoryOrigin) -> None:
    origin.objects.update({url: make_tar(seed) for seed, url in enumerate(URLS)})


def cached(cache: Cache) -> list[str]:
    return [url for url in URLS if url in cache]


@pytest.mark.parametrize(
    ("stage", "prewarm", "local_rank", "count"),
    [
        ("fit", 2, 0, 2),
        ("fit", 0, 0, 0),
        ("fit", None, None, 4),
        ("validate", 2, 0, 0),
        ("fit", 2, 1, 0),  # one rank of each node
    ],
)
def test_training_has_the_first_shards_fetched_before(
    make_cache: MakeCache, stage: str, prewarm: int | None, local_rank: int | None, count: int
) -> None:
    cache, trainer = make_cache(), types.SimpleNamespace(local_rank=local_rank)
    lightning.ShardCacheHooks(cache, SHARDS, prewarm=prewarm).setup(trainer, None, stage)
    assert cached(cache) == URLS[:count]


def test_a_loop_of_its_own_is_told_its_rank_by_the_launcher(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    cache = make_cache()
    lightning.ShardCacheHooks(cache, SHARDS).setup()
    assert cached(cache) == []


def test_directories_are_made_whoever_comes_first(make_cache: MakeCache, tmp_path: Path) -> None:
    wanted = [tmp_path / "traces" / "epoch", str(tmp_path / "checkpoints")]
    for _ in range(2):
        lightning.ShardCacheHooks(make_cache(), makedirs=wanted).setup(stage="test")
    assert all(Path(path).is_dir() for path in wanted)
    with pytest.raises(ConfigError, match="Give a number of shards"):
        lightning.ShardCacheHooks(make_cache(), SHARDS, prewarm=-1)


def test_what_cannot_be_prewarmed_is_a_warning(
    make_cache: MakeCache, origin: MemoryOrigin, caplog: pytest.LogCaptureFixture
) -> None:
    del origin.objects[URLS[1]]
    cache = make_cache()
    with caplog.at_level(logging.WARNING):
        lightning.ShardCacheHooks(cache, SHARDS, prewarm=3).setup()
        assert "train-0001.tar" in caplog.text
        lightning.ShardCacheHooks(cache, "s3://lab/{0..tar").setup()
        assert "are not prewarmed" in caplog.text
    assert cached(cache) == [URLS[0], URLS[2]]


def test_each_epoch_is_logged_by_itself(make_cache: MakeCache) -> None:
    cache, logged = make_cache(fill="complete"), []
    module = types.SimpleNamespace(log_dict=lambda metrics, **options: logged.append(metrics))
    hooks = lightning.ShardCacheHooks(cache, SHARDS, prewarm=1)
    hooks.on_train_epoch_end(None, module)
    assert logged == []  # nothing was set up
    hooks.setup()
    for opens, hit_rate, fetched in ((2, 0.5, 1), (4, 1.0, 0)):
        for url in URLS[:2] * (opens // 2):
            cache.open(url).close()
        hooks.on_train_epoch_end(None, module)
        assert logged[-1] == {
            "shardcache/opens": opens,
            "shardcache/hit_rate": hit_rate,
            "shardcache/bytes_read": opens * len(SHARD),
            "shardcache/bytes_fetched": fetched * len(SHARD),
        }
    hooks.on_train_epoch_end(None, module)
    assert "shardcache/hit_rate" not in logged[-1]  # of nothing


def test_the_callback_is_lightnings_own_and_travels(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="pip install lightning"):
        lightning.ShardCacheCallback  # noqa: B018
    fake = types.ModuleType("pytorch_lightning")
    fake.Callback = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setitem(vars(lightning), "ShardCacheCallback", None)
    monkeypatch.delitem(vars(lightning), "ShardCacheCallback")
    hooks = lightning.ShardCacheCallback(make_cache(), SHARDS, prewarm=3)
    for each in (hooks, pickle.loads(pickle.dumps(hooks))):
        assert isinstance(each, fake.Callback) and isinstance(each, lightning.ShardCacheCallback)
        assert (each.shards, each.prewarm) == ((SHARDS,), 3)
