"""The command line: what it prints, where, and how it ends."""
# ruff: noqa: F401, F811  (fixtures are imported, and shadowed by arguments)

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import click
import pytest

from shardcache.cache import Cache
from shardcache.cli import main as cli
from shardcache.errors import IntegrityError, LockTimeoutError
from shardcache.layout import Layout
from tests.support.clitools import data, run, spec, warm
from tests.support.tars import make_tar

# -- prewarm -------------------------------------------------------------------


def test_prewarm_says_what_it_needs_and_what_it_did(run, spec):
    code, out, err = run("prewarm", spec)
    need, warmed = out.splitlines()
    assert code == 0
    assert re.fullmatch(
        r"Need 4 shards, [\d.]+ KB: 0 cached, 4 to fetch \([\d.]+ KB\); free .*  ok", need
    )
    assert re.fullmatch(r"Warmed 4 of 4 shards \([\d.]+ KB\) in .*/s\.", warmed)
    assert err == ""
    code, out, err = run("prewarm", spec)
    assert "4 cached, nothing to fetch" in out
    assert "All 4 shards cached" in out


def test_prewarm_says_nothing_when_quiet(run, spec):
    assert run("prewarm", "-q", spec) == (0, "", "")


def test_missing_shard_is_exit_3_and_named(run, spec, bucket):
    code, out, err = run("prewarm", spec, f"s3://{bucket}/absent.tar")
    assert code == 3
    assert "Warmed 4 of 5 shards" in out
    assert "1 failed" in out
    assert f"failed  s3://{bucket}/absent.tar: not found" in err
    assert "--max-failures 1" in err
    assert run("prewarm", spec, f"s3://{bucket}/absent.tar", "--max-failures", "1")[0] == 0


def test_what_does_not_fit_is_exit_5_and_nothing_is_fetched(run, spec, proxy, monkeypatch):
    monkeypatch.setenv("SHARDCACHE_MAX_SIZE", "100kB")
    code, out, err = run("prewarm", spec)
    assert code == 5
    assert "does not fit" in out
    assert err.startswith("error: ")
    assert "--best-effort" in err
    assert proxy.summary() == {}
    assert run("prewarm", "-n", spec)[0] == 5
    code, out, err = run("prewarm", "--best-effort", spec)
    assert code == 0
    assert "left out for want of room" in out


def test_full_disk_is_exit_5(run, spec, monkeypatch):
    from shardcache.store.partial import Partial

    def full(self, *args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Partial, "write", full)
    code, _, err = run("prewarm", spec, "-j", "1")
    assert code == 5
    assert "no room for" in err


def test_deadline_is_exit_3_unless_best_effort_will_do(run, spec, proxy):
    proxy.pause(after=20_000)  # listings pass
    code, out, err = run("prewarm", spec, "--deadline", "500ms", "-q")
    assert (code, out) == (3, "")
    assert "4 shards not done because the deadline is over" in err
    assert run("prewarm", spec, "--deadline", "500ms", "--best-effort")[0] == 0


def test_check_asks_nobody_and_exits_4_when_shards_are_missing(run, spec, proxy):
    code, out, _ = run("prewarm", "--check", spec)
    assert (code, out) == (4, "0 of 4 shards cached (0 B); 4 missing\n")
    assert proxy.requests() == []
    run("prewarm", spec)
    code, out, _ = run("prewarm", "--check", spec)
    assert code == 0
    assert out.startswith("4 of 4 shards cached (")


def test_dry_run_fetches_nothing(run, spec, tmp_path):
    code, out, _ = run("prewarm", "-n", spec)
    assert code == 0
    assert "4 to fetch" in out
    assert not (tmp_path / "cache").exists()


def test_specs_come_from_files_and_stdin(run, spec, bucket, tmp_path, monkeypatch):
    import io

    listing = tmp_path / "shards.txt"
    listing.write_text(f"# the training set\n\n  {spec}  \n")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"s3://{bucket}/train-0000.tar\n"))
    code, out, _ = run("prewarm", "-f", listing, "-f", "-")
    assert code == 0
    assert "Need 4 shards" in out
    code, _, err = run("prewarm", "-f", tmp_path / "none")
    assert (code, "cannot be read" in err) == (2, True)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert run("prewarm", "-f", tmp_path / "binary")[0] == 2


def test_prefixes_and_globs_are_listed(run, spec, bucket):
    assert run("prewarm", f"s3://{bucket}/")[0] == 0
    assert "4 of 4" in run("prewarm", "--check", f"s3://{bucket}/train-*.tar")[1]
    code, _, err = run("prewarm", f"s3://{bucket}/nothing-*.tar")
    assert code == 1
    assert "nothing matches" in err


def test_prewarm_json_accounts_for_every_shard(run, spec, bucket, data):
    code, out, _ = run("prewarm", spec, f"s3://{bucket}/absent.tar", "--json")
    found = json.loads(out)
    assert code == 3
    assert (found["schema"], found["command"]) == (1, "prewarm")
    assert [shard["outcome"] for shard in found["shards"]] == ["fetched"] * 4 + ["failed"]
    assert found["shards"][0]["size"] == len(data["train-0000.tar"])
    assert found["shards"][4]["error_type"] == "ShardNotFoundError"
    assert found["summary"]["received_bytes"] == sum(map(len, data.values()))
    assert found["summary"]["plan"]["to_fetch"] == 5


def test_prewarm_json_lines_come_as_it_happens(run, spec):
    _, out, _ = run("prewarm", spec, "--format", "jsonl")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["type"] for line in lines] == ["plan", *["shard"] * 4, "summary"]
    assert lines[-1]["fetched"] == 4
    _, out, _ = run("prewarm", spec, "--check", "--format", "jsonl")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["type"] for line in lines] == [*["shard"] * 4, "summary"]


def test_prewarm_without_shards_is_a_usage_error(run):
    code, _, err = run("prewarm")
    assert code == 2
    assert err.startswith("error: Which shards?")


def test_jobs_raise_the_connections(run, spec, monkeypatch):
    made = []
    from_config = Cache.from_config.__func__

    def spy(cls, config, **options):
        made.append(config)
        return from_config(cls, config, **options)

    monkeypatch.setattr(Cache, "from_config", classmethod(spy))
    assert run("prewarm", spec, "-j", "40")[0] == 0
    assert (made[0].connections, made[0].strict) == (40, True)


def test_bad_credentials_are_told_once(run, spec, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    code, _, err = run("prewarm", spec)
    assert code == 3
    assert err.count("AWS_SECRET_ACCESS_KEY") == 1
    assert "Traceback" not in err


# -- looking -------------------------------------------------------------------


def test_ls_is_a_table_with_a_summary(run, warm, bucket, data):
    code, out, err = run("ls")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].split() == ["SHARD", "SIZE", "USED", "FETCHED", "STATE"]
    assert [line.split()[0] for line in lines[1:5]] == warm
    assert re.fullmatch(r"4 shards, [\d.]+ KB; [\d.]+ KB evictable", lines[5])


def test_ls_shows_the_limit_and_what_is_in_use(run, warm, monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDCACHE_MAX_SIZE", "1MB")
    with Cache(tmp_path / "cache") as cache, cache.open(warm[0]):
        _, out, _ = run("ls")
    lines = out.splitlines()
    assert [line.split()[-1] for line in lines[1:5]] == ["in_use", "ok", "ok", "ok"]
    assert re.fullmatch(r"4 shards, [\d.]+ KB of 1.0 MB \(\d+%\); [\d.]+ KB evictable", lines[5])


def test_ls_counts_what_a_live_session_uses_as_not_evictable(run, warm, tmp_path):
    with Cache(tmp_path / "cache") as cache:
        time.sleep(0.01)
        cache.fetch(warm[0])
        found = json.loads(run("ls", "--json")[1])
    assert 0 < found["summary"]["evictable_bytes"] < found["summary"]["bytes"]


def test_ls_filters_sorts_and_limits(run, warm, bucket):
    _, out, _ = run("ls", "train-000[12].tar")
    assert len(out.splitlines()) == 4
    assert out.splitlines()[-1].startswith("2 of 4 shards, ")
    _, out, _ = run("ls", f"s3://{bucket}/*", "--sort", "url:desc", "--limit", "1")
    assert warm[3] in out
    assert warm[0] not in out
    assert run("ls", "--filter", "size>1TB")[1].startswith("0 of 4 shards")
    assert len(run("ls", "--filter", "used<1d", "--filter", "state=ok")[1].splitlines()) == 6
    assert run("ls", "--filter", "size>>1")[0] == 2
    assert run("ls", "--sort", "nothing")[0] == 2


def test_ls_json_has_raw_values(run, warm, data):
    found = json.loads(run("ls", "--json")[1])
    shard = found["shards"][0]
    assert shard["url"] == warm[0]
    assert shard["size"] == len(data["train-0000.tar"])
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00$", shard["fetched_at"])
    assert Path(shard["path"]).read_bytes() == data["train-0000.tar"]
    assert found["summary"]["shards"] == 4


def test_ls_shows_damaged_entries(run, warm, tmp_path):
    with Cache(tmp_path / "cache") as cache:
        truncated, scribbled, gone = (cache.entry(url) for url in warm[:3])
    os.chmod(truncated.data, 0o600)
    os.truncate(truncated.data, 3)
    (scribbled.path / "meta.json").write_text("{")
    (gone.path / "meta.json").unlink()
    code, out, _ = run("ls")
    assert code == 0
    assert [line.split()[-1] for line in out.splitlines()[1:5]].count("damaged") == 3


def test_ls_long_shows_paths(run, warm, tmp_path):
    assert str(tmp_path / "cache") in run("ls", "-l")[1]


def test_ls_of_nothing(run, tmp_path):
    code, out, err = run("ls")
    assert (code, out) == (0, "0 shards, 0 B\n")
    assert "Nothing was cached" in err
    assert json.loads(run("ls", "--json")[1])["shards"] == []
    assert run("ls", "--partial")[1].startswith("0 partials")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "model.ckpt").write_text("precious")
    code, _, err = run("ls")
    assert code == 2
    assert "is not a shardcache directory" in err


def test_a_cache_that_is_just_being_made_is_empty(run, tmp_path):
    made = Layout.of_root(tmp_path / "cache")
    made.make()  # the manifest comes last
    code, out, err = run("ls", "--partial", "--json", "--dir", tmp_path / "cache")
    assert (code, json.loads(out)["partials"]) == (0, []), err
    (tmp_path / "cache" / "precious").touch()
    assert run("ls", "--dir", tmp_path / "cache")[0] == 2


def test_path_prints_a_path_and_nothing_else(run, warm, data):
    code, out, err = run("path", warm[1])
    assert (code, err) == (0, "")
    assert Path(out.rstrip("\n")).read_bytes() == data["train-0001.tar"]
    assert json.loads(run("path", warm[1], "--json")[1])["path"] == out.strip()


def test_path_of_what_is_not_cached_is_exit_1(run, spec, bucket):
    url = f"s3://{bucket}/train-0000.tar"
    code, out, err = run("path", url)
    assert (code, out) == (1, "")
    assert re.fullmatch(rf"error: {url} is not cached in .*\. Pass --fetch to fetch it\.\n", err)


def test_path_fetches_on_request(run, spec, bucket, data):
    code, out, err = run("path", "--fetch", f"s3://{bucket}/train-0002.tar")
    assert (code, err) == (0, "")
    assert Path(out.strip()).read_bytes() == data["train-0002.tar"]
    code, out, err = run("path", "--fetch", f"s3://{bucket}/none.tar")
    assert (code, out) == (1, "")
    assert "not found" in err


def test_path_of_a_local_shard_is_itself(run, tmp_path):
    shard = tmp_path / "x.tar"
    shard.write_bytes(make_tar(1))
    assert run("path", shard) == (0, f"{shard}\n", "")


# -- removing ------------------------------------------------------------------


def test_clean_removes_what_is_over_the_limit(run, warm, data):
    limit = sum(map(len, data.values())) - 1
    code, out, _ = run("clean", "-n", "--max-size", limit)
    assert code == 0
    first, second = out.splitlines()
    assert re.fullmatch(r"would remove 1 shard, [\d.]+ KB: 1 over --max-size", first)
    assert re.fullmatch(r"would keep 3 shards, [\d.]+ KB \(\d+% of [\d.]+ KB\)", second)
    assert len(json.loads(run("ls", "--json")[1])["shards"]) == 4
    code, out, _ = run("clean", "--max-size", limit)
    assert out.startswith("removed 1 shard, ")
    assert len(json.loads(run("ls", "--json")[1])["shards"]) == 3
    assert run("clean")[1].startswith("nothing to remove; kept 3 shards, ")


def test_clean_tells_each_reason(run, warm, tmp_path, monkeypatch):
    with Cache(tmp_path / "cache") as cache:
        for age, url in zip((10, 30), warm[:2], strict=True):
            meta = cache.entry(url).path / "meta.json"
            then = time.time() - age * 86400
            os.utime(meta, (then, then))
    orphan = tmp_path / "cache/v1/partial" / f"{'a' * 32}.{'b' * 24}.{'c' * 32}"
    orphan.mkdir()
    (orphan / "x.tar").write_bytes(b"x")
    monkeypatch.setenv("SHARDCACHE_MAX_AGE", "14d")
    _, out, _ = run("clean", "-n")
    assert "would remove 2 shards" in out
    assert "1 older than 14d, 1 orphan" in out
    assert "2 older than 7d" in run("clean", "-n", "--max-age", "7d")[1]
    assert run("clean", "--orphans")[1].splitlines()[0].endswith("1 orphan")
    assert not orphan.exists()
    assert run("clean", "-q", "--max-age", "7d") == (0, "", "")


def test_clean_json_lists_each_removal(run, warm):
    found = json.loads(run("clean", "--max-size", "1", "--json")[1])
    assert [r["reason"] for r in found["removals"]] == ["max_size"] * 4
    assert found["summary"]["kept"] == 0
    assert found["summary"]["dry_run"] is False


def test_clean_warns_when_limits_cannot_be_met(run, warm, tmp_path):
    with Cache(tmp_path / "cache") as cache, contextlib.ExitStack() as stack:
        for url in warm:
            stack.enter_context(cache.open(url))
        code, _, err = run("clean", "-q", "--max-size", "1")
    assert code == 0
    assert err.startswith("warning: ")
    assert "in use" in err


def test_clean_all_needs_a_yes(run, warm):
    code, _, err = run("clean", "--all")
    assert code == 2
    assert "-y" in err
    assert run("clean", "--all", "-n")[0] == 0
    assert len(json.loads(run("ls", "--json")[1])["shards"]) == 4
    assert run("clean", "--all", "-y")[0] == 0
    assert json.loads(run("ls", "--json")[1])["shards"] == []
    assert run("clean", "--all", "--max-size", "1", "-y")[0] == 2


def test_clean_touches_only_a_cache(run, tmp_path):
    code, out, err = run("clean")
    assert (code, out) == (0, "")
    assert "nothing to clean" in err
    assert run("clean", "-q") == (0, "", "")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "model.ckpt").write_text("precious")
    code, _, err = run("clean", "--all", "-y")
    assert code == 2
    assert (tmp_path / "cache" / "model.ckpt").exists()


def test_rm_needs_a_yes(run, warm, bucket):
    code, _, err = run("rm", warm[0])
    assert code == 2
    assert "-y" in err
    assert run("rm", "-n", warm[0])[1].startswith("would remove 1 shard, ")
    assert run("path", warm[0])[0] == 0
    code, out, _ = run("rm", "-y", f"s3://{bucket}/train-{{0000..0001}}.tar")
    assert (code, out.startswith("removed 2 shards, ")) == (0, True)
    assert run("path", warm[0])[0] == 1
    code, out, err = run("rm", "-y", warm[0], warm[2])
    assert code == 1
    assert f"error: {warm[0]} is not cached" in err
    assert run("path", warm[2])[0] == 1


def test_rm_of_what_is_being_read_is_exit_6(run, warm, tmp_path):
    with Cache(tmp_path / "cache") as cache, cache.open(warm[0]):
        code, _, err = run("rm", "-y", warm[0])
        assert code == 6
        assert "is pinned or being read" in err
        found = json.loads(run("rm", "-n", "--json", warm[0], warm[1])[1])
    assert [row["state"] for row in found["shards"]] == ["in_use", "removed"]


def test_pinned_shards_stay_until_they_are_unpinned(run, warm, bucket):
    code, out, err = run("pin", f"s3://{bucket}/train-{{0000..0001}}.tar", "--for", "3d")
    assert (code, out, err) == (0, "pinned 2 shards for 3d\n", "")
    states = [line.split()[-1] for line in run("ls")[1].splitlines()[1:5]]
    assert states == ["pinned", "pinned", "ok", "ok"]
    assert [row["state"] for row in json.loads(run("ls", "--json")[1])["shards"]] == states
    code, _, err = run("rm", "-y", warm[0])
    assert code == 6 and "shardcache unpin" in err
    assert "kept 2 shards" in run("clean", "--all", "-y")[1]
    code, out, err = run("unpin", *warm[:3])
    assert (code, out) == (1, "unpinned 2 shards\n")
    assert err.splitlines() == [f"error: {warm[2]} was not pinned in {_directory(run)}"]
    assert run("rm", "-y", warm[0])[0] == 0


def test_a_shard_can_be_pinned_before_it_is_cached(run, warm, bucket):
    missing = f"s3://{bucket}/later.tar"
    code, out, err = run("pin", missing, warm[0])
    assert (code, out) == (0, "pinned 2 shards until they are unpinned\n")
    assert "1 of them is not cached yet" in err
    found = json.loads(run("pin", missing, warm[0], "--json", "--for", "90s")[1])
    assert found["shards"] == [
        {"url": missing, "state": "not_cached"},
        {"url": warm[0], "state": "cached"},
    ]
    summary = found["summary"]
    assert (summary["pinned"], summary["not_cached"], summary["seconds"]) == (2, 1, 90.0)
    found = json.loads(run("unpin", missing, "--json")[1])
    assert found["shards"] == [{"url": missing, "state": "unpinned"}]


@pytest.mark.parametrize(
    "arguments", [("pin",), ("unpin",), ("pin", "s3://b/a.tar", "--for", "long"), ("pin", "x://y")]
)
def test_what_cannot_be_pinned_is_a_usage_error(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and err.startswith("error: ")


def _directory(run) -> str:
    return run("dir")[1].strip()


# -- config, dir, demo ---------------------------------------------------------


def test_config_tells_value_and_source(run, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDCACHE_MAX_SIZE", "5GB")
    code, out, _ = run("config")
    assert code == 0
    assert re.search(r"^max_size +5GB +environment SHARDCACHE_MAX_SIZE$", out, re.M)
    assert re.search(r"^attempts +5 +default$", out, re.M)
    assert out.splitlines()[-1].endswith(" options, 3 set")
    file = tmp_path / "job.toml"
    file.write_text('attempts = 7\nstorage_options = {secret = "hush"}\n')
    found = json.loads(run("config", "--config", file, "--json")[1])
    rows = {row["option"]: row for row in found["options"]}
    assert rows["attempts"]["value"] == "7"
    assert rows["attempts"]["source"] == f"file {file}"
    assert "hush" not in json.dumps(found)


def test_dir_prints_the_directory_whatever_else_is_broken(run, tmp_path, monkeypatch):
    assert run("dir") == (0, f"{tmp_path / 'cache'}\n", "")
    monkeypatch.setenv("SHARDCACHE_MAX_SIZE", "a lot")
    monkeypatch.setenv("SHARDCACHE_TYPO", "1")
    monkeypatch.setenv("WDS_CACHE_SIZE", "?")
    assert run("dir") == (0, f"{tmp_path / 'cache'}\n", "")
    assert run("--dir", "/elsewhere", "dir") == (0, "/elsewhere\n", "")
    code, _, err = run("ls")
    assert code == 2
    assert "SHARDCACHE_" in err


def test_a_stated_directory_or_file_outranks_a_broken_environment(run, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDCACHE_DIR", "$NOT_SET_ANYWHERE/x")
    monkeypatch.setenv("SHARDCACHE_CONFIG", "/no/such/file.toml")
    assert run("ls")[0] == 2
    file = tmp_path / "job.toml"
    file.write_text("")
    assert run("ls", "--dir", tmp_path / "c", "--config", file)[0] == 0


def test_no_directory_anywhere_says_how_to_set_one(run, monkeypatch, tmp_path):
    monkeypatch.delenv("SHARDCACHE_DIR")
    monkeypatch.chdir(tmp_path)
    code, _, err = run("dir")
    assert code == 2
    assert "--dir" in err
    assert "SHARDCACHE_DIR" in err


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 4)])
def test_demo_shows_its_steps(run, monkeypatch, ok, code, tmp_path):
    from shardcache.cli import demorun as demo

    step = demo.Step(
        name="prewarm 8 shards",
        object_fetches=8,
        most_fetches=1,
        origin_bytes=100,
        expected_bytes=100 if ok else 50,
        samples=None,
        complete=True,
        seconds=1.5,
    )
    report = demo.DemoReport((step,), 16, 100, (1, 1), tmp_path)
    asked = {}
    monkeypatch.setattr(demo, "run", lambda **options: asked.update(options) or report)
    assert run("demo", "--keep", "--dir", tmp_path)[0] == code
    assert (asked["keep"], asked["directory"]) == (True, tmp_path)
    _, out, err = run("demo")
    assert asked["directory"] is None
    assert "prewarm 8 shards" in out
    assert ("each fetched exactly once" in out) is ok
    assert str(tmp_path) in err
    assert run("demo", "--dir", tmp_path / "none")[0] == 2


# -- manners -------------------------------------------------------------------


def test_global_options_stand_before_or_after(run, warm):
    after = json.loads(run("ls", "--json")[1])
    before = json.loads(run("--json", "ls")[1])
    both = json.loads(run("--format", "tsv", "ls", "--format", "json")[1])
    assert after["shards"] == before["shards"] == both["shards"]


def test_version_and_help(run):
    code, out, _ = run("--version")
    assert (code, out) == (
        0,
        f"shardcache {cli.importlib.import_module('shardcache').__version__}\n",
    )
    assert run("ls", "--version")[0] == 0
    code, out, _ = run("--help")
    assert code == 0
    for name in ("prewarm", "ls", "path", "rm", "clean", "config", "dir", "demo"):
        assert re.search(rf"^  {name} +\S", out, re.M)
        code, text, _ = run(name, "-h")
        assert code == 0
        assert "Examples:\n    shardcache" in text
        assert "--dir DIR" in text
    assert "Exit codes:\n    0    done" in out


def test_usage_errors_are_one_sentence_and_exit_2(run):
    for arguments, said in (
        (["lss"], "Did you mean ls?"),
        (["nonsense"], "Known: prewarm, "),
        (["ls", "--nope"], "--nope"),
        (["prewarm", "x", "--jobs", "0"], "--jobs"),
        (["prewarm", "x", "--deadline", "soon"], "duration"),
        (["clean", "--max-size", "big"], "size"),
        (["rm"], "URL"),
        (["--format", "xml", "ls"], "xml"),
    ):
        code, out, err = run(*arguments)
        assert (code, out) == (2, ""), arguments
        assert err.startswith("error: ")
        assert said in err
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (LockTimeoutError("held by another"), 6, "held by another"),
        (IntegrityError("bytes differ"), 4, "bytes differ"),
        (OSError(errno.EIO, "Input/output error", "/disk/x"), 1, "/disk/x: Input/output error"),
        (OSError(errno.ENOSPC, "No space left on device"), 5, "No space left"),
        (OSError(errno.EDQUOT, "Quota exceeded"), 5, "Quota"),
    ],
)
def test_errors_become_one_sentence_and_their_exit_code(run, monkeypatch, error, code, said):
    def fail(self, url):
        raise error

    monkeypatch.setattr(Cache, "path", fail)
    found, out, err = run("path", "s3://b/x.tar")
    assert (found, out) == (code, "")
    assert err.startswith("error: ")
    assert said in err
    assert "Traceback" not in err
    assert "Traceback" in run("path", "s3://b/x.tar", "-vv")[2]


def test_unusable_directory_is_exit_2(run, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    for directory in (file, file / "below"):
        code, _, err = run("--dir", directory, "prewarm", "s3://b/x.tar")
        assert code == 2
        assert err.startswith("error: ")

    def denied(self, url):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "cache" / "v1"))

    monkeypatch.setattr(Cache, "path", denied)
    assert run("path", "s3://b/x.tar")[0] == 2


def test_the_librarys_log_is_shown_as_asked(run, spec, monkeypatch):
    import logging

    def noisy(self, url):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger("shardcache.cache").log(level, "said at %d", level)
            logging.getLogger("shardcache.origins.retry").log(level, "retry at %d", level)
        return Path("/x")

    monkeypatch.setattr(Cache, "path", noisy)
    assert run("path", "s3://b/x", "-q")[2].splitlines() == ["error: said at 40"]
    assert run("path", "s3://b/x")[2].splitlines() == ["warning: said at 30", "error: said at 40"]
    assert "info: said at 20" in run("path", "s3://b/x", "-v")[2]
    assert "warning: retry at 30" in run("path", "s3://b/x", "-v")[2]
    assert "debug: said at 10" in run("-v", "path", "s3://b/x", "-v")[2]
    assert logging.getLogger("shardcache").propagate


@pytest.fixture
def interruptible():
    """SIGINT as a terminal's programs have it: a test run in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupt_outside_of_a_run_is_exit_130(run, monkeypatch, interruptible):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(Cache, "path", lambda self, url: signal.raise_signal(signal.SIGINT))
    code, _, err = run("path", "s3://b/x.tar")
    assert (code, err.strip()) == (130, "error: interrupted")
    monkeypatch.setattr(Cache, "path", lambda self, url: signal.raise_signal(signal.SIGTERM))
    assert run("path", "s3://b/x.tar")[0] == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_ignored_interrupt_stays_ignored(run, monkeypatch, interruptible):
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def interrupted(self, url):
        signal.raise_signal(signal.SIGINT)
        return Path("/x")

    monkeypatch.setattr(Cache, "path", interrupted)
    assert run("path", "s3://b/x.tar")[:2] == (0, "/x\n")


def test_an_answer_of_no_changes_nothing(run, warm, monkeypatch):
    from shardcache.cli.output import Console

    monkeypatch.setattr(Console, "interactive", True)
    answers = iter([False, True])
    monkeypatch.setattr(click, "confirm", lambda question, err: next(answers))
    code, _, err = run("rm", warm[0])
    assert (code, err) == (1, "error: nothing was done\n")
    assert run("path", warm[0])[0] == 0
    assert run("rm", warm[0])[0] == 0
    assert run("path", warm[0])[0] == 1
