"""``shardcache prewarm``: its list of shards, its options, and what it suggests."""

from __future__ import annotations

import io
import json
import sys

import pytest


@pytest.mark.parametrize("options", [[], ["--check"], ["--ray"]])
def test_a_list_without_a_shard_is_a_usage_error(run, monkeypatch, options):
    """Not "All 0 shards cached": whoever wrote the list believes that there is something in it."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n  \n# nothing but remarks\n"))
    code, out, err = run("prewarm", "-f", "-", *options)
    assert (code, out) == (2, "") and "There is no shard in the list" in err


def test_a_list_holds_what_the_command_line_takes(run, bucket, data, s3_environment, tmp_path):
    lines = [
        "# braces, a pattern, a prefix, a URL",
        f"s3://{bucket}/train-{{0000..0001}}.tar",
        f"s3://{bucket}/*-0002.tar",
        f"s3://{bucket}/",
        f"  s3://{bucket}/train-0003.tar",
    ]
    for number, line in enumerate(lines[1:]):
        (tmp_path / "list").write_text(f"{lines[0]}\n\n{line}\n")
        asked = ["-f", tmp_path / "list"], [line.strip()]
        found = [json.loads(run("prewarm", "-n", "--json", *each)[1])["shards"] for each in asked]
        assert found[0] == found[1] and len(found[0]) == [2, 1, 4, 1][number]
    assert not (tmp_path / "cache").exists()
    (tmp_path / "list").write_bytes(b"\xff\xfe\x00")
    code, _, err = run("prewarm", "-f", tmp_path / "list")
    assert (code, "not UTF-8" in err) == (2, True)


def test_max_size_is_what_the_cache_may_hold(run, spec, data):
    size = len(data["train-0000.tar"])
    code, _, err = run("prewarm", spec, "--max-size", f"{2 * size}B")
    assert code == 5 and "more than there is room for" in err
    assert run("prewarm", spec, "--max-size", f"{2 * size}B", "--best-effort")[0] == 0
    assert "2 of 4 shards cached" in run("prewarm", spec, "--check")[1]
    assert run("prewarm", spec, "--max-size", f"{4 * size}B")[0] == 0


def test_a_prefix_without_its_slash_is_suggested_with_it(run, s3, bucket, s3_environment):
    s3.put(bucket, "train/a.tar", b"")
    s3.put(bucket, "train/b.tar", b"")
    code, _, err = run("prewarm", f"s3://{bucket}/train")
    assert code == 3
    assert f"2 shards below s3://{bucket}/train/" in err
    assert "did you mean" not in run("prewarm", f"s3://{bucket}/absent")[2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--node-rank", "0"], "go with --shard-by-node"),
        (["--ranks-per-node", "8"], "go with --shard-by-node"),
        (["--shard-by-node", "--node-rank", "0"], "go together"),
        (["--shard-by-node"], "which node this is"),
        (["--ray", "--shard-by-node", "--node-rank", "0", "--node-count", "2"], "With --ray"),
        (["--ray", "--jobs", "0"], "--jobs"),
    ],
)
def test_options_that_contradict_each_other_are_refused(run, monkeypatch, options, said):
    for name in ("SLURM_NODEID", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    code, _, err = run("prewarm", "s3://b/x.tar", *options)
    assert code == 2 and said in err


def test_ray_that_is_missing_is_told(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = run("prewarm", "--ray", "s3://b/x.tar")
    assert code == 2 and "pip install 'shardcache[ray]'" in err
