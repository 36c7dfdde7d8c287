"""`shardcache doctor`: its findings about real disks, limits and servers."""

import ctypes
import json
import os
import re
import socket
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from shardcache.cache import Cache
from tests.support.disktools import disk, needs_root, remount, unmount
from tests.support.shop import Shop
from tests.support.storetools import tree
from tests.support.tars import make_tar
from tests.support.webservers import answer

MIB = 1 << 20


@pytest.fixture
def ask(run):
    """Run the doctor, which exits with 4 if a check fails; returns its findings."""

    def ask(*arguments):
        code, out, _ = run("doctor", "--json", *arguments)
        rows = json.loads(out)["findings"]
        assert code == (4 if "fail" in [row["level"] for row in rows] else 0)
        return rows

    return ask


def of(rows, check, level=None):
    (row,) = (r for r in rows if r["check"] == check and level in (None, r["level"]))
    return row


def test_doctor_changes_nothing(run, ask, tmp_path):
    code, out, err = run("doctor")
    assert (code, err) == (0, "") and not (tmp_path / "cache").exists()
    assert out.startswith(f"ok    {tmp_path / 'cache'}  writable, will be created\n")
    assert re.fullmatch(r"0 failed, \d warnings?", out.splitlines()[-1])
    with Cache() as cache:
        cache.pin("s3://lab/a.tar")
    before = tree(tmp_path)
    rows = ask()
    assert of(rows, "owner", "ok")["found"] == "writable, mode 700"
    assert ", locks by flock" in of(rows, "filesystem", "ok")["found"]
    assert "tmpreaper" not in str(ask("--dir", "/opt/shards"))  # it empties /tmp
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("package", "fix"),
    [("aiobotocore", "pip install aiobotocore"), ("boto3", r"pip install boto3 botocore==[\d.]+")],
)
def test_versions_that_do_not_fit_are_named(ask, tmp_path, monkeypatch, package, fix):
    assert of(ask(), "packages", "ok")
    record = tmp_path / f"{package}-9.dist-info"
    record.mkdir()
    text = f"Metadata-Version: 2.1\nName: {package}\nVersion: 9\nRequires-Dist: botocore<1\n"
    (record / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    rows = [row for row in ask() if f"{package} needs botocore<1, not" in row["found"]]
    assert [row["level"] for row in rows] == ["warn"] and re.search(fix, rows[0]["fix"])


def test_findings_have_fixes_and_quiet_prints_failures_only(run, ask, tmp_path):
    cache = tmp_path / "cache"
    cache.write_text("")
    assert all(bool(row["fix"]) == (row["level"] != "ok") for row in ask())
    code, quiet, _ = run("doctor", "-q")
    line = f"fail  {cache}  it cannot be used. {cache} is not a directory. Point dir at"
    assert code == 4 and quiet.startswith(line) and "ok " not in quiet
    cache.unlink()
    cache.mkdir(mode=0o700)
    (cache / "model.ckpt").write_text("precious")
    for mode in 0o700, 0o777, 0o1777:  # the last one is that of /tmp
        cache.chmod(mode)
        fix = of(ask(), "owner", "fail")["fix"]
        assert f"{cache}/shards" in fix and ("chmod" in fix) == (mode == 0o777)


@needs_root
def test_a_read_only_disk_and_one_without_inodes_fail(ask, tmp_path):
    with disk(tmp_path / "disk", "size=10m,nr_inodes=6") as path:
        for number in range(4):
            (path / str(number)).touch()
        assert "inodes free" in of(ask("--dir", path / "cache"), "space", "fail")["found"]
        remount(path, "ro")
        fix = of(ask("--dir", path / "below" / "shards"), "owner", "fail")["fix"]
        assert f"mount -o remount,rw {path}" in fix
        assert fix.startswith(f"{path}/below/shards cannot be made, because {path} cannot be ")


@needs_root
def test_a_dead_mount_fails_without_a_hang(ask, tmp_path, monkeypatch):
    monkeypatch.setattr("shardcache.cli.doctor._PATIENCE", 0.5)
    (dead := tmp_path / "dead").mkdir()
    with open("/dev/fuse", "r+b", buffering=0) as unserved:
        options = f"fd={unserved.fileno()},rootmode=40000,user_id=0,group_id=0"
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mount(b"x", os.fsencode(dead), b"fuse", 0, options.encode()) == 0
        try:
            rows = ask("--dir", dead / "cache")
        finally:
            unmount(dead)
    assert "mount may be dead" in of(rows, "owner", "fail")["fix"]
    assert of(rows, "credentials")


@needs_root
def test_impossible_limits_are_named(ask, tmp_path, set_variables):
    shop = Shop(tmp_path, 6)
    with disk(tmp_path / "disk", "size=10m") as path:
        set_variables(SHARDCACHE_JOB="j")
        for isolation, urls in ("node", shop.urls[:3]), ("job", shop.urls[3:]):
            with Cache(path / "cache", cache_local=True, isolation=isolation) as cache:
                cache.prewarm(urls)

        def level(size, free="0", name="cache"):
            set_variables(SHARDCACHE_MAX_SIZE=size, SHARDCACHE_MIN_FREE=free)
            return of(ask("--dir", path / name), "space")["level"]

        assert level("20MiB") == "fail"  # on a RAM disk, it would take the job's memory
        assert level("9MiB", "20%") == "warn"
        (path / "others").write_bytes(bytes(os.statvfs(path).f_bavail * 4096 - (64 << 10)))
        assert level("9MiB") == "warn"
        assert level(f"{6 * shop.size}B") == "ok"  # the cache's own shards do not count as missing
        assert level("none", "10%") == "warn"  # new shards replace others, or are streamed
        assert level("1MiB", "5MB", "other") == "fail"


KEYS = {"AWS_ACCESS_KEY_ID": "AK", "AWS_SECRET_ACCESS_KEY": "hush", "AWS_SESSION_TOKEN": "T"}
HERE, DEAD = {"AWS_ENDPOINT_URL": "URL"}, {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
ROLE = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "URL"}
PROXY = {**HERE, "http_proxy": "http://me:hush@127.0.0.1:1"}
POD, ENDS = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {"AWS_CREDENTIAL_EXPIRATION": "END"}


def soon(minutes=180):
    return datetime.now(UTC) + timedelta(minutes=minutes)


ISSUED = {"AccessKeyId": "AK", "SecretAccessKey": "SK", "Expiration": soon().isoformat()}
LOGIN = answer("200 OK", json.dumps({**ISSUED, "Token": "T"}).encode())


def clock(minutes):
    return lambda head: answer("403 Forbidden", Date=format_datetime(soon(minutes)))


@pytest.mark.parametrize(
    ("variables", "response", "finding"),
    [
        ({}, "", "endpoint ok: not contacted"),
        ({}, "", "credentials warn: endpoint AWS, no credentials"),
        ({"AWS_SECRET_ACCESS_KEY": "x"}, "", "credentials warn: .*no cred.* or AWS_ACCESS_KEY_ID"),
        (KEYS | DEAD, "", "credentials warn: endpoint http.*1:1, .* from env.*; not tried: "),
        (KEYS | {"AWS_PROFILE": "x"}, "", r"credentials warn: .*\(x\) could not be found"),
        (KEYS | HERE, "200", "credentials ok: .*; accepted"),
        (KEYS | HERE, "403 AccessDenied", "credentials ok: .*; accepted"),  # for listing buckets
        (KEYS | HERE, "403 SignatureDoesNotMatch", "credentials fail: .*; refused.*NotMatch"),
        (KEYS | HERE, "400 ExpiredToken", "credentials fail: .*; refused.*log in again"),
        (KEYS | HERE, "501", "credentials warn: .*; not tried: it does not list buckets.*--url"),
        (ROLE | HERE, LOGIN, "credentials ok: .*container-role, .* in [23]h.*renewed"),
        (KEYS | HERE, "200", "credentials ok: .* env, which expire with their session;"),
        (KEYS | HERE | ENDS, "200", "credentials ok: .* env, .* in [23]h.*: log in again before "),
        *((HERE, clock(minutes), "endpoint ok: the clocks") for minutes in (0, 4)),
        *((HERE, clock(minutes), "endpoint warn: the clocks") for minutes in (-10, 40)),
        (PROXY, "", "endpoint fail: URL does not respond through the proxy 127.0.0.1:1: "),
        (PROXY | {"no_proxy": "HOST"}, "200", "endpoint ok: 127.0.0.1 has 1 address"),
        (POD, "", "space warn: .*Set max_size, or ephemeral_limit"),
        (POD | {"SHARDCACHE_EPHEMERAL_LIMIT": "1MB"}, "", "space ok: "),
    ],
)
def test_findings_about_the_environment(ask, serve, monkeypatch, variables, response, finding):
    if isinstance(response, str):
        status, _, code = response.partition(" ")
        response = answer(f"{status} X", f"<Error><Code>{code}</Code></Error>".encode())
    server = serve(response, most=9)
    own = {"URL": server.url, "HOST": server.url[7:], "END": f"{soon():%Y-%m-%dT%H:%M:%SZ}"}
    for name, value in variables.items():
        monkeypatch.setenv(name, own.get(value, value))
    found = [f"{r['check']} {r['level']}: {r['found']}. {r['fix']}" for r in ask()]
    assert any(re.match(finding.replace("URL", server.url), each) for each in found), found
    assert "hush" not in str(found)
    assert sum("AWS4-HMAC" in head for head in server.heads) <= 1  # one signed request


def test_a_silent_credential_process_does_not_stop_the_doctor(ask, tmp_path, monkeypatch):
    (file := tmp_path / "config").write_text("[default]\ncredential_process = sleep 3\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    monkeypatch.setattr("shardcache.cli.doctor._PATIENCE", 0.5)
    assert "no response" in of(ask(), "credentials", "fail")["found"]


def test_shards_that_found_no_room_are_counted(ask, data, bucket, s3_environment):
    with Cache(max_size=1000) as cache:
        cache.open(f"s3://{bucket}/train-0000.tar").read()
    assert "1 of 1 open of a day found no room" in of(ask(), "opens", "warn")["found"]


def test_each_upstream_is_asked(ask, s3, bucket, s3_environment, tmp_path, monkeypatch):
    (tmp_path / "nas").mkdir()
    stores = [f"{tmp_path}/nas", f"{tmp_path}/gone", f"s3://{bucket}/x", f"s3://{bucket}-gone/x"]
    monkeypatch.setenv("SHARDCACHE_UPSTREAMS", ",".join(stores))
    found = [row for row in ask() if row["check"] == "upstream"]
    assert [row["level"] for row in found] == ["ok", "fail", "ok", "fail"]
    assert [f"there is no {row['subject']}" in row["fix"] for row in found] == [False, True] * 2


def test_dead_addresses_of_the_endpoint_are_named(ask, serve, monkeypatch):
    port = serve(answer("403 Forbidden"), most=9).server_address[1]
    stream, addresses = (socket.AF_INET, socket.SOCK_STREAM, 6, ""), ["127.0.0.1", "127.0.0.2"]
    rows = [(*stream, (address, port)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: rows)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://shards.test:{port}")
    dead = "shards.test has 2 addresses, of which these accept no connection within 1 s: 127.0.0.2"
    assert of(ask(), "endpoint", "warn")["found"] == dead
    del rows[0]
    found = of(ask("--url", "s3://lab/a.tar"), "endpoint", "fail")["found"]
    assert "127.0.0.2 (Connection refused)" in found


def test_reading_a_shard_is_timed_and_failures_are_explained(ask, put, bucket):
    row = of(ask("--url", put("a.tar", bytes(3 * MIB))), "read", "ok")
    assert re.match(r"3\.1 MB in .*/s\), first byte after .*, ETag \S", row["found"])
    lab = "If it is an object, write s3://lab/b.tar"
    for url, why in (f"s3://{bucket}/b.tar", "404"), ("s3://lab", "s3://"), ("lab/b.tar", lab):
        assert why in of(ask("--url", url), "read", "fail")["fix"]


@needs_root
def test_a_small_dev_shm_keeps_room_for_the_batches_of_workers(ask, tmp_path, monkeypatch):
    """Docker's has 64 MB."""
    with disk(tmp_path / "shm", "size=64m") as shm:
        monkeypatch.setattr("shardcache.space.memory._SHARED", str(shm))
        tiers = [{"dir": shm / "cache", "min_free": 0}]
        with Cache(tmp_path / "home", cache_local=True, tiers=tiers) as cache:
            for number in range(4):
                (file := tmp_path / f"{number}.tar").write_bytes(make_tar(number, 4, 2 * MIB))
                cache.fetch(str(file))
            assert [entry.path.is_relative_to(shm) for entry in cache.entries()].count(True) == 1
        stated = os.statvfs(shm)
        assert stated.f_bavail * stated.f_frsize > 32 * MIB
        found = of(ask("--dir", shm / "x"), "space")["found"]
    assert "33.6 MB stay free for the batches of PyTorch's workers" in found
