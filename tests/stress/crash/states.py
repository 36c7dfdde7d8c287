"""Cache directories as processes leave them, those that were killed included.

What is found here was left by real work: whoever died was killed at the moment meant.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardcache.cache import Cache
from shardcache.layout import META
from shardcache.locks.flock import Holder
from shardcache.locks.sessions import Wait, WaitNote
from shardcache.origins.base import Body, ObjectInfo
from shardcache.origins.filesystem import FsspecOrigin
from shardcache.store.entry import Metadata
from shardcache.urls import ShardURL
from tests.stress.crash.place import BIG, MIB, Place

__all__ = [
    "SlowOrigin",
    "damaged",
    "half_fetched",
    "having",
    "made",
    "orphans",
    "rebooted",
    "sibling",
    "use",
]

#: What `orphans` must have, below ``v1``.
_LEFT = (
    "partial/[0-9a-f]*",
    "partial/evict.*",
    "partial/.*",
    "quarantine/*",
    "sessions/*.session",
    "sessions/*.wait",
    "sessions/.starting-*",
)
#: Seconds; a wait in a scenario that takes longer has gone wrong.
_PATIENCE = 30.0
#: Seconds within which the other connections of a fetch have begun, or will not.
_SOON = 2.0


# -- origins that make a moment happen -----------------------------------------------


class SlowOrigin(FsspecOrigin):
    """Lets its first connection end when all others have: each delivers one part."""

    def __init__(self, others: int) -> None:
        super().__init__("file", {})
        self._left = others
        self._guard = threading.Lock()
        self._begun = threading.Event()
        self._done = threading.Event()

    def open(
        self, url: ShardURL, start: int, stop: int | None, pin: ObjectInfo | None = None
    ) -> Any:
        """See `origin.Origin.open`."""
        body = super().open(url, start, stop, pin)
        if stop is None:
            return body  # streamed past the cache, alone
        if start == 0:
            return _Held(body, self._begun, self._done)
        self._begun.set()
        return _Following(body, self._finished)

    def _finished(self) -> None:
        with self._guard:
            self._left -= 1
            if not self._left:
                self._done.set()


class _Wrapped:
    def __init__(self, body: Body) -> None:
        self._body = body

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)


class _Held(_Wrapped):
    def __init__(self, body: Body, begun: threading.Event, done: threading.Event) -> None:
        super().__init__(body)
        self._begun = begun
        self._done = done

    def close(self) -> None:
        self._body.close()
        if self._begun.wait(_SOON):  # not where the first block already failed
            self._done.wait(_PATIENCE)

    def abort(self) -> None:
        self._begun.set()
        self._done.set()
        self._body.abort()


class _Following(_Wrapped):
    def __init__(self, body: Body, finished: Callable[[], None]) -> None:
        super().__init__(body)
        self._finished = finished

    def close(self) -> None:
        self._body.close()
        self._finished()


class _Deadly(FsspecOrigin):
    """Kills the process that reads beyond a byte."""

    def __init__(self, position: int) -> None:
        super().__init__("file", {})
        self._position = position

    def open(
        self, url: ShardURL, start: int, stop: int | None, pin: ObjectInfo | None = None
    ) -> Any:
        if start >= self._position:
            _die()
        return super().open(url, start, stop, pin)


def use(cache: Cache, origin: FsspecOrigin) -> None:
    """Read files from this origin."""
    process = cache._here()
    process.coordinator()
    process.origins.add("file", origin)


# -- processes that die --------------------------------------------------------------


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _killed(function: Callable[[], object]) -> None:
    """Run it in a process, which it must kill."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != -signal.SIGKILL:
        raise RuntimeError(f"a process that should have been killed ended with {status}")


@contextlib.contextmanager
def _deadly(owner: Any, name: str) -> Iterator[None]:
    """Calling ``owner.name`` kills the process; for a process that is to die."""
    setattr(owner, name, _die)
    yield


# -- what a struck process finds -----------------------------------------------------


def made(place: Place) -> None:
    """A cache without shards; flock was tried there, and nobody uses it any more."""
    with place.cache() as cache:
        cache._here().coordinator()


def having(*names: str, age: float = 0.0) -> Callable[[Place], None]:
    """A cache with these shards, last used ``age`` seconds ago."""

    def prepare(place: Place) -> None:
        made(place)
        with place.cache() as cache:
            for name in names:
                place.read(cache, name)
        used = time.time() - age
        for entry in cache.entries():
            os.utime(entry.path / META, (used, used))
        cache.close()

    return prepare


def _data(place: Place, name: str) -> Path:
    with place.cache() as cache:
        entry = cache.entry(place.url(name))
    assert entry is not None
    return entry.data


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[Path]:
    path.chmod(0o600)
    yield path
    path.chmod(0o400)


def _of_another_boot(data: Path) -> None:
    path = data.with_name(META)
    before = path.stat()
    metadata = Metadata.decode(path.read_bytes())
    path.write_bytes(metadata.trusted_since("an earlier boot").encode())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def rebooted(place: Place) -> None:
    """The machine was started anew since the shard was fetched."""
    having("a.tar")(place)
    _of_another_boot(_data(place, "a.tar"))


def damaged(place: Place) -> None:
    """One entry lost its end, another has a wrong byte since the machine crashed."""
    having("a.tar", "b.tar")(place)
    with _writable(_data(place, "a.tar")) as path:
        os.truncate(path, 1000)
    with _writable(_data(place, "b.tar")) as path, open(path, "r+b") as file:
        file.seek(1000)
        file.write(b"\0\1\2\3")
    _of_another_boot(path)


def half_fetched(place: Place) -> None:
    """Whoever fetched the big shard was killed behind its first part."""

    def fetch() -> None:
        cache = place.cache()
        use(cache, _Deadly(2 * MIB))
        place.read(cache, BIG)

    made(place)
    _killed(fetch)


def orphans(place: Place) -> None:
    """One of each thing that a process can leave: six were killed."""
    having("a.tar", "b.tar", "c.tar")(place)
    with _writable(_data(place, "b.tar")) as path:
        os.truncate(path, 1000)

    def fetch() -> None:
        cache = place.cache()
        use(cache, _Deadly(2 * MIB))
        place.read(cache, BIG)

    def evict() -> None:
        with _deadly(shutil, "rmtree"), place.cache() as cache:
            cache.remove(place.url("c.tar"))

    def set_aside() -> None:
        with place.cache() as cache:
            use(cache, _Deadly(0))
            place.read(cache, "b.tar")

    def register() -> None:
        with _deadly(Path, "rename"), place.cache() as cache:
            cache._here().coordinator()

    def wait() -> None:
        with place.cache() as cache:
            layout, shard = cache.node_layout, cache.parse(place.url("a.tar"))
        holder = Holder.this_process(rank=None, job=None, now=time.time())
        WaitNote(layout).say(Wait(str(shard), shard.key, holder, None))
        os.kill(os.getpid(), signal.SIGKILL)

    def write() -> None:
        cache = place.cache()
        cache._here().coordinator()
        with _deadly(Path, "replace"):
            place.read(cache, "d.tar")

    for function in (fetch, evict, set_aside, register, wait, write):
        _killed(function)
    for pattern in _LEFT:
        if not list(place.root.glob(f"v1/{pattern}")):
            raise RuntimeError(f"no killed process left anything like {pattern}")


def sibling(place: Place) -> None:
    """Rank 0 has the shard; the directory of rank 1, who is struck, is not yet made."""
    made(Place(place.root, place.origin))
    os.environ["SHARDCACHE_RANK"] = "0"
    with place.cache() as cache:
        place.read(cache, "a.tar")
