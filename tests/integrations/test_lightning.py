"""Lightning's hooks, without Lightning: `tests/integrations` has them in its trainers."""

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


class Module:
    """What a hook is given as the module: it logs."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], dict[str, bool]]] = []

    def log_dict(self, metrics: dict[str, float], **options: bool) -> None:
        self.logged.append((metrics, options))


@pytest.fixture(autouse=True)
def _objects(origin: MemoryOrigin) -> None:
    for seed in range(4):
        origin.objects[f"s3://lab/train-{seed:04d}.tar"] = make_tar(seed)


def cached(cache: Cache) -> list[str]:
    return sorted(entry.metadata().url for entry in cache.entries())


def urls(count: int) -> list[str]:
    return [f"s3://lab/train-{n:04d}.tar" for n in range(count)]


@pytest.mark.parametrize(
    ("stage", "prewarm", "count"),
    [("fit", 2, 2), ("fit", 0, 0), ("fit", None, 4), ("validate", 2, 0)],
)
def test_training_has_the_first_shards_fetched_before(
    make_cache: MakeCache, stage: str, prewarm: int | None, count: int
) -> None:
    cache = make_cache()
    lightning.ShardCacheHooks(cache, SHARDS, prewarm=prewarm).setup(stage=stage)
    assert cached(cache) == urls(count)


@pytest.mark.parametrize(
    ("local_rank", "environment", "expected"),
    [
        (1, {}, 0),
        (None, {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, 0),
        (None, {"RANK": "4", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}, 1),
    ],
)
def test_one_rank_of_each_node_prewarms(
    make_cache: MakeCache,
    monkeypatch: pytest.MonkeyPatch,
    local_rank: int | None,
    environment: dict[str, str],
    expected: int,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    trainer = types.SimpleNamespace(**({} if local_rank is None else {"local_rank": local_rank}))
    cache = make_cache()
    lightning.ShardCacheHooks(cache, SHARDS, prewarm=1).setup(trainer, None, "fit")
    assert len(cached(cache)) == expected


def test_directories_are_made_whoever_comes_first(make_cache: MakeCache, tmp_path: Path) -> None:
    wanted = [tmp_path / "traces" / "epoch", str(tmp_path / "checkpoints")]
    for _ in range(2):
        lightning.ShardCacheHooks(make_cache(), makedirs=wanted).setup(stage="test")
    assert all(Path(path).is_dir() for path in wanted)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        lightning.ShardCacheHooks(make_cache(), makedirs=[tmp_path / "file"]).setup()
    with pytest.raises(ConfigError, match="Give a number of shards"):
        lightning.ShardCacheHooks(make_cache(), SHARDS, prewarm=-1)


def test_what_cannot_be_prewarmed_is_a_warning(
    make_cache: MakeCache, origin: MemoryOrigin, caplog: pytest.LogCaptureFixture
) -> None:
    del origin.objects["s3://lab/train-0001.tar"]
    cache = make_cache()
    with caplog.at_level(logging.WARNING):
        lightning.ShardCacheHooks(cache, SHARDS, prewarm=3).setup()
        assert "train-0001.tar" in caplog.text
        caplog.clear()
        lightning.ShardCacheHooks(cache, "s3://lab/{0..tar").setup()
        assert "are not prewarmed" in caplog.text
    assert cached(cache) == ["s3://lab/train-0000.tar", "s3://lab/train-0002.tar"]


def test_an_epoch_is_told_by_itself(make_cache: MakeCache) -> None:
    cache, module = make_cache(fill="complete"), Module()
    hooks = lightning.ShardCacheHooks(cache, SHARDS, prewarm=1)
    hooks.on_train_epoch_end(None, module)
    assert module.logged == []  # nothing was set up: since when?
    hooks.setup()
    for opens, hit_rate, fetched in ((2, 0.5, 1), (4, 1.0, 0)):
        for url in urls(2) * (opens // 2):
            cache.open(url).close()
        hooks.on_train_epoch_end(None, module)
        metrics, options = module.logged[-1]
        assert metrics == {
            "shardcache/opens": opens,
            "shardcache/hit_rate": hit_rate,
            "shardcache/bytes_read": opens * len(SHARD),
            "shardcache/bytes_fetched": fetched * len(SHARD),
        }
        assert options == {"rank_zero_only": True}
    hooks.on_train_epoch_end(None, module)
    assert "shardcache/hit_rate" not in module.logged[-1][0]  # of nothing


def test_without_lightning_the_callback_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="pip install lightning"):
        lightning.ShardCacheCallback  # noqa: B018


def test_the_callback_is_lightnings_own_and_travels(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = types.ModuleType("pytorch_lightning")
    fake.Callback = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setitem(vars(lightning), "ShardCacheCallback", None)
    monkeypatch.delitem(vars(lightning), "ShardCacheCallback")
    hooks = lightning.ShardCacheCallback(make_cache(), SHARDS, prewarm=3)
    for each in (hooks, pickle.loads(pickle.dumps(hooks))):
        assert isinstance(each, fake.Callback) and isinstance(each, lightning.ShardCacheCallback)
        assert (each.shards, each.prewarm) == ((SHARDS,), 3)
