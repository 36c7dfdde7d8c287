"""The lock of a key is one lock for all options of a cache."""

import signal
import threading
from typing import Any

import pytest

from shardcache.cli.entries import partials
from tests.support import caches
from tests.support.storetools import BLOCK, forked, wait_until
from tests.support.tars import make_tar

URL = "s3://lab/a.tar"
BIG = make_tar(1, 400, 3500)
RAM = {"dir": "ram", "min_free": 0}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tiers": {"tiers": [RAM]},
    "isolation": {"isolation": "job"},
    "leases": {"locks": "lease"},
    "tiers, isolation": {"tiers": [RAM], "isolation": "job"},
    "tiers, leases": {"tiers": [RAM], "locks": "lease"},
}


@pytest.fixture(params=OPTIONS)
def make(request, make_cache, tmp_path, monkeypatch):
    """Make caches with options that cross."""
    options = dict(OPTIONS[request.param])
    if "tiers" in options:
        options["tiers"] = [{**RAM, "dir": tmp_path / "ram"}]
    monkeypatch.setenv("SHARDCACHE_JOB", "j7")
    return lambda **more: make_cache(**options, **more)


@pytest.mark.locks_work
def test_a_repair_does_not_touch_a_shard_that_is_being_downloaded(make, origin):
    origin.objects[URL], origin.states_checksums = BIG, False
    cache, other = make(), make()
    assert caches.read(cache, URL) == BIG
    damaged = cache.entry(URL).data
    damaged.chmod(0o600)
    with damaged.open("r+b") as file:
        file.write(b"damage")
    origin.objects[URL] = make_tar(2, 400, 3500)
    more, requests = origin.hold(BLOCK + 5), len(origin.requests)
    refresh = threading.Thread(target=other.prewarm, args=([URL],), kwargs={"refresh": True})
    refresh.start()
    try:
        wait_until(lambda: len(origin.requests) > requests)
        (finding,) = cache.verify(repair=True)
        assert (finding.state, finding.set_aside) == ("damaged", False)
    finally:
        more.set()
        refresh.join()
    assert caches.read(cache, URL) == origin.objects[URL]


@pytest.mark.locks_work("flock")
def test_a_killed_download_is_resumed_after_a_cleaning(request, make, origin):
    if "leases" in request.node.name:
        pytest.skip("a lease outlives its holder by 90 s")
    origin.objects[URL] = BIG
    cache = make(connections=1)

    def download(parent):
        origin.hold(2 * BLOCK + 5)
        with make(connections=1).open(URL) as stream:
            parent.say(len(stream.read(BLOCK)))
            stream.read()

    with forked(download) as child:
        assert child.hear() == BLOCK
        (row,) = wait_until(lambda: [r for r in partials(cache) if r["written_bytes"] > BLOCK])
        assert (row["state"], row["pid"]) == ("live", child.pid)
        child.kill(signal.SIGKILL)
    cache.clean()
    assert caches.read(cache, URL) == BIG
    assert [start for _, start, _ in origin.requests] == [2 * BLOCK]
