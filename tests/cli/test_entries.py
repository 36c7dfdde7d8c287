"""``shardcache ls``, ``rm``, ``pin``, ``unpin`` and ``clean``."""

import contextlib
import os
import re
import time

import pytest

from shardcache.cache import Cache
from shardcache.config import Config
from shardcache.errors import ConfigError
from shardcache.units import format_bytes
from tests.support.storetools import room


def states(run):
    return [line.split()[-1] for line in run("ls")[1].splitlines()[1:-1]]


def test_ls_is_a_table_with_a_summary(run, warm, monkeypatch, tmp_path):
    code, out, err = run("ls")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].split() == ["SHARD", "SIZE", "USED", "FETCHED", "STATE"]
    assert [line.split()[0] for line in lines[1:5]] == warm
    assert re.fullmatch(r"4 shards, [\d.]+ KB; [\d.]+ KB evictable", lines[5])
    monkeypatch.setenv("SHARDCACHE_MAX_SIZE", "1MB")
    with Cache(tmp_path / "cache") as cache, cache.open(warm[0]):
        assert states(run) == ["in_use", "ok", "ok", "ok"]
        os.utime(cache.entry(warm[1]).path / "meta.json")  # the running job has used it
        summary = r"4 shards, [\d.]+ KB, [\d.]+ KB of 1.0 MB on disk \(\d+%\); "
        assert re.search(summary, run("ls")[1])
        found = run.json("ls")
    rest = sum(shard["size"] for shard in found["shards"][2:])
    assert found["summary"]["evictable_bytes"] == rest


def test_ls_selects_sorts_and_limits(run, warm, bucket, tmp_path):
    _, out, _ = run("ls", "-l", "train-000{1,2}.tar")
    rows = run.json("ls", "train-000{1,2}.tar")["shards"]
    matching = f"matching: 2 shards, {format_bytes(sum(row['size'] for row in rows))}; in all: 4 "
    assert str(tmp_path / "cache") in out and out.splitlines()[-1].startswith(matching)
    _, out, _ = run("ls", f"s3://{bucket}/*", "--sort", "url:desc", "--limit", "1")
    assert warm[3] in out and warm[0] not in out
    code, out, err = run("ls", "none*", "train*")
    assert (code, len(out.splitlines())) == (0, 6) and err.startswith("none*: nothing in ")
    assert run.err("ls", "-q", "none*").startswith("error: none*: nothing in ")
    with Cache(tmp_path / "cache") as cache:
        os.utime(cache.entry(warm[2]).path / "meta.json")
    assert run("ls", "--sort", "used")[1].splitlines()[1].startswith(warm[2])
    header, row, _ = run("ls", "--by", "prefix")[1].splitlines()
    assert header.split() == ["PREFIX", "SHARDS", "SIZE", "USED"]
    assert row.split()[:2] == [f"s3://{bucket}/", "4"]
    assert run("ls", "--by", "prefix", "--partial")[0] == 2
    assert len(cache.pin(["train-000?.tar", warm[0]], "3d")) == 4 == len(cache.unpin("train-*"))
    assert cache.remove(f"s3://{bucket}/")[0] > 0 and not list(cache.entries())


def test_ls_shows_damaged_entries(run, warm):
    truncated, scribbled, gone, mistaken = map(Cache().entry, warm)
    other = mistaken.data.rename(mistaken.path / "other.tar")  # readers do not find this name
    assert states(run) == ["ok", "ok", "ok", "damaged"]
    other.rename(mistaken.path / "train-0003.tar")
    (mistaken.path / "meta.json").write_bytes((truncated.path / "meta.json").read_bytes())
    os.chmod(truncated.data, 0o600)
    os.truncate(truncated.data, 3)
    (scribbled.path / "meta.json").write_text("{")
    (gone.path / "meta.json").unlink()
    assert states(run).count("damaged") == 4
    paths = [row["path"] for row in run.json("ls")["shards"] if row["path"]]
    assert {str(truncated.data), str(scribbled.data), str(gone.data)}.issubset(paths)


def test_clean_removes_what_is_over_the_limit(run, warm, data, tmp_path):
    limit = f"{room(tmp_path, *map(len, data.values())) - 1}B"
    _, named, first, second = run("clean", "-n", "--max-size", limit)[1].splitlines()
    assert re.fullmatch(rf"({'|'.join(warm)})\t[\d.]+ KB\tmax_size", named)
    assert re.fullmatch(r"would remove 1 shard, [\d.]+ KB on disk: 1 max_size", first)
    assert re.fullmatch(r"would keep 3 shards, [\d.]+ KB on disk", second)
    assert run("clean", "--max-size", limit)[1].startswith("removed 1 shard, ")
    assert run("clean")[1].startswith("nothing to remove; kept 3 shards, ")
    with Cache(tmp_path / "cache") as cache, contextlib.ExitStack() as stack:
        for entry in list(cache.entries()):
            stack.enter_context(cache.open(entry.metadata().url))
        assert "Processes use 3 shards" in run("clean", "--all", "-y")[2]
        err = run.err("clean", "-q", "--max-size", "1B", code=0)
    assert err.startswith("warning: ") and "in use" in err
    assert run("clean", "--all", "-n")[0] == 0 and len(states(run)) == 3
    assert run("clean", "--all", "-y")[0] == 0 and len(states(run)) == 0
    assert "no shard is left, and other files fill" in run("clean", "--min-free", "100%")[2]


def test_commands_use_the_limits_of_the_last_job_and_do_not_replace_them(run, warm, data, tmp_path):
    limit = room(tmp_path, *map(len, data.values())) - 1
    config = Config(tmp_path / "cache")
    last = config.replace(max_size=limit, policy="lru", max_age="14d")
    with Cache.from_config(last, started=2000.0) as job:
        job.fetch(warm[0])
        with Cache.from_config(config, started=1000.0) as earlier:  # a new worker of that job
            earlier.fetch(warm[0])
        for _ in range(2):
            size, shown = f"max_size {limit}B, ", f" of {format_bytes(limit)}"
            limits = f"Limits of the last job: {size}max_age 14d, policy lru.\n"
            code, out, err = run("clean", "-n")
            assert (code, err) == (0, limits) and "would remove 1 shard, " in out
            assert run("clean", "-n", "--max-size", "1GB")[2] == limits.replace(size, "")
            run.out("rm", "-y", warm[3])
            run.out("prewarm", "--max-size", "1GB", warm[3])
            assert limits in run("prewarm", *warm, "s3://more/{0..9}.tar", "-n")[2]
            assert f"{shown} on disk (100%)" in run("ls")[1]
            assert shown in run("top", "--count", "1", "--interval", "0.2")[1]
            page = tmp_path / "report.html"
            assert run("report", "-o", page)[0] == 0 and shown in page.read_text()
            job.close()


def test_clean_names_each_reason(run, warm, orphan, tmp_path, monkeypatch):
    with Cache(tmp_path / "cache") as cache:
        for age, url in zip((10, 30), warm[:2], strict=True):
            then = time.time() - age * 86400
            os.utime(cache.entry(url).path / "meta.json", (then, then))
    monkeypatch.setenv("SHARDCACHE_MAX_AGE", "14d")
    _, out, _ = run("clean", "-n")
    assert "1 max_age" in out and "orphan" not in out  # the partial may still be resumed
    assert "2 max_age" in run("clean", "-n", "--max-age", "7d")[1]
    assert "removed 1 partial download, " in run("clean", "--orphans")[1]
    assert not orphan.exists()
    assert run("clean", "-q", "--max-age", "7d") == (0, "", "")


def test_rm_removes_cached_shards_and_names_the_others(run, warm, bucket, s3, tmp_path):
    s3.put(bucket, "empty", b"")
    run.out("path", "--fetch", f"s3://{bucket}/empty")
    assert run("rm", "-y", f"s3://{bucket}/empty") == (0, "removed 1 shard, 0 B\n", "")
    assert re.fullmatch(f"would remove 1 shard, .*\n  {warm[0]}  .*\n", run("rm", "-n", warm[0])[1])
    assert run.out("rm", "-y", *warm[:2]).startswith("removed 2 shards, ")
    assert f"error: {warm[0]} is not cached" in run.err("rm", "-y", warm[0], warm[2])
    (file := tmp_path / "here.tar").touch()
    assert "is read in place and not cached" in run.err("rm", "-y", str(file), code=2)
    for code, line in enumerate(("path lab/train.tar", "rm -y s3//lab/train.tar"), 1):
        assert "it is an object, write s3://lab/train.tar." in run.err(*line.split(), code=code)
    assert len(states(run)) == 1


def test_rm_keeps_shards_in_use_and_exits_6(run, warm, bucket, tmp_path):
    with Cache(tmp_path / "cache") as cache, cache.open(warm[0]):
        assert "is being read: `lsof " in run.err("rm", "-y", warm[0], code=6)
        found = run.json("rm", "-n", warm[0], warm[1], code=6)
    assert [row["state"] for row in found["shards"]] == ["in_use", "removed"]
    pinned = run("pin", f"s3://{bucket}/train-{{0000..0001}}.tar", "--for", "3d")
    assert pinned == (0, "pinned 2 shards for 3d\n", "")
    assert states(run) == ["pinned", "pinned", "ok", "ok"]
    assert run("pin", warm[0], "--for", "2d")[1].endswith("; this replaces the pins of 1 shard\n")
    assert "0 s protects nothing" in run.err("pin", warm[0], "--for", "0", code=2)
    assert "is pinned. Run `shardcache unpin` first." in run.err("rm", "-y", warm[0], code=6)
    removed, kept = run("clean", "--all", "-y")[1].splitlines()
    assert re.fullmatch(r"removed 2 shards, [\d.]+ KB on disk", removed)
    assert re.fullmatch(r"kept 2 shards, [\d.]+ KB on disk \(2 pinned\)", kept)
    error = f"error: {warm[2]} was not pinned in {tmp_path / 'cache'}\n"
    assert run("unpin", *warm[:3]) == (1, "unpinned 2 shards\n", error)
    run.out("rm", "-y", warm[0])


def test_a_shard_can_be_pinned_before_it_is_cached(run, warm, bucket):
    missing = f"s3://{bucket}/later.tar"
    kept = "pinned 2 shards until unpinned; 1 not cached yet, and kept once fetched\n"
    assert run("pin", missing, warm[0]) == (0, kept, "")
    listed = run("ls")[1].splitlines()
    assert listed[1].split() == [missing, "-", "-", "-", "not_cached"]
    assert listed[-1].startswith("4 shards, ") and listed[-1].endswith("1 pinned, not cached yet")
    found = run.json("pin", missing, warm[0], "--for", "90s")
    assert [row["state"] for row in found["shards"]] == ["not_cached", "cached"]
    assert found["summary"] == {"pinned": 2, "not_cached": 1, "seconds": 90.0}
    row = run.json("ls", missing)["shards"][0]
    assert (row["url"], row["state"], row["size"]) == (missing, "not_cached", None)
    run.out("unpin", "later*")


@pytest.mark.parametrize("pattern", ["s3://{}/", "s3://{}/train-*.tar", "train-*", "s3a://{}/t**"])
def test_every_command_takes_patterns(run, warm, bucket, pattern):
    spec, nothing = pattern.format(bucket), f"s3://{bucket}/none-*.tar"
    run("pin", f"s3://{bucket}/later-{{0,1}}.tar", warm[0])
    assert len(run("path", spec)[1].splitlines()) == 4
    assert run("verify", "--quick", spec)[1].startswith("compared the sizes of 4 shards")
    assert run("pin", spec)[1] == "pinned 4 shards until unpinned\n"
    assert run("unpin", spec)[1] == f"unpinned {6 if spec.endswith('/') else 4} shards\n"
    for command in ("pin", "unpin", "path", "verify", "rm -y"):
        code, out, err = run(*command.split(), nothing)
        which = " that is pinned" if command == "unpin" else ""
        assert (code, out) == (1, "") and f"error: {nothing}: nothing{which} in" in err
    assert run("rm", "-y", spec)[1].startswith("removed 4 shards, ")


def test_shards_of_another_endpoint_are_named_by_patterns(run, warm, proxy, monkeypatch, tmp_path):
    theirs = proxy.url.removeprefix("http://")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{theirs.replace('127.0.0.1', 'localhost')}")
    run.out("prewarm", warm[0])
    lines = run("ls", "--sort", "fetched:desc")[1].splitlines()
    assert [f"(from {theirs})" in line for line in lines] == [False, *[True] * 4, False, False]
    assert lines[-1].endswith("4 from another endpoint")
    for command in ("path", "rm -y"):
        err = run.err(*command.split(), warm[1])
        assert f"came from another endpoint ({theirs})" in err and f"'{warm[1]}*'" in err
    text = f"{warm[1]}: not cached; its copy came from another endpoint ({theirs})"
    assert text in run("prewarm", "--check", warm[1])[2]
    code, out, err = run("path", f"{warm[1]}*")
    assert (code, err) == (0, f"{warm[1]} came from another endpoint ({theirs}).\n")
    assert out.strip() in run("ls", "-l")[1]
    assert run("pin", "train-0001.tar")[1] == "pinned 1 shard until unpinned\n"
    assert states(run).count("pinned") == 1
    assert run("unpin", "train*")[1] == "unpinned 1 shard\n"
    with Cache(tmp_path / "cache") as cache:
        assert cache.path("train-0001.tar") is None
        with pytest.raises(ConfigError, match="came from another endpoint"):
            cache.prewarm(cache.select("train*"))
    assert run("rm", "-y", "train*")[1].startswith("removed 5 shards, ")


def test_commands_refuse_what_others_may_have_written(run, warm, tmp_path):
    (tmp_path / "cache").chmod(0o777)
    for words in ["ls"], ["path", "*"], ["verify"], ["clean"], ["rm", "-y", "*"], ["stats"]:
        code, out, err = run(*words)
        assert (code, out) == (2, "") and "can be written by every user" in err


def test_brackets_are_said_to_be_no_pattern(run, warm, bucket):
    url, pattern = f"s3://{bucket}/train-000[01].tar", "train-000[01]*"
    names = "ls", "path", "rm -y", "verify"
    lines = [f"{name} {spec}" for name in names for spec in (url, pattern)]
    for line in *lines, f"path --fetch {url}", f"prewarm {url}", f"prewarm {url}*":
        code, _, err = run(*line.split())
        assert code and err.count("Brackets are no pattern: write {a,b}") == 1, (line, err)
    assert run("ls", "none.tar")[2].endswith("matches.\n")
