"""What the tests on the shim share: processes with one cache, and how their locks fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

from shardcache.cache import Cache
from shardcache.layout import Layout
from shardcache.locks import mounts
from shardcache.store.digest import BLOCK
from shardcache.store.partial import read_progress
from tests.stress.fuse.shim import Shim
from tests.support.fakes import Fault, MemoryOrigin
from tests.support.storetools import Parent, wait_until
from tests.support.tars import make_tar

URL = "s3://lab/train-0000.tar"
DATA = make_tar(1, members=2, size=BLOCK)  # four blocks and a bit


@dataclass(frozen=True, slots=True)
class Locks:
    """A way in which flock fails, and what the cache knows of it.

    Attributes:
        known: "by type": the filesystem's name says that flock cannot be believed;
            "never": ``locks="flock"`` forces the cache to believe in it.
        flock: what it does; see `fusenodes.Settings.flock`.
        killable: whether a process in a hanging flock can be killed.
    """

    known: str
    flock: str
    killable: bool = True

    def __str__(self) -> str:
        return f"{self.flock}-known-{self.known}" + ("" if self.killable else "-unkillable")

    @property
    def believed(self) -> bool:
        """Whether flock on the mount decides anything."""
        return self.known == "never"

    @property
    def work(self) -> bool:
        """Whether what decides tells the truth: flock that works, or leases."""
        return not self.believed or self.flock == "working"

    @property
    def graced(self) -> bool:
        """Whether use is told by time."""
        return not self.believed or self.flock == "refused"

    @property
    def options(self) -> dict[str, Any]:
        return {"locks": "flock"} if self.known == "never" else {}

    def begin(self, shim: Shim, monkeypatch: pytest.MonkeyPatch, node: Path) -> None:
        """From now on locks fail so; ``node`` is where this node's sessions go."""
        node.mkdir(exist_ok=True)
        monkeypatch.setattr(mounts, "_NODE_DIRECTORIES", (str(node),))
        shim.set(flock=self.flock, killable=self.killable)


KNOWN_BY_TYPE = [Locks("by type", f) for f in ("working", "refused", "lying", "hanging")]
NEVER_KNOWN = [Locks("never", f) for f in ("working", "refused", "lying")]
ALL_LOCKS = [*KNOWN_BY_TYPE, *NEVER_KNOWN]
#: One of each kind: what the cache relies on is the same for the others.
_SHOWN = {Locks("by type", "hanging"), *NEVER_KNOWN}
SOME_LOCKS = [
    locks if locks in _SHOWN else pytest.param(locks, marks=pytest.mark.full) for locks in ALL_LOCKS
]


def cache_on(root: Path, origin: MemoryOrigin, **options: Any) -> Cache:
    """A cache of this process that reads ``s3://`` from memory."""
    cache = Cache(root, min_free=0, connections=1, **options)
    process = cache._here()
    process.coordinator()
    process.origins.add("s3", origin)
    return cache


@contextlib.contextmanager
def using(root: Path, origin: MemoryOrigin | None = None, **options: Any) -> Iterator[Cache]:
    """As `cache_on`, closed at the end."""
    cache = cache_on(root, origin or MemoryOrigin(objects={URL: DATA}), **options)
    try:
        yield cache
    finally:
        cache.close()


@dataclass(frozen=True, slots=True)
class Read:
    """What a process read, and what it cost."""

    right: bool
    stored: bool
    fetches: int
    delivered: int


def reader(
    parent: Parent, _number: int, root: Path, options: dict[str, Any], gate: Event | None = None
) -> None:
    """A process that reads the shard when told, says how it went, and ends when told.

    Args:
        parent: the test.
        _number: which of a crowd.
        root: of the cache.
        options: of the cache.
        gate: the fetch waits for it after two blocks.
    """
    origin = MemoryOrigin(objects={URL: DATA})
    if gate is not None:
        origin.faults.append(Fault(after=2 * BLOCK, wait=gate))  # type: ignore[arg-type]
    with using(root, origin, **options) as cache:
        parent.say("ready")
        parent.hear()
        with cache.open(URL) as stream:
            stored = stream.name != URL
            right = stream.read() == DATA
        fetches = sum(start == 0 for _, start, _ in origin.requests)
        parent.say(Read(right, stored, fetches, origin.delivered))
        parent.hear()


def partials(root: Path) -> list[Path]:
    """What is in flight, or was left; looked at where locks cannot hang: behind the mount."""
    directory = Layout.of_root(root).partial
    return sorted(directory.iterdir()) if directory.exists() else []


def wait_for_bytes(root: Path, count: int) -> None:
    """Until a fetch has so many bytes on the disk."""

    def there() -> bool:
        found = [read_progress(path) for path in partials(root)]
        return any(p is not None and p.written >= count for p in found)

    wait_until(there)
