"""``shardcache verify``: what it prints, and how it ends."""

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
    """Changes the first byte of a cached shard, a name."""

    def flip(url):
        with Cache(tmp_path / "cache") as cache, open(cache.entry(url).data, "r+b") as file:
            file.write(b"x")
            return file.name

    return flip


def test_a_sound_cache_is_one_line_and_so_is_an_empty_one(run, spec, proxy):
    code, out, err = run("verify")
    assert code == 0 and out.startswith("verified 0 shards, 0 B") and "Nothing was cached" in err
    assert run("verify", spec)[:2] == (1, "")  # nothing of it is sound
    run("prewarm", spec)
    proxy.reset()
    code, out, err = run("verify")
    assert (code, err) == (0, "") and re.fullmatch(SOUND, out)
    assert run("verify", "-q") == (0, "", "") and proxy.requests() == []
    assert re.fullmatch(SOUND, run("verify", "--remote")[1])
    assert sorted(request.method for request in proxy.requests()) == ["HEAD"] * SHARDS


def test_damage_is_exit_4_and_a_line_with_url_and_reason(run, warm, flip):
    path = flip(warm[1])
    code, out, err = run("verify")
    line, summary = out.splitlines()
    assert code == 4 and re.fullmatch(r"verified 4 shards, .*: 1 damaged", summary)
    assert re.fullmatch(rf"damaged +{warm[1]} +its bytes changed since they were downloaded", line)
    assert "--repair" in err
    assert run("verify", "-q")[:2] == (4, f"{line}\n")  # what cron has to mail
    assert "verified 1 shard," in run("verify", "train-0002.tar")[1]
    assert run("verify", "train-0001.tar", "train-0002.tar")[0] == 4
    assert run("verify", "train-1*.tar")[0] == 1  # nothing was verified
    assert "verified 2 shards," in run("verify", "--sample", "50%")[1]
    code, out, _ = run("verify", "--quick")  # sizes only
    assert (code, out.startswith("compared the sizes of 4 shards, ")) == (0, True)
    os.truncate(path, 1)
    code, out, _ = run("verify", "--quick")
    assert (code, "1 bytes, not" in out) == (4, True)


def test_repair_sets_aside_unless_it_is_a_dry_run(run, warm, flip, data, tmp_path):
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


def test_what_changed_and_what_is_gone_is_exit_4(run, warm, s3, bucket):
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
    """In place of the origin, what takes connections and says nothing."""
    address = urlsplit(proxy.endpoint_url)
    proxy.close()
    with socket.create_server((address.hostname, address.port)) as server:
        server.settimeout(PATIENCE)
        yield server


def test_that_is_exit_3_and_told_above_a_bar_that_goes_at_the_end(silent, tmp_path):
    environment = {"SHARDCACHE_ATTEMPTS": "1", "NO_COLOR": "1"}
    words, directory = ["verify", "--remote"], tmp_path / "cache"
    with Screen(*words, directory=directory, environment=environment) as screen:
        screen.read(until=r"━.*0/4 shards.*ETA")
        silent.close()
        text = screen.read()
        assert screen.command.process.wait(PATIENCE) == 3
    assert re.search(r"\x1b\[2Kunreachable ", text) and "does not answer" in text
    assert text.endswith(": 4 unreachable\r\n")


def test_interrupted_it_says_how_far_it_came(silent, tmp_path):
    words, environment = ["verify", "--remote"], {"SHARDCACHE_TIMEOUT": "1s"}
    with Command(*words, directory=tmp_path / "cache", environment=environment) as command:
        connection, _ = silent.accept()
        with connection:
            command.process.send_signal(signal.SIGINT)
            code, out, _ = command.end()
    assert code == 130
    assert out.startswith("interrupted: verified 0 shards")
