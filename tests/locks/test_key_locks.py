"""The lock of a key is one lock for all options of a cache."""

import threading
from typing import Any

import pytest

from tests.support import caches
from tests.support.storetools import BLOCK, wait_until
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
    options = dict(OPTIONS[request.param])
    if "tiers" in options:
        options["tiers"] = [{**RAM, "dir": tmp_path / "ram"}]
    monkeypatch.setenv("SHARDCACHE_JOB", "j7")
    return lambda **more: make_cache(**options, **more)


@pytest.mark.locks_work
def test_a_repair_does_not_touch_a_shard_that_is_being_downloaded(make, origin, tmp_path):
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
    wait_until(lambda: not list(tmp_path.rglob("locks/??/*")))  # the download leaves no lock file
