"""The output and exit codes of ``shardcache prewarm`` and ``path``."""

import json
import os
import re
from operator import itemgetter
from pathlib import Path

import pytest
import webdataset as wds

from shardcache.cli.main import main
from shardcache.prewarm import Outcome, PrewarmPlan, PrewarmReport, ShardResult, Stopped
from shardcache.urls import parse_url
from tests.support.clitools import run_process
from tests.support.storetools import room
from tests.support.tars import make_tar


def test_prewarm_prints_its_plan_and_result(run, spec, bucket):
    code, out, err = run("prewarm", spec)
    need, warmed = out.splitlines()
    assert (code, err) == (0, "")
    size = r"[\d.]+ KB"
    plan = rf"Need 4 shards, {size}: 0 cached, 4 to fetch \({size}\); free .*  ok"
    assert re.fullmatch(plan, need)
    assert re.fullmatch(rf"Warmed 4 of 4 shards \({size}\) in .*/s\.", warmed)
    need, done = run("prewarm", spec)[1].splitlines()
    assert "4 cached, nothing to fetch" in need and done.startswith("All 4 shards cached")
    assert run("prewarm", "-q", spec) == (0, "", "")
    absent = f"s3://{bucket}/absent.tar"
    code, out, err = run("prewarm", spec, absent)
    assert code == 3 and "Warmed 0 of 1 shard" in out and "1 failed" in out
    assert f"failed  {absent}: not found" in err and "pass --skip-missing." in err
    run.out("prewarm", spec, absent, "--max-failures", "1")
    err = run.err("prewarm", "s3://nowhere/{0..3}.tar", code=3)  # no number of failures would help
    assert "there is no bucket nowhere" in err and "--max-failures" not in err


def test_expand_prints_the_urls_of_a_specification(run, spec, data, bucket):
    urls = "".join(f"s3://{bucket}/{name}\n" for name in sorted(data))
    for given in (spec, f"s3://{bucket}/train-*.tar", f"s3://{bucket}/"):
        assert run("expand", given) == run("expand", "--dir", "/dev/null", given) == (0, urls, "")
    assert "nothing matches" in run.err("expand", f"s3://{bucket}/none-*.tar")


@pytest.mark.parametrize("end", [[], ["-0"]])
def test_expand_prints_the_bytes_of_a_name(end, tmp_path, monkeypatch, capsysbinary):
    monkeypatch.setenv("SHARDCACHE_CACHE_LOCAL", "1")
    path = f"{tmp_path}/new\N{LATIN SMALL LETTER U WITH DIAERESIS}\udcff.tar"
    Path(path).touch()
    assert main(["expand", *end, f"{tmp_path}/*.tar"]) == 0
    assert capsysbinary.readouterr().out == os.fsencode(path) + (b"\0" if end else b"\n")


@pytest.mark.parametrize("command", ["prewarm {}/", "prewarm s3://{1}/", "import {0} {0}/"])
def test_a_control_character_fails_alone(run, put, bucket, tmp_path, set_variables, command):
    set_variables(SHARDCACHE_CACHE_LOCAL=1)
    (folder := tmp_path / "shards").mkdir()
    for name in ("a.tar", "b\n.tar"):
        (folder / name).write_bytes(make_tar(1))
        put(name, make_tar(1))
    err = run.err(*command.format(folder, bucket).split(), "--json", code=3)
    assert err.count("contains a control character") == 1
    assert ("a.tar (" in err) == command.startswith("import")  # a disk states no checksum


def test_a_plan_that_does_not_fit_is_exit_5(run, spec, data, proxy, tmp_path, monkeypatch):
    size = room(tmp_path, len(data["train-0000.tar"]))
    half = "prewarm", spec, "--max-size", f"{2 * size}B"
    code, out, err = run(*half)
    assert code == 5 and "does not fit" in out
    assert err.startswith("error: ") and "--best-effort" in err
    assert proxy.received() == 0
    run.err(*half, "-n", code=5)
    code, out, err = run(*half, "--best-effort")
    assert "  Reading the shards left out evicts cached ones, unless they are pinned" in err
    assert code == 0 and "left out for lack of room" in out
    assert "2 cached, 2 to fetch" in run("prewarm", spec, "--check")[1]
    assert (
        "2 to fetch (sizes unknown)"
        not in run("prewarm", f"{spec[: spec.rindex('/')]}/", "--check")[1]
    )
    run.out("prewarm", spec, "--max-size", f"{4 * size}B")
    monkeypatch.setenv("SHARDCACHE_MIN_FREE", "99%")  # cached shards need no room
    code, out, err = run("prewarm", spec, "--refresh", "--max-size", "1B")
    assert (code, err) == (0, "") and "All 4 shards cached" in out


def test_a_shard_is_not_divided_among_tiers(run, spec, data, proxy, tmp_path, monkeypatch):
    size = room(tmp_path, len(data["train-0000.tar"]))
    monkeypatch.setenv("SHARDCACHE_TIERS", f"{tmp_path}/tier={size * 5 // 2}B")
    run.err("prewarm", "-n", spec, "--max-size", f"{size * 3 // 2}B", code=5)
    assert "4 to fetch" in run.out("prewarm", "-n", spec, "--max-size", f"{2 * size}B")


def test_a_missed_deadline_is_exit_3_unless_best_effort(run, spec, proxy):
    proxy.pause(after=20_000)  # listings pass
    code, out, err = run("prewarm", spec, "--deadline", "500ms", "-q")
    assert (code, out) == (3, "")
    assert "4 shards not done because the deadline has passed" in err
    assert run("prewarm", spec, "--deadline", "500ms", "--best-effort")[0] == 0


def test_check_sends_no_request_and_names_what_is_missing(run, warm, spec, bucket, proxy):
    proxy.reset()
    assert run.out("prewarm", "--check", spec).endswith("4 cached, nothing to fetch\n")
    out = run.out("prewarm", "--check", spec, "--max-size", "1B")
    assert re.search(r"nothing to fetch; [\d.]+ KB over the limits, which", out)
    run("rm", "-y", warm[3])
    assert run.err("prewarm", "--check", spec, code=4) == f"  failed  {warm[3]}: not cached\n"
    os.truncate(run.out("path", warm[2]).strip(), 9)
    assert f"  failed  {warm[2]}: not cached\n" in run.err("prewarm", "--check", spec, code=4)
    _, out, err = run("prewarm", "--check", f"s3://{bucket}/none-{{0..9}}.tar")
    assert "0 cached, 10 to fetch (sizes unknown)" in out and proxy.requests() == []
    first, more = err.splitlines()
    assert first == f"  failed  s3://{bucket}/none-0.tar: not cached"
    assert more == "  failed  9 more for the same reason; -v lists them"


def test_a_list_file_takes_the_same_specs(run, bucket, data, s3_environment, tmp_path):
    specs = [f"s3://{bucket}/train-{{0000..0001}}.tar", f"s3://{bucket}/*-0002.tar"]
    lines = "# a remark\r\n\r\n  " + "\r\n".join(specs)
    (tmp_path / "list").write_text(lines, "utf-8-sig", newline="")
    for given in ["-f", tmp_path / "list"], specs:
        found = run.json("prewarm", "-n", *given)["shards"]
        assert [each["url"][-8:] for each in found] == ["0000.tar", "0001.tar", "0002.tar"]
    assert not (tmp_path / "cache").exists()
    (tmp_path / "list").write_bytes(b"\xff\xfe\x00")
    assert "contains a control character" in run.err("prewarm", "-f", tmp_path / "list", code=2)


def test_a_prefix_without_its_slash_is_suggested_with_it(run, bucket, s3_environment):
    hint = f"For all shards below s3://{bucket}/train, write s3://{bucket}/train/"
    assert hint in run.err("prewarm", f"s3://{bucket}/train", f"s3://{bucket}/absent.tar", code=3)
    _, out, err = run("prewarm", f"s3://{bucket}/train", "-n")  # without a request for the shard
    assert "(sizes unknown)" in out and out.endswith("some may not exist\n") and hint in err
    assert "there is no bucket absent" in run.err("prewarm", "-n", "s3://absent/a.tar", code=1)


def test_a_plan_names_shards_that_are_not_listed(run, spec, bucket):
    wrong = f"s3://{bucket}/train-0001.tra"
    err = run.err("prewarm", "-n", spec, wrong, code=0)
    assert err.count("not listed at the origin") == 1 and f"{wrong}: not listed" in err
    assert "For all shards below" not in err
    assert "It ends with a space." in run.err("prewarm", f"s3://{bucket}/train-0001.tar ", code=3)


def test_path_prints_just_a_path_and_downloads_on_request(run, spec, bucket, data, tmp_path):
    url = f"s3://{bucket}/train-0002.tar"
    code, out, err = run("path", "--fetch", url)
    assert (code, err) == (0, "")
    assert Path(out.rstrip("\n")).read_bytes() == data["train-0002.tar"]
    assert run("path", url) == (0, out, "")
    command = f"pipe:aws s3 cp --profile absent s3://{bucket}/train-0001.tar -"
    code, out, err = run("path", "--fetch", command)
    assert code and not out and "profile (absent)" in err
    shard = tmp_path / "x.tar"
    shard.write_bytes(make_tar(1))
    assert run("path", shard) == (0, f"{shard}\n", "")


def test_a_report_in_words():
    kinds = [outcome for outcome in Outcome if outcome is not Outcome.MISSING]
    results = [ShardResult(f"s3://b/x-{n}.tar", kind, 1000) for n, kind in enumerate(kinds)]
    results[1] = ShardResult("s3://b/x-1.tar", Outcome.FETCHED, 1000, received=1000, retries=1)
    plan = PrewarmPlan(tuple(parse_url(each.url) for each in results), {})
    assert str(PrewarmReport(plan, tuple(results), 2.0, Stopped.DEADLINE)) == (
        "Warmed 4 of 8 shards (4.0 KB, 1.0 KB received) in 2.0 s, 500 B/s; 1 failed, "
        "1 skipped, not at the origin, 1 retried, 1 fetched by other processes, 1 linked, "
        "1 imported, 1 left out for lack of room, "
        "1 not done because the deadline has passed."
    )


#: Shards that nodes share, two of them twice.
SHARED = "/nas/train-{0000..0030}.tar::/nas/extra-{a,b,b,a}.tar"


@pytest.fixture
def share(run, monkeypatch):
    """Returns a function that runs the command, and returns the shards of the node's share."""
    monkeypatch.setenv("SHARDCACHE_CACHE_LOCAL", "1")

    def share(*options):
        code, out, err = run("prewarm", SHARED, "-n", "--json", "--shard-by-node", *options)
        assert code != 2, err
        return [shard["url"].removeprefix("file://") for shard in json.loads(out)["shards"]]

    return share


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 8), (3, 1), (3, 4), (40, 2)])
def test_a_node_gets_the_shards_of_its_ranks_each_once(monkeypatch, share, nodes, ranks):
    everything = set()
    monkeypatch.setenv("WORLD_SIZE", str(nodes * ranks))
    for node in range(nodes):
        wanted = []
        for rank in range(node * ranks, (node + 1) * ranks):
            monkeypatch.setenv("RANK", str(rank))
            wanted += enumerate(wds.split_by_node(iter(wds.shardlists.expand_urls(SHARED))))
        wanted.sort(key=itemgetter(0))  # the order of the list
        number = "--node-rank", node, "--node-count", nodes
        shards = share(*number, "--ranks-per-node", ranks)
        assert shards == list(dict.fromkeys(url for _, url in wanted))
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
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    if isinstance(expected, str):
        assert expected in run.err("prewarm", SHARED, "-n", "--shard-by-node", code=2)
    else:
        node, count = expected
        assert share() == share("--node-rank", node, "--node-count", count)
    assert len(share("--node-rank", 0, "--node-count", 9)) == 4  # arguments win


def test_path_names_all_shards_that_do_not_exist(run, spec, bucket):
    absent = [f"s3://{bucket}/absent-{number}.tar" for number in range(3)]
    present = f"s3://{bucket}/train-0001.tar"
    for options, why in ([], ". Pass --fetch to download it."), (["--fetch"], "not found"):
        code, out, err = run("path", *options, *absent[:2], present, absent[2])
        assert (code, out) == (1, "")
        lines = [line for line in err.splitlines() if line.startswith("error: ") and why in line]
        assert [url for url in absent for line in lines if url in line] == absent


def test_a_bucket_that_is_given_up_is_a_failure_of_best_effort_too(run, spec, bucket, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    options = "--jobs", 1, "--best-effort", "--max-failures", 99
    code, _, err = run("prewarm", *options, f"s3://{bucket}/train-{{0000..0009}}.tar")
    assert code == 3 and "failed  2 more for the same reason" in err


def test_a_log_that_cannot_be_written_is_no_fault_of_the_cache(put, proxy):
    command = "-v", "path", "--fetch", put("a.tar", make_tar(1))
    with open("/dev/full", "w") as full:
        assert run_process(*command, stderr=full)[0] == 0
    assert [*proxy.fetches().values()] == [1]
