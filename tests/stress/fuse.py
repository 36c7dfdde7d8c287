"""A filesystem that fails on demand, as a network mount may.

    with mounted(tmp_path) as shim:
        shim.set(stale=True)
        shim.fail("rename", "v1/objects/*", error=errno.EIO, done=True)
        Cache(shim.root)

A passthrough FUSE filesystem with one process per mount; two mounts of a directory act as two
nodes. It implements the protocol (include/uapi/linux/fuse.h, 7.36 and later), because pyfuse3 does
not forward flock, mfusepy works with paths only, and both hide inodes that outlive their names and
cached absences. The kernel repeats ``open`` and ``stat`` after ESTALE, so two errors in a row reach
the caller as one.
"""

import contextlib
import ctypes
import errno
import fcntl
import fnmatch
import functools
import os
import resource
import select
import signal
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.stress.harness import die_with_parent
from tests.support.storetools import Child, Parent, forked

#: Opcode -> the method that serves the request, and the layout of its arguments.
OPERATIONS = {
    1: ("lookup", ""), 3: ("getattr", "16x"), 4: ("setattr", "I12xQ8x2Q8x2I4xI4x2I4x"),
    9: ("mkdir", "I4x"), 10: ("unlink", ""), 11: ("rmdir", ""), 12: ("rename", "Q"),
    13: ("link", "Q"), 14: ("open", "I"), 15: ("read", "2QI"), 16: ("write", "2QI20x"),
    17: ("statfs", ""), 18: ("release", "Q"), 20: ("fsync", "Q"), 27: ("opendir", "I"),
    28: ("readdir", "2QI"), 29: ("releasedir", "Q"), 30: ("fsyncdir", "Q"),
    32: ("setlk", "Q24xI"), 33: ("setlk", "Q24xI"), 35: ("create", "2I8x"),
}  # fmt: skip
#: Operations that change what is on the disk.
CHANGES = "create mkdir rename unlink rmdir link write setattr"
#: Requests whose arguments end in names.
_NAMED = {"lookup", "mkdir", "unlink", "rmdir", "rename", "link", "create"}
_INIT, _NO_ANSWER, _ROOT = 26, (2, 36, 42), 1  # forget, interrupt, forget many
_MAX_WRITE = 1 << 20
#: The accepted features: parallel reads, large writes, flock.
_FLAGS = 1 | 1 << 5 | 1 << 10 | 1 << 18 | 1 << 22
_MODE, _UID, _GID, _SIZE, _ATIME, _MTIME = (1 << n for n in range(6))
_LOCKS = {fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX, fcntl.F_UNLCK: fcntl.LOCK_UN}


@dataclass(slots=True)
class Rule:
    """A fault."""

    ops: list[str]  # names of operations (``rename``, ``lookup``, ...)
    pattern: str  # shell pattern of paths relative to the mount
    error: int = errno.EIO  # of the reply
    kill: bool = False  # whether to kill the process with SIGKILL
    done: bool = False  # whether to carry out the operation first
    times: int = 1  # requests to hit; -1 for all
    skip: int = 0  # requests to pass first
    struck: int = 0  # requests hit so far


class Shim:
    """A mount ``root`` of the directory ``backing``, and its faults."""

    def __init__(self, root: Path, backing: Path, process: Child) -> None:
        self.root, self.backing, self._process = root, backing, process

    def set(self, **settings: Any) -> None:
        """Change how the mount behaves.

        Args:
            negative: Seconds for which the kernel caches the absence of a name.
            delay: Seconds after which a name created by another node appears.
            stale: Whether a file that another node removed fails with ESTALE, as on NFS.
        """
        self._process.ask(settings)

    def fail(self, ops: str, pattern: str = "*", **fault: Any) -> int:
        """Add a `Rule` for one or more operations; returns its number."""
        return len(self._process.ask(Rule(ops.split(), pattern, **fault))) - 1

    def heal(self) -> None:
        """Drop all rules."""
        self.set(rules=[])

    def struck(self, rule: int) -> int:
        """Return how many requests a rule has hit."""
        return int(self._process.ask({})[rule])

    def crash(self) -> None:
        """Kill the process and keep the mount: every call fails with ENOTCONN."""
        self._process.kill()


@contextlib.contextmanager
def mounted(directory: Path, name: str = "net") -> Iterator[Shim]:
    """Mount ``directory``/backing at ``directory``/``name``."""
    root, backing = directory / name, (directory / "backing").resolve()
    for path in (root, backing):
        path.mkdir(exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK)
    except OSError as exn:
        pytest.skip(f"needs FUSE: {exn}")
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other"
    nosuid_nodev, detach = 6, 2
    if libc.mount(b"shim", bytes(root), b"fuse.shim", nosuid_nodev, options.encode()):
        pytest.skip(f"needs to mount a FUSE filesystem: {os.strerror(ctypes.get_errno())}")
    try:
        with forked(_serve, device, str(backing)) as process:
            os.close(device)
            yield Shim(root, backing, process)
    finally:
        libc.umount2(bytes(root), detach)


# -- the process behind a mount ----------------------------------------------------------


def _serve(parent: Parent, device: int, backing: str) -> None:
    """Serve requests of the kernel and the test, one at a time, until unmounted."""
    die_with_parent()
    os.umask(0)  # the kernel has applied the umask of the caller
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    served = _Files(device, backing)
    while True:
        ready, _, _ = select.select([device, parent], [], [])
        if parent in ready:
            order = parent.hear()
            if isinstance(order, Rule):
                served.rules.append(order)
            else:
                vars(served).update(order)
            parent.say([rule.struck for rule in served.rules])
        elif not served.receive():
            return


def _attributes(found: os.stat_result) -> bytes:
    seconds = (int(found.st_atime), int(found.st_mtime), int(found.st_ctime))
    nanos = (t % 10**9 for t in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns))
    owner = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid, found.st_rdev)
    size = (found.st_ino, found.st_size, found.st_blocks)
    return struct.pack("<6Q10I", *size, *seconds, *nanos, *owner, found.st_blksize, 0)


def _stat(name: bytes, directory: int) -> os.stat_result | None:
    with contextlib.suppress(FileNotFoundError):
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    return None


class _Files:
    """The operations, named after requests; each returns its reply or raises OSError.

    An inode's number is an O_PATH descriptor, which stays open until the end, so that the inode
    outlives its names.
    """

    def __init__(self, device: int, backing: str) -> None:
        self.device, self.backing = device, backing
        self.rules: list[Rule] = []
        self.negative = self.delay = 0.0
        self.stale = False
        self._root = os.open(backing, os.O_PATH | os.O_DIRECTORY)
        self._nodes = {self._key(self._root): self._root}
        self._removed: set[tuple[int, int]] = set()  # inodes removed through this mount
        self._known: dict[tuple[int, bytes], tuple[int, int]] = {}  # names created or seen here
        self._listings: dict[int, list[bytes]] = {}

    def receive(self) -> bool:
        """Serve one request; returns False when the filesystem was unmounted."""
        try:
            data = os.read(self.device, _MAX_WRITE + 4096)
        except OSError as exn:
            return exn.errno != errno.ENODEV  # other errors mean an interrupted request
        _length, op, unique, number, _uid, _gid, pid = struct.unpack_from("<2I2Q3I", data)
        body, answer, error = data[40:], b"", 0
        if op in _NO_ANSWER:
            return True
        try:
            if op == _INIT:
                answer = self._agreed(body)
            elif op in OPERATIONS:
                answer = self._carry_out(*OPERATIONS[op], self._node(number), pid, body)
            else:
                error = errno.ENOSYS
        except OSError as exn:
            error = exn.errno or errno.EIO
        with contextlib.suppress(FileNotFoundError):  # the caller was interrupted
            os.writev(self.device, [struct.pack("<IiQ", 16 + len(answer), -error, unique), answer])
        return True

    def _agreed(self, body: bytes) -> bytes:
        major, minor, readahead, offered = struct.unpack_from("<4I", body)
        limits = (readahead, offered & _FLAGS, 16, 12, _MAX_WRITE, 1, 256)
        return struct.pack("<4I2H2IH34x", major, min(minor, 38), *limits)

    def _carry_out(self, op: str, layout: str, node: int, pid: int, body: bytes) -> bytes:
        given = struct.unpack_from(f"<{layout}", body)
        rest = body[struct.calcsize(f"<{layout}") :]
        names = rest.split(b"\0")[:-1] if op in _NAMED else []
        rule = self._rule(op, node, given, names)
        if rule is not None and rule.kill and pid:
            with contextlib.suppress(ProcessLookupError):  # the number may be that of a thread
                os.kill(pid, signal.SIGKILL)
        if not op.startswith("release"):
            self._check(node)
        if rule is None or rule.done:
            data = [rest] if op == "write" else []
            answer = bytes(getattr(self, op)(node, *given, *names, *data))
        if rule is not None:
            raise OSError(rule.error, "")
        return answer

    def _rule(self, op: str, node: int, given: tuple[int, ...], names: list[bytes]) -> Rule | None:
        """Return the rule that hits this request, or None."""
        directories = [node, self._node(given[0])] if op == "rename" else [node]
        paths = []
        for directory, name in zip(directories, names or [b""], strict=True):
            path = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), os.fsdecode(name))
            paths.append(os.path.relpath(path, self.backing))
        for rule in [rule for rule in self.rules if op in rule.ops and rule.times]:
            if any(fnmatch.fnmatchcase(path, rule.pattern) for path in paths):
                if not rule.skip:
                    rule.times -= rule.times > 0
                    rule.struck += 1
                    return rule
                rule.skip -= 1
        return None

    # -- inodes ----------------------------------------------------------------------

    def _node(self, number: int) -> int:
        """Return the descriptor of an inode."""
        return self._root if number == _ROOT else number

    @staticmethod
    def _key(inode: int | os.stat_result) -> tuple[int, int]:
        found = os.fstat(inode) if isinstance(inode, int) else inode
        return found.st_dev, found.st_ino

    def _check(self, node: int) -> None:
        """Raise ESTALE if another node removed the inode."""
        found = os.fstat(node)
        if self.stale and not found.st_nlink and self._key(found) not in self._removed:
            raise OSError(errno.ESTALE, "")

    def _entry(self, parent: int, name: bytes, *, made: bool = False) -> bytes:
        """Return the reply to a lookup or a creation."""
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent)
        found = os.fstat(fd)
        node = self._nodes.setdefault(self._key(found), fd)
        if node != fd:
            os.close(fd)
        if made:
            self._known[parent, name] = self._key(found)
        elif not self._visible(parent, name, found):
            raise FileNotFoundError(errno.ENOENT, "")
        return struct.pack("<4Q2I", node, 0, 0, 0, 0, 0) + _attributes(found)

    def _visible(self, parent: int, name: bytes, found: os.stat_result) -> bool:
        if found.st_ctime + self.delay <= time.time():
            self._known[parent, name] = self._key(found)
        return self._known.get((parent, name)) == self._key(found)

    @staticmethod
    def _opened(fd: int) -> bytes:
        """Return the reply to an open; the handle is the descriptor."""
        past_the_page_cache = 1  # so that the reader gets the errors of reads
        return struct.pack("<QIi", fd, past_the_page_cache, 0)

    # -- names -----------------------------------------------------------------------

    def lookup(self, node: int, name: bytes) -> bytes:
        try:
            return self._entry(node, name)
        except FileNotFoundError:
            if not self.negative:
                raise
            seconds, rest = divmod(self.negative, 1)
            return struct.pack("<4Q2I88x", 0, 0, int(seconds), 0, int(rest * 1e9), 0)

    def mkdir(self, node: int, mode: int, name: bytes) -> bytes:
        os.mkdir(name, mode & 0o7777, dir_fd=node)
        return self._entry(node, name, made=True)

    def link(self, node: int, source: int, name: bytes) -> bytes:
        self._check(source)
        os.link(f"/proc/self/fd/{source}", name, dst_dir_fd=node, follow_symlinks=True)
        return self._entry(node, name, made=True)

    def create(self, node: int, flags: int, mode: int, name: bytes) -> bytes:
        flags = flags & (os.O_ACCMODE | os.O_EXCL) | os.O_CREAT | os.O_NOFOLLOW
        fd = os.open(name, flags, mode & 0o7777, dir_fd=node)
        return self._entry(node, name, made=True) + self._opened(fd)

    def unlink(self, node: int, name: bytes, remove: Callable[..., None] = os.unlink) -> bytes:
        found = os.stat(name, dir_fd=node, follow_symlinks=False)
        remove(name, dir_fd=node)
        self._removed.add(self._key(found))
        return b""

    rmdir = functools.partialmethod(unlink, remove=os.rmdir)

    def rename(self, node: int, number: int, old: bytes, new: bytes) -> bytes:
        target = self._node(number)
        found, there = os.stat(old, dir_fd=node, follow_symlinks=False), _stat(new, target)
        os.rename(old, new, src_dir_fd=node, dst_dir_fd=target)
        if there is not None and not os.path.samestat(found, there):
            self._removed.add(self._key(there))
        self._known[target, new] = self._key(found)
        return b""

    def readdir(self, node: int, handle: int, offset: int, size: int) -> bytes:
        if offset == 0:
            self._listings[handle] = list(self._listing(node, handle))
        out = b""
        for entry in self._listings[handle][offset:]:
            if len(out) + len(entry) > size:
                break
            out += entry
        return out

    def _listing(self, node: int, handle: int) -> Iterator[bytes]:
        """Yield a record for each visible name of a directory."""
        offset = 0
        for name in map(os.fsencode, os.listdir(handle)):
            found = _stat(name, handle)
            if found is not None and self._visible(node, name, found):
                offset += 1
                head = struct.pack("<2Q2I", found.st_ino, offset, len(name), found.st_mode >> 12)
                yield (head + name).ljust(-(-(len(head) + len(name)) // 8) * 8, b"\0")

    # -- attributes and data ---------------------------------------------------------

    def getattr(self, node: int) -> bytes:
        return struct.pack("<Q2I", 0, 0, 0) + _attributes(os.fstat(node))

    def setattr(self, node: int, valid: int, size: int, *more: int) -> bytes:
        atime, mtime, atime_n, mtime_n, mode, uid, gid = more
        path, found = f"/proc/self/fd/{node}", os.fstat(node)
        if valid & _MODE:
            os.chmod(path, mode & 0o7777)
        if valid & (_UID | _GID):
            os.chown(path, uid if valid & _UID else -1, gid if valid & _GID else -1)
        if valid & _SIZE:
            os.truncate(path, size)
        if valid & (_ATIME | _MTIME):
            used = atime * 10**9 + atime_n if valid & _ATIME else found.st_atime_ns
            changed = mtime * 10**9 + mtime_n if valid & _MTIME else found.st_mtime_ns
            os.utime(path, ns=(used, changed))
        return self.getattr(node)

    def statfs(self, node: int) -> bytes:
        found = os.statvfs(f"/proc/self/fd/{node}")
        blocks = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<5Q4I24x", *blocks, found.f_bsize, found.f_namemax, found.f_frsize, 0)

    def open(self, node: int, flags: int) -> bytes:
        return self._opened(os.open(f"/proc/self/fd/{node}", flags & os.O_ACCMODE))

    def read(self, node: int, handle: int, offset: int, size: int) -> bytes:
        return os.pread(handle, size, offset)

    def write(self, node: int, handle: int, offset: int, size: int, data: bytes) -> bytes:
        return struct.pack("<2I", os.pwrite(handle, memoryview(data)[:size], offset), 0)

    def fsync(self, node: int, handle: int) -> bytes:
        os.fsync(handle)
        return b""

    def release(self, node: int, handle: int) -> bytes:
        self._listings.pop(handle, None)
        os.close(handle)
        return b""

    opendir, fsyncdir, releasedir = open, fsync, release

    def setlk(self, node: int, handle: int, kind: int) -> bytes:
        fcntl.flock(handle, _LOCKS[kind] | fcntl.LOCK_NB)
        return b""
