"""What --json and --format jsonl print is what docs/schemas says: no field more, none less.

Each command runs for real until every field of its schema was seen, with every word that it may
be, and as null where it may be that.
"""
# ruff: noqa: F401, F811  (fixtures are imported, and shadowed by arguments)

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from jsonschema import Draft202012Validator

from shardcache.cache import Cache
from shardcache.cli.main import _COMMANDS
from shardcache.cli.recipes import RECIPES
from shardcache.fetch.waiting import Waiter
from shardcache.locks.flock import Holder
from shardcache.locks.sessions import Wait, WaitNote, live_waits
from shardcache.prewarm.run import _Run as Run
from shardcache.space.volume import Volume
from shardcache.stats.activity import Watcher
from shardcache.store.partial import Partial
from tests.support.clitools import Command, data, run, slow, spec, wait_until, warm, written
from tests.support.jsontools import HOME, Seen
from tests.support.storetools import wait_until as patiently
from tests.support.tars import make_tar

ROOT = HOME.parent.parent


@pytest.fixture
def said(request, run):
    """Runs the command that the test is about, as JSON, as JSON lines or both."""
    name = request.function.__name__.removeprefix("test_json_of_").replace("_", "-")
    seen = Seen(name)

    def said(*arguments, code=0, form="json"):
        ended, out, err = run(seen.command, *arguments, "--format", form)
        assert ended == code, err
        assert os.environ.get("AWS_SECRET_ACCESS_KEY", "no secret") not in out
        return seen.document(out) if form == "json" else seen.lines(out)

    said.seen = seen
    said.lines = lambda *arguments, **options: said(*arguments, form="jsonl", **options)
    yield said
    assert seen.unseen() == set()


def sidecar(cache_dir, url):
    with Cache(cache_dir) as cache:
        return cache.entry(url).path / "meta.json"


# -- the schemas -------------------------------------------------------------------------


def test_schemas_are_what_docs_schemas_py_says():
    command = [sys.executable, ROOT / "docs" / "schemas.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_command_has_a_schema_and_a_test():
    schemas = {path.stem for path in HOME.glob("*.json")}
    tests = {name.removeprefix("test_json_of_") for name in globals() if "_json_of_" in name}
    tests = {name.replace("_", "-") for name in tests}
    assert schemas == set(_COMMANDS) == tests


def fields(schema, name=""):
    yield name, schema
    for each, inner in schema.get("properties", {}).items():
        yield from fields(inner, each)
    for inner in (*schema.get("oneOf", ()), *schema.get("$defs", {}).values()):
        yield from fields(inner)
    for inner in (schema.get("items"), schema.get("additionalProperties")):
        if inner:
            yield from fields(inner)


@pytest.mark.parametrize("path", sorted(HOME.glob("*.json")), ids=lambda path: path.stem)
def test_a_schema_is_closed_and_says_what_its_fields_are(path):
    schema = json.loads(path.read_text())
    Draft202012Validator.check_schema(schema)
    names = {"bytes": r"(^|_)bytes(_|$)|^(max_)?size$", "seconds": r"(^|_)seconds$|^p\d+$"}
    names["bytes per second"] = r"^bytes_per_second$"
    names["UTC"] = r"^at$|_at$|^since$|^until$|^hour$"
    for name, field in fields(schema):
        if field.get("type") == "object" and "properties" not in field:
            # By names that may be any; what they are of is closed.
            assert field["additionalProperties"]["type"] == "object", name
        elif field.get("type") == "object":
            assert field["additionalProperties"] is False, name
            assert field["required"] == list(field["properties"]), name
        if name:
            assert field.get("description"), name
            unit = field.get("x-unit")
            # One word for one thing: a name tells its unit, and a unit the name.
            assert unit not in names or re.search(names[unit], name), (name, unit)
            told = [u for u, pattern in names.items() if re.search(pattern, name)]
            whole = field.get("type") in ("array", "object") or name == "bytes_per_second"
            assert whole or not told or unit == told[0], (name, unit)


# -- what changes the cache --------------------------------------------------------------


def test_json_of_prewarm(said, spec, bucket, s3, proxy, tmp_path, monkeypatch, slow):
    absent = f"s3://{bucket}/absent.tar"
    proxy.resume()
    first, second, third, fourth = (f"s3://{bucket}/train-{n:04d}.tar" for n in range(4))
    said("-n", first)  # missing
    assert said(first, absent, code=3)["summary"]["failed"] == 1
    said.lines(first, second, absent, "--max-failures", "0", "-j", "1", code=3)
    # Another rank links what is there; a run with no room leaves out, or fails.
    with monkeypatch.context() as rank:
        rank.setenv("SHARDCACHE_ISOLATION", "rank")
        rank.setenv("SHARDCACHE_RANK", "1")
        assert said(first)["summary"]["linked"] == 1
    with monkeypatch.context() as full:
        full.setenv("SHARDCACHE_MAX_SIZE", "1kB")
        assert said("--best-effort", third, fourth)["summary"]["left_out"] == 2
        full.delenv("SHARDCACHE_MAX_SIZE")
        no_room = OSError(errno.ENOSPC, "No space left on device")
        full.setattr(Partial, "write", lambda *a, **k: (_ for _ in ()).throw(no_room))
        assert said(third, fourth, "-j", "1", code=5)["summary"]["stopped"] == "full"
    with monkeypatch.context() as wrong:
        wrong.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        many = f"s3://{bucket}/train-{{1000..1009}}.tar"
        assert said(many, "-j", "1", code=3)["summary"]["stopped"] == "refused"
    with Cache() as cache:
        proxy.pause(after=20_000)
        fetch = threading.Thread(target=cache.fetch, args=(second,))
        fetch.start()
        lock = cache.node_layout.key_lock(cache.parse(second).key)
        while not lock.exists() or not lock.read_bytes():
            time.sleep(0.01)
        with monkeypatch.context() as waiting:
            pause = Waiter.pause
            waiting.setattr(Waiter, "pause", lambda self: (proxy.resume(), pause(self)))
            assert said(second)["summary"]["coalesced"] == 1
        fetch.join()
    s3.put(bucket, "train-0000.tar", make_tar(9))
    found = said("--refresh", first, second)["summary"]
    assert (found["plan"]["outdated"], found["refreshed"], found["cached"]) == (1, 1, 1)
    proxy.pause(after=2_500_000)
    big = f"s3://{bucket}/big-{{0..2}}.tar"
    watch = Run._watch

    def end_once_there_is_something(self):
        if any(status.written for _, status, _ in self._running.values()):
            self._end = 0.0
        watch(self)

    with monkeypatch.context() as soon:
        soon.setattr(Run, "_watch", end_once_there_is_something)
        found = said(big, "--deadline", "1h", "-j", "1", code=3)["summary"]
    assert (found["stopped"], found["cancelled"], found["not_started"]) == ("deadline", 1, 2)
    assert written(tmp_path / "cache") > 0
    with Command("prewarm", big, "--json", directory=tmp_path / "other") as command:
        wait_until(lambda: written(tmp_path / "other") > 0, command)
        command.process.send_signal(signal.SIGINT)
        code, out, _ = command.end()
    assert (code, said.seen.document(out)["summary"]["stopped"]) == (130, "requested")


def test_json_of_clean(said, run, warm, tmp_path, monkeypatch):
    said("-n", "--max-size", "1")
    said("-n", "--min-free", "100%")
    said("-n", "--all")
    partial = tmp_path / "cache/v1/partial" / f"{'a' * 32}.{'b' * 24}.{'c' * 32}"
    partial.mkdir()
    (partial / "x.tar").write_bytes(b"x")
    with Cache(tmp_path / "cache") as cache:
        for url in warm[:2]:
            os.utime(cache.entry(url).path / "meta.json", (1e9, 1e9))
        damaged = cache.entry(warm[3]).data
    damaged.chmod(0o600)
    damaged.write_bytes(b"y" * damaged.stat().st_size)
    assert run("verify", "--repair")[0] == 4
    said("-n", "--max-age", "1d")
    with monkeypatch.context() as few:
        few.setattr(Volume, "lacks_inodes", lambda self, wanted: 100)
        said("-n")
    said.lines()


def test_where_nothing_is_clean_says_so_in_json(run, tmp_path):
    code, out, _ = run("clean", "--json")
    assert code == 0 and Seen("clean").document(out)["summary"]["kept"] == 0


def test_json_of_rm(said, warm, tmp_path):
    with Cache(tmp_path / "cache") as cache, cache.open(warm[0]):
        said("-n", warm[0], warm[1], "s3://lab/absent.tar", code=6)
        said.lines("-y", warm[1])


def test_json_of_pin(said, warm):
    said(warm[0], "s3://lab/absent.tar", "--for", "3d")
    said.lines(warm[0])


def test_json_of_unpin(said, run, warm):
    run("pin", warm[0])
    said(*warm[:2], code=1)
    said.lines(warm[0], code=1)


# -- what looks at it --------------------------------------------------------------------


def test_json_of_ls(said, run, warm, slow, proxy, tmp_path, monkeypatch):
    directory = tmp_path / "cache"
    (tmp_path / "local.tar").write_bytes(make_tar(9))
    with Cache(directory, cache_local=True, min_free=0) as cache:
        cache.fetch(str(tmp_path / "local.tar"))
    run("pin", warm[0])
    sidecar(directory, warm[1]).write_text("{")
    with Cache(directory) as cache, cache.open(warm[2]):
        cache.entry(warm[3]).data.unlink()
        said()
    monkeypatch.setenv("SHARDCACHE_MAX_SIZE", "1GB")
    assert said.lines("--sort", "size:desc", "--limit", "1")[-1]["shown"] == 1
    monkeypatch.delenv("SHARDCACHE_MAX_SIZE")
    with Command("prewarm", slow, directory=directory, environment={"SHARDCACHE_RANK": "3"}) as on:
        wait_until(lambda: len(list(directory.glob("v1/partial/*/progress"))) == 3, on)
        wait_until(lambda: written(directory) > 2 << 20, on)
        found = said("--partial")
        assert {partial["rank"] for partial in found["partials"]} == {3}
    for partial in found["partials"]:
        (Path(partial["dir"]) / "meta.json").unlink()
        (Path(partial["dir"]) / "progress").unlink()
    assert said.lines("--partial")[-1]["orphans"] == len(found["partials"])


def test_json_of_path(said, warm):
    said(warm[0])


def test_json_of_verify(said, run, warm, s3, bucket, tmp_path, proxy, monkeypatch):
    monkeypatch.setenv("SHARDCACHE_ATTEMPTS", "1")
    s3.put(bucket, "train-0000.tar", b"x" * 10)
    s3.client().delete_object(Bucket=bucket, Key="train-0001.tar")
    with Cache(tmp_path / "cache") as cache:
        data = cache.entry(warm[2]).data
    data.chmod(0o600)
    data.write_bytes(b"y" * data.stat().st_size)
    said.lines("--remote", code=4)
    sidecar(tmp_path / "cache", warm[2]).unlink()
    unreadable = sidecar(tmp_path / "cache", warm[3])
    proxy.close()
    said("--remote", code=4)
    from shardcache.store import verify

    def failing(fd):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(verify, "read_blocks", failing)
    assert unreadable.exists()
    said("train-0003.tar", code=3)


def test_json_of_stats(said, run, warm, tmp_path, monkeypatch):
    for environment in ({}, {"SHARDCACHE_RANK": "2"}):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with Cache(tmp_path / "cache", min_free=0) as cache, cache.open(warm[0]) as stream:
            stream.read()
    assert said()["opens"] == 2
    monkeypatch.setenv("SHARDCACHE_RANK", "3")  # fetched, and opened nothing
    run("rm", "-y", warm[1])
    run("prewarm", warm[1])
    assert [row["rank"] for row in said("--by", "rank")["ranks"]] == [None, 2, 3]
    said.lines("--by", "rank")
    said.lines("--by", "hour")
    said("--by", "hour")
    assert said("--zero")["zeroed"]
    assert said("--dir", tmp_path / "none")["since"] is None


def test_json_of_top(said, warm, slow, proxy, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDCACHE_RANK", "1")
    said("--dir", tmp_path / "none", "--interval", "0.2")
    urls = [slow.replace("{0..2}", str(number)) for number in range(2)]
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(Cache(tmp_path / "cache", min_free=0))
        stack.callback(proxy.resume)

        def fetch(url):
            with contextlib.suppress(Exception):
                cache.fetch(url)

        def begin(url):
            thread = threading.Thread(target=fetch, args=(url,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(proxy.resume)
            stack.callback(cache.cancel)

        begin(urls[0])
        layout = cache.node_layout
        while not list(layout.partial.glob("*/progress")):
            time.sleep(0.01)

        # Some wait, and not all is known of each.
        now, key = time.time(), cache.parse(urls[0]).key
        me, there = Holder(7, "node-2", None, None, now), Holder(9, "node-7", 5, "17", now)
        for wait in (
            Wait(urls[0], key, me, None),
            Wait(urls[0], "a" * 32, there, me),
            Wait(urls[0], "b" * 32, me, there),
            Wait(urls[0], "c" * 32, me, None),
        ):
            note = WaitNote(layout)
            stack.callback(note.close)
            note.say(wait)

        look, looks = Watcher.look, []

        def then_something_happens(self):
            found = look(self)
            looks.append(found)
            if len(looks) == 1:
                begin(urls[1])
                with Cache(tmp_path / "cache", min_free=0) as other, other.open(warm[0]) as stream:
                    stream.read()
                while len(list(layout.partial.glob("*/progress"))) < 2:
                    time.sleep(0.01)
            return found

        with monkeypatch.context() as eventful:
            eventful.setattr(Watcher, "look", then_something_happens)
            said.lines("--interval", "0.2", "--count", "2")
        for path in layout.partial.glob("*/progress"):
            path.unlink()
        for path in layout.locks.glob("*/*.lock"):
            os.truncate(path, 0)
        monkeypatch.setenv("SHARDCACHE_MAX_SIZE", "1GB")
        said("--interval", "0.2")


def test_json_of_report(said, run, warm, tmp_path, monkeypatch):
    run("rm", "-y", warm[0])
    run("prewarm", warm[0])
    for rank in ("", "2"):
        monkeypatch.setenv("SHARDCACHE_RANK", rank) if rank else None
        with Cache(tmp_path / "cache", min_free=0) as cache, cache.open(warm[0]) as stream:
            stream.read()
    assert [row["fetches"] for row in said()["refetched"]] == [2]
    monkeypatch.setenv("SHARDCACHE_MAX_SIZE", "1GB")
    said()
    said("--dir", tmp_path / "none")


# -- what needs no cache -----------------------------------------------------------------


def test_json_of_recipe(said, tmp_path):
    for kind in RECIPES:
        said(kind)
    assert Path(said("cron", "-o", tmp_path)["files"][0]["path"]).is_file()


def test_json_of_config(said):
    said()
    said.lines()


def test_json_of_dir(said):
    said()


def test_json_of_doctor(said, run, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDCACHE_MAX_SIZE", "100%")
    said()
    monkeypatch.setenv("SHARDCACHE_MAX_SIZE", "much")
    said(code=4)
    said.lines(code=4)


def test_json_of_completion(said):
    for shell in ("bash", "zsh", "fish"):
        said(shell)


def test_json_of_demo(said, monkeypatch, tmp_path):
    """Its steps are made up here; in tests/test_demo.py they are not, and held against the same."""
    from shardcache.cli import demorun as demo

    steps = tuple(demo.Step("x", 8, 1, 100, 100, samples, True, 1.5) for samples in (None, 3))
    for directory in (None, tmp_path):
        report = demo.DemoReport(steps, 16, 100, (1, 1), directory)
        monkeypatch.setattr(demo, "run", lambda report=report, **options: report)
        said()
        said.lines()


# -- for spreadsheets --------------------------------------------------------------------

TSV = {
    "prewarm": ["{spec}"],
    "ls": [],
    "ls --partial": [],
    "path": ["{url}"],
    "rm": ["-n", "{url}"],
    "pin": ["{url}"],
    "unpin": ["{url}"],
    "clean": ["-n", "--all"],
    "verify": ["--remote"],
    "stats": [],
    "stats --by rank": [],
    "stats --by hour": [],
    "top": ["--count", "2", "--interval", "0.2"],
    "report": [],
    "recipe": ["slurm"],
    "config": [],
    "dir": [],
    "doctor": [],
    "completion": ["zsh"],
    "demo": [],
}


@pytest.fixture
def stored(run, warm, s3, bucket, monkeypatch):
    """A cache with something to say: pinned, damaged, changed at the origin."""
    from shardcache.cli import demorun as demo

    run("pin", warm[0])
    s3.put(bucket, "train-0002.tar", b"x")
    step = demo.Step("x", 8, 1, 100, 100, None, True, 1.5)
    report = demo.DemoReport((step,), 16, 100, (1, 1), None)
    monkeypatch.setattr(demo, "run", lambda **options: report)
    return warm


def test_tsv_is_a_heading_and_rows_of_fields_that_json_has(run, stored, spec):
    assert {command.split()[0] for command in TSV} == set(_COMMANDS)
    for command, more in TSV.items():
        words = [*command.split(), *(word.format(spec=spec, url=stored[0]) for word in more)]
        code, out, err = run(*words, "--format", "tsv")
        assert code in (0, 1, 4, 6), (command, err)
        heading, *rows = [line.split("\t") for line in out.splitlines()]
        assert all(len(row) == len(heading) for row in rows), out
        assert not any(cell.startswith("{") for row in rows for cell in row), out
        assert len(rows) == 2 if command == "top" else rows or command == "ls --partial", out
        schema = json.loads((HOME / f"{command.split()[0]}.json").read_text())
        known = {name for name, _ in fields(schema)}
        assert {part for name in heading for part in name.split(".")} <= known, command
