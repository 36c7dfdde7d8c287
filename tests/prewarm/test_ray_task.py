"""The task on each node of a Ray cluster, without Ray; tests/stress/test_ray.py runs a cluster."""

import pickle

import pytest

from shardcache.errors import CacheFullError, ConfigError, ShardCacheError, ShardNotFoundError
from shardcache.prewarm import Share
from shardcache.prewarm.ray import NodeReport, _prewarm_here
from shardcache.process import ProcessCache


@pytest.fixture
def node(shop, monkeypatch):
    """Run the task on four shards of a slow mount; returns its report, which Ray pickles."""
    monkeypatch.setenv("SHARDCACHE_CACHE_LOCAL", "1")

    def node(spec="{0..3}.tar", share=None, **settings):
        settings = {"dir": shop.path, **settings}
        empty = NodeReport("node-a", 0, interrupted=True)
        report = _prewarm_here(empty, [f"file://{shop.origin}/{spec}"], settings, None, {}, share)
        return pickle.loads(pickle.dumps(report))

    return node


def test_a_node_reports_its_plan_and_each_shard(node):
    first = node()
    report, results = first.report, node(share=Share(1, 2)).report.results
    assert len(report.plan.shards) == len(report.results) == report.fetched == 4
    assert (first.name, first.error, first.interrupted) == ("node-a", None, False)
    cached = {each.url[-5:]: str(each.outcome) for each in results}
    assert cached == {"1.tar": "cached", "3.tar": "cached"}


@pytest.mark.parametrize(
    ("settings", "spec", "kind"),
    [
        ({"max_size": "1kB"}, "{0..3}.tar", CacheFullError),
        ({"policy": "odd"}, "{0..3}.tar", ConfigError),
        ({}, "nothing-*.tar", ShardNotFoundError),
    ],
)
def test_a_node_reports_why_it_cannot_prewarm(node, settings, spec, kind):
    report = node(spec, **settings)
    assert type(report.error) is kind and not report.interrupted


def test_errors_that_cannot_be_pickled_are_sent_as_text(node, monkeypatch):
    class Local(Exception):
        """Pickle cannot find this class in the module."""

    def fail(*args):
        raise Local("odd")

    monkeypatch.setattr(ProcessCache, "fetch", fail)
    errors = {repr(each.error) for each in node().report.results}
    assert errors == {repr(ShardCacheError("Local: odd"))}
