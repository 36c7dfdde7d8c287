"""What the tests of the store share: shards, entries, and processes of their own."""

import contextlib
import errno
import gc
import hashlib
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from shardcache.clock import boot_id
from shardcache.layout import Layout
from shardcache.origins.base import ObjectInfo
from shardcache.space.memory import allocation
from shardcache.store.digest import BLOCK, block_digest, tree_digest
from shardcache.store.directory import Metadata
from shardcache.store.entry import Entry, Store
from shardcache.store.partial import Partial
from shardcache.urls import parse_url

#: Seconds: ends a test that hangs; nothing passes or fails by being faster.
PATIENCE = 120.0

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes users")


def payload(size: int, seed: int = 1) -> bytes:
    """Bytes that differ everywhere, and from seed to seed."""
    return hashlib.shake_128(f"{seed}".encode()).digest(size)


def metadata_for(
    url: str = "s3://lab/a.tar", data: bytes = b"", *, etag: str | None = None, size: object = ...
) -> Metadata:
    """The sidecar of ``data``; ``size`` is what the origin stated, by default the truth."""
    blocks = [data[i : i + BLOCK] for i in range(0, len(data), BLOCK)]
    return Metadata(
        url=url,
        key=parse_url(url).key,
        info=ObjectInfo(
            size=len(data) if size is ... else size,
            etag=etag or hashlib.md5(data).hexdigest(),
        ),
        size=len(data),
        digest=tree_digest(block_digest(block) for block in blocks),
        checked=None,
        fetched_at=1_000_000.0,
        boot=boot_id(),
        library="test",
    )


def begin(layout: Layout, metadata: Metadata) -> Partial:
    return Partial.create(layout, metadata, parse_url(metadata.url).basename)


def fill(partial: Partial, data: bytes, blocks: Iterator[int] | range | None = None) -> None:
    """Write and record blocks of ``data``, all of them by default."""
    count = -(-len(data) // BLOCK)
    for index in range(count) if blocks is None else blocks:
        block = memoryview(data)[index * BLOCK : (index + 1) * BLOCK]
        partial.write(index * BLOCK, block)
        partial.record(index, block_digest(block), len(block))


def begun(layout: Layout, url: str = "s3://lab/a.tar", data: bytes = b"shard") -> Partial:
    """A partial that has all its blocks."""
    partial = begin(layout, metadata_for(url, data))
    fill(partial, data)
    return partial


def publish(
    store: Store,
    url: str = "s3://lab/a.tar",
    data: bytes = b"shard",
    *,
    used: float | None = None,
    etag: str | None = None,
) -> Entry:
    """Put an entry into the store the way a fetch does."""
    metadata = metadata_for(url, data, etag=etag)
    partial = begin(store.layout, metadata)
    fill(partial, data)
    path = store.publish(partial, metadata)
    store._known.pop(metadata.key, None)  # so that it is looked at as what others have published
    partial.close()
    if used is not None:
        store.touch(str(path), used)
    return Entry.at(path)


def room(path: Path, *sizes: int) -> int:
    """Bytes on disk of a cache that holds shards of these sizes."""
    return sum(map(allocation(path), sizes))


def read(store: Store, url: str = "s3://lab/a.tar") -> bytes | None:
    """What the store has of a shard; None is a miss."""
    shard = parse_url(url)
    opened = store.open(shard.key, shard.basename)
    if opened is None:
        return None
    with opened.file as file:
        return file.read()


def make_store(path: Path, **options: bool) -> Store:
    layout = Layout(path / "v1")
    layout.make()
    return Store(layout, **options)


def age(path: Path, seconds: float = 10 * 86400.0) -> None:
    """Everything below was last touched so long ago: longer than any grace.

    Where flock does not tell who is dead, only time does; where it does, no time may matter.
    """
    then = time.time() - seconds
    for found in [path, *path.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):
            os.utime(found, (then, then), follow_symlinks=False)


def tree(path: Path) -> dict[str, tuple[int, int]]:
    """Every name below a directory, with inode and size."""
    return {
        str(p.relative_to(path)): (p.lstat().st_ino, p.lstat().st_size) for p in path.rglob("*")
    }


@contextlib.contextmanager
def public_directory() -> Iterator[Path]:
    """A directory that every user can reach."""
    path = Path(tempfile.mkdtemp(dir=tempfile.gettempdir()))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def children(pid: int | str = "self") -> set[int]:
    """Processes that a process has and that have not been waited for."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that ended
            found |= set(map(int, (task / "children").read_text().split()))
    return found


def descriptors() -> list[str]:
    """What this process has open: number and path."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return sorted(found)


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """The body closes every descriptor that it opens."""
    gc.collect()  # what an earlier test dropped must not be closed in the midst of this one
    before = descriptors()
    yield
    # What went meanwhile was an earlier test's; a thread that ends may take its time.
    wait_until(lambda: set(descriptors()) <= set(before))


@contextlib.contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """No more than ``left`` files can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    hoard: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + left, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                hoard.append(os.dup(0))
        for _ in range(left):
            os.close(hoard.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in hoard:
            os.close(fd)


class Child:
    """A forked process that answers; see `forked`."""

    def __init__(self, pid: int, channel: Connection) -> None:
        self.pid = pid
        self._channel = channel
        self._reaped = False

    def tell(self, message: Any = None) -> None:
        self._channel.send(message)

    def hear(self, seconds: float = PATIENCE) -> Any:
        """Return the child's next message; fail with its exception, or after ``seconds``."""
        assert self._channel.poll(seconds), "the child says nothing"
        kind, value = self._channel.recv()
        assert kind == "said", value
        return value

    def speaks(self, seconds: float) -> bool:
        """Whether it says something within that time, or has said it."""
        return self._channel.poll(seconds)

    def ask(self, message: Any = None) -> Any:
        self.tell(message)
        return self.hear()

    def kill(self, number: int = signal.SIGKILL) -> None:
        if not self._reaped:
            os.kill(self.pid, number)
            if number == signal.SIGKILL:
                self.wait()

    def wait(self) -> int:
        """The exit status of a child that ends by itself."""
        self._reaped = True
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Parent:
    """A child's end: `say` to the parent, `hear` what it tells; `select` can wait for it."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self.fileno = channel.fileno

    def say(self, value: Any = None) -> None:
        self._channel.send(("said", value))

    def hear(self) -> Any:
        return self._channel.recv()


@contextlib.contextmanager
def forked(function: Callable[..., None], *args: Any) -> Iterator[Child]:
    """Run ``function(parent, *args)`` in a process that does not outlive the block."""
    ours, theirs = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        status = 1
        _stop_measuring()
        try:
            function(Parent(theirs), *args)
            status = 0
        except (EOFError, BrokenPipeError):
            status = 2  # the test ended
        except BaseException:
            with contextlib.suppress(OSError):
                theirs.send(("failed", traceback.format_exc()))
        finally:
            os._exit(status)
    theirs.close()
    child = Child(pid, ours)
    try:
        yield child
    finally:
        child.kill()
        ours.close()


def _stop_measuring() -> None:
    """A child that may be killed must not leave half a coverage file."""
    coverage = sys.modules.get("coverage")
    current = coverage.Coverage.current() if coverage is not None else None
    if current is not None:
        current.stop()


@contextlib.contextmanager
def crowd(count: int, function: Callable[..., None], *args: Any) -> Iterator[list[Child]]:
    """``count`` children that have all started; each is given its number after ``parent``."""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(forked(function, i, *args)) for i in range(count)]
        yield children


def together(count: int, act: Callable[[int], Any], seconds: float = PATIENCE) -> list[Any]:
    """Call ``act(number)`` in ``count`` processes at the same time, and return what they return.

    Fails if a process takes longer than ``seconds``.
    """

    def work(parent: Parent, number: int) -> None:
        parent.say("ready")
        parent.hear()
        parent.say(act(number))

    with crowd(count, work) as children:
        for child in children:
            child.hear()
        for child in children:
            child.tell()
        return [child.hear(seconds) for child in children]


def wait_until(condition: Callable[[], Any]) -> Any:
    """Wait for something that will happen; what it was, in the end."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)
    return found


def refusing(number: int, *, when: Callable[..., bool] = lambda *a, **k: True, real: Any) -> Any:
    """``real``, failing with an errno ``when`` its arguments say so."""

    def call(*args: Any, **kw: Any) -> Any:
        if when(*args, **kw):
            raise OSError(number, errno.errorcode[number])
        return real(*args, **kw)

    return call
