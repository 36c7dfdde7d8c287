"""Splitting shards by node, as WebDataset's splitter gives them to the ranks of a node."""

import json

import pytest
import webdataset as wds

SPEC = "/nas/train-{0000..0030}.tar::/nas/extra-{a,b,b,a}.tar"


@pytest.fixture
def share(run, monkeypatch):
    """Returns a function that runs the command, and returns the shards of the node's share."""
    monkeypatch.setenv("SHARDCACHE_CACHE_LOCAL", "1")

    def share(*options):
        code, out, err = run("prewarm", SPEC, "-n", "--json", "--shard-by-node", *options)
        assert code != 2, err
        return [shard["url"].removeprefix("file://") for shard in json.loads(out)["shards"]]

    return share


def of_ranks(monkeypatch, ranks, world):
    """Return the shards that WebDataset gives to these ranks, in the order of the list."""
    found = []
    for rank in ranks:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        found += enumerate(wds.split_by_node(iter(wds.shardlists.expand_urls(SPEC))))
    return [url for _, url in sorted(found, key=lambda pair: pair[0])]


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 8), (3, 1), (3, 4), (40, 2)])
def test_a_node_gets_the_shards_of_its_ranks_each_once(monkeypatch, share, nodes, ranks):
    everything = set()
    for node in range(nodes):
        mine = range(node * ranks, (node + 1) * ranks)
        wanted = of_ranks(monkeypatch, mine, nodes * ranks)
        number = "--node-rank", node, "--node-count", nodes
        shards = share(*number, "--ranks-per-node", ranks)
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
def test_the_launcher_sets_the_share_of_a_node(monkeypatch, run, share, environ, expected):
    for name in ("GROUP_RANK", "GROUP_WORLD_SIZE"):  # fixtures clear those of Slurm
        monkeypatch.delenv(name, raising=False)
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    if isinstance(expected, str):
        code, _, err = run("prewarm", SPEC, "-n", "--shard-by-node")
        assert code == 2 and expected in err
    else:
        node, count = expected
        assert share() == share("--node-rank", node, "--node-count", count)
    assert len(share("--node-rank", 0, "--node-count", 9)) == 4  # arguments win
