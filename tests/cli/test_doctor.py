"""`shardcache doctor`: real disks, limits and servers, each with the finding it deserves."""
# ruff: noqa: F401, F811  (fixtures are imported, and shadowed by arguments)

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from shardcache.cache import Cache
from shardcache.cli import checkup, doctor, reach
from shardcache.cli.doctor import examine
from shardcache.config import Config
from shardcache.layout import Layout
from tests.stress.fuse.shim import Shim, mounted, needs_fuse
from tests.support.clitools import data, run, run_process, spec
from tests.support.disktools import disk, limited_group, needs_mounts, remount
from tests.support.shop import Shop
from tests.support.storetools import forked, tree
from tests.support.tars import make_tar

MIB = 1 << 20
Rows = list[dict[str, str]]
Doctor = Callable[..., tuple[int, Rows]]


@pytest.fixture
def ask(run) -> Doctor:
    """Runs the doctor; gives its exit code and findings."""

    def ask(*arguments: object) -> tuple[int, Rows]:
        code, out, err = run("doctor", "--json", *arguments)
        assert "Traceback" not in err
        return code, json.loads(out)["findings"]

    return ask


def of(rows: Rows, check: str, subject: object = None) -> dict[str, str]:
    (row,) = (
        r for r in rows if r["check"] == check and subject in (None, r["subject"])
    )  # fmt: skip
    return row


def bad(rows: Rows, subject: object = None) -> set[tuple[str, str]]:
    """Level and check of all that is not ok."""
    return {
        (r["level"], r["check"])
        for r in rows
        if r["level"] != "ok" and str(subject) in ("None", r["subject"])
    }


@pytest.fixture
def group() -> Iterator[Path]:
    yield from limited_group()


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[Shim]:
    needs_fuse()
    with mounted(tmp_path) as found:
        yield found


# -- what it says, and how -------------------------------------------------------


def test_a_healthy_directory_is_exit_0_and_is_not_made(run, tmp_path):
    before = tree(tmp_path)
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    first, *_, last = out.splitlines()
    assert re.fullmatch(
        rf"ok    {tmp_path / 'cache'}  \w+, local, writable, rename and flock work; will be made",
        first,
    )
    assert re.fullmatch(r"0 failed, \d warnings?", last)
    assert tree(tmp_path) == before


def test_a_cache_is_looked_at_and_left_as_it_is(ask, tmp_path):
    shop = Shop(tmp_path, 3)
    with Cache(shop.path, cache_local=True, min_free=0) as cache:
        for url in shop.urls:
            cache.fetch(url)
    before = tree(tmp_path)
    code, rows = ask()
    assert code == 0
    assert "; 3 shards, " in of(rows, "filesystem")["found"]
    assert of(rows, "locks")["found"] == "flock in the cache"
    assert of(rows, "leftovers")["level"] == "ok"
    assert tree(tmp_path) == before


def test_an_empty_directory_stays_empty(ask, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o700)
    code, rows = ask()
    assert code == 0
    assert of(rows, "filesystem")["found"].endswith("; empty")
    assert list((tmp_path / "cache").iterdir()) == []


def test_machines_get_every_finding_in_their_format(run, tmp_path):
    (tmp_path / "cache").write_text("")
    code, out, _ = run("doctor", "--json")
    found = json.loads(out)
    assert (code, found["schema"], found["command"]) == (4, 1, "doctor")
    rows = found["findings"]
    assert all(list(r) == ["level", "check", "subject", "found", "fix"] for r in rows)
    assert {row["level"] for row in rows} <= {"ok", "warn", "fail"}
    for row in rows:
        assert bool(row["fix"]) == (row["level"] != "ok"), row
    levels = [row["level"] for row in rows]
    assert found["summary"] == {level: levels.count(level) for level in ("ok", "warn", "fail")}
    code, out, _ = run("doctor", "--format", "jsonl")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["type"] for line in lines] == [*["finding"] * len(rows), "summary"]
    assert code == 4


def test_people_get_the_fix_in_the_same_line_and_quiet_ones_what_is_wrong(run, tmp_path):
    (tmp_path / "cache").write_text("")
    code, out, _ = run("doctor")
    line = f"fail  {tmp_path / 'cache'}  {tmp_path / 'cache'} is not a directory. Point dir at"
    assert code == 4 and out.startswith(line)
    assert re.search(r"^1 failed, \d warnings?$", out.splitlines()[-1])
    code, quiet, _ = run("doctor", "-q")
    assert code == 4 and quiet.startswith(line) and "ok " not in quiet


def test_warnings_do_not_fail(ask, monkeypatch):
    monkeypatch.setenv("SHARDCACHE_POLICY", "")
    code, rows = ask()
    assert code == 0
    assert of(rows, "environment", "SHARDCACHE_POLICY")["level"] == "warn"


def test_a_check_that_fails_itself_is_a_warning(run, ask, monkeypatch):
    def broken(*arguments: object) -> Any:
        raise ZeroDivisionError("one over none")

    monkeypatch.setattr(checkup, "check_inodes", broken)
    monkeypatch.setattr(doctor, "read_rules", broken)
    code, rows = ask()
    assert code == 0
    row = of(rows, "inodes")
    assert row["level"] == "warn"
    assert row["found"] == "could not be checked: ZeroDivisionError: one over none"
    assert of(rows, "cleaners", "tmpfiles.d")["level"] == "warn"
    assert of(rows, "clock")["level"] == "ok"
    monkeypatch.setattr(doctor, "look", broken)
    monkeypatch.setattr(doctor.Machine, "now", broken)
    code, rows = ask()
    assert bad(rows) >= {("warn", "filesystem"), ("warn", "machine")}
    assert code == 0 and of(rows, "environment")["level"] == "ok"


# -- configuration ----------------------------------------------------------------


def test_no_directory_is_a_failure_and_the_machine_is_checked_all_the_same(
    ask, monkeypatch, tmp_path
):
    monkeypatch.delenv("SHARDCACHE_DIR")
    monkeypatch.chdir(tmp_path)
    code, rows = ask("--url", "s3://b/x.tar")
    assert code == 4
    assert "SHARDCACHE_DIR=" in of(rows, "configuration")["fix"]
    assert of(rows, "clock")["level"] == "ok"
    assert of(rows, "origin")["found"].startswith("not read")


def test_of_a_broken_configuration_the_directory_is_checked(ask, monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDCACHE_MAX_SIZ", "5GB")
    code, rows = ask("--url", "s3://b/x.tar")
    assert code == 4
    assert "Did you mean SHARDCACHE_MAX_SIZE?" in of(rows, "configuration")["fix"]
    assert of(rows, "origin")["found"].startswith("not read")
    assert of(rows, "filesystem", str(tmp_path / "cache"))["level"] == "ok"


def test_odd_variables_are_named(ask, monkeypatch, tmp_path):
    assert of(ask()[1], "environment")["found"] == "nothing odd"
    monkeypatch.setenv("WDS_CACHE", str(tmp_path / "other"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    code, rows = ask()
    assert code == 0
    assert str(tmp_path / "other") in of(rows, "environment", "WDS_CACHE")["found"]
    assert "AWS_ACCESS_KEY_ID" in of(rows, "environment", "AWS_SECRET_ACCESS_KEY")["found"]
    monkeypatch.setenv("WDS_CACHE", str(tmp_path / "cache"))
    assert ("warn", "environment") not in bad(ask()[1], "WDS_CACHE")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    code, rows = ask()
    assert code == 4
    assert of(rows, "environment", "LOCAL_WORLD_SIZE")["level"] == "fail"


# -- disks -------------------------------------------------------------------------


def test_a_directory_of_others_things_is_a_warning(ask, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / "model.ckpt").write_text("precious")
    code, rows = ask()
    assert code == 0
    assert ("warn", "filesystem") in bad(rows)
    assert any(f"{tmp_path / 'cache'}/shards" in row["fix"] for row in rows)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["model.ckpt"]


def test_what_the_library_refuses_fails_with_the_librarys_advice(ask, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    code, rows = ask()
    assert code == 4
    fails = [row for row in rows if row["level"] == "fail"]
    assert "can be written by every user" in fails[0]["found"]
    assert fails[0]["fix"].startswith("Use a directory of your own")


@needs_mounts
def test_a_read_only_disk_fails(ask, tmp_path):
    with disk(tmp_path / "disk", "size=1m") as path:
        remount(path, "ro")
        for directory in (path, path / "below" / "shards"):
            code, rows = ask("--dir", directory)
            row = of(rows, "filesystem")
            assert (code, row["level"]) == (4, "fail")
            assert "Read-only file system" in row["found"]
            assert row["fix"].startswith(f"mount -o remount,rw {path}")


@needs_mounts
def test_a_disk_smaller_than_its_limits_warns(ask, tmp_path, monkeypatch):
    monkeypatch.setattr("shardcache.cli.checkup.MEMORY_TYPES", frozenset())
    with disk(tmp_path / "disk", "size=10m") as path:
        monkeypatch.setenv("SHARDCACHE_DIR", str(path))
        monkeypatch.setenv("SHARDCACHE_MAX_SIZE", "20MiB")
        code, rows = ask()
        row = of(rows, "space")
        assert (code, row["level"]) == (0, "warn")
        assert "allows 21.0 MB, but the disk has 10.5 MB" in row["found"]
        monkeypatch.setenv("SHARDCACHE_MAX_SIZE", "9MiB")
        assert of(ask()[1], "space")["level"] == "ok"
        monkeypatch.setenv("SHARDCACHE_MIN_FREE", "20%")
        assert "min_free keeps 2.1 MB" in of(ask()[1], "space")["found"]
        assert of(ask()[1], "space")["level"] == "warn"
        monkeypatch.setenv("SHARDCACHE_MIN_FREE", "0")
        (path / "big").write_bytes(bytes(6 * MIB))
        row = of(ask()[1], "space")
        assert row["level"] == "warn" and "only 4.2 MB can be held now" in row["found"]
        monkeypatch.setenv("SHARDCACHE_MIN_FREE", "5MB")
        code, rows = ask()
        assert (code, of(rows, "space")["level"]) == (4, "fail")
        assert "nothing can be stored" in of(rows, "space")["found"]


@needs_mounts
@pytest.mark.parametrize("types", [checkup.MEMORY_TYPES, frozenset()])
def test_what_the_cache_holds_itself_is_not_missing(ask, tmp_path, monkeypatch, types):
    monkeypatch.setattr("shardcache.cli.checkup.MEMORY_TYPES", types)
    with disk(tmp_path / "disk", "size=10m") as path:
        shop = Shop(tmp_path, 6)
        root = path / "cache"
        with Cache(root, cache_local=True, min_free=0) as cache:
            for url in shop.urls:
                cache.fetch(url)
        free = os.statvfs(path)
        room = free.f_bavail * free.f_frsize
        (path / "others").write_bytes(bytes(room - 65536))
        monkeypatch.setenv("SHARDCACHE_DIR", str(root))
        monkeypatch.setenv("SHARDCACHE_MAX_SIZE", str(6 * shop.size))
        assert ("warn", "space") not in bad(ask()[1])
        assert ("warn", "memory") not in bad(ask()[1])


@needs_mounts
def test_a_disk_without_inodes_fails(ask, tmp_path):
    with disk(tmp_path / "disk", "size=10m,nr_inodes=6") as path:
        assert of(ask("--dir", path)[1], "inodes")["level"] == "ok"
        for number in range(4):
            (path / str(number)).touch()
        code, rows = ask("--dir", path / "cache")
        assert (code, of(rows, "inodes")["level"]) == (4, "fail")
        assert "inodes free" in of(rows, "inodes")["found"]


@needs_mounts
def test_two_tiers_on_one_disk_are_a_warning(ask, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDCACHE_TIERS", f"{tmp_path / 'fast'}=1MB")
    code, rows = ask()
    assert code == 0
    assert str(tmp_path / "cache") in of(rows, "tiers", str(tmp_path / "fast"))["found"]
    assert {r["subject"] for r in rows if r["check"] == "filesystem"} == {
        str(tmp_path / "fast"),
        str(tmp_path / "cache"),
    }
    with disk(tmp_path / "fast", "size=10m"):
        assert ("warn", "tiers") not in bad(ask()[1])
    assert not list((tmp_path / "fast").iterdir())


# -- memory ------------------------------------------------------------------------


@needs_mounts
def test_a_ram_disk_smaller_than_max_size_fails(ask, tmp_path, monkeypatch):
    with disk(tmp_path / "ram", "size=8m") as path:
        monkeypatch.setenv("SHARDCACHE_TIERS", f"{path / 'shards'}=9MiB")
        code, rows = ask()
        row = of(rows, "memory")
        assert (code, row["level"], row["subject"]) == (4, "fail", str(path / "shards"))
        assert row["found"] == f"max_size 9.4 MB, but {path} has a limit of 8.4 MB"
        monkeypatch.setenv("SHARDCACHE_TIERS", f"{path / 'shards'}=7MiB")
        code, rows = ask()
        assert (code, of(rows, "memory")["level"]) == (0, "ok")
        assert list(path.iterdir()) == []


@needs_mounts
def test_a_ram_disk_larger_than_the_memory_of_the_cgroup_fails(tmp_path, group):
    member = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', f"{group}/cgroup.procs", sys.executable]
    member += ["-m", "shardcache"]
    found = {}
    with disk(tmp_path / "ram", "size=1g") as path:
        for size in ("300MB", "267MB", "100MB"):
            code, out, _ = run_process(
                "doctor",
                "--json",
                directory=path / "shards",
                environment={"SHARDCACHE_MAX_SIZE": size},
                python=member,
            )
            row = of(json.loads(out)["findings"], "memory")
            found[size] = code, row["level"], row["found"]
    assert found["300MB"] == (4, "fail", "max_size 300.0 MB, but cgroup memory is 268.4 MB")
    assert found["267MB"][:2] == (0, "warn")
    assert "of cgroup memory are left" in found["267MB"][2]
    assert found["100MB"][:2] == (0, "ok")


# -- network and broken filesystems --------------------------------------------------


def test_a_network_mount_is_a_warning_and_says_how_locks_are_kept(ask, shim):
    code, rows = ask("--dir", shim.root / "cache")
    assert code == 0
    warned = [row for row in rows if row["level"] == "warn" and row["check"] == "filesystem"]
    assert "a network filesystem" in warned[0]["found"] and "local disk" in warned[0]["fix"]
    assert "nodes agree by leases" in of(rows, "locks")["found"]
    assert list(shim.backing.iterdir()) == []


def test_flock_where_it_means_nothing_fails_if_it_was_asked_for(ask, shim, monkeypatch):
    monkeypatch.setenv("SHARDCACHE_LOCKS", "flock")
    code, rows = ask("--dir", shim.root / "cache")
    assert (code, of(rows, "locks")["level"]) == (4, "fail")


@pytest.mark.parametrize("how", ["refused", "lying", "hanging"])
def test_a_flock_that_does_not_work_is_a_warning(shim, how, monkeypatch, tmp_path):
    # As if it were a disk of this node: there, flock is expected to work.
    shim.set(flock=how, killable=True)
    place = doctor.look(Config(shim.root / "cache"), 1.0)
    assert place.mount is not None and not place.hung
    local = checkup.Mount(place.mount.point, "xfs", "/dev/x", frozenset())
    place = checkup.Place("/x", mount=local, kind="missing", flock=place.flock)
    (finding,) = checkup.check_locks(place, Config("/x"))
    assert (finding.level, "flock" in finding.found) == ("warn", True)
    shim.heal()
    shim.set(flock="working")
    assert list(shim.backing.iterdir()) == []
    assert doctor.look(Config(shim.root / "cache")).flock == "works"


@pytest.mark.parametrize("killable", [True, False])
@pytest.mark.parametrize("op", ["lookup", "statfs", "mkdir", "write"])
def test_a_dead_mount_fails_and_nothing_waits_for_it(shim, op, killable, tmp_path):
    shim.set(killable=killable)
    shim.fail(op, hang=True, times=-1)
    config = Config(shim.root / "cache", tiers=[{"dir": tmp_path / "fast", "max_size": MIB}])
    began = time.monotonic()
    findings = list(examine(config, silence=1.0))
    assert time.monotonic() - began < 45  # it would never end
    rows = [f for f in findings if f.subject == str(shim.root / "cache")]
    assert [f.level for f in rows] == ["fail"]
    assert "does not answer within" in rows[0].found
    assert str(shim.root) in rows[0].found and "mounted anew" in rows[0].fix
    assert any(f.level == "ok" and f.subject == str(tmp_path / "fast") for f in findings)
    shim.heal()


def test_the_command_ends_though_what_it_asked_never_does(shim, tmp_path):
    shim.set(killable=False)
    shim.fail("lookup", hang=True, times=-1)
    code, out, _ = run_process("doctor", "--json", directory=shim.root / "cache")
    assert (code, shim.hanging() > 0) == (4, True)
    assert "within 5 s" in of(json.loads(out)["findings"], "filesystem")["found"]
    shim.heal()


def test_a_mount_whose_server_is_gone_fails(ask, shim):
    shim.crash()
    code, rows = ask("--dir", shim.root / "cache")
    row = of(rows, "filesystem")
    assert (code, row["level"]) == (4, "fail")
    assert "not connected" in row["found"]


def test_files_that_cannot_be_renamed_fail(ask, shim):
    shim.fail("rename", error=errno.EIO, times=-1)
    code, rows = ask("--dir", shim.root / "cache")
    assert code == 4
    assert any("cannot be renamed" in row["found"] for row in rows)
    assert list(shim.backing.iterdir()) == []


def test_ranks_without_hard_links_are_a_warning(ask, shim, monkeypatch):
    monkeypatch.setenv("SHARDCACHE_ISOLATION", "rank")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert of(ask("--dir", shim.root / "cache")[1], "isolation")["level"] == "ok"
    shim.fail("link", error=errno.EPERM, times=-1)
    row = of(ask("--dir", shim.root / "cache")[1], "isolation")
    assert row["level"] == "warn"
    assert "8 ranks of this node take 8 times the space" in row["found"]
    monkeypatch.setenv("SHARDCACHE_ISOLATION", "node")
    assert ("warn", "isolation") not in bad(ask("--dir", shim.root / "cache")[1])


# -- cleaners, pods, leftovers ---------------------------------------------------------


def test_a_directory_that_systemd_empties_is_a_warning(tmp_path):
    rules = tmp_path / "tmpfiles.d"
    rules.mkdir()
    shards = tmp_path / "link" / "shards"
    (tmp_path / "link").symlink_to(tmp_path)
    (rules / "tmp.conf").write_text(f"q {tmp_path} 1777 root root 30d\n")

    def found() -> Any:
        findings = examine(Config(shards), tmpfiles=[rules])
        return next(f for f in findings if f.check == "cleaners")

    finding = found()
    assert finding.level == "warn"
    assert "may delete shards unused for 30d" in finding.found
    line = finding.fix.partition(": ")[2]
    assert line == f"x {tmp_path / 'shards'}"
    (rules / "shardcache.conf").write_text(f"{line}\n")
    assert found().level == "ok"


def test_a_pod_has_to_state_its_ephemeral_limit(ask, monkeypatch, tmp_path):
    assert not any(row["check"] == "kubernetes" for row in ask()[1])
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    if tmp_path.stat().st_dev != Path("/").stat().st_dev:
        pytest.skip("the test's directory is not on the root filesystem")
    code, rows = ask()
    assert (code, of(rows, "kubernetes")["level"]) == (0, "warn")
    monkeypatch.setenv("SHARDCACHE_EPHEMERAL_LIMIT", "10GB")
    assert of(ask()[1], "kubernetes")["level"] == "ok"


@pytest.mark.parametrize(
    ("mount", "counts"),
    [
        (("/", "overlay", "overlay", "/"), True),
        (("/cache", "xfs", "/dev/a", "/pods/1/volumes/kubernetes.io~empty-dir/cache"), True),
        (("/cache", "xfs", "/dev/a", "/shards"), False),
        (("/dev/shm", "tmpfs", "shm", "/"), False),
        (("/", "tmpfs", "rootfs", "/"), False),
    ],
)
def test_only_what_counts_against_a_pod_needs_its_limit(mount, counts):
    point, kind, source, root = mount
    place = checkup.Place(
        "/cache", mount=checkup.Mount(point, kind, source, frozenset(), root), size=10**9
    )
    found = list(checkup.check_kubernetes(place, Config("/cache"), True))
    assert [f.level for f in found] == (["warn"] if counts else [])
    assert list(checkup.check_kubernetes(place, Config("/cache"), False)) == []


@pytest.mark.locks_work("flock", "answers")
def test_what_dead_jobs_left_is_found_and_the_fix_removes_it(run, ask, tmp_path):
    shop = Shop(tmp_path, 2)
    with Cache(shop.path, cache_local=True, min_free=0) as cache:
        os.truncate(cache.fetch(shop.urls[0]).data, 100)
        with cache.open(shop.urls[0]) as stream:
            stream.read()
        cache.fetch(shop.urls[1])
    layout = Layout.of_root(shop.path)

    def die(parent: Any) -> None:
        cache = Cache(shop.path, cache_local=True, min_free=0)
        cache.fetch(shop.urls[1])
        with cache.open(shop.urls[1]) as stream:
            stream.read(1)
            parent.say("in")
            parent.hear()

    with forked(die) as child:
        assert child.hear() == "in"
        partial = layout.new_partial("a" * 32, "b" * 24)
        partial.mkdir()
        (partial / "x.tar").write_bytes(bytes(5000))
        row = of(ask()[1], "leftovers")
        assert "fetches that died: 1 (4.1 KB)" in row["found"] or "(5.0 KB)" in row["found"]
        assert "sessions" not in row["found"]  # that one lives
        child.kill()
    before = tree(tmp_path)
    code, rows = ask()
    row = of(rows, "leftovers")
    assert (code, row["level"]) == (0, "warn")
    assert "damaged shards set aside: 1" in row["found"]
    assert "sessions of dead processes: 1" in row["found"]
    assert tree(tmp_path) == before
    command = row["fix"].removeprefix("Run: shardcache ").split()
    assert run(*command)[0] == 0
    assert of(ask()[1], "leftovers")["level"] == "ok"


# -- limits ------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "code", "level"), [(90, 4, "fail"), (200, 0, "warn")])
def test_too_few_open_files_are_told(tmp_path, limit, code, level):
    limited = ["prlimit", f"--nofile={limit}:{limit}", sys.executable, "-m", "shardcache"]
    found, out, err = run_process("doctor", "--json", directory=tmp_path / "c", python=limited)
    row = of(json.loads(out)["findings"], "files")
    assert (found, row["level"]) == (code, level), err
    assert f"limit {limit}," in row["found"] and "ulimit -n" in row["fix"]


def test_few_cpus_for_many_ranks_are_told(ask, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(os.cpu_count()))
    row = of(ask()[1], "cpus")
    assert row["level"] == "warn"
    assert f"{os.cpu_count()} ranks on this node: 1 each" in row["found"]


# -- the origin --------------------------------------------------------------------


def test_a_shard_is_read_and_timed(ask, spec, bucket, data, s3, tmp_path):
    big = make_tar(9, 60, 100_000)
    etag = s3.put(bucket, "big.tar", big)
    assert len(big) > 8 * MIB
    code, rows = ask("--url", f"s3://{bucket}/big.tar")
    row = of(rows, "origin")
    assert (code, row["level"], row["subject"]) == (0, "ok", f"s3://{bucket}/big.tar")
    assert re.fullmatch(
        rf"8\.4 MB in [\d.]+ m?s \([\d.]+ [MG]B/s\), first byte after [\d.]+ m?s, ETag {etag}",
        row["found"],
    )
    agreed = [row["found"] for row in rows if row["check"] == "clock"]
    assert len(agreed) == 2 and agreed[1].startswith("agrees with http://127.0.0.1")
    small = f"s3://{bucket}/train-0000.tar"
    assert of(ask("--url", small)[1], "origin")["level"] == "ok"
    assert not (tmp_path / "cache").exists()


def test_what_is_not_read_fails_with_the_librarys_reason(ask, spec, bucket, monkeypatch):
    code, rows = ask("--url", f"s3://{bucket}/absent.tar")
    row = of(rows, "origin")
    assert (code, row["level"]) == (4, "fail")
    assert "not found at http://127.0.0.1" in row["fix"] and "(404)" in row["fix"]
    code, rows = ask("--url", "ftp://x/y.tar")
    assert (code, of(rows, "origin")["level"]) == (4, "fail")
    assert "allow_schemes" in of(rows, "origin")["fix"]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    code, rows = ask("--url", f"s3://{bucket}/train-0000.tar")
    assert (code, of(rows, "origin")["level"]) == (4, "fail")
    assert "AWS_SECRET_ACCESS_KEY" in of(rows, "origin")["fix"]
    monkeypatch.setenv("SHARDCACHE_ENDPOINT_URL", "http://127.0.0.1:9")
    code, rows = ask("--url", f"s3://{bucket}/train-0000.tar")
    assert (code, of(rows, "origin")["level"]) == (4, "fail")
    assert "127.0.0.1:9" in of(rows, "origin")["fix"]
    assert len([row for row in rows if row["check"] == "clock"]) == 1


def test_upstreams_are_asked_whether_they_have_it(ask, spec, bucket, data, tmp_path):
    near, file = tmp_path / "near", tmp_path / "job.toml"
    (near / bucket).mkdir(parents=True)
    (near / bucket / "train-0000.tar").write_bytes(data["train-0000.tar"])
    dead = '{url = "s3://near/x", endpoint_url = "http://127.0.0.1:9"}'
    file.write_text(f'dir = "{tmp_path / "cache"}"\nupstreams = ["{near}", {dead}]\n')
    code, rows = ask("--config", file, "--url", f"s3://{bucket}/train-0000.tar")
    assert code == 0
    assert of(rows, "upstream", str(near))["found"].startswith("has it: s3://")
    row = of(rows, "upstream", "s3://near/x")
    assert row["level"] == "warn" and "http://127.0.0.1:9" in row["fix"]
    rows = ask("--config", file, "--url", f"s3://{bucket}/train-0001.tar")[1]
    assert of(rows, "upstream", str(near))["found"].startswith("has not got it")


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, Any]]]:
    """A web server with a clock of its own."""
    state: dict[str, Any] = {"ahead": 0.0, "seen": []}

    class Handler(BaseHTTPRequestHandler):
        def date_time_string(self, timestamp: float | None = None) -> str:
            return formatdate(time.time() + state["ahead"], usegmt=True)

        def do_GET(self) -> None:
            state["seen"].append((self.command, self.path, dict(self.headers)))
            self.send_response(200)
            self.send_header("ETag", '"one"')
            self.send_header("Content-Length", "5")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(b"shard")

        do_HEAD = do_GET

        def log_message(self, *arguments: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{found.server_port}", state
        finally:
            found.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("ahead", "level", "said"),
    [
        (0, "ok", "agrees with"),
        (120, "warn", "behind"),
        (1200, "fail", "behind"),
        (-1200, "fail", "ahead of"),
    ],
)
def test_a_clock_that_differs_from_the_origins_is_told(ask, server, ahead, level, said):
    place, state = server
    state["ahead"] = ahead
    code, rows = ask("--url", f"{place}/a.tar?sig=CaNaRy&X-Amz-Signature=CaNaRy")
    _, row = (row for row in rows if row["check"] == "clock")
    assert (row["level"], code) == (level, 4 if level == "fail" else 0)
    assert said in row["found"] and place in row["found"]
    assert "CaNaRy" not in json.dumps(rows)
    asked = [(path, headers) for command, path, headers in state["seen"] if command == "HEAD"]
    assert asked[-1][0] in ("/", "") and "Authorization" not in asked[-1][1]


def test_an_origin_that_never_answers_ends_nobody(tmp_path, monkeypatch):
    def hang(config: Config, url: str) -> Iterator[checkup.Finding]:
        yield checkup.Finding("ok", "clock", "clock", "right")
        time.sleep(5)

    monkeypatch.setattr(doctor, "read_origin", hang)
    monkeypatch.setattr(doctor, "_ORIGIN", 0.5)
    *_, before, last = examine(Config(tmp_path), url="/net/x.tar")
    assert (last.check, last.level) == ("origin", "fail")
    assert before.found == "right"  # what was known stays known


def test_whatever_a_check_says_is_freed_from_credentials(tmp_path, monkeypatch):
    secret = "https://me:CaNaRy@host/x?X-Amz-Signature=CaNaRy&token=CaNaRy"

    def talk(config: Config, url: str) -> Iterator[checkup.Finding]:
        yield checkup.Finding("fail", "origin", secret, secret, secret)
        raise ValueError(secret)

    monkeypatch.setattr(doctor, "read_origin", talk)
    *_, said, failed = examine(Config(tmp_path), url="s3://b/x.tar")
    assert (said.level, failed.level) == ("fail", "warn")
    assert "could not be checked: ValueError: https://host/x?" in failed.found
    assert "CaNaRy" not in repr((said, failed))


def test_no_credential_is_shown(run, tmp_path, spec, bucket, monkeypatch):
    canary = "CaNaRyCaNaRy0123456789"
    file = tmp_path / "job.toml"
    file.write_text(
        f'dir = "{tmp_path / "cache"}"\n[storage_options]\nkey = "{canary}"\nsecret = "{canary}"\n'
    )
    monkeypatch.setenv("HTTP_X_PASSWORD", canary)
    monkeypatch.setenv("AWS_SESSION_TOKEN", canary)
    url = f"s3://{bucket}/train-0000.tar"
    for arguments in (
        ["--config", file, "--url", url],
        ["--config", file, "--url", f"https://me:{canary}@127.0.0.1:9/x?X-Amz-Signature={canary}"],
        ["--config", file, "--url", f"pipe:curl -u me:{canary} https://x/y"],
        ["--config", file, "--url", f"what://me:{canary}@x/y?sig={canary}&token={canary}"],
    ):
        for format in ("human", "json"):
            code, out, err = run("doctor", "-vv", "--format", format, *arguments)
            assert code == 4
            assert canary not in out + err
