"""The process behind a mount of the shim: a passthrough FUSE filesystem that fails on demand.

Inodes are O_PATH descriptors, so a file stays reachable whatever becomes of its name. `Settings` is
what one node of a network filesystem knows and another does not; a `Rule` strikes requests by
operation and path. Commands come on stdin, one JSON object a line, and are answered on stdout; the
process unmounts and ends when stdin does, so no mount outlives its test.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import json
import os
import resource
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.stress.fuse import proto
from tests.stress.fuse.proto import Op, Request

Key = tuple[int, int]

_DIRECT_IO = 1


@dataclass(slots=True)
class Settings:
    """How the filesystem behaves.

    Attributes:
        entry, attr: seconds the kernel may remember names and attributes.
        negative: seconds it may remember that there is no such name.
        delay: seconds during which a name made elsewhere is not seen here.
        stale: whether what was removed elsewhere answers ESTALE, as on NFS,
            or lives until it is closed, as on a local filesystem.
        flock: "working", "lying", "refused" or "hanging".
        flock_error: what "refused" says.
    """

    entry: float = 0.0
    attr: float = 0.0
    negative: float = 0.0
    delay: float = 0.0
    stale: bool = False
    flock: str = "working"
    flock_error: int = errno.ENOLCK


@dataclass(slots=True)
class Node:
    """An inode the kernel knows."""

    fd: int
    key: Key
    lookups: int = 1


@dataclass(slots=True)
class Handle:
    """An open file or directory."""

    fd: int
    key: Key
    names: list[tuple[str, int, int]] = field(default_factory=list)


class Nodes:
    """What the kernel may name by number; safe between threads."""

    def __init__(self, backing: Path) -> None:
        self.root = Path(os.path.realpath(backing))
        self.settings = Settings()
        self.guard = threading.RLock()
        self.nodes: dict[int, Node] = {}
        self.handles: dict[int, Handle] = {}
        self.removed: set[Key] = set()  # inodes whose names went through this mount
        self._by_key: dict[Key, int] = {}
        self._next = proto.ROOT
        self._next_handle = 1
        self._known: dict[tuple[Key, str], Key] = {}  # names made or seen here
        self.add(os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))

    # -- inodes ----------------------------------------------------------------

    def add(self, fd: int) -> tuple[int, os.stat_result]:
        """The number of an inode, looked up once more; ``fd`` is ours."""
        found = os.fstat(fd)
        key = key_of(found)
        with self.guard:
            number = self._by_key.get(key)
            if number is not None:
                os.close(fd)
                self.nodes[number].lookups += 1
            else:
                number, self._next = self._next, self._next + 1
                self.nodes[number] = Node(fd, key)
                self._by_key[key] = number
        return number, found

    def drop(self, number: int, count: int) -> None:
        """The kernel forgets ``count`` lookups."""
        with self.guard:
            node = self.nodes[number]
            node.lookups -= count
            if node.lookups <= 0 and number != proto.ROOT:
                del self.nodes[number], self._by_key[node.key]
                os.close(node.fd)

    def forget(self, request: Request) -> None:
        """FORGET and BATCH_FORGET."""
        if request.op == proto.Op.FORGET:
            self.drop(request.node, request.unpack("<Q")[0])
            return
        count, _ = request.unpack("<II")
        for at in range(count):
            number, lookups = request.unpack(f"<8x{16 * at}xQQ")
            self.drop(number, lookups)

    def alive(self, number: int) -> Node:
        """An inode.

        Raises:
            OSError: ESTALE, if another node removed it.
        """
        node = self.nodes[number]
        if self.settings.stale and node.key not in self.removed:
            found = os.fstat(node.fd)
            if found.st_nlink == 0:
                raise OSError(errno.ESTALE, "")
        return node

    def proc(self, number: int) -> str:
        """A path that opens the inode itself."""
        return f"/proc/self/fd/{self.alive(number).fd}"

    def absolute(self, number: int, name: str = "") -> Path:
        """Where it is, or a name in it, below the backing directory."""
        return Path(os.readlink(f"/proc/self/fd/{self.nodes[number].fd}"), name)

    def relative(self, number: int, name: str = "") -> str:
        """As `absolute`, as the tests say it."""
        return os.path.relpath(self.absolute(number, name), self.root)

    def entry(self, parent: int, name: str, *, made: bool = False) -> bytes:
        """The answer to a lookup, or to what made the name."""
        directory = self.nodes[parent]
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory.fd)
        number, found = self.add(fd)
        if made:
            self.know(directory.key, name, found)
        elif not self._visible(directory.key, name, found):
            self.drop(number, 1)
            raise FileNotFoundError(errno.ENOENT, "")
        return proto.entry_reply(number, found, self.settings.entry, self.settings.attr)

    def know(self, parent: Key, name: str, found: os.stat_result) -> None:
        """A name that was made here: always seen."""
        self._known[parent, name] = key_of(found)

    def _visible(self, parent: Key, name: str, found: os.stat_result) -> bool:
        if self._known.get((parent, name)) == key_of(found):
            return True
        if self.settings.delay and found.st_ctime + self.settings.delay > time.time():
            return False
        self.know(parent, name, found)
        return True

    # -- open files --------------------------------------------------------------

    def opened(self, fd: int) -> bytes:
        """The answer to what opened ``fd``."""
        found = os.fstat(fd)
        with self.guard:
            number, self._next_handle = self._next_handle, self._next_handle + 1
            self.handles[number] = Handle(fd, key_of(found))
        # Past the page cache: the errors of reads reach the reader as they are.
        return proto.open_reply(number, 0 if stat.S_ISDIR(found.st_mode) else _DIRECT_IO)

    def close(self, number: int) -> None:
        with self.guard:
            os.close(self.handles.pop(number).fd)

    def listing(self, handle: Handle) -> Iterator[tuple[str, int, int]]:
        """(name, inode, type) of what is seen of a directory."""
        here = os.fstat(handle.fd).st_ino
        yield ".", here, stat.S_IFDIR >> 12
        yield "..", here, stat.S_IFDIR >> 12
        for name in os.listdir(handle.fd):
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=handle.fd, follow_symlinks=False)
                if self._visible(handle.key, name, found):
                    yield name, found.st_ino, found.st_mode >> 12


def key_of(found: os.stat_result) -> Key:
    return found.st_dev, found.st_ino


_MODE, _UID, _GID, _SIZE, _ATIME, _MTIME, _FH, _ATIME_NOW, _MTIME_NOW = (1 << n for n in range(9))
_SETATTR = "<IIQQQQQQIIIIIIII"
_LOCKS = {0: fcntl.LOCK_SH, 1: fcntl.LOCK_EX, 2: fcntl.LOCK_UN}  # by F_RDLCK, F_WRLCK, F_UNLCK


class HangError(Exception):
    """This request is not answered."""


class Files(Nodes):
    """The operations, found by the names of requests; each answers or raises OSError."""

    # -- making names ------------------------------------------------------------

    def lookup(self, request: Request) -> bytes:
        try:
            return self.entry(request.node, request.names(0)[0])
        except FileNotFoundError:
            if self.settings.negative:
                return proto.negative_reply(self.settings.negative)
            raise

    def _own(self, request: Request, name: str) -> None:
        if request.uid != os.geteuid():
            directory = self.nodes[request.node].fd
            os.chown(name, request.uid, request.gid, dir_fd=directory, follow_symlinks=False)

    def _make(self, request: Request, name: str, make: Callable[[int], None]) -> bytes:
        make(self.nodes[request.node].fd)
        self._own(request, name)
        return self.entry(request.node, name, made=True)

    def mkdir(self, request: Request) -> bytes:
        (name,) = request.names(8)
        mode, _umask = request.unpack("<II")
        return self._make(request, name, lambda fd: os.mkdir(name, mode & 0o7777, dir_fd=fd))

    def link(self, request: Request) -> bytes:
        (name,) = request.names(8)
        source = self.proc(request.unpack("<Q")[0])
        return self._make(
            request, name, lambda fd: os.link(source, name, dst_dir_fd=fd, follow_symlinks=True)
        )

    def create(self, request: Request) -> bytes:
        flags, mode, _umask, _ = request.unpack("<IIII")
        (name,) = request.names(16)
        directory = self.nodes[request.node].fd
        kept = flags & (os.O_ACCMODE | os.O_EXCL)
        new = _look(name, directory) is None
        flags = kept | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, mode & 0o7777, dir_fd=directory)
        if new:
            self._own(request, name)
        return self.entry(request.node, name, made=True) + self.opened(fd)

    # -- taking names away -------------------------------------------------------

    def unlink(self, request: Request) -> bytes:
        (name,) = request.names(0)
        directory = self.nodes[request.node].fd
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        remove = os.rmdir if request.op == Op.RMDIR else os.unlink
        remove(name, dir_fd=directory)
        self.removed.add(key_of(found))
        return b""

    rmdir = unlink

    def rename(self, request: Request) -> bytes:
        (target,) = request.unpack("<Q")
        return self._move(request.node, target, *request.names(8))

    def rename2(self, request: Request) -> bytes:
        target, flags, _ = request.unpack("<QII")
        if flags:  # as NFS says to RENAME_NOREPLACE and RENAME_EXCHANGE
            raise OSError(errno.EINVAL, "")
        return self._move(request.node, target, *request.names(16))

    def _move(self, source: int, target: int, old: str, new: str) -> bytes:
        olds, news = self.nodes[source], self.nodes[target]
        found = os.stat(old, dir_fd=olds.fd, follow_symlinks=False)
        there = _look(new, news.fd)
        os.rename(old, new, src_dir_fd=olds.fd, dst_dir_fd=news.fd)
        if there is not None and not os.path.samestat(found, there):
            self.removed.add(key_of(there))
        self.know(news.key, new, found)
        return b""

    # -- attributes ----------------------------------------------------------------

    def getattr(self, request: Request) -> bytes:
        found = os.fstat(self.alive(request.node).fd)
        return proto.attr_reply(found, self.settings.attr)

    def setattr(self, request: Request) -> bytes:
        valid, _, handle, size, _, atime, mtime, _, atime_n, mtime_n, _, mode, _, uid, gid, _ = (
            request.unpack(_SETATTR)
        )
        path = self.proc(request.node)
        if valid & _MODE:
            os.chmod(path, mode & 0o7777)
        if valid & (_UID | _GID):
            os.chown(path, uid if valid & _UID else -1, gid if valid & _GID else -1)
        if valid & _SIZE:
            os.truncate(self.handles[handle].fd if valid & _FH else path, size)
        if valid & (_ATIME | _MTIME):
            now, found = time.time_ns(), os.fstat(self.nodes[request.node].fd)
            used = now if valid & _ATIME_NOW else atime * 10**9 + atime_n
            changed = now if valid & _MTIME_NOW else mtime * 10**9 + mtime_n
            times = (
                used if valid & _ATIME else found.st_atime_ns,
                changed if valid & _MTIME else found.st_mtime_ns,
            )
            os.utime(path, ns=times)
        return self.getattr(request)

    def statfs(self, request: Request) -> bytes:
        return proto.statfs_reply(os.statvfs(f"/proc/self/fd/{self.nodes[request.node].fd}"))

    # -- data ------------------------------------------------------------------------

    def open(self, request: Request) -> bytes:
        flags, _ = request.unpack("<II")
        return self.opened(os.open(self.proc(request.node), flags & os.O_ACCMODE | os.O_CLOEXEC))

    def opendir(self, request: Request) -> bytes:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        return self.opened(os.open(self.proc(request.node), flags))

    def read(self, request: Request) -> bytes:
        self.alive(request.node)
        handle, offset, size = request.unpack("<QQI")
        return os.pread(self.handles[handle].fd, size, offset)

    def write(self, request: Request) -> bytes:
        self.alive(request.node)
        handle, offset, size = request.unpack("<QQI")
        data = memoryview(request.body)[40 : 40 + size]
        return os.pwrite(self.handles[handle].fd, data, offset).to_bytes(4, "little") + bytes(4)

    def fsync(self, request: Request) -> bytes:
        os.fsync(self.handles[request.unpack("<Q")[0]].fd)
        return b""

    def fsyncdir(self, request: Request) -> bytes:
        return b""

    def readdir(self, request: Request) -> bytes:
        number, offset, size = request.unpack("<QQI")
        handle = self.handles[number]
        if offset == 0:
            handle.names = list(self.listing(handle))
        return proto.dirents(handle.names, offset, size)

    def release(self, request: Request) -> bytes:
        self.close(request.unpack("<Q")[0])
        return b""

    releasedir = release

    # -- locks -----------------------------------------------------------------------

    def setlk(self, request: Request) -> bytes:
        number, _owner, _start, _end, kind, _pid, _flags, _ = request.unpack("<QQQQIIII")
        mode = self.settings.flock
        if mode == "hanging":
            raise HangError
        if mode == "refused":
            raise OSError(self.settings.flock_error, "")
        if mode == "working":
            self.alive(request.node)
            wait = 0 if request.op == Op.SETLKW else fcntl.LOCK_NB
            fcntl.flock(self.handles[number].fd, _LOCKS[kind] | wait)
        return b""

    setlkw = setlk


def _look(name: str, directory: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


@dataclass(slots=True)
class Rule:
    """One fault.

    Attributes:
        ops: names of operations (``rename``, ``lookup``, ...).
        pattern: shell pattern of paths relative to the mount; either of two.
        error: errno that is answered.
        done: whether the operation is carried out first.
        times: how many requests it strikes; -1 is all.
        skip: how many it lets pass first.
        struck: how many it has struck.
    """

    ops: frozenset[str]
    pattern: str
    error: int = 0
    done: bool = False
    times: int = 1
    skip: int = 0
    struck: int = 0


class Faults:
    """The rules in force; safe between threads."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []
        self._guard = threading.Lock()

    def add(self, rule: Rule) -> int:
        with self._guard:
            self._rules.append(rule)
            return len(self._rules) - 1

    def clear(self) -> None:
        """All rules have run out; their counts can still be asked for."""
        with self._guard:
            for rule in self._rules:
                rule.times = 0

    def struck(self) -> list[int]:
        return [rule.struck for rule in self._rules]

    def strike(self, op: str, paths: Callable[[], Iterable[str]]) -> Rule | None:
        """The rule that strikes this request, if one does."""
        if not any(op in rule.ops and rule.times for rule in self._rules):
            return None
        found = list(paths())
        with self._guard:
            for rule in self._rules:
                if op not in rule.ops or not rule.times:
                    continue
                if not any(fnmatch.fnmatchcase(path, rule.pattern) for path in found):
                    continue
                if rule.skip:
                    rule.skip -= 1
                    continue
                rule.times -= rule.times > 0
                rule.struck += 1
                return rule
        return None


class Hanging:
    """Requests without an answer.

    Args:
        give_up: answers a request that waited for ``limit`` seconds, so that no
            process of the machine is stuck for ever whatever becomes of a test.
    """

    def __init__(self, give_up: Callable[[Request], None], limit: float) -> None:
        self.killable = True
        self._waiting: dict[int, tuple[Request, float]] = {}
        self._interrupted: set[int] = set()
        self._guard = threading.Lock()
        self._give_up = give_up
        self._limit = limit
        threading.Thread(target=self._watch, daemon=True).start()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> bool:
        """Keep it; False if its asker has been interrupted already."""
        with self._guard:
            if self.killable and request.unique in self._interrupted:
                self._interrupted.discard(request.unique)
                return False
            self._waiting[request.unique] = (request, time.monotonic())
            return True

    def interrupt(self, unique: int) -> bool:
        """The asker got a signal; True if its request must be answered with EINTR."""
        with self._guard:
            if not self.killable:
                return False
            if unique in self._waiting:
                del self._waiting[unique]
                return True
            self._interrupted.add(unique)  # it may come after its interrupt
            return False

    def take(self) -> list[Request]:
        """All of them, to be carried out now."""
        with self._guard:
            found = [request for request, _ in self._waiting.values()]
            self._waiting.clear()
            return found

    def _watch(self) -> None:
        while True:
            time.sleep(1.0)
            old = time.monotonic() - self._limit
            with self._guard:
                late = [r for r, since in self._waiting.values() if since < old]
                for request in late:
                    del self._waiting[request.unique]
            for request in late:
                self._give_up(request)


#: Seconds after which what hangs is answered EIO: longer than any test waits.
_LIMIT = 150.0
_THREADS = 4
#: Where the name begins in the arguments of operations on (directory, name).
_NAME_AT = {
    Op.LOOKUP: 0,
    Op.MKDIR: 8,
    Op.UNLINK: 0,
    Op.RMDIR: 0,
    Op.CREATE: 16,
    Op.LINK: 8,
    Op.RENAME: 8,
    Op.RENAME2: 16,
}
_ENTERING = (Op.LOOKUP, Op.CREATE, Op.MKDIR, Op.LINK)


class Daemon:
    """One mount: answers the kernel, and the test."""

    def __init__(self, backing: Path, mountpoint: Path) -> None:
        self.files = Files(backing)
        self.mountpoint = mountpoint
        self.faults = Faults()
        self._operations: dict[int, Callable[[Request], bytes]] = {
            op: getattr(self.files, op.name.lower())
            for op in Op
            if hasattr(self.files, op.name.lower()) and op != Op.FORGET
        }
        self.channel = proto.mount(mountpoint)
        self.hanging = Hanging(lambda r: self.channel.reply(r.unique, error=errno.EIO), _LIMIT)

    def serve(self) -> None:
        """Answer requests until the filesystem is unmounted."""
        while (request := self.channel.receive()) is not None:
            if request.op == Op.INIT:
                self.channel.greet(request)
            elif request.op in (Op.FORGET, Op.BATCH_FORGET):
                self.files.forget(request)
            elif request.op == Op.INTERRUPT:
                (unique,) = request.unpack("<Q")
                if self.hanging.interrupt(unique):
                    self.channel.reply(unique, error=errno.EINTR)
            elif request.op == Op.SETLKW:
                threading.Thread(target=self.handle, args=(request,), daemon=True).start()
            else:
                self.handle(request)

    def handle(self, request: Request) -> None:
        """Carry out one request and answer it."""
        operation = self._operations.get(request.op)
        if operation is None:
            self.channel.reply(request.unique, error=errno.ENOSYS)
            return
        name = Op(request.op).name.lower().removesuffix("2")
        try:
            data = self._carry_out(name, operation, request)
        except HangError:
            if not self.hanging.add(request):
                self.channel.reply(request.unique, error=errno.EINTR)
        except OSError as exn:
            self.channel.reply(request.unique, error=exn.errno or errno.EIO)
        except Exception as exn:  # a bug of the shim: say so, and fail the request
            print(f"shim: {name}: {type(exn).__name__}: {exn}", file=sys.stderr, flush=True)
            self.channel.reply(request.unique, error=errno.EREMOTEIO)
        else:
            self.channel.reply(request.unique, data)

    def _carry_out(
        self, name: str, operation: Callable[[Request], bytes], request: Request
    ) -> bytes:
        rule = self.faults.strike(name, lambda: self._paths(request))
        if rule is None:
            return operation(request)
        if rule.done:
            data = operation(request)
            # The kernel never hears of the inode and the handle in this answer.
            if request.op in _ENTERING:
                self.files.drop(int.from_bytes(data[:8], "little"), 1)
            if request.op == Op.CREATE:
                self.files.close(int.from_bytes(data[128:136], "little"))
        raise OSError(rule.error, "")

    def _paths(self, request: Request) -> Iterator[str]:
        at = _NAME_AT.get(Op(request.op))
        if at is None:
            yield self.files.relative(request.node)
            return
        names = request.names(at)
        yield self.files.relative(request.node, names[0])
        if request.op in (Op.RENAME, Op.RENAME2):
            yield self.files.relative(request.unpack("<Q")[0], names[1])

    # -- the test's side -----------------------------------------------------------

    def command(self, do: str, **given: Any) -> dict[str, Any]:
        """Carry out one command of the test; the answer is the state afterwards."""
        answer: dict[str, Any] = {}
        if do == "set":
            self.hanging.killable = given.pop("killable", self.hanging.killable)
            for name, value in given.items():
                getattr(self.files.settings, name)
                setattr(self.files.settings, name, value)
        elif do == "fail":
            answer["rule"] = self.faults.add(Rule(frozenset(given.pop("ops")), **given))
        elif do == "heal":
            self.faults.clear()
            self.files.settings = Settings()
        if do == "heal" or (do == "set" and self.files.settings.flock != "hanging"):
            for request in self.hanging.take():
                self.handle(request)
        return answer | {
            "hanging": len(self.hanging),
            "struck": self.faults.struck(),
        }


def main(backing: str, mountpoint: str) -> None:
    """Serve one mount until stdin ends."""
    os.umask(0)  # the kernel has applied the asker's
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    try:
        daemon = Daemon(Path(backing), Path(mountpoint))
    except OSError as exn:
        print(json.dumps({"error": str(exn)}), flush=True)
        return
    for _ in range(_THREADS):
        threading.Thread(target=daemon.serve, daemon=True).start()
    print(json.dumps({}), flush=True)
    try:
        for line in sys.stdin:
            if not line.strip():
                break  # said by a test whose forked children still hold our stdin open
            print(json.dumps(daemon.command(**json.loads(line))), flush=True)
    finally:
        proto.unmount(daemon.mountpoint)
        os._exit(0)  # closes the device, which lets go whatever hangs
