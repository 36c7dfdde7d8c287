"""Lightning's hooks, without Lightning: `tests/packages` has them in its trainers."""

import pickle
import sys
import types
from pathlib import Path

import pytest

from shardcache import ConfigError, lightning
from tests.support.tars import make_tar

SHARDS = "s3://lab/train-{0000..0003}.tar"
URLS = [f"s3://lab/train-{n:04d}.tar" for n in range(4)]


@pytest.fixture(autouse=True)
def _objects(origin):
    origin.objects.update({url: make_tar(seed) for seed, url in enumerate(URLS)})


def cached(cache) -> list[str]:
    return [url for url in URLS if url in cache]


@pytest.mark.parametrize(
    ("stage", "prewarm", "local_rank", "count"),
    [
        ("fit", 2, 0, 2),
        ("fit", 0, 0, 0),
        ("fit", None, None, 4),
        ("validate", 2, 0, 0),
        ("fit", 2, 1, 0),  # one rank per node prewarms
        (None, 2, "of the launcher", 0),  # a training loop without a trainer
    ],
)
def test_setup_prewarms_the_first_shards(
    make_cache, monkeypatch, stage, prewarm, local_rank, count
):
    cache, trainer = make_cache(), types.SimpleNamespace(local_rank=local_rank)
    if stage is None:
        trainer = None
        for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
            monkeypatch.setenv(name, value)
    lightning.ShardCacheHooks(cache, SHARDS, prewarm=prewarm).setup(trainer, None, stage)
    assert cached(cache) == URLS[:count]


def test_setup_makes_directories(make_cache, tmp_path):
    wanted = [tmp_path / "traces" / "epoch", str(tmp_path / "checkpoints")]
    for _ in range(2):
        lightning.ShardCacheHooks(make_cache(), makedirs=wanted).setup(stage="test")
    assert all(Path(path).is_dir() for path in wanted)
    with pytest.raises(ConfigError, match="Give a number of shards"):
        lightning.ShardCacheHooks(make_cache(), SHARDS, prewarm=-1)


def test_a_failed_prewarm_is_a_warning(make_cache, origin, caplog):
    del origin.objects[URLS[1]]
    cache = make_cache()
    lightning.ShardCacheHooks(cache, SHARDS, prewarm=3).setup()
    lightning.ShardCacheHooks(cache, "s3://lab/{0..tar").setup()
    assert "train-0001.tar" in caplog.text and "are not prewarmed" in caplog.text
    assert cached(cache) == [URLS[0], URLS[2]]


def test_each_epoch_logs_its_own_figures(make_cache):
    cache, logged, size = make_cache(fill="complete"), [], len(make_tar(0))
    module = types.SimpleNamespace(log_dict=lambda metrics, **options: logged.append(metrics))
    hooks = lightning.ShardCacheHooks(cache, SHARDS, prewarm=1)
    hooks.on_train_epoch_end(None, module)
    assert logged == []  # before setup
    hooks.setup()
    for opens, hit_rate, fetched in ((2, 0.5, 1), (4, 1.0, 0)):
        for url in URLS[:2] * (opens // 2):
            cache.open(url).read()
        hooks.on_train_epoch_end(None, module)
        assert logged[-1] == {
            "shardcache/opens": opens,
            "shardcache/hit_rate": hit_rate,
            "shardcache/bytes_read": opens * size,
            "shardcache/bytes_fetched": fetched * size,
        }
    hooks.on_train_epoch_end(None, module)
    assert "shardcache/hit_rate" not in logged[-1]


def test_the_callback_is_one_of_lightning_and_can_be_pickled(make_cache, monkeypatch):
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
