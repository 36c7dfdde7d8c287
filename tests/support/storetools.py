"""Helpers for tests of the store: shards, entries, descriptors and forked processes."""

import contextlib
import errno
import gc
import hashlib
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shardcache.clock import boot_id
from shardcache.layout import Layout
from shardcache.locks.keys import Flock, Holder
from shardcache.origins.base import ObjectInfo
from shardcache.space.memory import allocation
from shardcache.store.digest import block_digest, tree_digest
from shardcache.store.directory import Metadata
from shardcache.store.entry import Entry, Store
from shardcache.store.partial import Partial
from shardcache.urls import parse_url

#: Seconds after which a test that hangs fails.
PATIENCE = 120.0

#: Bytes that a download hashes and records at once.
BLOCK = 1 << 20


def payload(size: int, seed: int = 1) -> bytes:
    return hashlib.shake_128(f"{seed}".encode()).digest(size)


def metadata_for(url="s3://lab/a.tar", data=b"", *, etag=None, size: object = ...) -> Metadata:
    """Return the sidecar of ``data``; ``size`` is the size that the origin stated."""
    blocks = [data[i : i + BLOCK] for i in range(0, len(data), BLOCK)]
    return Metadata(
        url=url,
        key=parse_url(url).key,
        info=ObjectInfo(len(data) if size is ... else size, etag or hashlib.md5(data).hexdigest()),
        size=len(data),
        digest=tree_digest(b"".join(map(block_digest, blocks))),
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
    """Return a partial with all its blocks."""
    partial = begin(layout, metadata_for(url, data))
    fill(partial, data)
    return partial


def publish(store, url="s3://lab/a.tar", data=b"shard", *, used=None, etag=None) -> Entry:
    """Publish an entry, as a download does."""
    metadata = metadata_for(url, data, etag=etag)
    partial = begin(store.layout, metadata)
    fill(partial, data)
    others = [entry.path for entry in store.entries_of(metadata.key)]
    path = store.publish(partial, metadata, others)
    store._known.pop(metadata.key, None)  # as if another process had published it
    partial.close()
    if used is not None:
        store.touch(str(path), used)
    return Entry.at(path)


def room(path: Path, *sizes: int) -> int:
    """Return the bytes on disk of a cache that holds shards of these sizes."""
    return sum(map(allocation(path), sizes))


def read(store: Store, url: str = "s3://lab/a.tar") -> bytes | None:
    """Return the bytes of a cached shard, or None for a miss."""
    shard = parse_url(url)
    opened = store.open(shard.key, shard.basename)
    if opened is None:
        return None
    with opened.file as file:
        return file.read()


layout_of = Layout.of_root  # the node's namespace of a cache


def taken(path: Path, **holder: Any) -> Flock:
    """Take a lock in the name of this process, or of the one that ``holder`` describes."""
    lock, record = Flock(path), Holder.this_process()._replace(**holder)
    assert lock.try_acquire(record)
    lock.update(record)  # with its partial, in place of that of an earlier holder
    return lock


def make_store(path: Path, **options: bool) -> Store:
    layout = Layout(path / "v1")
    layout.make()
    return Store(layout, **options)


def damage(file: Path) -> None:
    """Change the bytes of a file, but not its size."""
    file.chmod(0o600)
    file.write_bytes(b"x" * file.stat().st_size)


def age(path: Path, seconds: float = 10 * 86400.0) -> None:
    """Set the times of everything below to so long ago; by default, longer than any grace.

    Without flock, only time shows that a process is dead.
    """
    then = time.time() - seconds
    for found in [path, *path.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):
            os.utime(found, (then, then), follow_symlinks=False)


def tree(path: Path) -> dict[str, tuple[int, int]]:
    """Return inode and size of every path below a directory."""
    found = ((str(p.relative_to(path)), p.lstat()) for p in path.rglob("*"))
    return {name: (status.st_ino, status.st_size) for name, status in found}


@contextlib.contextmanager
def public_directory() -> Iterator[Path]:
    """Make a directory that every user can reach."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def descriptors() -> list[str]:
    """Return number and path of every open descriptor."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing
            found.append(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return sorted(found)


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Check that the body closes every descriptor that it opens."""
    gc.collect()  # so that no object of an earlier test is closed during this one
    before = descriptors()
    yield
    wait_until(lambda: set(descriptors()) <= set(before))


@contextlib.contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """Limit the number of files that can be opened to ``left``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    hoard = [os.dup(0)]
    while hoard[-1] < highest:  # fill the gaps
        hoard.append(os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (hoard[-1] + 1 + left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in hoard:
            os.close(fd)


class Child:
    """A forked process that sends messages; see `forked`."""

    def __init__(self, pid: int, channel: Connection) -> None:
        self.pid = pid
        self._channel = channel
        self._reaped = False

    def tell(self, message: Any = None) -> None:
        self._channel.send(message)

    def hear(self, seconds: float = PATIENCE) -> Any:
        """Return the child's next message; fail with its exception, or after ``seconds``."""
        assert self._channel.poll(seconds), "the child sent no message"
        kind, value = self._channel.recv()
        assert kind == "sent", value
        return value

    def speaks(self, seconds: float) -> bool:
        """Return whether a message arrives in time."""
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
        """Wait for the child to end; returns its exit status."""
        self._reaped = True
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Parent:
    """The child's end of the channel: `say` sends, `hear` receives, `select` can wait for it."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self.fileno = channel.fileno

    def say(self, value: Any = None) -> None:
        self._channel.send(("sent", value))

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
    """Stop coverage, because a killed child would leave half a file."""
    if (coverage := sys.modules.get("coverage")) and (current := coverage.Coverage.current()):
        current.stop()


@contextlib.contextmanager
def crowd(count: int, function: Callable[..., None], *args: Any) -> Iterator[list[Child]]:
    """Run ``function(parent, number, *args)`` in ``count`` processes."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(forked(function, number, *args)) for number in range(count)]


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
    """Wait until the condition is true; returns its value."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, "the condition never came true"
        time.sleep(0.002)
    return found


def no_thread(suffix: str) -> None:
    """Wait until no thread with such a name runs."""
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.endswith(suffix)])


def refusing(number: int, *, when: Callable[..., bool] = lambda *a, **k: True, real: Any) -> Any:
    """Return ``real``, except that it fails with an errno if ``when(*arguments)`` is true."""

    def call(*args: Any, **kw: Any) -> Any:
        if when(*args, **kw):
            raise OSError(number, errno.errorcode[number])
        return real(*args, **kw)

    return call
