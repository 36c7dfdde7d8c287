"""The protocol of /dev/fuse, as far as a passthrough filesystem needs it.

Spoken directly, not through libfuse: what the tests want to see (an inode that
stays reachable after another node unlinked its name, a flock that is never
answered, a negative dentry with a lifetime) is hidden or mended by its
path-based interface. Needs the device, and the right to mount.

The structures are those of include/uapi/linux/fuse.h, protocol 7.36 and later.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

ROOT = 1
DEVICE = "/dev/fuse"
FILESYSTEM = "fuse.shim"

_MAX_WRITE = 1 << 20
_PAGE = 4096
_MS_NOSUID, _MS_NODEV, _MNT_DETACH = 2, 4, 2

_IN = struct.Struct("<IIQQIIIHH")  # len opcode unique nodeid uid gid pid extlen pad
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_ENTRY = struct.Struct("<QQQQII")
_ATTR_OUT = struct.Struct("<QII")
_INIT_IN = struct.Struct("<IIIII")
_INIT_OUT = struct.Struct("<IIIIHHIIHHIIH22x")
_STATFS = struct.Struct("<QQQQQIIII24x")
_DIRENT = struct.Struct("<QQII")

# Of fuse.h: what of the kernel's offers is accepted.
_ASYNC_READ, _BIG_WRITES, _FLOCK_LOCKS = 1, 1 << 5, 1 << 10
_PARALLEL_DIROPS, _MAX_PAGES, _EXTENDED = 1 << 18, 1 << 22, 1 << 30
_DIRECT_IO_MMAP = 1 << 4  # of flags2: bit 36


class Op(IntEnum):
    """Requests of the kernel."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    SETLK = 32
    SETLKW = 33
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    RENAME2 = 45


@dataclass(frozen=True, slots=True)
class Request:
    """One request: who asks what of which inode, and the rest undecoded."""

    op: int
    unique: int
    node: int
    uid: int
    gid: int
    pid: int
    body: bytes

    def unpack(self, layout: str) -> tuple[int, ...]:
        return struct.unpack_from(layout, self.body)

    def names(self, offset: int) -> list[str]:
        """The NUL-ended names behind ``offset`` bytes of arguments."""
        return [os.fsdecode(name) for name in self.body[offset:].split(b"\0")[:-1]]


class Channel:
    """The device, open on one mount. Safe between threads."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._size = _MAX_WRITE + _PAGE

    def receive(self) -> Request | None:
        """The next request; None when the filesystem was unmounted."""
        while True:
            try:
                data = os.read(self.fd, self._size)
            except OSError as exn:
                if exn.errno in (errno.ENODEV, errno.EBADF):
                    return None
                if exn.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue  # the request was called off while it was read
                raise
            _length, op, unique, node, uid, gid, pid, _ext, _pad = _IN.unpack_from(data)
            return Request(op, unique, node, uid, gid, pid, data[_IN.size :])

    def reply(self, unique: int, data: bytes = b"", error: int = 0) -> None:
        body = b"" if error else data
        header = _OUT.pack(_OUT.size + len(body), -error, unique)
        # ENOENT: the asker was interrupted and has gone.
        with contextlib.suppress(OSError):
            os.writev(self.fd, [header, body])

    def greet(self, request: Request) -> None:
        """Answer INIT."""
        major, minor, readahead, offered, _flags2 = request.unpack(_INIT_IN.format)
        wanted = _ASYNC_READ | _BIG_WRITES | _FLOCK_LOCKS | _PARALLEL_DIROPS | _MAX_PAGES
        flags = wanted & offered
        flags2 = 0
        if offered & _EXTENDED:
            flags |= _EXTENDED
            flags2 = _DIRECT_IO_MMAP & _flags2
        out = _INIT_OUT.pack(
            major, min(minor, 38), readahead, flags, 16, 12, _MAX_WRITE, 1, 256, 0, flags2, 0, 0
        )
        self.reply(request.unique, out)


def attributes(found: os.stat_result) -> bytes:
    """A stat result as the kernel wants it."""
    times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
    return _ATTR.pack(
        found.st_ino,
        found.st_size,
        found.st_blocks,
        *(t // 10**9 for t in times),
        *(t % 10**9 for t in times),
        found.st_mode,
        found.st_nlink,
        found.st_uid,
        found.st_gid,
        found.st_rdev,
        found.st_blksize,
        0,
    )


def _split(seconds: float) -> tuple[int, int]:
    return int(seconds), int(seconds % 1 * 1e9)


def attr_reply(found: os.stat_result, valid: float) -> bytes:
    seconds, nanos = _split(valid)
    return _ATTR_OUT.pack(seconds, nanos, 0) + attributes(found)


def entry_reply(node: int, found: os.stat_result, entry: float, attr: float) -> bytes:
    (seconds, nanos), (attr_s, attr_n) = _split(entry), _split(attr)
    return _ENTRY.pack(node, 0, seconds, attr_s, nanos, attr_n) + attributes(found)


def negative_reply(valid: float) -> bytes:
    """'No such name, and do not ask again for so long': a negative dentry."""
    seconds, nanos = _split(valid)
    return _ENTRY.pack(0, 0, seconds, 0, nanos, 0) + bytes(_ATTR.size)


def open_reply(handle: int, flags: int) -> bytes:
    return struct.pack("<QIi", handle, flags, 0)


def statfs_reply(found: os.statvfs_result) -> bytes:
    return _STATFS.pack(
        found.f_blocks,
        found.f_bfree,
        found.f_bavail,
        found.f_files,
        found.f_ffree,
        found.f_bsize,
        found.f_namemax,
        found.f_frsize,
        0,
    )


def dirents(names: list[tuple[str, int, int]], start: int, limit: int) -> bytes:
    """Directory entries (name, inode, type) from ``start``, as many as fit."""
    out = bytearray()
    for index in range(start, len(names)):
        name, inode, kind = names[index]
        encoded = os.fsencode(name)
        padded = -(-(_DIRENT.size + len(encoded)) // 8) * 8
        if len(out) + padded > limit:
            break
        entry = _DIRENT.pack(inode, index + 1, len(encoded), kind) + encoded
        out += entry.ljust(padded, b"\0")
    return bytes(out)


# -- mounting -------------------------------------------------------------------


def mount(mountpoint: Path) -> Channel:
    """Mount; the filesystem answers as soon as somebody serves the channel.

    Raises:
        OSError: there is no device, or this user may not mount.
    """
    fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    options = (
        f"fd={fd},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()},"
        "default_permissions,allow_other"
    )
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (b"shim", os.fsencode(mountpoint), FILESYSTEM.encode())
    if libc.mount(*arguments, _MS_NOSUID | _MS_NODEV, options.encode()) != 0:
        number = ctypes.get_errno()
        os.close(fd)
        raise OSError(number, f"mount: {os.strerror(number)}", str(mountpoint))
    return Channel(fd)


def unmount(mountpoint: Path) -> None:
    """Take it out of sight, whoever uses it; harmless when it is not mounted."""
    ctypes.CDLL(None).umount2(os.fsencode(mountpoint), _MNT_DETACH)
