"""Tiers: a cache in several directories, which are filled in order."""

import contextlib
import errno
import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardcache.cache import Cache
from shardcache.errors import CacheFullError
from tests.support.caches import read, warnings
from tests.support.clitools import command
from tests.support.disktools import disk, remount
from tests.support.shop import Shop
from tests.support.storetools import layout_of
from tests.support.tars import make_tar

MIB = 1 << 20


@pytest.fixture
def ram(tmp_path: Path) -> Path:
    return tmp_path / "ram"


def opened(shop: Shop, ram: Path, size: int | None, **options: Any) -> Cache:
    return shop.cache(tiers=[{"dir": ram, "min_free": 0, "max_size": size}], **options)


def tier(cache: Cache, ram: Path, url: str) -> str | None:
    path = cache.path(url)
    return path and ("ram" if ram in path.parents else "home")


def cli(shop: Shop, *words: str, **environment: str) -> str:
    code, text = command("--dir", shop.path, *words, SHARDCACHE_CACHE_LOCAL="1", **environment)
    assert code == 0, text
    return text


def test_a_killed_download_whose_tier_is_full_begins_anew_in_the_next(make_cache, origin, ram):
    urls = [f"s3://lab/{name}.tar" for name in "abx"]
    origin.objects |= {url: make_tar(n, members=1, size=MIB) for n, url in enumerate(urls)}

    def cache(size: int) -> Cache:
        return make_cache(tiers=[{"dir": ram, "min_free": 0, "max_size": size * MIB}])

    for url in urls[:2]:
        cache(10).fetch(url)
    cache(10).pin(urls[:2])
    if not (pid := os.fork()):
        origin.hold(after=MIB)
        cache(10).open(urls[2]).read(MIB // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    with cache(5) as full:
        assert [full.open(url).read() == origin.objects[url] for url in urls] == [True] * 3
        assert [tier(full, ram, url) for url in urls] == ["ram", "ram", "home"]
        assert not list(ram.glob("v1/partial/*"))


@pytest.mark.parametrize("problem", ["a file", "read-only", "read-only later"])
def test_jobs_and_commands_go_on_without_a_tier_that_fails(shop, ram, caplog, problem):
    is_read, url = problem == "read-only later", shop.urls[1]
    run = partial(cli, shop, SHARDCACHE_TIERS=str(ram / "cache"))
    with disk(ram, "size=8m"):
        if problem == "a file":
            (ram / "cache").write_text("a file")
        elif problem == "read-only later":
            run("prewarm", shop.urls[0])
        if problem != "a file":
            remount(ram, "ro")
        texts = [run(word, url) for word in ("prewarm", "pin", "unpin")]
        caplog.clear()
        with opened(shop, ram / "cache", None) as cache:
            assert (tier(cache, ram, url), read(cache, url)) == ("home", Path(url).read_bytes())
        assert len(warnings(caplog)) == (not is_read)
        texts.append(run("clean", "--all", "-y"))
        warned = [f"the tier {ram}/cache is not used" in text for text in texts]
        # If it is read-only later, its shards are read.
        assert warned == [not is_read, True, False, is_read]
        assert f"verified {is_read:d} shard" in run("verify")  # not that of `dir`


def test_commands_use_the_tiers_of_a_prewarm_and_count_a_shared_disk_once(shop, ram):
    tiers, plan = {"SHARDCACHE_TIERS": f"{ram}=1GB"}, ("prewarm", "-n", "--json", shop.urls[0])
    plans = [json.loads(text) for text in (cli(shop, *plan), cli(shop, *plan, **tiers))]
    free = [found["summary"]["plan"]["free_bytes"] for found in plans]
    assert free[1] == pytest.approx(free[0], rel=0.01)
    cli(shop, "prewarm", "-q", shop.urls[0], **tiers)
    assert "1 shard" in cli(shop, "ls")


def test_a_damaged_entry_in_one_tier_does_not_hide_one_in_another(shop, ram):
    url = shop.urls[0]
    with shop.cache() as cache:
        cache.fetch(url)
    with Cache(ram, cache_local=True, min_free=0) as cache:
        entry = cache.fetch(url)
    os.truncate(entry.data, 100)
    with opened(shop, ram, None) as cache:
        Path(url).unlink()
        assert len(read(cache, url)) == shop.size


@pytest.mark.parametrize(("size", "fault"), [(MIB, None), (None, errno.EIO), (None, errno.ENOSPC)])
def test_the_last_tier_makes_room_also_after_another_one_failed(
    shop, ram, tmp_path, monkeypatch, size, fault
):
    files, real = [tmp_path / "big.tar", tmp_path / "old.tar"], os.pwrite
    for path in files:
        path.write_bytes(make_tar(2, members=100, size=20_000))
    with shop.cache() as home:
        old, big = home.fetch(str(files[1])).data, files[0]
    with opened(shop, ram, size, policy="lru") as cache:

        def write(fd: int, data: memoryview, offset: int) -> int:
            is_data = len(data) > 10_000
            if is_data and os.readlink(f"/proc/self/fd/{fd}").startswith(f"{ram}/v1/partial"):
                raise OSError(fault, os.strerror(fault))
            if is_data and old.exists():
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            return real(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", write)
        assert read(cache, str(big)) == big.read_bytes()
        assert tier(cache, ram, str(big)) == "home" and not old.exists()
        assert size or list(layout_of(ram).partials.iterdir()) == []


def test_prewarm_and_clean_apply_the_limits_of_all_tiers(shop, ram):
    urls = shop.urls[:6]
    with opened(shop, ram, shop.room(3), max_size=shop.room(3)) as cache:
        with pytest.raises(CacheFullError):
            cache.prewarm(shop.urls[:7])
        assert list(cache.entries()) == []
        assert cache.prewarm(urls).failed == 0
        assert len(list(cache.entries())) == len(list(cache.verify())) == 6
    with opened(shop, ram, shop.room(2)) as cache:
        report = cache.clean(max_size=shop.room(1))
        assert (len(report.removed), report.kept) == (3, 3)
        assert [tier(cache, ram, url) for url in urls].count("ram") == 2


@pytest.mark.parametrize("policy", ["working-set", "lru"])
def test_a_shard_is_evicted_only_if_no_tier_has_free_room(shop, ram, policy):
    options = {"max_size": shop.room(4), "policy": policy}

    def tiers(cache: Cache) -> list[str | None]:
        return [tier(cache, ram, url) for url in shop.urls]

    with opened(shop, ram, shop.room(2), **options) as job:
        job.prewarm(shop.urls[:2], jobs=1)
    with opened(shop, ram, shop.room(2), **options) as job:
        report = job.prewarm(shop.urls[2:6], jobs=1)
        assert report.plan.evict == 0 and tiers(job) == [*["ram"] * 2, *["home"] * 4, None, None]
        # No job uses the first shard any more.
        report = job.prewarm(shop.urls[1:7], jobs=1)
        assert report.plan.evict == shop.room(1)
        assert tiers(job) == [None, "ram", *["home"] * 4, "ram", None]
        # The job uses all, so only lru evicts one.
        with pytest.raises(CacheFullError) if policy == "working-set" else contextlib.nullcontext():
            assert job.prewarm(shop.urls[7]).plan.evict == shop.room(1)
            assert tiers(job)[1] == tiers(job)[6] == "ram" and tiers(job)[7] == "home"
            assert tiers(job).count("home") == 4


def test_commands_find_the_tiers_of_a_job(shop, ram):
    with opened(shop, ram, shop.room(2), max_size=shop.room(14)) as cache:
        cache.prewarm(shop.urls)
    run = partial(cli, shop)
    assert "on disk (50%)" in run("ls")  # of the limits of both tiers
    with shop.cache() as later:
        assert later.path(shop.urls[0]) is None and read(later, shop.urls[5])

    os.utime(layout_of(shop.path).limits, (4e9, 4e9))  # of a job that ran while the clock was wrong
    with opened(shop, ram, shop.room(3), max_size=shop.room(13)) as cache:
        cache.process.prepare()
    assert f"max_size {shop.room(13) // 1024}KiB" in run("clean", "-n")

    assert "8 cached" in run("prewarm", "--check", *shop.urls)
    assert f"tiers {ram}=" in run("clean", "-n")
    shutil.rmtree(ram)
    run("prewarm", *shop.urls)  # not into a tier that is gone, and that no option names
    assert not ram.exists()
