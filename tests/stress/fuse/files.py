"""The operations of the shim: each carries out one request on the backing directory.

A method is found by the request's name. It returns the answer or raises OSError.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.stress.fuse import proto
from tests.stress.fuse.nodes import Nodes, key_of
from tests.stress.fuse.powerloss import Unsynced
from tests.stress.fuse.proto import Op, Request

_MODE, _UID, _GID, _SIZE, _ATIME, _MTIME, _FH, _ATIME_NOW, _MTIME_NOW = (1 << n for n in range(9))
_SETATTR = "<IIQQQQQQIIIIIIII"
_LOCKS = {0: fcntl.LOCK_SH, 1: fcntl.LOCK_EX, 2: fcntl.LOCK_UN}  # by F_RDLCK, F_WRLCK, F_UNLCK


class HangError(Exception):
    """This request is not answered."""


class Files(Nodes):
    """The operations; safe between threads.

    Args:
        backing: the directory that is shown.
        grave: where a power failure finds what was unlinked; None models none.
    """

    def __init__(self, backing: Path, grave: Path | None) -> None:
        super().__init__(backing)
        self.journal = Unsynced(grave) if grave is not None else None
        self.dead = False

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Unsynced | None]:
        if self.journal is None:
            yield None
            return
        with self.journal.changing():
            if self.dead:
                raise OSError(errno.EIO, "")
            yield self.journal

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
        with self._changing() as journal:
            make(self.nodes[request.node].fd)
            if journal is not None:
                journal.made(self.absolute(request.node, name))
        self._own(request, name)
        return self.entry(request.node, name, made=True)

    def mkdir(self, request: Request) -> bytes:
        (name,) = request.names(8)
        mode, _umask = request.unpack("<II")
        return self._make(request, name, lambda fd: os.mkdir(name, mode & 0o7777, dir_fd=fd))

    def mknod(self, request: Request) -> bytes:
        (name,) = request.names(16)
        mode, device, _umask, _ = request.unpack("<IIII")
        return self._make(request, name, lambda fd: os.mknod(name, mode, device, dir_fd=fd))

    def symlink(self, request: Request) -> bytes:
        name, target = request.names(0)
        return self._make(request, name, lambda fd: os.symlink(target, name, dir_fd=fd))

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
        with self._changing() as journal:
            new = _look(name, directory) is None
            flags = kept | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(name, flags, mode & 0o7777, dir_fd=directory)
            if journal is not None and new:
                journal.made(self.absolute(request.node, name))
        if new:
            self._own(request, name)
        return self.entry(request.node, name, made=True) + self.opened(fd)

    # -- taking names away -------------------------------------------------------

    def unlink(self, request: Request) -> bytes:
        (name,) = request.names(0)
        directory = self.nodes[request.node].fd
        with self._changing() as journal:
            if self.hide_open(request.node, name):
                return b""
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
            path = self.absolute(request.node, name)
            kept = journal.keep(path) if journal is not None else None
            os.unlink(name, dir_fd=directory)
            self.removed.add(key_of(found))
            if journal is not None:
                journal.removed(path, kept)
        return b""

    def rmdir(self, request: Request) -> bytes:
        (name,) = request.names(0)
        directory = self.nodes[request.node].fd
        with self._changing() as journal:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
            os.rmdir(name, dir_fd=directory)
            self.removed.add(key_of(found))
            if journal is not None:
                journal.removed(
                    self.absolute(request.node, name), None, stat.S_IMODE(found.st_mode)
                )
        return b""

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
        with self._changing() as journal:
            found = os.stat(old, dir_fd=olds.fd, follow_symlinks=False)
            there = _look(new, news.fd)
            if there is not None and os.path.samestat(found, there):
                return b""  # two names of one file: nothing happens
            if there is not None and self.hide_open(target, new):
                there = None
            before, after = self.absolute(source, old), self.absolute(target, new)
            kept = None
            if journal is not None and there is not None and not stat.S_ISDIR(there.st_mode):
                kept = journal.keep(after)
            os.rename(old, new, src_dir_fd=olds.fd, dst_dir_fd=news.fd)
            if there is not None:
                self.removed.add(key_of(there))
            if journal is not None:
                mode = stat.S_IMODE(there.st_mode) if there is not None else 0
                journal.renamed(before, after, kept, mode if there is not None else None)
        self.know(news.key, new, found)
        return b""

    def readlink(self, request: Request) -> bytes:
        return os.fsencode(os.readlink("", dir_fd=self.nodes[request.node].fd))

    # -- attributes ----------------------------------------------------------------

    def getattr(self, request: Request) -> bytes:
        found = os.fstat(self.alive(request.node).fd)
        return proto.attr_reply(found, self.settings.attr)

    def setattr(self, request: Request) -> bytes:
        valid, _, handle, size, _, atime, mtime, _, atime_n, mtime_n, _, mode, _, uid, gid, _ = (
            request.unpack(_SETATTR)
        )
        path = self.proc(request.node)
        node = self.nodes[request.node]
        with self._changing() as journal:
            if valid & _MODE:
                os.chmod(path, mode & 0o7777)
            if valid & (_UID | _GID):
                os.chown(path, uid if valid & _UID else -1, gid if valid & _GID else -1)
            if valid & _SIZE:
                if journal is not None:
                    journal.writing(node.key, path)
                os.truncate(self.handles[handle].fd if valid & _FH else path, size)
            if valid & (_ATIME | _MTIME):
                now, found = time.time_ns(), os.fstat(node.fd)
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
        node = self.alive(request.node)
        handle, offset, size = request.unpack("<QQI")
        data = memoryview(request.body)[40 : 40 + size]
        with self._changing() as journal:
            if journal is not None:
                journal.writing(node.key, f"/proc/self/fd/{node.fd}")
            count = os.pwrite(self.handles[handle].fd, data, offset)
        return count.to_bytes(4, "little") + bytes(4)

    def fsync(self, request: Request) -> bytes:
        os.fsync(self.handles[request.unpack("<Q")[0]].fd)
        if self.journal is not None:
            self.journal.synced(self.nodes[request.node].key)
        return b""

    def fsyncdir(self, request: Request) -> bytes:
        if self.journal is not None:
            self.journal.synced(None)
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
