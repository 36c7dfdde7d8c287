"""Splitting shards by node, as WebDataset's splitter gives them to the ranks of a node."""

import pytest
import webdataset as wds

from shardcache.errors import ConfigError
from shardcache.origins.listing import Listing
from shardcache.prewarm.plan import Share, own_share, wanted_shards

SPEC = "s3://lab/train-{0000..0030}.tar::s3://lab/extra-{a,b,b,a}.tar"


def of_ranks(monkeypatch, ranks, world):
    """Return the shards that WebDataset gives to these ranks, in the order of the list."""
    found = []
    for rank in ranks:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        found += enumerate(wds.split_by_node(iter(wds.shardlists.expand_urls(SPEC))))
    return [url for _, url in sorted(found, key=lambda pair: pair[0])]


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 8), (3, 1), (3, 4), (40, 2)])
def test_a_node_gets_the_shards_of_its_ranks_each_once(monkeypatch, make_cache, nodes, ranks):
    cache, everything = make_cache(), set()
    for node in range(nodes):
        mine = range(node * ranks, (node + 1) * ranks)
        wanted = of_ranks(monkeypatch, mine, nodes * ranks)
        share = Share(node, nodes, ranks)
        shards = [str(s) for s in wanted_shards(cache, [SPEC], Listing(cache.config), share)]
        assert shards == list(dict.fromkeys(wanted))
        everything.update(shards)
    assert len(everything) == 33


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "4"}, (1, 2)),
        ({"SLURM_NODEID": "3", "SLURM_NNODES": "4"}, (3, 4)),
        ({"SLURM_NODEID": "", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}, (0, 1)),
        ({"SLURM_NODEID": "x", "SLURM_NNODES": "4"}, "SLURM_NODEID='x'"),
        ({"SLURM_NODEID": "4", "SLURM_NNODES": "4"}, "not one of 4"),
    ],
)
def test_the_launcher_sets_the_share_of_a_node(monkeypatch, environ, expected):
    for name in ("GROUP_RANK", "GROUP_WORLD_SIZE"):  # fixtures clear those of Slurm
        monkeypatch.delenv(name, raising=False)
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            own_share(None, None, 1)
    else:
        assert own_share(None, None, 8) == Share(*expected, 8)
    assert own_share(0, 9, 1) == Share(0, 9, 1)  # arguments win
