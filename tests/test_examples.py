"""The examples run unchanged: alone, under torchrun, and as a batch file of Slurm."""

import re
from collections import Counter, defaultdict
from itertools import chain, product

import pytest

from shardcache import Cache
from tests.support.trainingtools import EXAMPLES, ROOT, DataSet, programs, run, run_ranks

SHARDS, MEMBERS = 8, 6

#: Stubs for Slurm's programs, for an allocation of one node.
SRUN = '[[ $1 == --ntasks-per-node=1 ]] && shift\necho "srun: $1 $2" >&2\nexec "$@"'
#: A stub for torchrun with one process; the batch file runs torchrun itself.
ALONE = '[[ "${*:1:3}" == "--standalone --nproc-per-node 1" ]] && exec python "${@:4}"'
SCONTROL = '[[ "$*" == "show hostnames node[1]" ]] && echo localhost'
NODE = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "1"}
NODE |= {"SLURM_JOB_NODELIST": "node[1]", "PORT": "0"}
#: By script: stubs of programs, variables, ranks, workers per rank, hits, and lines of stderr.
RUNS = {
    "torchrun.sh": (
        *({"torchrun": ALONE, "shardcache": "exit 3"}, {}, 1, 1, SHARDS),
        ["prewarming ended with exit code 3; training starts without it"],
    ),
    "train.sbatch": (
        *({"srun": SRUN, "scontrol": SCONTROL}, NODE, 2, 0, 2 * SHARDS),
        ["srun: shardcache prewarm", "srun: torchrun --nnodes"],
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_script_prewarms_and_trains(name, s3, bucket, s3_environment, proxy, tmp_path):
    data = DataSet(s3, bucket, proxy, SHARDS, MEMBERS)
    stubs, variables, ranks, workers, hits, expected = RUNS[name]
    listed, path = tmp_path / "listed", programs(tmp_path / "bin", **stubs)
    variables = {"PATH": path, "RANKS": str(ranks), **variables}
    options = ["--workers", str(workers), "--list", str(listed)]
    done = run(["bash", str(EXAMPLES / name), data.spec, *options], **variables)
    seen = done.stderr.splitlines()
    assert [line for line in seen if line.startswith(("srun: ", "prewarming "))] == expected
    assert "same order" not in done.stderr
    epochs = re.findall(r"epoch ([12]): rank (\d) read \d+ samples, loss \d", done.stdout)
    assert {*epochs} == {*product("12", map(str, range(ranks)))}
    lines = [line.split() for line in listed.read_text().splitlines()]
    for epoch in "12":
        assert data.complete(key for found, key in lines if found == epoch)
    assert data.once()
    with Cache() as cache:
        assert cache.stats().hits == hits
        assert ranks == 1 or {0, 1} <= {each.rank for each in cache.samples() if each.counters}


@pytest.fixture
def resume(tmp_path):
    """Kill an example at its first checkpoint, and run it to the end; returns what both listed."""

    def resume(name, ranks, *options):
        listed, saved = tmp_path / "listed", tmp_path / "run.pt"
        command = [str(EXAMPLES / name), *options, "--list", str(listed), "--every", "3"]
        command += ["--checkpoint", str(saved), "--dir", str(tmp_path / "cache")]
        run_ranks(2, command, kill_when=saved.exists)
        assert "epoch 1 is complete" in run_ranks(ranks, command).stdout
        return [line.split() for line in listed.read_text().splitlines()]

    return resume


@pytest.mark.parametrize("mixed", [False, True])
def test_training_resumes_an_epoch_exactly(mixed, resume, s3, bucket, s3_environment, proxy):
    data = DataSet(s3, bucket, proxy, 16, 12)
    options = [data.spec, "--workers", "1"]
    if mixed:
        first, second = (data.spec.replace(*part) for part in (("15}", "11}"), ("{0000", "{0012")))
        options = [first, "--mix", second, "3", "--workers", "0"]
    batches = defaultdict(set)
    for epoch, number, key in resume("resume.py", 1, *options, "--batch", "16"):
        batches[epoch, number].add(key)
    # Both runs trained some of the batches, which are the same ones with one rank and with two.
    assert {len(keys) for keys in batches.values()} == {16}
    counts = Counter(key for keys in batches.values() for key in keys)
    if mixed:  # in two epochs of 144 samples, 72 of the first 144, and 216 of the other 48
        assert Counter(counts[key] for key in data.keys) == {0: 72, 1: 72, 4: 24, 5: 24}
    else:
        for each in "01":
            epoch = [keys for at, keys in batches.items() if at[0] == each]
            assert data.complete(chain(*epoch))
    assert data.once()


def test_a_pipeline_resumes_an_epoch_exactly(resume, s3, bucket, s3_environment, proxy):
    data = DataSet(s3, bucket, proxy, 16, 12)  # 48 samples for each of 2 x 2 workers
    # Both runs trained some of the batches, which are the same ones.
    batches = {*map(tuple, resume("resume_pipeline.py", 2, data.spec))}
    for each in "01":
        assert data.complete(key for _, epoch, *keys in batches if epoch == each for key in keys)
    assert data.once()
