"""The output and exit codes of ``shardcache verify``."""

import os
import re
import signal
import socket
from urllib.parse import urlsplit

import pytest

from shardcache.cache import Cache
from tests.support.clitools import SHARDS, Command, Screen
from tests.support.storetools import PATIENCE, tree

SOUND = r"verified 4 shards, [\d.]+ KB in [\d.]+ m?s: nothing is wrong\n"


@pytest.fixture
def flip(warm, tmp_path):
    """Change the first byte of a cached shard."""

    def flip(url):
        with Cache(tmp_path / "cache") as cache, open(cache.entry(url).data, "r+b") as file:
            file.write(b"x")
            return file.name

    return flip


def test_a_sound_or_empty_cache_is_one_line(run, spec, proxy):
    code, out, err = run("verify")
    assert code == 0 and out.startswith("verified 0 shards, 0 B") and "Nothing was cached" in err
    assert run("verify", spec)[:2] == (1, "")
    run("prewarm", spec)
    proxy.reset()
    code, out, err = run("verify")
    assert (code, err) == (0, "") and re.fullmatch(SOUND, out)
    assert run("verify", "-q") == (0, "", "") and proxy.requests() == []
    assert re.fullmatch(SOUND, run("verify", "--remote")[1])
    assert sorted(request.method for request in proxy.requests()) == ["HEAD"] * SHARDS


def test_damage_is_a_line_and_exit_4(run, warm, flip):
    path = flip(warm[1])
    code, out, err = run("verify")
    line, summary = out.splitlines()
    assert code == 4 and re.fullmatch(r"verified 4 shards, .*: 1 damaged", summary)
    assert re.fullmatch(rf"damaged +{warm[1]} +its bytes changed since they were downloaded", line)
    assert "--repair" in err
    assert run("verify", "-q")[:2] == (4, f"{line}\n")
    assert "verified 1 shard," in run("verify", "train-0002.tar")[1]
    assert run("verify", "train-0001.tar", "train-0002.tar")[0] == 4
    assert run("verify", "train-1*.tar")[0] == 1
    assert "verified 2 shards," in run("verify", "--sample", "50%")[1]
    code, out, _ = run("verify", "--quick")
    assert (code, out.startswith("compared the sizes of 4 shards, ")) == (0, True)
    os.truncate(path, 1)
    code, out, _ = run("verify", "--quick")
    assert (code, "1 bytes, not" in out) == (4, True)


def test_repair_sets_damaged_shards_aside(run, warm, flip, data, tmp_path):
    flip(warm[1])
    before = tree(tmp_path / "cache")
    code, out, _ = run("verify", "--repair", "-n")
    assert (code, out.endswith(": 1 damaged, to be set aside\n")) == (4, True)
    assert tree(tmp_path / "cache") == before
    code, out, err = run("verify", "--repair")
    line, summary = out.splitlines()
    assert (code, err) == (4, "")
    assert line.endswith(" (set aside)") and summary.endswith(": 1 damaged, 1 set aside")
    _, path, _ = run("path", "--fetch", warm[1])
    with open(path.strip(), "rb") as file:
        assert file.read() == data["train-0001.tar"]
    assert run("verify")[0] == 0


def test_changed_and_missing_objects_are_exit_4(run, warm, s3, bucket):
    s3.put(bucket, "train-0001.tar", b"x" * 10)
    s3.client().delete_object(Bucket=bucket, Key="train-0002.tar")
    code, out, err = run("verify", "--remote", "--quick")
    *lines, summary = out.splitlines()
    found = [["changed", warm[1]], ["gone", warm[2]]]
    assert (code, sorted(line.split()[:2] for line in lines)) == (4, found)
    assert "10 bytes instead of" in out and summary.endswith(": 1 changed, 1 gone")
    assert "shardcache rm" in err
    run("rm", "-y", warm[1])
    run("prewarm", warm[1])
    code, out, _ = run("verify", "--remote")
    assert (code, "changed" in out) == (4, False)


@pytest.fixture
def silent(proxy, warm):
    """A server in place of the origin, which accepts connections and sends nothing."""
    address = urlsplit(proxy.endpoint_url)
    proxy.close()
    with socket.create_server((address.hostname, address.port)) as server:
        server.settimeout(PATIENCE)
        yield server


def test_a_silent_origin_is_exit_3_and_printed_above_the_bar(silent, tmp_path):
    environment = {"SHARDCACHE_ATTEMPTS": "1", "NO_COLOR": "1"}
    where = {"directory": tmp_path / "cache", "environment": environment}
    with Screen("verify", "--remote", **where) as screen:
        screen.read(until=r"━.*0/4 shards.*ETA")
        silent.close()
        text, code = screen.end()
    assert code == 3 and re.search(r"\x1b\[2Kunreachable ", text) and "does not answer" in text
    assert text.endswith(": 4 unreachable\r\n")


def test_an_interrupted_verify_prints_its_progress(silent, tmp_path):
    where = {"directory": tmp_path / "cache", "environment": {"SHARDCACHE_TIMEOUT": "1s"}}
    with Command("verify", "--remote", **where) as command:
        connection, _ = silent.accept()
        with connection:
            command.process.send_signal(signal.SIGINT)
            code, out, _ = command.end()
    assert code == 130
    assert out.startswith("interrupted: verified 0 shards")
