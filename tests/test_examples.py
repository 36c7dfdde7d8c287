"""The examples run as they stand: alone, under torchrun, from Slurm's batch file."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from shardcache import Cache
from tests.support.trainingtools import EXAMPLES, ROOT, DataSet, programs, run

SHARDS, MEMBERS = 8, 6

#: What Slurm's programs do on an allocation of one node, no more.
SRUN = '[[ $1 == --ntasks-per-node=1 ]] && shift\necho "srun: $1 $2" >&2\nexec "$@"'
#: Its training loop alone, without ranks; torchrun itself runs in the other two.
ALONE = '[[ "${*:1:3}" == "--standalone --nproc-per-node 1" ]] && exec python "${@:4}"'
SCONTROL = '[[ "$*" == "show hostnames node[1]" ]] && echo localhost'


@pytest.fixture
def data(s3, bucket, s3_environment, proxy):
    return DataSet(s3, bucket, proxy, SHARDS, MEMBERS)


def epochs(listed):
    """The samples that `train.py --list` wrote down, by epoch."""
    found: dict[int, list[str]] = defaultdict(list)
    for line in listed.read_text().splitlines():
        epoch, key = line.split()
        found[int(epoch)].append(key)
    return found


def test_two_ranks_with_two_spawned_workers_fetch_each_shard_once(data, tmp_path):
    listed = tmp_path / "listed"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    train = [str(EXAMPLES / "train.py"), data.spec, "--dir", str(tmp_path / "cache")]
    run([*torchrun, "--nproc-per-node", "2", *train, "--list", str(listed)])
    found = epochs(listed)
    assert sorted(found) == [1, 2]
    assert data.complete(found[1])
    assert data.complete(found[2])
    assert data.once()
    # Four workers in two ranks: each had shards of its own, and the parents had none.
    ranks = {sample.rank for sample in Cache(tmp_path / "cache").samples() if sample.counters}
    assert ranks == {0, 1}


NODE = {
    "SLURM_SUBMIT_DIR": str(ROOT),
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NODELIST": "node[1]",
    "PORT": "0",
}
#: Of a script: the programs it calls, its variables, and what it is seen to call.
RUNS = {
    "torchrun.sh": ({"torchrun": ALONE}, {}, []),
    "train.sbatch": (
        {"srun": SRUN, "scontrol": SCONTROL},
        NODE,
        ["srun: shardcache prewarm", "srun: torchrun --nnodes"],
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_script_is_what_bash_takes_and_prewarms_and_trains(data, tmp_path, name):
    for command in (["bash", "-n"], [str(Path(sys.executable).with_name("shellcheck"))]):
        done = subprocess.run([*command, str(EXAMPLES / name)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    stubs, variables, expected = RUNS[name]
    listed, path = tmp_path / "listed", programs(tmp_path / "bin", **stubs)
    variables = {"RANKS": "1", "SHARDCACHE_DIR": str(tmp_path / "cache"), **variables}
    script = ["bash", str(EXAMPLES / name), data.spec, "--workers", "0", "--list", str(listed)]
    done = run(script, PATH=path, **variables)
    assert [line for line in done.stderr.splitlines() if line.startswith("srun: ")] == expected
    assert len(re.findall(r"^epoch [12]: rank 0 read 48 samples, loss \d", done.stdout, re.M)) == 2
    assert data.complete(epochs(listed)[1]) and data.once()
    assert Cache(tmp_path / "cache").stats().hits == 2 * SHARDS  # all of them were there


def test_training_goes_on_when_prewarming_fails(data, tmp_path):
    path = programs(tmp_path / "bin", torchrun='echo "trains: ${*: -1}"')
    (tmp_path / "bin" / "shardcache").write_text("#!/usr/bin/env bash\nexit 3\n")
    script = ["bash", str(EXAMPLES / "torchrun.sh"), data.spec]
    done = run(script, PATH=path, SHARDCACHE_DIR=str(tmp_path / "cache"))
    assert "prewarming ended with exit code 3; training goes on without" in done.stderr
    assert done.stdout == f"trains: {data.spec}\n"
