"""The task on each node of a Ray cluster, without Ray; tests/stress/test_ray.py runs a cluster."""

import pickle

import pytest

from shardcache.errors import CacheFullError, ConfigError, ShardCacheError, ShardNotFoundError
from shardcache.prewarm import Outcome
from shardcache.prewarm import ray as module
from shardcache.prewarm.plan import Share
from shardcache.prewarm.ray import _prewarm_here
from shardcache.process import ProcessCache
from tests.support.tars import make_tar


@pytest.fixture
def order(tmp_path, monkeypatch):
    """Store four shards on a cached mount; returns the arguments of a node's task."""
    monkeypatch.setenv("SHARDCACHE_CACHE_LOCAL", "1")
    (tmp_path / "data").mkdir()
    for number in range(4):
        (tmp_path / "data" / f"{number}.tar").write_bytes(make_tar(number))

    def order(spec="{0..3}.tar", settings=None, **options):
        settings = {"dir": tmp_path / "cache", **(settings or {})}
        return [f"file://{tmp_path}/data/{spec}"], settings, None, options

    return order


def result(order, share=None):
    """Run the task, and return its result, which Ray pickles."""
    return pickle.loads(pickle.dumps(_prewarm_here(*order, share)))


def test_an_unknown_argument_is_refused_before_anything_starts():
    with pytest.raises(TypeError, match="nosuch"):
        module.prewarm_nodes("s3://b/a.tar", nosuch=1)


def test_a_node_reports_its_plan_and_each_shard(order):
    report = result(order())
    assert len(report.plan.shards) == len(report.results) == report.fetched == 4
    results = result(order(), Share(1, 2)).results
    assert [each.url[-5:] for each in results] == ["1.tar", "3.tar"]
    assert {each.outcome for each in results} == {Outcome.CACHED}


@pytest.mark.parametrize(
    ("settings", "spec", "kind"),
    [
        ({"max_size": "1kB"}, "{0..3}.tar", CacheFullError),
        ({"policy": "odd"}, "{0..3}.tar", ConfigError),
        ({}, "nothing-*.tar", ShardNotFoundError),
    ],
)
def test_a_node_reports_why_it_cannot_prewarm(order, settings, spec, kind):
    assert type(result(order(spec, settings))) is kind


def test_errors_that_cannot_be_pickled_are_sent_as_text(order, monkeypatch):
    class Local(Exception):
        """Pickle cannot find this class in the module."""

    def fail(*args):
        raise Local("odd")

    monkeypatch.setattr(ProcessCache, "fetch", fail)
    errors = {repr(each.error) for each in result(order()).results}
    assert errors == {repr(ShardCacheError("Local: odd"))}
