"""Splitting shards by node: those that WebDataset's own splitter gives the ranks of a node."""

from __future__ import annotations

import pytest
import webdataset as wds

from shardcache.errors import ConfigError
from shardcache.origins.listing import Listing
from shardcache.prewarm.plan import Share, expand, own_share, wanted_shards

SPEC = "s3://lab/train-{0000..0030}.tar::s3://lab/extra-{a,b}.tar"


@pytest.fixture
def launched(monkeypatch):
    """Sets what a launcher does, and nothing else of that kind."""

    def launched(environ):
        for name in ("SLURM_NODEID", "SLURM_NNODES", "GROUP_RANK", "GROUP_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, text in environ.items():
            monkeypatch.setenv(name, text)

    return launched


def of_ranks(monkeypatch, pipeline, ranks, world):
    """What WebDataset gives these ranks, in the order of the list."""
    found = []
    for rank in ranks:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        found += enumerate(pipeline())
    return [url for _, url in sorted(found, key=lambda pair: pair[0])]


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 8), (3, 1), (3, 4), (40, 2)])
def test_a_node_gets_the_shards_of_its_ranks(monkeypatch, nodes, ranks):
    urls = expand([SPEC])
    everything = []
    for node in range(nodes):
        mine = range(node * ranks, (node + 1) * ranks)
        wanted = of_ranks(monkeypatch, lambda: wds.split_by_node(iter(urls)), mine, nodes * ranks)
        share = Share(node, nodes, ranks).of(urls)
        assert share == wanted
        everything += share
    assert sorted(everything) == sorted(urls)


def test_a_shard_that_is_named_twice_counts_twice_and_is_fetched_once(monkeypatch, make_cache):
    spec = "s3://lab/{a,a,b,c,a}.tar"
    wanted = of_ranks(
        monkeypatch, lambda: wds.split_by_node(iter(wds.shardlists.expand_urls(spec))), [0], 2
    )
    assert wanted == ["s3://lab/a.tar", "s3://lab/b.tar", "s3://lab/a.tar"]
    cache = make_cache()
    for node, names in ((0, "ab"), (1, "ac")):
        shards = wanted_shards(cache, [spec], Listing(cache.config), Share(node, 2))
        assert [str(shard) for shard in shards] == [f"s3://lab/{name}.tar" for name in names]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "4"}, (1, 2)),
        ({"SLURM_NODEID": "3", "SLURM_NNODES": "4"}, (3, 4)),
        ({"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "5"}, (2, 5)),
        ({"SLURM_NODEID": "", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}, (0, 1)),
    ],
)
def test_launchers_tell_which_node_this_is(launched, environ, expected):
    launched(environ)
    assert own_share(None, None, 8) == Share(*expected, 8)
    assert own_share(0, 9, 1) == Share(0, 9, 1)  # what is stated wins


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        ((None, None, 1), {}, "which node"),
        ((None, None, 1), {"SLURM_NODEID": "x", "SLURM_NNODES": "4"}, "SLURM_NODEID='x'"),
        ((None, None, 1), {"SLURM_NODEID": "4", "SLURM_NNODES": "4"}, "not one of 4"),
        ((1, None, 1), {}, "go together"),
        ((3, 3, 1), {}, "not one of 3"),
    ],
)
def test_what_cannot_be_a_split_is_refused(launched, arguments, environ, said):
    launched(environ)
    with pytest.raises(ConfigError, match=said):
        own_share(*arguments)
