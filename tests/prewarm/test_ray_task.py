"""The task on each node of a Ray cluster, without Ray; tests/stress/test_ray.py runs a cluster."""

import pickle
import threading

import pytest

from shardcache.errors import CacheFullError, ConfigError, ShardCacheError, ShardNotFoundError
from shardcache.prewarm import Outcome, Stopped
from shardcache.prewarm import ray as module
from shardcache.prewarm.plan import Share
from shardcache.prewarm.ray import NodeReport, _prewarm_here
from shardcache.process import ProcessCache
from tests.support.storetools import wait_until
from tests.support.tars import make_tar


@pytest.fixture
def order(tmp_path, monkeypatch):
    """Store four shards on a cached mount; returns the arguments of a node's task."""
    monkeypatch.setenv("SHARDCACHE_CACHE_LOCAL", "1")
    monkeypatch.setattr(module, "_NEWS_EVERY", 0.05)
    (tmp_path / "data").mkdir()
    for number in range(4):
        (tmp_path / "data" / f"{number}.tar").write_bytes(make_tar(number))

    def order(spec="{0..3}.tar", settings=None, **options):
        settings = {"dir": tmp_path / "cache", **(settings or {})}
        return [f"file://{tmp_path}/data/{spec}"], settings, None, options

    return order


def taken(order, share=None):
    """Run the task, and return the driver's report of the node; every message is pickled."""
    node = NodeReport("node-a", 0)
    for news in _prewarm_here(*order, share):
        node.take(pickle.loads(pickle.dumps(news)))
    return node


def test_an_unknown_argument_is_refused_before_anything_starts():
    with pytest.raises(TypeError, match="nosuch"):
        module.prewarm_nodes("s3://b/a.tar", nosuch=1)


def test_a_node_reports_its_plan_each_shard_and_its_result(order):
    node = taken(order())
    assert node.plan is not None and len(node.plan.shards) == 4
    assert node.report.fetched == len(node.results) == 4 and node.error is None
    assert node.received == node.report.received
    results = taken(order(), Share(1, 2)).report.results
    assert [result.url[-5:] for result in results] == ["1.tar", "3.tar"]
    assert {result.outcome for result in results} == {Outcome.CACHED}


@pytest.mark.parametrize(
    ("settings", "spec", "kind"),
    [
        ({"max_size": "1kB"}, "{0..3}.tar", CacheFullError),
        ({"policy": "odd"}, "{0..3}.tar", ConfigError),
        ({}, "nothing-*.tar", ShardNotFoundError),
    ],
)
def test_a_node_reports_why_it_cannot_prewarm(order, settings, spec, kind):
    node = taken(order(spec, settings))
    assert type(node.error) is kind and not node.lost


def test_errors_that_cannot_be_pickled_are_sent_as_text(order, monkeypatch):
    class Local(Exception):
        """Pickle cannot find this class in the module."""

    def fail(*args):
        raise Local("odd")

    monkeypatch.setattr(ProcessCache, "fetch", fail)
    errors = {repr(result.error) for result in taken(order()).report.results}
    assert errors == {repr(ShardCacheError("Local: odd"))}


def test_a_cancelled_task_ends_its_prewarm(order, monkeypatch):
    """`ray.cancel` raises an exception in the task."""
    begun, obtain = threading.Event(), ProcessCache.fetch

    def slow(*args):
        begun.set()
        return obtain(*args)

    monkeypatch.setattr(ProcessCache, "fetch", slow)
    before = threading.active_count()
    stream = _prewarm_here(*order(jobs=1, limit_rate="64kB"), None)
    node = NodeReport("node-a", 0)
    while node.plan is None or not begun.is_set():
        node.take(next(stream))
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    wait_until(lambda: threading.active_count() <= before)
    node.interrupt()
    assert node.report.stopped is Stopped.REQUESTED and len(node.report.results) == 4
