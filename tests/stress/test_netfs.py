"""Network filesystems: stale handles, lost replies, names that come late, power that fails.

On a mount that does what NFS does when servers and clients disagree. A reader gets the
right bytes; what the mount did wrong costs at most a second fetch.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcache.cache import Cache
from shardcache.errors import TransferError
from shardcache.layout import MANIFEST, Layout
from shardcache.locks import mounts
from shardcache.origins.base import TransientError
from shardcache.store.digest import BLOCK
from tests.stress.fuse.shim import Shim, mounted, needs_fuse
from tests.stress.nettools import DATA, URL, Read, partials, reader, using
from tests.support.fakes import Fault, MemoryOrigin
from tests.support.storetools import Child, Parent, age, crowd, forked, wait_until
from tests.support.tars import make_tar


@pytest.fixture(scope="module", autouse=True)
def _fuse() -> None:
    needs_fuse()


@pytest.fixture(autouse=True)
def _node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lock files of this node go where the test ends with them."""
    node = tmp_path / "node"
    node.mkdir()
    monkeypatch.setattr(mounts, "_NODE_DIRECTORIES", (str(node),))


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[Shim]:
    with mounted(tmp_path) as found:
        yield found


@pytest.fixture
def root(shim: Shim) -> Path:
    return shim.root / "cache"


def more(cases: list[Any]) -> list[Any]:
    """Cases that only ``--full`` runs."""
    return [pytest.param(case, marks=pytest.mark.full) for case in cases]


def read(cache: Cache) -> bytes:
    with cache.open(URL) as stream:
        return stream.read()


def cached(root: Path, **options: Any) -> MemoryOrigin:
    """Puts the shard into a cache; gives an origin that has not been asked."""
    with using(root, **options) as cache:
        cache.fetch(URL)
    return MemoryOrigin(objects={URL: DATA})


# -- stale handles -------------------------------------------------------------------


@pytest.mark.parametrize("op", ["open", "getattr", "lookup"])
@pytest.mark.parametrize("times", [1, 2])  # the kernel asks twice before it says so
def test_a_handle_that_is_stale_for_once_costs_a_look_and_no_fetch(
    shim: Shim, root: Path, op: str, times: int
) -> None:
    origin = cached(root)
    with using(root, origin) as cache:
        rule = shim.fail(op, "*.tar", error=errno.ESTALE, times=times)
        assert read(cache) == DATA
        assert shim.struck(rule) == times
        assert origin.requests == []


@pytest.mark.parametrize("op", ["read", "read getattr lookup"])
def test_a_handle_that_turns_stale_in_mid_read_is_opened_again_at_its_offset(
    shim: Shim, root: Path, op: str
) -> None:
    origin = cached(root)
    with using(root, origin) as cache, cache.open(URL) as stream:
        first = stream.read(BLOCK)
        opened = shim.calls("open")
        rule = shim.fail(op, "*.tar", error=errno.ESTALE)
        assert first + stream.read(BLOCK) + stream.read() == DATA
        assert shim.struck(rule) == 1
        assert shim.calls("open") > opened
        assert origin.requests == []


@pytest.mark.parametrize("op", ["open", "read", "getattr", "lookup"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_file_that_fails_for_good_is_read_from_its_origin(
    shim: Shim, root: Path, op: str, number: int
) -> None:
    origin = cached(root)
    with using(root, origin) as cache:
        rule = shim.fail(op, "*.tar", error=number, times=-1)
        assert read(cache) == DATA
        assert shim.struck(rule) > 0
        assert origin.requests != []


@pytest.mark.parametrize("where", ["meta.json", "cache/v1/objects/*", "cache/v1*"])
def test_stale_directories_and_sidecars_fail_no_read(shim: Shim, root: Path, where: str) -> None:
    cached(root)
    for op in ("open", "opendir", "lookup", "getattr", "readdir", "setattr"):
        origin = MemoryOrigin(objects={URL: DATA})
        with using(root, origin) as cache:
            shim.fail(op, f"*{where}", error=errno.ESTALE, times=2)
            assert read(cache) == DATA, op
        shim.heal()


def reads_in_two_halves(parent: Parent, root: Path) -> None:
    origin = MemoryOrigin(objects={URL: DATA})
    with using(root, origin) as cache, cache.open(URL) as stream:
        first = stream.read(BLOCK)
        parent.say("half")
        parent.hear()
        parent.say((first + stream.read() == DATA, origin.delivered))


def test_an_entry_that_another_node_evicts_is_read_to_its_end(tmp_path: Path) -> None:
    with mounted(tmp_path, name="here") as here, mounted(tmp_path, name="there") as there:
        for shim in (here, there):
            shim.set(stale=True, silly=True)
        cached(here.root / "cache")
        with forked(reads_in_two_halves, here.root / "cache") as child:
            child.hear()
            # Read for so long that the other node sees no use of it.
            age(tmp_path / "backing" / "cache" / "v1" / "objects")
            with using(there.root / "cache") as cache:
                assert cache.remove(URL)[0] == len(DATA)
            right, delivered = child.ask()
            assert right
            assert delivered <= len(DATA) - BLOCK  # the rest of it


def test_what_is_evicted_while_it_is_open_here_leaves_nothing_behind(
    shim: Shim, root: Path
) -> None:
    # As on NFS, an open file keeps a silly name, and its directory cannot go.
    shim.set(silly=True)
    cached(root)
    with using(root) as cache:
        with cache.open(URL) as stream:
            first = stream.read(BLOCK)
            age(shim.backing / "cache" / "v1" / "objects")
            cache.remove(URL)
            assert URL not in cache
            assert first + stream.read() == DATA
        age(shim.backing / "cache" / "v1" / "partial")
        wait_until(lambda: cache.clean(limits=False) and not partials(shim.backing / "cache"))
        assert read(cache) == DATA


CHANGES = ("setattr", "create", "write", "mkdir", "rename", "unlink", "rmdir")
OTHERS = ["getattr", "opendir", "readdir", "statfs", "fsync", "release", "link"]


@pytest.mark.parametrize("op", [*CHANGES, "lookup", "open", "read", *more(OTHERS)])
def test_whatever_the_filesystem_cannot_do_any_more_every_read_is_right(
    shim: Shim, root: Path, op: str
) -> None:
    fresh = {f"s3://lab/{n}.tar": make_tar(n) for n in range(4)}
    last = errno.ENOSPC if op in CHANGES else errno.EACCES
    numbers = [errno.EIO, errno.ESTALE, errno.ENOTCONN, last]
    origin = MemoryOrigin(objects={URL: DATA, **fresh})
    for number, (url, data) in zip(numbers, fresh.items(), strict=True):
        with using(root, origin) as cache:
            assert read(cache) == DATA
            shim.fail(op, "cache/v1*", error=number, times=-1)
            assert read(cache) == DATA, number
            with cache.open(url) as stream:
                assert stream.read() == data, number
            # Fetched, once more where room could be made, and streamed.
            asked = sum(asked_for == url for asked_for, _, _ in origin.requests)
            assert asked <= 2 + (number == errno.ENOSPC), number
        with using(root, origin) as cache:  # one that comes when it fails already
            assert read(cache) == DATA, number
        shim.heal()
        with using(root, origin) as cache:
            with cache.open(url) as stream:
                assert stream.read() == data, number
            assert url in cache
            age(shim.backing / "cache" / "v1" / "partial")
            cache.clean(limits=False)
        assert partials(shim.backing / "cache") == [], number


def test_a_mount_that_dies_under_a_reader_is_read_from_the_origin(tmp_path: Path) -> None:
    with mounted(tmp_path) as shim, using(shim.root / "cache") as cache:
        cache.fetch(URL)
        with cache.open(URL) as stream:
            first = stream.read(BLOCK)
            shim.crash()
            assert first + stream.read() == DATA
        assert read(cache) == DATA
    with mounted(tmp_path) as shim, using(shim.root / "cache", MemoryOrigin()) as cache:
        assert read(cache) == DATA


def test_a_mount_that_dies_under_a_fetch_that_is_followed_costs_no_byte(tmp_path: Path) -> None:
    more = threading.Event()
    origin = MemoryOrigin(objects={URL: DATA}, faults=deque([Fault(after=BLOCK + 5, wait=more)]))
    with (
        mounted(tmp_path) as shim,
        using(shim.root / "cache", origin) as cache,
        cache.open(URL) as stream,
    ):
        first = stream.read(10)
        shim.crash()
        more.set()
        assert first + stream.read() == DATA


# -- lost replies --------------------------------------------------------------------

#: What a client says when it sent its request again and the server had carried it out.
LOST = {
    "rename": (errno.ENOENT, errno.EIO, errno.ETIMEDOUT),
    "mkdir": (errno.EEXIST, errno.EIO, errno.ETIMEDOUT),
    "link": (errno.EEXIST, errno.EIO, errno.ETIMEDOUT),
    "unlink": (errno.ENOENT, errno.EIO, errno.ETIMEDOUT),
    "rmdir": (errno.ENOENT, errno.EIO),
    "create": (errno.EEXIST, errno.EIO, errno.ETIMEDOUT),
    "setattr": (errno.EIO,),
}
lost_replies = pytest.mark.parametrize(
    ("op", "number"),
    [
        pytest.param(op, n, marks=[pytest.mark.full] if n == errno.ETIMEDOUT else [])
        for op, numbers in LOST.items()
        for n in numbers
    ],
)


@lost_replies
def test_a_lost_reply_anywhere_in_a_fetch_fails_no_read(
    shim: Shim, root: Path, op: str, number: int
) -> None:
    with using(root) as cache:
        cache.fetch(URL)  # the root is made
    for skip in range(100):
        url = f"s3://lab/{skip}.tar"
        data = make_tar(skip)
        origin = MemoryOrigin(objects={url: data})
        with using(root, origin) as cache:
            rule = shim.fail(op, error=number, done=True, skip=skip)
            with cache.open(url) as stream:
                assert stream.read() == data, skip
            struck = shim.struck(rule)
        shim.heal()
        with using(root, MemoryOrigin(objects={url: data})) as cache:
            with cache.open(url) as stream:
                assert stream.read() == data, skip
            age(shim.backing / "cache" / "v1" / "partial")
            cache.clean(limits=False)
        assert partials(shim.backing / "cache") == [], skip
        if not struck:
            break
    else:
        pytest.fail("a fetch has no hundred of them")


@pytest.mark.parametrize("number", LOST["rename"])
def test_an_entry_whose_renames_reply_was_lost_is_published_and_not_fetched_again(
    shim: Shim, root: Path, number: int
) -> None:
    origin = MemoryOrigin(objects={URL: DATA})
    with using(root, origin) as cache:
        rule = shim.fail("rename", "cache/v1/objects/*", error=number, done=True)
        assert read(cache) == DATA
        assert shim.struck(rule) == 1
        assert URL in cache
        assert read(cache) == DATA
    assert len(origin.requests) == 1 and origin.delivered == len(DATA)


@pytest.mark.parametrize("op", ["rename", "unlink", "rmdir"])
@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO, *more([errno.ETIMEDOUT])])
def test_a_lost_reply_anywhere_in_an_eviction_leaves_a_good_cache(
    shim: Shim, root: Path, op: str, number: int
) -> None:
    origin = MemoryOrigin(objects={URL: DATA})
    for skip in range(20):
        with using(root, origin) as cache:
            assert read(cache) == DATA
            age(shim.backing / "cache" / "v1")
            rule = shim.fail(op, error=number, done=True, skip=skip)
            try:
                cache.remove(URL)
            except OSError as exn:
                assert exn.errno == number  # told, and nothing is broken
            struck = shim.struck(rule)
            shim.heal()
            assert read(cache) == DATA
            age(shim.backing / "cache" / "v1" / "partial")
            cache.clean(limits=False)
        assert partials(shim.backing / "cache") == [], skip
        if not struck:
            break
    else:
        pytest.fail("an eviction has not twenty of them")


# -- directories that many make --------------------------------------------------------


def makes_the_root(parent: Parent, number: int, roots: list[Path]) -> None:
    """A process that comes to several new roots at the same moments as all others."""
    for root in roots:
        parent.hear()
        with using(root) as cache:
            found = cache._here().namespaces
            right = read(cache) == DATA
            parent.say((right, cache.path(URL) is not None, found.node.locks.parent))
            parent.hear()
        parent.say("closed")


def all_make(children: list[Child], roots: list[Path]) -> None:
    for root in roots:
        for child in children:
            child.tell()
        found = [child.hear() for child in children]
        assert all(right and stored for right, stored, _ in found)
        # All have the same locks.
        assert len({locks for _, _, locks in found}) == 1
        for child in children:
            child.tell()
        assert [child.hear() for child in children] == ["closed"] * len(children)
        assert (root / MANIFEST).is_file()


@pytest.mark.parametrize("local", [True, False])
def test_sixty_four_processes_make_one_root(
    shim: Shim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    if local:
        roots = [tmp_path / "plain" / str(n) / "deep" / "cache" for n in range(2)]
    else:
        roots = [shim.root / "deep" / "cache"]
    with crowd(64, makes_the_root, roots) as children:
        all_make(children, roots)


def test_nodes_that_see_each_others_directories_late_make_one_root(tmp_path: Path) -> None:
    with mounted(tmp_path, name="here") as here, mounted(tmp_path, name="there") as there:
        for shim in (here, there):
            shim.set(delay=0.5, negative=0.5)
        with (
            crowd(2, makes_the_root, [here.root / "deep" / "cache"]) as ours,
            crowd(2, makes_the_root, [there.root / "deep" / "cache"]) as theirs,
        ):
            for child in (*ours, *theirs):
                child.tell()
            found = [child.hear() for child in (*ours, *theirs)]
            assert all(right for right, _, _ in found)
            for child in (*ours, *theirs):
                child.tell()
                child.hear()
        for shim in (here, there):
            with using(shim.root / "deep" / "cache", MemoryOrigin()) as cache:
                wait_until(lambda cache=cache: URL in cache)
                assert read(cache) == DATA


@pytest.mark.parametrize("done", [True, False])
def test_a_directory_that_is_said_to_be_there_and_is_not_fails_no_read(
    shim: Shim, root: Path, done: bool
) -> None:
    for skip in range(40):
        with using(root / str(skip)) as cache:
            rule = shim.fail("mkdir", error=errno.EEXIST, done=done, skip=skip)
            assert read(cache) == DATA, skip
            struck = shim.struck(rule)
            shim.heal()
        if not struck:
            break
    else:
        pytest.fail("a fetch makes no forty directories")


def test_a_directory_that_nobody_sees_yet_is_waited_for_or_passed_by(
    shim: Shim, root: Path
) -> None:
    # Another node made everything, and this one is told EEXIST and ENOENT in turn.
    with using(shim.backing / "cache"):
        pass
    shim.set(delay=2.0, negative=1.0)
    with using(root) as cache:
        assert read(cache) == DATA
    shim.heal()
    with using(root) as cache:
        assert read(cache) == DATA
        assert URL in cache


# -- two nodes -------------------------------------------------------------------------


def test_two_nodes_that_fetch_one_shard_at_once_both_get_it(tmp_path: Path) -> None:
    with mounted(tmp_path, name="here") as here, mounted(tmp_path, name="there") as there:
        for shim in (here, there):
            shim.set(delay=0.3, attr=0.3, entry=0.3, negative=0.3, stale=True, silly=True)
        with using(here.root / "cache"):
            time.sleep(0.4)
        with (
            crowd(2, reader, here.root / "cache", {}) as ours,
            crowd(2, reader, there.root / "cache", {}) as theirs,
        ):
            children = [*ours, *theirs]
            assert [child.hear() for child in children] == ["ready"] * 4
            for child in children:
                child.tell()
            found: list[Read] = [child.hear() for child in children]
        assert all(read.right for read in found)
        # Here both nodes are one machine, and so share their locks; others would not.
        assert sum(read.fetches for read in found) <= 2
        behind = tmp_path / "backing" / "cache"
        with using(there.root / "cache", MemoryOrigin()) as cache:
            wait_until(lambda: URL in cache)
            assert read(cache) == DATA
            age(behind / "v1" / "partial")
            # What the other node made or removed is seen late here.
            wait_until(lambda: cache.clean(limits=False) and not partials(behind))


@pytest.mark.parametrize("directory_seen", [True, False])
def test_an_entry_that_another_node_published_unseen_costs_one_fetch_and_one_stream(
    shim: Shim, root: Path, monkeypatch: pytest.MonkeyPatch, directory_seen: bool
) -> None:
    for module in ("store", "modes"):
        monkeypatch.setattr(f"shardcache.{module}._UNSEEN", 0.005)
    origin = MemoryOrigin(objects={URL: DATA})
    with using(root, origin) as cache:
        if directory_seen:
            Layout.of_root(root).key_dir(cache.parse(URL).key).mkdir(parents=True)
        shim.set(delay=60.0)
        with using(shim.backing / "cache") as elsewhere:
            theirs = elsewhere.fetch(URL)
        assert read(cache) == DATA
        assert len(origin.requests) == 2
        shim.set(delay=0.0)
    with using(root, origin) as cache:
        assert read(cache) == DATA
        assert len(origin.requests) == 2
    assert theirs.data.read_bytes() == DATA
    assert partials(shim.backing / "cache") == []


# -- power -----------------------------------------------------------------------------


def boot_anew(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in ("store", "intake", "locking", "metadata"):
        monkeypatch.setattr(f"shardcache.{module}.boot_id", lambda: name)


@pytest.mark.parametrize("data", ["zeros", "truncated", "torn", "kept"])
@pytest.mark.parametrize("names", [0, 1, *more([3]), None])
def test_after_a_power_failure_no_wrong_byte_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, names: int | None
) -> None:
    boot_anew(monkeypatch, "before")
    with mounted(tmp_path, power=True) as shim:
        with using(shim.root / "cache") as cache:
            assert read(cache) == DATA
        shim.lose_power(data, names=names, seed=7)
    boot_anew(monkeypatch, "after")
    origin = MemoryOrigin(objects={URL: DATA})
    with mounted(tmp_path) as shim:
        with using(shim.root / "cache", origin) as cache:
            assert read(cache) == DATA
            assert read(cache) == DATA
            assert len(origin.requests) <= 1
            if data == "kept" and names == 0:
                assert origin.requests == []  # verified, and found good
        with using(shim.root / "cache", MemoryOrigin()) as cache:
            assert read(cache) == DATA  # once more, from what is there now
            age(shim.backing / "cache" / "v1" / "partial")
            cache.clean(limits=False)
    assert partials(tmp_path / "backing" / "cache") == []


@pytest.mark.parametrize("names", [0, 1, None])
def test_what_was_synced_before_it_was_named_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: int | None
) -> None:
    with mounted(tmp_path, power=True) as shim:
        with using(shim.root / "cache", fsync="fsync") as cache:
            assert read(cache) == DATA
        shim.lose_power("zeros", names=names)
    boot_anew(monkeypatch, "after")
    origin = MemoryOrigin()
    with mounted(tmp_path) as shim, using(shim.root / "cache", origin, fsync="fsync") as cache:
        assert read(cache) == DATA
        assert origin.requests == []


@pytest.mark.parametrize("data", ["zeros", "truncated", "torn"])
@pytest.mark.parametrize("spare", ["", "*/progress", "*/*.tar"])
def test_a_fetch_cut_off_by_a_power_failure_is_resumed_from_what_is_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, spare: str
) -> None:
    with mounted(tmp_path, power=True) as shim:
        origin = MemoryOrigin(objects={URL: DATA})
        origin.faults.append(Fault(after=3 * BLOCK, error=TransientError("cut")))
        origin.faults.append(Fault(after=None))
        with using(shim.root / "cache", origin, attempts=1) as cache:
            with pytest.raises(TransferError):
                cache.fetch(URL)
            # Of what made the root, and the partial, all is on the disk.
            for path in shim.root.rglob("*.json"):
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)
        assert len(partials(shim.backing / "cache")) == 1
        assert shim.lose_power(data, seed=3, spare=spare)["files"]
    age(Layout.of_root(tmp_path / "backing" / "cache").partial)
    boot_anew(monkeypatch, "after")
    origin = MemoryOrigin(objects={URL: DATA})
    with mounted(tmp_path) as shim, using(shim.root / "cache", origin) as cache:
        assert read(cache) == DATA
        assert URL in cache
        if spare == "*/progress" and data == "torn":
            assert origin.delivered > len(DATA) - 3 * BLOCK  # what was torn came again
        cache.clean(limits=False)
    assert partials(tmp_path / "backing" / "cache") == []
    assert os.listdir(Layout.of_root(tmp_path / "backing" / "cache").quarantine) == []
