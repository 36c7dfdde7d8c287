"""A cache on a filesystem that fails, `tests.stress.fuse`: every read ends with the right bytes."""

import errno
import os
import socket

import pytest

from shardcache.layout import Layout
from shardcache.locks.keys import Holder, KeyLease
from tests.stress import harness
from tests.stress.fuse import CHANGES
from tests.support.caches import warnings
from tests.support.storetools import age, forked, together, tree, wait_until


def swept(far, shim, root="cache", **options):
    """Wait until a sweep leaves nothing: a download may still be ending."""
    path = shim.root / root
    return wait_until(lambda: not harness.swept(path, far.cache(path, **options)))


def all_read(far, count, roots):
    """Return whether processes on these nodes all read the first shard correctly."""
    return all(together(count, lambda number: far.read(far.cache(roots[number % len(roots)]))))


def test_many_processes_make_one_root_and_share_one_download_without_flock(far, shim):
    rule = shim.fail("setlk", error=errno.ENOLCK, times=-1)
    root = shim.root / "a" / "deep" / "cache"
    assert all_read(far, 24, [root])
    assert (root / "manifest.json").is_file()
    with far.cache(root) as cache:
        assert far.read(cache) and far.begun() == 1
    assert swept(far, shim, "a/deep/cache")
    assert shim.struck(rule) == 0  # flock, which may hang, is not called


def test_the_lease_of_a_dead_node_is_taken_without_exchange(shim):
    layout, key = Layout(shim.root / "v1"), "a" * 32
    layout.make()
    elsewhere, here = Holder(1, "node-7", None, None, 0.0), Holder(2, "node-8", None, None, 0.0)

    def dies(parent):
        socket.gethostname = lambda: "node-7"  # so that its process cannot be looked up
        lease = KeyLease(layout, key, 1.0)
        parent.say(lease.try_acquire(elsewhere))
        parent.hear()

    with forked(dies) as holder:
        assert holder.hear() is True
    lease = KeyLease(layout, key, 1.0)
    assert not lease.try_acquire(here)
    wait_until(lambda: lease.try_acquire(here))
    lease.release()


@pytest.mark.parametrize("op", ["open", "getattr", "lookup", "read"])
def test_a_file_that_fails_once_is_read_again(far, shim, op):
    with far.cache(shim.root / "cache") as cache:
        assert far.read(cache)
        rule = shim.fail(op, "*.tar", error=errno.ESTALE)
        assert far.read(cache) and shim.struck(rule)
        assert far.begun() == 1 or op == "read"  # one more lookup is enough


@pytest.mark.parametrize("locks", ["flock", "lease"])
@pytest.mark.parametrize(
    "op",
    [
        *(*CHANGES.split(), "fsync fsyncdir", "open", "opendir", "readdir", "read", "getattr"),
        "lookup",
    ],
)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE])
def test_every_read_is_right_whatever_operation_fails(far, shim, caplog, op, number, locks):
    options = {"locks": locks, **({"fsync": "fsync"} if locks == "flock" else {})}
    with far.cache(shim.root / "cache", **options) as cache:
        assert far.read(cache, 1)
    caplog.clear()
    with far.cache(shim.root / "cache", **options) as cache:
        shim.fail(op, "cache/*", error=number, times=-1)
        assert far.read(cache, 1) and far.read(cache, 2) and far.read(cache, 3)
        shim.heal()
    assert len([text for text in warnings(caplog) if far.url(3) in text]) <= 1
    assert swept(far, shim, locks=locks)


@pytest.mark.parametrize(
    "op", [*CHANGES.split(), "open", "opendir", "read", "getattr", "lookup", "all"]
)
def test_the_other_tier_does_the_work_of_one_that_fails(far, shim, tmp_path, op):
    tiers = [{"dir": shim.root / "tier", "min_free": 0}]
    with far.cache(tmp_path / "home", tiers=tiers, locks="flock") as cache:
        assert far.read(cache, 1) and shim.root in cache.path(far.url(1)).parents
        if op == "all":
            shim.crash()
        else:
            shim.fail(op, "tier*", times=-1)
        assert all(far.read(cache, number) for number in [1, 2, 3, 4, 5, 2, 3, 4, 5])
        stats = cache.stats()
        assert stats.streamed <= 1 and stats.hits >= 4 and cache.process.disk.is_well
        if op != "all":
            shim.heal()


@pytest.mark.filterwarnings(
    "error::pytest.PytestUnraisableExceptionWarning"
)  # no file is left open
def test_a_faster_tier_is_read_if_the_last_one_fails(far, shim, tmp_path):
    options = {"tiers": [{"dir": tmp_path / "fast", "min_free": 0}], "locks": "flock"}
    with far.cache(shim.root / "home", **options) as cache:
        assert far.read(cache, 1)
    with far.cache(shim.root / "home", **options) as cache:
        cache.process.prepare()
        rule = shim.fail("lookup", "home/v1/objects/*", times=-1)
        assert far.read(cache, 1) and cache.stats().hits == 1
        assert shim.struck(rule)
        shim.heal()


def test_a_process_that_cannot_read_the_manifest_leaves_the_cache_alone(far, shim):
    with far.cache(shim.root / "cache") as cache:
        assert far.read(cache, 1)
    before = tree(shim.backing)
    shim.fail("read", "*manifest.json*", times=-1)
    with far.cache(shim.root / "cache") as cache:
        assert far.read(cache, 2)
    assert tree(shim.backing) == before


@pytest.mark.parametrize("cold", [True, False])
def test_a_read_continues_from_the_origin_if_the_mount_dies(far, shim, cold):
    root = shim.root / "cache"
    if not cold:
        with far.cache(root) as cache:
            assert far.read(cache)
    far.rate.value = 2e6  # so that the mount dies during a download
    with far.cache(root) as cache:
        with cache.open(far.url()) as stream:
            first = stream.read(1000)
            shim.crash()
            far.rate.value = 1e9
            assert far.right(first + stream.read())
        assert far.read(cache, 1)


#: Errors of a repeated request that the server had already carried out.
LOST = {
    "rename": (errno.ENOENT, errno.EIO, errno.ETIMEDOUT),
    "mkdir": (errno.EEXIST, errno.EIO),
    "link": (errno.EEXIST, errno.EIO),
    "unlink": (errno.ENOENT, errno.EIO),
    "rmdir": (errno.ENOENT, errno.EIO),
    "create": (errno.EEXIST, errno.EIO),
    "setattr": (errno.EIO,),
}


@pytest.mark.parametrize(
    ("op", "number", "done"),
    [(op, number, True) for op, numbers in LOST.items() for number in numbers]
    + [(op, errno.ENOSPC, False) for op in [*CHANGES.split(), "fsync fsyncdir"]],
)
@pytest.mark.parametrize("evicting", [False, True], ids=["fetch", "evict"])
def test_a_lost_reply_fails_no_read_and_leaves_nothing(far, shim, op, number, done, evicting):
    root = shim.root / "cache"
    with far.cache(root) as cache:
        assert far.read(cache, 1)  # creates the root
    for skip in range(100):
        # If the reply to a lease's creation is lost, no process holds it: keep the wait short.
        with far.cache(root, stale_after=0.5) as cache:
            if evicting:
                assert far.read(cache, 2)
                age(shim.backing / "cache" / "v1" / "objects")
            else:
                cache.remove(far.url(2))
            rule = shim.fail(op, error=number, done=done, skip=skip)
            if evicting:
                try:
                    cache.remove(far.url(2))
                except OSError as exn:
                    assert exn.errno == number
            assert far.read(cache, 2), skip
            struck = shim.struck(rule)
            shim.heal()
        assert swept(far, shim), skip
        if not struck:
            return
    pytest.fail("100 requests did not reach the end")


def test_nodes_share_shards_although_names_appear_late(far, nodes):
    for node in nodes:
        node.set(delay=0.4, negative=0.4, stale=True)
    roots = [node.root / "deep" / "cache" for node in nodes]
    assert all_read(far, 6, roots)
    assert far.begun() <= 4
    for root in roots:
        with far.cache(root) as cache:
            wait_until(lambda cache=cache: cache.path(far.url()))
            assert far.read(cache)


def test_an_entry_evicted_by_another_node_is_read_to_its_end(far, nodes):
    here, there = nodes
    here.set(stale=True)
    with far.cache(here.root / "cache") as cache:
        assert far.read(cache)
        with cache.open(far.url()) as stream, open(str(stream.name), "rb") as plain:
            first = stream.read(1000)
            age(here.backing / "cache" / "v1" / "objects")
            with far.cache(there.root / "cache") as other:
                other.remove(far.url())
            with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
                plain.read()
            assert far.right(first + stream.read())
        assert far.read(cache)
