"""The process behind a mount of `shim`: a passthrough FUSE filesystem that fails on demand.

It speaks the protocol itself (include/uapi/linux/fuse.h, 7.36 and later): pyfuse3 does not pass
flock on, mfusepy knows paths only, and both hide what the tests want to see: an inode that outlives
its name on another node, and an absence that is remembered.

An inode's number is an O_PATH descriptor, kept as long as the mount, so that it stays reachable
whatever becomes of its name. Orders come on stdin, one JSON object a line, and are answered on
stdout; the process unmounts and ends when stdin does, so no mount outlives its test.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import fnmatch
import json
import os
import resource
import select
import stat
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Key = tuple[int, int]

#: Requests that are served, and the methods that serve them.
OPERATIONS = {
    1: "lookup", 3: "getattr", 4: "setattr", 9: "mkdir", 10: "unlink", 11: "rmdir", 12: "rename",
    13: "link", 14: "open", 15: "read", 16: "write", 17: "statfs", 18: "release", 20: "fsync",
    27: "opendir", 28: "readdir", 29: "releasedir", 30: "fsyncdir", 32: "setlk", 33: "setlk",
    35: "create", 45: "rename2",
}  # fmt: skip
_FORGET, _INIT, _INTERRUPT, _BATCH_FORGET, _ROOT = 2, 26, 36, 42, 1
#: Where the name begins in the arguments of operations on (directory, name).
_NAME_AT = {
    "lookup": 0, "mkdir": 8, "unlink": 0, "rmdir": 0, "create": 16, "link": 8, "rename": 8,
    "rename2": 16,
}  # fmt: skip
_MAX_WRITE = 1 << 20
_ATTR, _ENTRY = struct.Struct("<6Q10I"), struct.Struct("<4Q2I")
_DIRENT = struct.Struct("<2Q2I")
#: What of the kernel's offers is accepted: reads in parallel, large writes, flock.
_FLAGS = 1 | 1 << 5 | 1 << 10 | 1 << 18 | 1 << 22
_EXTENDED, _DIRECT_IO_MMAP = 1 << 30, 1 << 4
_MODE, _UID, _GID, _SIZE, _ATIME, _MTIME, _FH, _ATIME_NOW, _MTIME_NOW = (1 << n for n in range(9))
_LOCKS = {0: fcntl.LOCK_SH, 1: fcntl.LOCK_EX, 2: fcntl.LOCK_UN}  # by F_RDLCK, F_WRLCK, F_UNLCK


@dataclass(slots=True)
class Settings:
    """How the filesystem behaves."""

    negative: float = 0.0  # seconds the kernel may remember that there is no such name
    delay: float = 0.0  # seconds during which a name made elsewhere is not seen here
    stale: bool = False  # what was removed elsewhere answers ESTALE, as on NFS


@dataclass(slots=True)
class Rule:
    """One fault."""

    ops: list[str]  # names of operations (``rename``, ``lookup``, ...)
    pattern: str  # shell pattern of paths relative to the mount; either of two
    error: int = 0  # errno that is answered
    done: bool = False  # the operation is carried out first
    times: int = 1  # how many requests it strikes; -1 is all
    skip: int = 0  # how many it lets pass first
    struck: int = 0  # how many it has struck


@dataclass(slots=True)
class Request:
    """Which operation on which inode, and its arguments undecoded."""

    unique: int
    name: str
    node: int
    body: bytes

    def unpack(self, layout: str) -> tuple[int, ...]:
        return struct.unpack_from(layout, self.body)

    def names(self) -> list[str]:
        """The NUL-ended names among the arguments."""
        encoded = self.body[_NAME_AT[self.name] :].split(b"\0")[:-1]
        return [os.fsdecode(name) for name in encoded]


def key_of(found: os.stat_result) -> Key:
    return found.st_dev, found.st_ino


def _attributes(found: os.stat_result) -> bytes:
    seconds = (int(found.st_atime), int(found.st_mtime), int(found.st_ctime))
    nanos = (t % 10**9 for t in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns))
    owner = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid, found.st_rdev)
    size = (found.st_ino, found.st_size, found.st_blocks)
    return _ATTR.pack(*size, *seconds, *nanos, *owner, found.st_blksize, 0)


def _stat(name: str, directory: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


class Files:
    """The operations, named as requests are; each returns its answer or raises OSError."""

    def __init__(self, backing: str) -> None:
        self.settings = Settings()
        self.backing = os.path.realpath(backing)
        self._root = os.open(self.backing, os.O_PATH | os.O_DIRECTORY)
        self._nodes = {key_of(os.fstat(self._root)): self._root}
        self._removed: set[Key] = set()  # inodes whose names went through this mount
        self._known: dict[tuple[int, str], Key] = {}  # names made or seen here
        self._listings: dict[int, list[bytes]] = {}

    def node(self, number: int) -> int:
        """The inode that the kernel means."""
        return self._root if number == _ROOT else number

    def _alive(self, node: int) -> str:
        """A path that opens the inode itself; ESTALE if another node removed it."""
        found = os.fstat(node)
        if self.settings.stale and not found.st_nlink and key_of(found) not in self._removed:
            raise OSError(errno.ESTALE, "")
        return f"/proc/self/fd/{node}"

    def _entry(self, parent: int, name: str, *, made: bool = False) -> bytes:
        """The answer to a lookup, or to what made the name."""
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent)
        found = os.fstat(fd)
        node = self._nodes.setdefault(key_of(found), fd)
        if node != fd:
            os.close(fd)
        if made:
            self._known[parent, name] = key_of(found)
        elif not self._visible(parent, name, found):
            raise FileNotFoundError(errno.ENOENT, "")
        return _ENTRY.pack(node, 0, 0, 0, 0, 0) + _attributes(found)

    def _visible(self, parent: int, name: str, found: os.stat_result) -> bool:
        if self._known.get((parent, name)) != key_of(found):
            if found.st_ctime + self.settings.delay > time.time():
                return False
            self._known[parent, name] = key_of(found)
        return True

    def _opened(self, fd: int) -> bytes:
        """The answer to what opened ``fd``: its own number is the handle."""
        # Past the page cache: the errors of reads reach the reader as they are.
        return struct.pack("<QIi", fd, not stat.S_ISDIR(os.fstat(fd).st_mode), 0)

    # -- names ---------------------------------------------------------------------

    def lookup(self, request: Request) -> bytes:
        try:
            return self._entry(request.node, request.names()[0])
        except FileNotFoundError:
            if not self.settings.negative:
                raise
            seconds, rest = divmod(self.settings.negative, 1)
            return _ENTRY.pack(0, 0, int(seconds), 0, int(rest * 1e9), 0) + bytes(_ATTR.size)

    def mkdir(self, request: Request) -> bytes:
        (name,) = request.names()
        os.mkdir(name, request.unpack("<I")[0] & 0o7777, dir_fd=request.node)
        return self._entry(request.node, name, made=True)

    def link(self, request: Request) -> bytes:
        (name,), (source,) = request.names(), request.unpack("<Q")
        os.link(self._alive(source), name, dst_dir_fd=request.node, follow_symlinks=True)
        return self._entry(request.node, name, made=True)

    def create(self, request: Request) -> bytes:
        (name,), (flags, mode) = request.names(), request.unpack("<2I")
        flags = flags & (os.O_ACCMODE | os.O_EXCL) | os.O_CREAT | os.O_NOFOLLOW
        fd = os.open(name, flags, mode & 0o7777, dir_fd=request.node)
        return self._entry(request.node, name, made=True) + self._opened(fd)

    def unlink(self, request: Request) -> bytes:
        (name,) = request.names()
        found = os.stat(name, dir_fd=request.node, follow_symlinks=False)
        (os.rmdir if request.name == "rmdir" else os.unlink)(name, dir_fd=request.node)
        self._removed.add(key_of(found))
        return b""

    rmdir = unlink

    def rename(self, request: Request) -> bytes:
        (old, new), target = request.names(), self.node(*request.unpack("<Q"))
        if request.name == "rename2" and request.unpack("<QI")[1]:
            raise OSError(errno.EINVAL, "")  # as NFS says to RENAME_NOREPLACE and RENAME_EXCHANGE
        found = os.stat(old, dir_fd=request.node, follow_symlinks=False)
        there = _stat(new, target)
        os.rename(old, new, src_dir_fd=request.node, dst_dir_fd=target)
        if there is not None and not os.path.samestat(found, there):
            self._removed.add(key_of(there))
        self._known[target, new] = key_of(found)
        return b""

    rename2 = rename

    # -- attributes ----------------------------------------------------------------

    def getattr(self, request: Request) -> bytes:
        self._alive(request.node)
        return struct.pack("<Q2I", 0, 0, 0) + _attributes(os.fstat(request.node))

    def setattr(self, request: Request) -> bytes:
        valid, _, handle, size, _, atime, mtime, _, atime_n, mtime_n, _, mode, _, uid, gid, _ = (
            request.unpack("<2I6Q8I")
        )
        path = self._alive(request.node)
        if valid & _MODE:
            os.chmod(path, mode & 0o7777)
        if valid & (_UID | _GID):
            os.chown(path, uid if valid & _UID else -1, gid if valid & _GID else -1)
        if valid & _SIZE:
            os.truncate(handle if valid & _FH else path, size)
        if valid & (_ATIME | _MTIME):
            now, found = time.time_ns(), os.fstat(request.node)
            used = now if valid & _ATIME_NOW else atime * 10**9 + atime_n
            changed = now if valid & _MTIME_NOW else mtime * 10**9 + mtime_n
            used = used if valid & _ATIME else found.st_atime_ns
            os.utime(path, ns=(used, changed if valid & _MTIME else found.st_mtime_ns))
        return self.getattr(request)

    def statfs(self, request: Request) -> bytes:
        found = os.statvfs(f"/proc/self/fd/{request.node}")
        blocks = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<5Q4I24x", *blocks, found.f_bsize, found.f_namemax, found.f_frsize, 0)

    # -- data ------------------------------------------------------------------------

    def open(self, request: Request) -> bytes:
        (flags,) = request.unpack("<I")
        directory = os.O_DIRECTORY if request.name == "opendir" else 0
        return self._opened(os.open(self._alive(request.node), flags & os.O_ACCMODE | directory))

    opendir = open

    def read(self, request: Request) -> bytes:
        self._alive(request.node)
        handle, offset, size = request.unpack("<2QI")
        return os.pread(handle, size, offset)

    def write(self, request: Request) -> bytes:
        self._alive(request.node)
        handle, offset, size = request.unpack("<2QI")
        written = os.pwrite(handle, memoryview(request.body)[40 : 40 + size], offset)
        return struct.pack("<2I", written, 0)

    def fsync(self, request: Request) -> bytes:
        os.fsync(request.unpack("<Q")[0])
        return b""

    def fsyncdir(self, request: Request) -> bytes:
        return b""

    def readdir(self, request: Request) -> bytes:
        handle, offset, size = request.unpack("<2QI")
        if offset == 0:
            self._listings[handle] = list(self._listing(request.node, handle))
        out = b""
        for entry in self._listings[handle][offset:]:
            if len(out) + len(entry) > size:
                break
            out += entry
        return out

    def _listing(self, node: int, handle: int) -> Iterator[bytes]:
        """What is seen of a directory, one record for each name."""
        offset = 0
        for name in os.listdir(handle):
            found = _stat(name, handle)
            if found is not None and self._visible(node, name, found):
                offset, encoded = offset + 1, os.fsencode(name)
                head = _DIRENT.pack(found.st_ino, offset, len(encoded), found.st_mode >> 12)
                yield (head + encoded).ljust(-(-(len(head) + len(encoded)) // 8) * 8, b"\0")

    def release(self, request: Request) -> bytes:
        (handle,) = request.unpack("<Q")
        self._listings.pop(handle, None)
        os.close(handle)
        return b""

    releasedir = release

    def setlk(self, request: Request) -> bytes:
        handle, _owner, _start, _end, kind = request.unpack("<4QI")
        self._alive(request.node)
        fcntl.flock(handle, _LOCKS[kind] | fcntl.LOCK_NB)  # nobody here waits for a lock
        return b""


class Daemon:
    """One mount: answers the kernel, and the test."""

    def __init__(self, backing: str, mountpoint: str) -> None:
        self.files = Files(backing)
        self.rules: list[Rule] = []
        self.device = mount(mountpoint)

    def serve(self) -> None:
        """Answer requests and orders, one at a time, until there are no more orders."""
        while True:
            ready, _, _ = select.select([self.device, sys.stdin], [], [])
            if sys.stdin in ready:
                line = sys.stdin.readline()
                if not line.strip():
                    return  # a test's forked children may hold our stdin open: it says so
                print(json.dumps(self._order(**json.loads(line))), flush=True)
            elif not self._receive():
                return

    def _receive(self) -> bool:
        """Answer one request; False when the filesystem was unmounted."""
        try:
            data = os.read(self.device, _MAX_WRITE + 4096)
        except OSError as exn:
            return exn.errno != errno.ENODEV  # else the request was called off meanwhile
        _length, op, unique, node = struct.unpack_from("<2I2Q", data)
        body = data[40:]
        if op == _INIT:
            major, minor, readahead, offered, flags2 = struct.unpack_from("<5I", body)
            flags = offered & (_FLAGS | _EXTENDED)
            versions = (major, min(minor, 38), readahead, flags, 16, 12, _MAX_WRITE, 1, 256, 0)
            extra = flags2 & _DIRECT_IO_MMAP if offered & _EXTENDED else 0
            self._reply(unique, struct.pack("<4I2H2I2HIH26x", *versions, extra, 0))
        elif name := OPERATIONS.get(op):
            self._handle(Request(unique, name, self.files.node(node), body))
        elif op not in (_FORGET, _BATCH_FORGET, _INTERRUPT):  # those want no answer
            self._reply(unique, error=errno.ENOSYS)
        return True

    def _reply(self, unique: int, data: bytes = b"", error: int = 0) -> None:
        with contextlib.suppress(FileNotFoundError):  # the asker was interrupted and has gone
            os.writev(self.device, [struct.pack("<IiQ", 16 + len(data), -error, unique), data])

    def _handle(self, request: Request) -> None:
        try:
            self._reply(request.unique, self._carry_out(request))
        except OSError as exn:
            self._reply(request.unique, error=exn.errno or errno.EIO)

    def _carry_out(self, request: Request) -> bytes:
        rule = self._strike(request)
        data = b"" if rule and not rule.done else getattr(self.files, request.name)(request)
        if rule:
            raise OSError(rule.error, "")
        return bytes(data)

    def _strike(self, request: Request) -> Rule | None:
        """The rule that strikes this request, if one does."""
        op = request.name.removesuffix("2")
        rules = [rule for rule in self.rules if op in rule.ops and rule.times]
        paths = list(self._paths(request)) if rules else []
        for rule in rules:
            if any(fnmatch.fnmatchcase(path, rule.pattern) for path in paths):
                if not rule.skip:
                    rule.times -= rule.times > 0
                    rule.struck += 1
                    return rule
                rule.skip -= 1
        return None

    def _paths(self, request: Request) -> Iterator[str]:
        """What a request is about, relative to the mount."""
        directories, names = [request.node], [""]
        if request.name in _NAME_AT:
            names = request.names()
        if request.name.startswith("rename"):
            directories.append(self.files.node(*request.unpack("<Q")))
        for directory, name in zip(directories, names, strict=True):
            path = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), name)
            yield os.path.relpath(path, self.files.backing)

    def _order(self, do: str, **given: Any) -> dict[str, Any]:
        """Carry out an order of the test; the answer is the state afterwards."""
        if do == "set":
            for name, value in given.items():
                setattr(self.files.settings, name, value)
        elif do == "fail":
            self.rules.append(Rule(**given))
        elif do == "heal":
            self.files.settings = Settings()
            for rule in self.rules:
                rule.times = 0
        return {"struck": [rule.struck for rule in self.rules]}


def mount(mountpoint: str) -> int:
    """Mount; returns the device, by which the filesystem is served."""
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK)
    options = f"fd={fd},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}"
    options += ",default_permissions,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    nosuid_nodev = 6
    if libc.mount(b"shim", mountpoint.encode(), b"fuse.shim", nosuid_nodev, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), mountpoint)
    return fd


def unmount(mountpoint: str) -> None:
    """Take it out of sight, whoever uses it; harmless when it is not mounted."""
    detach = 2
    ctypes.CDLL(None).umount2(mountpoint.encode(), detach)


def main(backing: str, mountpoint: str) -> None:
    os.umask(0)  # the kernel has applied the asker's
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    try:
        daemon = Daemon(backing, mountpoint)
    except OSError as exn:
        print(json.dumps({"error": str(exn)}), flush=True)
        return
    print(json.dumps({}), flush=True)
    try:
        daemon.serve()
    finally:
        unmount(mountpoint)
        os._exit(0)  # closes the device, which lets go whoever still waits


if __name__ == "__main__":
    main(*sys.argv[1:])
