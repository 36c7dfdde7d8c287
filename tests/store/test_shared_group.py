"""One cache for all users of a group: real users, whatever their umask."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rich.table  # noqa: F401 - before users change: the standard library is closed to them

from shardcache import Cache, ConfigError
from shardcache.cli.main import main
from shardcache.layout import Layout
from tests.support.fakes import Fault, MemoryOrigin
from tests.support.storetools import Parent, needs_root, public_directory, wait_until
from tests.support.tars import make_tar
from tests.support.users import ANNA, BELA, GROUP, User, ask, running

pytestmark = needs_root

OTHER_GROUP = 64998
OUTSIDER = User(64993, ())
SHARDS = {f"s3://lab/{n}.tar": make_tar(n) for n in range(8)}
URL = "s3://lab/0.tar"
BIG = make_tar(1, 400, 3500)

UMASKS = [0, 0o022, 0o077]
SHARED = {"directory": 0o2770, "file": 0o660, "published": 0o440}
ALONE = {"directory": 0o700, "file": 0o600, "published": 0o400}


def expected(name: str, path: Path, modes: dict[str, int]) -> int:
    if path.is_dir():
        return modes["directory"]
    return modes["published" if "/objects/" in name and path.suffix == ".tar" else "file"]


def open_cache(root: Path, origin: MemoryOrigin | None = None, **options: Any) -> Cache:
    """A cache of `SHARDS` that needs no server."""
    origin = origin or MemoryOrigin(objects=dict(SHARDS))
    cache = Cache(root, **{"min_free": 0, "strict": True, **options})
    process = cache._here()
    process.coordinator()
    process.origins.add("s3", origin)
    return cache


def fetch(root: Path, *urls: str, **options: Any) -> list[tuple[str, bool, int]]:
    """How each shard was had, whether its bytes are right, and how many requests that cost."""
    found = []
    origin = MemoryOrigin(objects=dict(SHARDS))
    with open_cache(root, origin, **options) as cache:
        for url in urls or (URL,):
            before = len(origin.requests)
            _, outcome = cache.opener.fetch(cache.parse(url))
            with cache.open(url) as stream:
                right = stream.read() == SHARDS[url]
            found.append((str(outcome), right, len(origin.requests) - before))
    return found


def modes_of(root: Path) -> dict[str, int]:
    """The mode of everything below a directory, and of it."""
    paths = [root, *root.rglob("*")]
    return {
        str(path.relative_to(root.parent)): stat.S_IMODE(path.lstat().st_mode) for path in paths
    }


@pytest.fixture
def area(tmp_path: Path) -> Iterator[Path]:
    """A directory where members of the group may make caches, and others may look."""
    # All of what the children need is loaded here: they may not read this checkout.
    fetch(tmp_path / "warm-up")
    with public_directory() as public:
        directory = public / "lab"
        directory.mkdir()
        os.chown(directory, 0, GROUP)
        directory.chmod(0o2775)
        yield directory


# -- permissions ---------------------------------------------------------------


def killed_midway(parent: Parent, root: Path, options: dict[str, object]) -> None:
    """Fetch half a shard and wait for the signal."""
    origin = MemoryOrigin(objects={URL: BIG}, chunk=100)
    origin.faults.append(Fault(after=500, wait=threading.Event()))
    cache = open_cache(root, origin, **options)
    threading.Thread(target=cache.fetch, args=(URL,), daemon=True).start()
    wait_until(lambda: origin.delivered >= 500)
    parent.say()
    parent.hear()


@pytest.mark.parametrize("umask", UMASKS)
@pytest.mark.parametrize("group", [GROUP, None])
def test_permissions_are_the_same_whatever_the_umask(
    area: Path, umask: int, group: int | None
) -> None:
    root = area / "deep" / "cache"
    if group is None:
        (area / "deep").mkdir()
        os.chown(area / "deep", ANNA.uid, ANNA.uid)
        (area / "deep").chmod(0o755)
    modes = ALONE if group is None else SHARED
    options = {"shared_group": group, "isolation": "rank"}
    with running(ANNA, killed_midway, root, options, umask=umask) as child:
        child.hear()
        ask(ANNA, lambda: fetch(root, "s3://lab/1.tar", **options), umask=umask)
        found = modes_of(root)
        names = "/".join(found)
        for part in ("/progress", ".session", ".lock", "/objects/", "meta.json", "ranks/local-0"):
            assert part in names, part
        for name, mode in found.items():
            path = root.parent / name
            assert mode == expected(name, path, modes), name
            assert path.lstat().st_gid == (ANNA.uid if group is None else group), name
    if group is not None:  # what was made above the cache lets the same people in
        assert stat.S_IMODE((area / "deep").stat().st_mode) == 0o2770


def test_outsiders_see_nothing(area: Path) -> None:
    root = area / "cache"
    ask(ANNA, lambda: fetch(root, shared_group=GROUP))
    paths = [str(path) for path in [root, *root.rglob("*")]]

    def look() -> list[str]:
        seen = []
        for path in paths:
            for attempt in (os.listdir, lambda p: os.open(p, os.O_RDONLY), os.unlink):
                try:
                    attempt(path)
                    seen.append(path)
                except (PermissionError, NotADirectoryError):
                    continue
        return seen

    assert len(paths) > 15
    assert ask(OUTSIDER, look) == []
    for options, text in (({"shared_group": GROUP}, "not in the group"), ({}, "shared_group")):
        with pytest.raises(AssertionError, match=text):
            ask(OUTSIDER, lambda options=options: fetch(root, **options))


# -- what members may do with each other's shards --------------------------------


def test_one_fetches_the_other_hits_touches_evicts_and_sweeps(area: Path) -> None:
    root = area / "cache"
    had = ask(ANNA, lambda: fetch(root, "s3://lab/1.tar", shared_group=GROUP), umask=0o077)
    assert had == [("fetched", True, 1)]
    (sidecar,) = root.rglob("meta.json")
    os.utime(sidecar, (1, 1))
    with running(ANNA, killed_midway, root, {"shared_group": GROUP}) as child:
        child.hear()
        child.kill(signal.SIGKILL)
    layout = Layout.of_root(root)
    assert list(layout.partial.iterdir()) and list(layout.sessions.iterdir())

    def use() -> tuple[list[tuple[str, bool, int]], float, tuple[int, int], int]:
        had = fetch(root, "s3://lab/1.tar", shared_group=GROUP)
        used = sidecar.stat().st_mtime
        with open_cache(root, shared_group=GROUP) as cache:
            removed = cache.remove("s3://lab/1.tar")
            return had, used, removed, len(cache.clean(orphans=True).removed)

    had, used, removed, swept = ask(BELA, use, umask=0)
    assert had == [("hit", True, 0)]
    assert used > 1_000_000_000
    assert removed == (len(SHARDS["s3://lab/1.tar"]), 0) and swept == 1
    assert list(root.rglob("*.tar")) == list(layout.partial.iterdir()) == []
    assert list(layout.sessions.iterdir()) == []
    assert list(layout.locks.rglob(f"{'?' * 32}.lock")) == []


def test_half_a_shard_is_resumed_by_its_own_user_only(area: Path) -> None:
    root = area / "cache"
    big, size, half = {URL: BIG}, len(BIG), 2 << 20

    def begin(parent: Parent) -> None:
        origin = MemoryOrigin(objects=big)
        origin.faults.append(Fault(after=half + 10, wait=threading.Event()))
        cache = open_cache(root, origin, shared_group=GROUP)
        threading.Thread(target=cache.fetch, args=(URL,), daemon=True).start()
        wait_until(lambda: origin.delivered > half)
        parent.say()
        parent.hear()

    def go_on() -> tuple[int, bool]:
        origin = MemoryOrigin(objects=big)
        with open_cache(root, origin, shared_group=GROUP) as cache, cache.open(URL) as stream:
            right = stream.read() == big[URL]
            cache.clean(orphans=True)
        return origin.delivered, right

    for user, delivered in ((ANNA, size - half), (BELA, size)):
        with running(ANNA, begin) as child:
            child.hear()
            child.kill()
        assert ask(user, go_on) == (delivered, True)
        published = next(root.rglob("0.tar"))
        assert published.stat().st_uid == user.uid  # who alone can make it read-only
        assert stat.S_IMODE(published.stat().st_mode) == 0o440
        assert list(Layout.of_root(root).partial.iterdir()) == []
        shutil.rmtree(root)


def test_many_of_both_make_one_cache_and_fetch_every_shard_once(area: Path) -> None:
    root = area / "cache"

    def take_part(parent: Parent) -> None:
        parent.hear()
        parent.say(fetch(root, *SHARDS, shared_group=GROUP))

    crowd = [(user, umask) for user in (ANNA, BELA) for umask in (0, 0o027, 0o077)]
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(running(u, take_part, umask=m)) for u, m in crowd]
        for child in children:
            child.tell()
        found = [child.hear() for child in children]
    assert all(right for one in found for _, right, _ in one)
    requests = [sum(one[n][2] for one in found) for n in range(len(SHARDS))]
    assert requests == [1] * len(SHARDS)


# -- refusals ------------------------------------------------------------------


def command_of(text: str) -> str:
    """The command that an error names."""
    return text.partition("can mend that: ")[2].partition("\n")[0].strip().rstrip(".")


@pytest.mark.parametrize(
    ("mode", "group"),
    [(0o2750, GROUP), (0o770, GROUP), (0o2770, OTHER_GROUP)],
)
def test_a_root_that_the_group_does_not_share_is_refused_with_the_command_that_mends_it(
    area: Path, mode: int, group: int
) -> None:
    root = area / "cache"
    root.mkdir()
    os.chown(root, ANNA.uid, group)
    root.chmod(mode)

    def refusal() -> str:
        try:
            fetch(root, shared_group=GROUP)
        except ConfigError as exn:
            return str(exn)
        return ""

    for user in (ANNA, BELA):
        command = command_of(ask(user, refusal))
        assert command == f"chgrp {GROUP} {root} && chmod 2770 {root}"
    assert list(root.iterdir()) == []

    subprocess.run(command, shell=True, check=True)
    assert ask(BELA, lambda: fetch(root, shared_group=GROUP)) == [("fetched", True, 1)]


def cli(*arguments: str, **environment: str) -> Callable[[], tuple[int, str]]:
    def run() -> tuple[int, str]:
        os.environ.update(environment)
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            code = main(list(arguments))
        return code, text.getvalue()

    return run


def test_a_shared_cache_is_not_used_without_its_group_nor_the_other_way_round(area: Path) -> None:
    shared, own = area / "shared", area / "own"
    ask(ANNA, lambda: fetch(shared, shared_group=GROUP))
    ask(ANNA, lambda: fetch(own))
    before = modes_of(shared), modes_of(own)
    both = User(ANNA.uid, (GROUP, OTHER_GROUP))
    cases = [
        (ANNA, shared, "", f"shared by the group {GROUP}; set shared_group='{GROUP}'"),
        (both, shared, str(OTHER_GROUP), f"shared by the group {GROUP}"),
        (ANNA, own, str(GROUP), "the cache of one user"),
    ]
    for command in (("ls",), ("clean", "--all", "-y"), ("rm", "-y", URL)):
        for user, root, group, reason in cases:
            environment = {"SHARDCACHE_SHARED_GROUP": group} if group else {}
            code, text = ask(user, cli("--dir", str(root), *command, **environment))
            assert code == 2 and reason in text
    assert (modes_of(shared), modes_of(own)) == before
    code, text = ask(BELA, cli("--dir", str(shared), "ls", SHARDCACHE_SHARED_GROUP=str(GROUP)))
    assert code == 0 and URL in text
    for root, options in ((shared, {}), (own, {"shared_group": GROUP})):
        with pytest.raises(AssertionError, match="ConfigError"):
            ask(ANNA, lambda root=root, options=options: fetch(root, **options))


def test_a_group_that_is_none_and_one_that_we_are_not_in(area: Path) -> None:
    for name in ("no such group", "", "-1", str(2**32 - 1), True, 1.5):
        with pytest.raises(ConfigError, match="shared_group"):
            open_cache(area / "cache", shared_group=name)
    assert not (area / "cache").exists()
    with pytest.raises(AssertionError, match="not in the group.*log in"):
        ask(ANNA, lambda: fetch(area / "cache", shared_group=OTHER_GROUP))
