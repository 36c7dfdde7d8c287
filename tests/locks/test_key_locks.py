"""The lock of a key is one lock for all options of a cache."""

import json

import pytest

from shardcache.locks.keys import Holder, read_holder
from tests.support import caches
from tests.support.storetools import BLOCK, damage, wait_until
from tests.support.tars import make_tar

URL = "s3://lab/a.tar"
BIG = make_tar(1, 400, 3500)
CROSSED = ["plain", "tiers", "isolation", "locks", "tiers isolation", "tiers locks"]


@pytest.mark.parametrize("names", CROSSED)
def test_a_repair_does_not_touch_a_shard_that_is_being_downloaded(
    make_cache, origin, pool, tmp_path, set_variables, names
):
    set_variables(SHARDCACHE_JOB="j7")
    tiers = [{"dir": tmp_path / "ram", "min_free": 0}]
    options = {"tiers": tiers, "isolation": "job", "locks": "lease"}
    given = {name: value for name, value in options.items() if name in names}
    origin.objects[URL], origin.states_checksums = BIG, False
    cache, other = make_cache(**given), make_cache(**given)
    assert caches.read(cache, URL) == BIG
    damage(cache.entry(URL).data)
    origin.objects[URL] = make_tar(2, 400, 3500)
    more, requests = origin.hold(BLOCK + 5), len(origin.requests)
    prewarm = pool.submit(other.prewarm, [URL], refresh=True)
    wait_until(lambda: len(origin.requests) > requests)
    (finding,) = cache.verify(repair=True)
    assert (finding.state, finding.set_aside) == ("damaged", False)
    more.set()
    prewarm.result()
    assert caches.read(cache, URL) == origin.objects[URL]
    wait_until(lambda: not list(tmp_path.rglob("locks/??/*")))  # the download leaves no lock file


@pytest.mark.parametrize(
    "change", [{"pid": "12"}, {"host": "\x1b[2J"}, {"more": 1}, {"job": 5}, None]
)
def test_an_invalid_record_of_a_holder_is_ignored(tmp_path, change):
    path, holder = tmp_path / "a.lock", Holder(12, "node-7", 5, None, 1_000_010.0)
    path.write_bytes(holder.encode())
    assert read_holder(path) == holder
    path.write_text(json.dumps(change and holder._asdict() | change))
    assert read_holder(path) is None
