"""Log records: their events, levels and fields, as docs/observing.md documents them."""

import logging
import multiprocessing
import os
import re
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.errors import ConfigError
from shardcache.units import exact_bytes
from tests.support.caches import held_elsewhere, read
from tests.support.disktools import needs_root
from tests.support.fakes import Fault
from tests.support.shop import Shop
from tests.support.storetools import PATIENCE, room, together
from tests.support.tars import make_tar
from tests.support.trainingtools import ROOT

PAGE = (ROOT / "docs" / "observing.md").read_text()
URL = "s3://lab/a.tar"
DATA = make_tar(1)
#: Attributes of every record.
_PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


@pytest.fixture
def log(caplog):
    caplog.set_level("DEBUG", "shardcache")
    return caplog


def fields(record):
    return {name: value for name, value in vars(record).items() if name not in _PLAIN}


def only(log, event):
    """Return the only record of an event, which has the level and the fields of the page."""
    (found,) = (one for one in log.records if getattr(one, "event", None) == event)
    row, *_ = re.findall(rf"^\|[^|]*`{event}`[^|]*\|([^|]*)\|([^|]*)\|$", PAGE, re.MULTILINE)
    assert found.levelname in re.findall(r"[A-Z]+", row[0])
    names = re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", row[1]))
    assert set(fields(found)) == {"event", *names}
    return found


def test_log_record_of_a_wait(make_cache, origin, clock, log):
    origin.objects[URL] = DATA
    cache = make_cache(fill="complete")
    lock = held_elsewhere(cache, URL, clock.now)
    clock.on_sleep.append(lambda: lock.release() if clock.elapsed > 15 else None)
    cache.open(URL).read()
    found = fields(only(log, "waiting"))
    wanted = {"shard": URL, "holder_pid": 4711, "holder_host": "node-7", "holder_rank": 3}
    assert wanted.items() <= found.items() and found["written"] is found["size"] is None
    assert 10 <= found["seconds"] < 12


def test_log_records_of_reads_and_an_eviction(make_cache, origin, log, tmp_path):
    big, size = "s3://lab/big.tar", len(DATA)
    origin.objects.update({URL: DATA, big: make_tar(2, members=9)})
    origin.faults.append(Fault(after=None))
    cache = make_cache(max_size=room(tmp_path, size))
    for _ in range(2):
        cache.open(URL).read()
    levels = [one.levelname for one in log.records if one.levelno >= logging.INFO]
    assert levels == ["WARNING", "INFO"]  # of the retry, and of the download
    cache.open(big).read()
    cache.clean(everything=True)
    for event, wanted in {
        "retry": {"shard": URL, "attempt": 1},
        "fetched": {"shard": URL, "bytes": size, "source": "origin"},
        "hit": {"shard": URL, "bytes": size},
        "streamed": {"shard": big, "reason": "CacheFullError"},
        "evicted": {"key": cache.parse(URL).key, "bytes": size, "reason": "all"},
    }.items():
        assert wanted.items() <= fields(only(log, event)).items()


@pytest.mark.parametrize("ranks", [False, True])
def test_a_job_warns_once_that_shards_find_no_room(tmp_path, log, ranks):
    """Workers are forked with the cache; ranks make their own."""
    shop = Shop(tmp_path, 4)
    options = {"dir": shop.path, "cache_local": True, "max_size": shop.room(1)}
    meeting = multiprocessing.Barrier(3)

    def work(number):
        if ranks:
            os.environ.update(RANK=str(number), WORLD_SIZE="3")
        log.clear()
        with Cache(**options) if ranks else cache as own:
            own.fetch(shop.urls[0])
            meeting.wait(PATIENCE)
            for url in shop.urls:
                own.open(url).read()
        return [(one.levelname, one.getMessage()) for one in log.records]

    with Cache(**options) as cache:
        cache.fetch(shop.urls[0])
        if ranks:
            cache.close()  # belongs to another job
        logged = [one for records in together(3, work) for one in records]
        log.clear()
    logged += [(one.levelname, one.getMessage()) for one in log.records]
    (warning,) = [text for level, text in logged if level == "WARNING"]
    assert f"{shop.path} is full (max_size {exact_bytes(shop.room(1))}" in warning
    assert "Raise max_size" in warning
    ended = [text for _, text in logged if "this process had" in text]
    assert len(ended) == 3 and all("4 opens, 25.00% hits, 3 streamed" in text for text in ended)


def alarms_of(cache, urls):
    """Read shards in a worker; returns what it logged at WARNING and above."""
    logged, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("shardcache").addHandler(handler)
    assert [cache.open(url).name for url in urls] == [f"file://{url}" for url in urls]
    return logged


def occupied(root):
    root.mkdir()
    (root / "model.ckpt").touch()


#: How to make a directory that cannot be used, and the advice.
UNUSABLE = {
    "another user's": (lambda root: (root.mkdir(), os.chown(root, 1, 1)), "of your own"),
    "with other files": (occupied, "of its own, such as"),
    "below a file": (lambda root: root.parent.touch(), "Point dir at a directory"),
    "below /proc": (None, "Point dir"),  # only making it shows the error
}


@needs_root
@pytest.mark.parametrize(
    ("kind", "method"), [*((kind, "fork") for kind in UNUSABLE), ("with other files", "spawn")]
)
def test_a_directory_that_cannot_be_used_is_one_error(tmp_path, log, set_variables, kind, method):
    set_variables(_SHARDCACHE_UNUSABLE="")
    shop, root, (make, advice) = Shop(tmp_path, 3), tmp_path / "root", UNUSABLE[kind]
    root = root / "file" / "cache" if kind == "below a file" else root
    root = Path("/proc/cache") if make is None else root
    root.parent.parent.mkdir(exist_ok=True)
    (make or id)(root)
    with Cache(root, cache_local=True) as cache:
        assert read(cache, shop.urls[0])
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert pool.starmap(alarms_of, [(cache, shop.urls)] * 4) == [[]] * 4
        with pytest.raises((ConfigError, OSError)):
            cache.fetch(shop.urls[0])
    (error,) = [one for one in log.records if one.levelno >= logging.WARNING]
    assert (error.levelname, advice in error.getMessage()) == ("ERROR", True)
    set_variables(_SHARDCACHE_UNUSABLE="", RANK=1, WORLD_SIZE=2, LOCAL_RANK=1)
    read(Cache(root, cache_local=True), shop.urls[0])  # the first rank of the node logs it
    assert len([one for one in log.records if one.levelno >= logging.WARNING]) == 1
    with pytest.raises((ConfigError, OSError)):
        strict = Cache(root, strict=True, cache_local=True)
        assert make is None
        strict.open(shop.urls[0])


def test_a_directory_is_used_once_it_can_be(tmp_path, log, clock):
    shop, root = Shop(tmp_path, 1), tmp_path / "root"
    occupied(root)
    with Cache(root, cache_local=True) as cache:
        read(cache, shop.urls[0])
        (root / "model.ckpt").unlink()
        clock.sleep(60)
        read(cache, shop.urls[0])
        assert shop.urls[0] in cache


def test_every_metric_is_documented(run):
    named = re.findall(r"`shardcache_(\w+)_total`", PAGE)
    run("pin", "s3://b/a.tar")  # creates the cache
    shown = run("stats", "--format", "prometheus")[1]
    assert named == re.findall(r"# TYPE shardcache_(\w+)_total", shown)
