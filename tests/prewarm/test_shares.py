"""Splitting shards by node: those that WebDataset's own splitter gives the ranks of a node."""

from __future__ import annotations

import pytest
import webdataset as wds

from shardcache.errors import ConfigError
from shardcache.prewarm.plan import Share, expand, own_share

SPEC = "s3://lab/train-{0000..0030}.tar::s3://lab/extra-{a,b}.tar"


def of_ranks(monkeypatch, pipeline, ranks, world):
    """What WebDataset gives these ranks, in the order of the list."""
    found = []
    for rank in ranks:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        found += enumerate(pipeline())
    return [url for _, url in sorted(found, key=lambda pair: pair[0])]


@pytest.mark.parametrize(
    ("nodes", "ranks"), [(1, 1), (1, 8), (2, 1), (3, 1), (3, 4), (4, 8), (40, 2)]
)
def test_a_node_gets_the_shards_of_its_ranks(monkeypatch, nodes, ranks):
    urls = expand([SPEC])
    everything = []
    for node in range(nodes):
        mine = range(node * ranks, (node + 1) * ranks)
        wanted = of_ranks(monkeypatch, lambda: wds.split_by_node(iter(urls)), mine, nodes * ranks)
        share = expand([SPEC], share=Share(node, nodes, ranks))
        assert share == wanted
        everything += share
    assert sorted(everything) == sorted(urls)


def test_the_split_is_that_of_a_whole_dataset(monkeypatch):
    """Through WebDataset's own expansion of the specification, and its pipeline."""

    def pipeline():
        source = wds.SimpleShardList(SPEC)
        return [found["url"] for found in wds.DataPipeline(source, wds.split_by_node)]

    for node in range(3):
        wanted = of_ranks(monkeypatch, pipeline, [2 * node, 2 * node + 1], 6)
        assert expand([SPEC], share=Share(node, 3, 2)) == wanted


def test_a_shard_that_is_named_twice_counts_twice_and_is_fetched_once(monkeypatch):
    spec = "s3://lab/{a,a,b,c,a}.tar"
    wanted = of_ranks(
        monkeypatch, lambda: wds.split_by_node(iter(wds.shardlists.expand_urls(spec))), [0], 2
    )
    assert wanted == ["s3://lab/a.tar", "s3://lab/b.tar", "s3://lab/a.tar"]
    assert expand([spec], share=Share(0, 2)) == ["s3://lab/a.tar", "s3://lab/b.tar"]
    assert expand([spec], share=Share(1, 2)) == ["s3://lab/a.tar", "s3://lab/c.tar"]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "4"}, (1, 2)),
        ({"SLURM_NODEID": "3", "SLURM_NNODES": "4"}, (3, 4)),
        ({"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "5"}, (2, 5)),
        ({"SLURM_NODEID": "", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}, (0, 1)),
    ],
)
def test_launchers_tell_which_node_this_is(environ, expected):
    share = own_share(None, None, 8, environ)
    assert (share.node, share.count, share.ranks) == (*expected, 8)
    assert own_share(0, 9, 1, environ) == Share(0, 9, 1)  # what is stated wins


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        ((None, None, 1), {}, "which node"),
        ((None, None, 1), {"SLURM_NODEID": "1"}, "which node"),
        ((None, None, 1), {"SLURM_NODEID": "x", "SLURM_NNODES": "4"}, "SLURM_NODEID='x'"),
        ((None, None, 1), {"SLURM_NODEID": "4", "SLURM_NNODES": "4"}, "not one of 4"),
        ((1, None, 1), {}, "go together"),
        ((None, 3, 1), {}, "go together"),
        ((3, 3, 1), {}, "from 0 to 2"),
        ((0, 0, 1), {}, "at least 1"),
    ],
)
def test_what_cannot_be_a_split_is_refused(arguments, environ, said):
    with pytest.raises(ConfigError, match=said):
        own_share(*arguments, environ)
