"""One cache for all users of a group, with real users and several umasks."""

import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rich.table  # noqa: F401 - the children cannot import it as other users

from shardcache import Cache
from shardcache.files import Modes
from tests.support.clitools import command
from tests.support.disktools import needs_root
from tests.support.fakes import Fault, MemoryOrigin
from tests.support.storetools import Parent, layout_of, public_directory, tree, wait_until
from tests.support.tars import make_tar
from tests.support.users import ANNA, BELA, GROUP, User, ask, running

pytestmark = needs_root

OTHER_GROUP = 64998
OUTSIDER = User(64993, ())
SHARDS = {f"s3://lab/{n}.tar": make_tar(n) for n in range(8)}
URL = "s3://lab/0.tar"
BIG, HALF = make_tar(1, 400, 3500), 2 << 20

SHARED = {"directory": 0o2770, "file": 0o660, "published": 0o440}
ALONE = {"directory": 0o700, "file": 0o600, "published": 0o400}


def open_cache(root: Path, origin: MemoryOrigin | None = None, **options: Any) -> Cache:
    """A cache of `SHARDS` that needs no server."""
    origin = origin or MemoryOrigin(objects=dict(SHARDS))
    cache = Cache(root, **{"min_free": 0, "strict": True, **options})
    cache.process.prepare()
    cache.process.origins.use("s3", origin)
    return cache


def fetch(root: Path, *urls: str, **options: Any) -> list[tuple[str, bool, int]]:
    """Return for each shard the outcome, whether its bytes are right, and the requests."""
    found = []
    origin = MemoryOrigin(objects=dict(SHARDS))
    with open_cache(root, origin, **options) as cache:
        for url in urls or (URL,):
            before = len(origin.requests)
            (result,) = cache.prewarm([url]).results
            right = cache.open(url).read() == SHARDS[url]
            found.append((result.outcome.value, right, len(origin.requests) - before))
    return found


def fetch_midway(parent: Parent, root: Path, options: dict[str, Any]) -> None:
    """Download half of a shard and wait for a signal."""
    origin = MemoryOrigin(objects={URL: BIG})
    origin.faults.append(Fault(after=HALF + 10, wait=threading.Event()))
    cache = open_cache(root, origin, **options)
    threading.Thread(target=cache.fetch, args=(URL,), daemon=True).start()
    wait_until(lambda: origin.delivered > HALF)
    parent.say()
    parent.hear()


@pytest.fixture
def area(tmp_path: Path) -> Iterator[Path]:
    """A directory where members of the group may make caches, and others may read."""
    # Imports all that the children need: as other users they cannot read this checkout.
    fetch(tmp_path / "warm-up")
    with public_directory() as public:
        directory = public / "lab"
        directory.mkdir()
        os.chown(directory, 0, GROUP)
        directory.chmod(0o2775)
        yield directory


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
@pytest.mark.parametrize("group", [GROUP, None])
def test_permissions_do_not_depend_on_the_umask(area, umask, group):
    root = area / "deep" / "cache"
    if group is None:
        root.parent.mkdir()
        os.chown(root.parent, ANNA.uid, ANNA.uid)
        root.parent.chmod(0o755)
    modes = ALONE if group is None else SHARED
    options = {"shared_group": group, "isolation": "rank"}
    with running(ANNA, fetch_midway, root, options, umask=umask) as child:
        child.hear()
        ask(ANNA, lambda: fetch(root, "s3://lab/1.tar", **options), umask=umask)
        found = {str(path): path.lstat() for path in (root, *root.rglob("*"))}
        for part in ("/progress", ".session", ".lock", "/objects/", "meta.json", "ranks/local-0"):
            assert any(part in name for name in found), part
        for name, status in found.items():
            published = "/objects/" in name and name.endswith(".tar")
            kind = "directory" if stat.S_ISDIR(status.st_mode) else "file"
            assert stat.S_IMODE(status.st_mode) == modes["published" if published else kind], name
            assert status.st_gid == (ANNA.uid if group is None else group), name
    if group is not None:  # the new directory above the cache is shared, too
        assert stat.S_IMODE(root.parent.stat().st_mode) == 0o2770


def test_a_user_outside_the_group_is_refused_with_the_reason(area: Path) -> None:
    root = area / "cache"
    ask(ANNA, lambda: fetch(root, shared_group=GROUP))
    assert ask(OUTSIDER, lambda: list(map(str, root.glob("**/*")))) == []
    for group, text in ((GROUP, "not in the group.*log in"), (None, "shared_group")):
        with pytest.raises(AssertionError, match=text):
            ask(OUTSIDER, lambda group=group: fetch(root, shared_group=group))


def test_one_user_downloads_and_the_other_hits_touches_and_removes(area: Path) -> None:
    root = area / "cache"
    assert ask(ANNA, lambda: fetch(root, shared_group=GROUP)) == [("fetched", True, 1)]
    (sidecar,) = root.rglob("meta.json")
    os.utime(sidecar, (1, 1))

    def use() -> tuple[list[tuple[str, bool, int]], float, tuple[int, int]]:
        found, used = fetch(root, shared_group=GROUP), sidecar.stat().st_mtime
        with open_cache(root, shared_group=GROUP) as cache:
            return found, used, cache.remove(URL)

    found, used, removed = ask(BELA, use, umask=0)
    assert found == [("cached", True, 0)] and used > 1_000_000_000
    assert removed == (len(SHARDS[URL]), 0) and list(root.rglob("*.tar")) == []


def test_only_the_same_user_resumes_a_download(area: Path) -> None:
    root = area / "cache"

    def resume() -> tuple[int, bool]:
        origin = MemoryOrigin(objects={URL: BIG})
        with open_cache(root, origin, shared_group=GROUP) as cache, cache.open(URL) as stream:
            right = stream.read() == BIG
            cache.clean(orphans=True)
        return origin.delivered, right

    for user, delivered in ((ANNA, len(BIG) - HALF), (BELA, len(BIG))):
        with running(ANNA, fetch_midway, root, {"shared_group": GROUP}) as child:
            child.hear()
            child.kill()
        assert ask(user, resume) == (delivered, True)
        published = next(root.rglob("0.tar"))
        assert published.stat().st_uid == user.uid  # only its owner can make it read-only
        assert stat.S_IMODE(published.stat().st_mode) == 0o440
        layout = layout_of(root)
        assert list(layout.partials.iterdir()) == list(layout.sessions.iterdir()) == []
        assert list(layout.locks.rglob(f"{'?' * 32}.lock")) == []
        shutil.rmtree(root)


@pytest.mark.parametrize(
    ("mode", "group"), [(0o2750, GROUP), (0o770, GROUP), (0o2770, OTHER_GROUP)]
)
def test_a_root_with_the_wrong_group_is_refused_with_the_command_that_mends_it(area, mode, group):
    root = area / "cache"
    root.mkdir()
    os.chown(root, ANNA.uid, group)
    root.chmod(mode)
    mend = f"chgrp {GROUP} {root} && chmod 2770 {root}"
    for user in (ANNA, BELA):
        with pytest.raises(AssertionError, match=mend):
            ask(user, lambda: fetch(root, shared_group=GROUP))
    assert list(root.iterdir()) == []
    subprocess.run(mend, shell=True, check=True)
    assert ask(BELA, lambda: fetch(root, shared_group=GROUP)) == [("fetched", True, 1)]


def test_a_shared_cache_is_refused_without_its_group_and_vice_versa(area, monkeypatch):
    shared, own = area / "shared", area / "own"
    ask(ANNA, lambda: fetch(shared, shared_group=GROUP))
    ask(ANNA, lambda: fetch(own))
    before, both = tree(area), User(ANNA.uid, (GROUP, OTHER_GROUP))
    for root, group, reason in (
        (shared, "", f"shared by the group {GROUP}. Set shared_group='{GROUP}'"),
        (shared, OTHER_GROUP, f"shared by the group {GROUP}"),
        (own, GROUP, "the cache of one user"),
    ):
        monkeypatch.setenv("SHARDCACHE_SHARED_GROUP", str(group))
        for arguments in (("ls",), ("clean", "--all", "-y"), ("rm", "-y", URL)):
            code, text = ask(both, lambda a=arguments, r=root: command("--dir", r, *a))
            assert code == 2 and reason in text
    assert tree(area) == before
    code, text = ask(BELA, lambda: command("--dir", shared, "ls"))  # uses the last group
    assert code == 0 and URL in text


def refresh(root: Path) -> None:
    with open_cache(root, shared_group=GROUP) as cache:
        assert cache.prewarm([URL], refresh=True).refreshed == 1


def read_old(parent: Parent, root: Path, replaces: bool) -> None:
    """Keep the old version in use, and maybe replace it."""
    with open_cache(root, MemoryOrigin(objects={URL: BIG}), shared_group=GROUP) as cache:
        old = cache.fetch(URL).directory
        with cache.open(URL):
            if replaces:
                refresh(root)
            parent.say(old)
            parent.hear()


@pytest.mark.parametrize("who", ["owner", "member"])
def test_the_newest_version_does_not_depend_on_who_stored_or_indexed_it(area, who):
    root = area / "cache"

    def index(old: str) -> bool:
        if who == "member":
            refresh(root)
        layout_of(root, Modes.of(GROUP)).write(Path(old, "samples.idx"), b"")  # as a `TarDataset`
        with open_cache(root, shared_group=GROUP) as cache:
            return cache.open(URL).read() == SHARDS[URL]

    with running(ANNA, read_old, root, who == "owner") as anna:
        assert ask(BELA, index, anna.hear())
        anna.tell()
