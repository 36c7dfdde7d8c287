"""Options crossed two by two: any two of them keep the same promises, with a real server."""

import os

import pytest
import webdataset.tariterators  # noqa: F401 - so that not each job imports it

from shardcache import Cache, TarDataset
from shardcache.cli.entries import partials
from tests.support.clitools import command
from tests.support.disktools import disk, needs_root, remount
from tests.support.storetools import BLOCK, age, damage, forked, room, together, wait_until
from tests.support.tars import make_tar
from tests.support.users import GROUP

SETTINGS = "room isolation reader tiers locks group upstream pins"
#: A covering array: any two values of two settings meet in a row, except those of the first one,
#: which decides what the others can show.
ROWS = """
ample rank follow   tiers flock -     -        -
ample job  complete tiers flock group -        -
ample node samples  tiers lease -     -        pins
ample node follow   -     lease group upstream -
one   rank samples  tiers flock group upstream pins
one   rank complete -     lease group upstream pins
one   job  samples  -     flock -     upstream -
one   job  follow   -     lease -     -        pins
one   node complete tiers flock -     -        pins
none  rank follow   tiers flock group -        pins
none  job  complete -     lease -     upstream -
none  node samples  -     flock -     -        -
mount rank samples  -     flock -     upstream -
mount node follow   tiers lease group -        -
"""
ROOM = {"ample": 3, "one": 1, "none": 0, "mount": 0}  #: shards that ``dir`` takes
SHARDS = [make_tar(number, 3, BLOCK // 4) for number in range(3)]
SIZE, LATE = len(SHARDS[0]), make_tar(9, 4, BLOCK // 2)


class World:
    """A cache with the settings of one row, and its jobs."""

    def __init__(self, row, path, s3, bucket, proxy):
        self.settings = settings = dict(zip(SETTINGS.split(), row.split(), strict=True))
        self.root, self.ram, self.proxy = path / "disk/cache", path / "ram", proxy
        one = room(path, SIZE, *3 * [0])  # the links of ranks have sidecars of their own
        limits = {"one": int(1.5 * one), "none": one // 2}
        options = {"isolation": settings["isolation"], "locks": settings["locks"]}
        options |= {"shared_group": str(GROUP)} if self.has("group") else {}
        self.environment = {f"SHARDCACHE_{name.upper()}": value for name, value in options.items()}
        self.options = {**options, "max_size": limits.get(settings["room"])}
        self.options["fill"] = "complete" if self.has("complete") else "follow"
        if self.has("tiers"):
            self.options["tiers"] = [{"dir": self.ram, "max_size": int(1.5 * one), "min_free": 0}]
        if self.has("upstream"):
            (path / "nas").mkdir()
            self.options["upstreams"] = [{"url": str(path / "nas"), "write_back": True}]
        self.stored = min(3, ROOM[settings["room"]] + self.has("tiers")) * (not self.has("mount"))
        self.urls = [f"s3://{bucket}/{name}.tar" for name in (0, 1, 2, "late")]
        for url, data in zip(self.urls, [*SHARDS, LATE], strict=True):
            s3.put(bucket, url.rpartition("/")[2], data)

    def has(self, value):
        return value in self.settings.values()

    def job(self, number, use):
        """Run ``use(cache)`` as a job of one process."""

        def work(_):
            os.environ |= {"SHARDCACHE_JOB": f"job{number}", "SHARDCACHE_RANK": str(number)}
            with Cache(self.root, **self.options) as cache:
                return use(cache)

        self.proxy.reset()
        return together(1, work)[0]

    def read(self, cache):
        """Read all shards but the late one; return how many are stored then."""
        if self.has("samples"):
            data = TarDataset(self.urls[:3], cache=cache)
            found = [sample["txt"][:4].decode() for sample in data]
            assert found == [f"{n // 3}/{n % 3}/" for n in range(9)]
        else:
            for url, shard in zip(self.urls, SHARDS, strict=False):
                with cache.open(url) as stream:
                    assert stream.read() == shard
        return sum(url in cache for url in self.urls[:3])

    def epoch(self, number, misses):
        """Read all shards as a job: stored ones from the disk, others with one request each."""
        assert self.job(number, self.read) == self.stored
        # A sample of a streamed shard is a request of its own.
        if self.stored == 3 or not self.has("samples"):
            assert self.proxy.fetches().total() == 3 - self.stored + misses

    def cli(self, *words, code=0):
        found, text = command("--dir", self.root, *words, **self.environment)
        assert found == code, text

    def files(self, pattern="objects/*/*/*/*.tar"):
        return [path for root in (self.root, self.ram) for path in root.glob(f"v1/**/{pattern}")]

    def wait_an_hour(self):
        """With leases, nothing is evicted before that."""
        if self.has("lease"):
            for root in (self.root, self.ram):
                age(root)


@needs_root
@pytest.mark.usefixtures("s3_environment")
@pytest.mark.parametrize("row", ROWS.strip().splitlines(), ids=lambda row: "-".join(row.split()))
def test_any_two_options_keep_all_promises(row, tmp_path, s3, bucket, proxy):
    world = World(row, tmp_path, s3, bucket, proxy)
    with disk(tmp_path / "disk", "size=64m"):
        if world.has("mount"):
            world.job(0, lambda cache: str(cache.process.prepare()))
            remount(tmp_path / "disk", "ro")
        if world.has("pins"):
            world.cli("pin", *world.urls[:3])  # before a job has named its tiers
        world.epoch(0, misses=world.stored)
        world.epoch(0, misses=0)
        world.epoch(1, misses=0)
        world.cli("verify")
        if not world.has("mount"):
            if world.stored:
                damage_and_repair(world)
            kill_and_resume(world)
            remove(world)
        else:  # the node's directory of this cache goes with it
            remount(tmp_path / "disk", "rw")
            world.wait_an_hour()
            world.cli("clean", "--all", "--remove-dir", "-y")


def damage_and_repair(world):
    victim = world.files()[0]
    links = [path for path in world.files() if path.samefile(victim)]
    assert len(links) == (1 if world.has("node") else 2)
    damage(victim)
    world.cli("verify", "--repair", code=4)
    assert not any(path.exists() for path in links)
    world.wait_an_hour()
    world.epoch(2, misses=0 if world.has("upstream") else 1)
    world.cli("verify")


def kill_and_resume(world):
    def begin(parent):
        os.environ |= {"SHARDCACHE_JOB": "job0", "SHARDCACHE_RANK": "0"}
        Cache(world.root, **world.options).open(world.urls[3]).read()

    world.wait_an_hour()
    world.proxy.reset()
    world.proxy.pause(2 * BLOCK + 10)
    is_resumed = world.has("ample") and world.has("flock")
    with forked(begin) as child:
        wait_until(lambda: world.proxy.received() >= 2 * BLOCK)
        if is_resumed:  # the second block is written after the first one was recorded
            found = wait_until(lambda: world.files("partial/*/late.tar"))[0]
            wait_until(lambda: found.stat().st_blocks * 512 >= 2 * BLOCK)
            (row,) = partials(Cache(world.root, **world.options))
            assert (row["state"], row["pid"]) == ("live", child.pid)
        child.kill()
    world.cli("clean")
    world.proxy.resume()
    assert world.job(0, lambda cache: cache.open(world.urls[3]).read() == LATE)
    assert (world.proxy.received() < len(LATE)) == is_resumed
    world.wait_an_hour()


def remove(world):
    def names():
        return {path.name for path in world.files()}

    if world.has("pins"):
        pinned = names() - {"late.tar"}
        world.cli("clean", "--all", "-y")
        assert names() == pinned
        if pinned:
            world.cli("rm", "-y", min(pinned), code=6)
        world.cli("unpin", *world.urls[:3])
    if found := names():
        world.cli("rm", "-y", min(found))
        assert names() == found - {min(found)}
    world.cli("clean", "--all", "-y")
    left = [world.files(pattern) for pattern in ("partial/*", "locks/*/*", "sessions/*.streamed")]
    assert world.files() == [] and left == [[]] * 3
    world.epoch(3, misses=0 if world.has("upstream") else world.stored)
    world.wait_an_hour()
    world.cli("clean", "--all", "--remove-dir", "-y")
    assert not world.root.exists() and not world.ram.exists()
