"""Processes of other users: two members of one group, and somebody who is not in it.

Root alone can run as anybody, so tests that use these are marked `needs_root`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardcache import Cache
from tests.support.fakes import MemoryOrigin
from tests.support.storetools import Child, Parent, forked, public_directory
from tests.support.tars import make_tar

#: Numbers that no distribution gives to anybody.
GROUP = 64999
OTHER_GROUP = 64998
SHARDS = {f"s3://lab/{n}.tar": make_tar(n) for n in range(8)}
URL = "s3://lab/0.tar"


@dataclass(frozen=True)
class User:
    uid: int
    groups: tuple[int, ...] = (GROUP,)

    def become(self, umask: int = 0o077) -> None:
        """Turn this process into one of the user's, for good."""
        os.chdir("/")  # where the tests run may be closed to others
        os.setgroups(list(self.groups))
        os.setresgid(self.uid, self.uid, self.uid)
        os.setresuid(self.uid, self.uid, self.uid)
        os.umask(umask)


ANNA = User(64991)
BELA = User(64992)
OUTSIDER = User(64993, ())


@contextlib.contextmanager
def running(
    user: User, function: Callable[..., None], *args: Any, umask: int = 0o077
) -> Iterator[Child]:
    """``function(parent, *args)`` in a process of ``user``; see `storetools.forked`."""

    def child(parent: Parent) -> None:
        user.become(umask)
        function(parent, *args)

    with forked(child) as found:
        yield found


def ask(user: User, function: Callable[..., Any], *args: Any, umask: int = 0o077) -> Any:
    """What ``function(*args)`` returns to ``user``."""

    def answer(parent: Parent) -> None:
        parent.say(function(*args))

    with running(user, answer, umask=umask) as child:
        return child.hear()


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
            _, outcome = cache.fetch_shard(cache.parse(url))
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
