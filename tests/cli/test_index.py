"""`shardcache index`: writes the index file of a data set, resumes, and checks it."""

import json
import random
import re
import tarfile
import threading
from pathlib import Path

import pytest

from shardcache import TarDataset
from tests.support.clitools import SHARDS, Command
from tests.support.proxy import Answer, Fault, Rule
from tests.support.storetools import PATIENCE, wait_until
from tests.support.tars import sample_tar, tar_of


@pytest.fixture
def file(tmp_path):
    return tmp_path / "train.json"


def test_the_file_serves_a_data_set_and_wids(run, spec, file, proxy, open_cache):
    assert run.out("index", spec, "-o", file).startswith("80 samples in 4 shards, counted in ")
    record = json.loads(file.read_text())
    assert [row["nsamples"] for row in record["shardlist"]] == [20] * SHARDS
    assert record["wids_version"] == 1
    data = TarDataset(file, cache=open_cache())
    assert (len(data), data[79]["__key__"]) == (80, "0003-00019")
    assert [path.name for path in file.parent.glob("train*")] == ["train.json"]
    proxy.reset()
    assert run("index", spec, "-o", file, "-q")[:2] == (0, "")
    assert proxy.received() == 0  # the entries have the offsets
    assert run.json("index", "-o", file, "--check")["summary"]["samples"] == 80
    file.write_text(file.read_text().replace("20}", "21}", 1))
    out = run.out("index", "-o", file, "--check", code=4)
    assert f"/train-0000.tar has 20 samples; {file} states 21\n" in out


def test_a_journal_resumes_a_failed_run_without_the_cache(run, spec, file, s3, bucket, data, proxy):
    s3.client().delete_object(Bucket=bucket, Key="train-0001.tar")
    absent = f"s3://{bucket}/absent-{{0..4}}.tar"
    err = run.err("index", absent, spec, "-o", file, "-v", code=3)
    assert f"  failed  s3://{bucket}/absent-0.tar: not found" in err
    assert err.count("  failed  ") == 6 and not file.exists()
    text = f"6 shards could not be counted. The others are in {file}.partial. "
    assert f"{text}Upload the missing shards, or " in err
    run.out("rm", "-y", "*.tar")
    key = re.search(r'"(\w{32})"', Path(f"{file}.partial").read_text())[1]
    lines = [json.dumps([key, "", number]) for number in (-7, 3.5)]  # the journal is damaged
    with open(f"{file}.partial", "ab") as journal:
        journal.write("\n".join(["", *lines, "5", "null", '["x"]', ""]).encode() + b"\xff")
    s3.put(bucket, "train-0001.tar", data["train-0001.tar"])
    proxy.reset()
    run.out("index", spec, "-o", file)
    assert list(proxy.fetches()) == [f"{bucket}/train-0001.tar"]
    assert [row["nsamples"] for row in json.loads(file.read_text())["shardlist"]] == [20] * SHARDS


def test_a_count_holds_for_one_version_at_one_endpoint(
    run, spec, file, s3, bucket, data, proxy, set_variables
):
    absent = f"s3://{bucket}/absent.tar"
    run.err("index", absent, spec, "-o", file, code=3)
    s3.put(bucket, "train-0001.tar", sample_tar(1, 7))
    run.out("prewarm", "--refresh", spec)
    s3.put(bucket, "absent.tar", data["train-0000.tar"])
    assert run.out("index", absent, spec, "-o", file).startswith("87 samples in 5 shards")
    s3.client().delete_object(Bucket=bucket, Key="absent.tar")
    run.out("rm", "-y", absent)
    run.err("index", absent, spec, "-o", file, code=3)
    set_variables(AWS_ENDPOINT_URL_S3=proxy.url.replace("127.0.0.1", "localhost"))
    proxy.reset()
    run.err("index", absent, spec, "-o", file, code=3)
    assert len(proxy.fetches()) == 4  # of the other endpoint


def test_files_that_a_data_set_would_not_know_and_shards_without_samples(run, put, file):
    assert "let it end in .json" in run.err("index", "s3://b/a.tar", "-o", "foo.idx", code=2)
    err = run.err("index", put("text.tar", b"no tar" * 99), "-o", file, code=3)
    assert "1 shard could not be counted. Pack and upload it again, or leave it out, and run" in err
    assert not Path(f"{file}.partial").exists()


ONE, TWO = (tar_of([(f"{key}.x", key.encode())], tarfile.USTAR_FORMAT) for key in "ab")
LONG = 3 << 20
DATA = random.Random(0).randbytes(LONG)
LARGE = tar_of([("a.x", DATA[512:])], tarfile.USTAR_FORMAT)
SMALL = tar_of([(f"{n}.x", DATA[n : n + 4000]) for n in range(700)], tarfile.USTAR_FORMAT)
#: Where the marker of the last one begins.
END = 700 * (512 + 4096)
STOP = f"readers stop at an end marker at byte {END} and miss the data from byte "


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (ONE[:1024] + TWO[:1024], "it ends at byte 2048 without an end marker"),
        (ONE[:1024] + TWO[:700], "readers fail after byte 1024 (unexpected end of data)"),
        (ONE + TWO, "readers stop at an end marker at byte 1024 and miss the data from byte 10240"),
        (LARGE + TWO, f"readers stop at an end marker at byte {LONG} and miss the data from byte "),
        *((SMALL[: END + 512 * n] + TWO, STOP) for n in (2, 3)),
        (ONE + b"junk", "readers stop at an end marker at byte 1024 and miss the data from byte "),
        (ONE[:1024] + b"x" * 512 + TWO, "readers stop at a damaged header at byte 1024 and miss "),
        ("a.x b.x a.x", "the key a occurs again after other keys"),
        ("d/a.x d/a.y d/a.X", "the sample d/a has two files x"),
    ],
)
def test_samples_that_readers_miss_or_mix_are_named(run, put, file, data, problem):
    malformed = isinstance(data, bytes)
    url = put("a.tar", data if malformed else tar_of([(n, b"") for n in data.split()]))
    # A download looks at the end; names and headers are checked when samples are counted.
    commands = ["prewarm"] * (malformed and data[-512:] != bytes(512))
    if "fail" not in problem:
        commands += ["index"] * 2  # the second one reads what the first one has stored
    for command in commands:
        err = run.err(command, url, *(["-o", file] if command == "index" else []), code=0)
        assert (err.count("warning"), f"{url}: {problem}" in err) == (1, True)
    if malformed:
        assert f"malformed    {url}  {problem}" in run.out("verify", code=4)


def test_zeros_in_a_sample_are_no_end_marker(run, put):
    url = put("a.tar", tar_of([("a.x", bytes(LONG)), ("b.x", b"b")]))
    assert "warning" not in run.err("prewarm", url, code=0)
    assert "malformed" not in run("verify")[1]


def test_a_shard_without_room_is_counted(run, spec, file, monkeypatch):
    monkeypatch.setenv("SHARDCACHE_MAX_SIZE", "30kB")
    run.out("index", spec, "-o", file)
    assert len(json.loads(file.read_text())["shardlist"]) == SHARDS


def test_an_interrupt_does_not_wait_for_a_silent_server(serve, file, tmp_path):
    ended, environment = threading.Event(), {"SHARDCACHE_TIMEOUT": "1h"}
    server = serve(lambda head: ended.wait(4 * PATIENCE) and b"", most=9)
    options = {"directory": tmp_path / "cache", "environment": environment}
    with Command("index", f"{server.url}/a.tar", "-o", file, **options) as command:
        wait_until(lambda: server.heads)
        command.process.send_signal(2)
        code, _, err = command.end()
    ended.set()
    assert (code, "Traceback" in err) == (130, False)


def test_only_absent_shards_are_skipped_and_named(run, bucket, spec, file, proxy):
    commands = (["index", "--skip-missing", "-o", file], ["prewarm", "--skip-missing"])
    holes = [f"s3://{bucket}/hole-{number}.tar" for number in range(3)]
    refused = f"{bucket}/train-0001.tar"
    proxy.script(Rule(Fault(answer=Answer(403, [], b"")), path=refused, times=None))
    for command in commands:
        # Nothing would be left.
        assert "pass --skip-missing" not in run.err(*command, *holes, code=3)
        err = run.err(*command, spec, *holes, code=3)
        assert f"failed  s3://{refused}" in err and not file.exists()
        assert re.findall(r"  skipped  (\S+): not found", err) == holes
    proxy.script()
    for command in commands:
        assert "3 skipped" in run.out(*command, spec, *holes)
    assert run.json("stats")["opens"] == 0  # of jobs; the commands named what failed
    run.out("index", "-o", file, "--check")
    assert [row["nsamples"] for row in json.loads(file.read_text())["shardlist"]] == [20] * SHARDS
