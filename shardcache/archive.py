"""Read the files of tar archives as WebDataset does, in less time.

Nearly all headers of a shard are plain: they describe a regular file with a name and a size. This
module parses them with one regular expression and a checksum in C. At the first other header
(sparse files, global headers, unusual numbers, damage, compression), it passes the same bytes and
the rest of the archive to tarfile. So it is always tarfile that decides which members an archive
has, and where and how reading it fails.

Streams are never closed. Nothing after a member is read until the next one is requested, so that
readers do not wait for bytes that are still being downloaded.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any
from zlib import adler32

from shardcache.errors import IntegrityError

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
#: Bytes per read while skipping a member.
_PIECE = 20 * _BLOCK
#: Limit of an extended header in bytes, ample for a name and a few timestamps. Larger ones are left
#: to tarfile.
_EXTENDED_MAX = 1 << 16
#: The first bytes of compressed archives. No name of a sample begins with them.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"]\0\0", b"\xfd7z", b"\x28\xb5\x2f")
#: The names of archives that tarfile's mode "r|*" opens.
_SUFFIXES = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
#: The header of a directory. It is put before the header at which tarfile takes over, because
#: tarfile applies other rules to the first header of an archive.
_DIRECTORY = tarfile.TarInfo("x")
_DIRECTORY.type = tarfile.DIRTYPE
_NOT_FIRST = _DIRECTORY.tobuf(tarfile.USTAR_FORMAT)

# The forms of a number that all tar programs read alike: octal digits with a final NUL or space, a
# field of NULs, and GNU's base 256. Other forms are left to tarfile.
_NUMBER = rb"(?:[0-7]{7}[\0 ]|[0-7]{6}[\0 ]{2}|\0{8}|[\x80\xff].{7})"
_match = re.compile(
    rb"(?=([^\0]{0,100})).{100}"  # 1: name
    + _NUMBER * 3  # mode, user, group
    + rb"(0[0-7]{10})[\0 ]"  # 2: size below a GiB, so a damaged one cannot take all memory
    + rb"(?:[0-7]{11}[\0 ]|\0{12}|[\x80\xff].{11})"  # time
    + rb"([0-7]{6}[\0 ]{2})"  # 3: checksum
    + rb"(.)"  # 4: type
    + rb".{172}"  # link, magic, user, group
    + _NUMBER * 2  # device
    + rb"(?=([^\0]{0,155})).{167}",  # 5: prefix
    re.DOTALL,
).fullmatch
#: Matches a record of an extended header that has the name, or a value that WebDataset ignores.
_record = re.compile(rb"([1-9][0-9]{0,5}) (path|[acm]time|[ug]id|[ug]name)=([^\n]+)\n").match

_REGULAR = (b"0", b"7")
_WITHOUT_DATA = (b"5", b"2", b"1", b"3", b"4", b"6")
_EXTENDED = (b"x", b"L")
#: The first bytes of an extended header that Python's tarfile writes, and of GNU's long names.
_EXTENDED_NAME = b"././@"

#: Matches the name of a member that is WebDataset's metadata, which is no part of a sample.
is_meta = re.compile(r"(?=__)[^/]*__\Z|__[^/]*__($|/)").match
_split = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$").match
#: Matches a value of a global header by which tarfile reads later members differently.
_redefines = re.compile(r"(?:path|size|hdrcharset)$|GNU\.sparse\.").match
#: The warning that a shard is not packed well; its arguments are the shard and the problem.
MALFORMED = "%s: %s. Pack and upload it again."
#: The problem of a shard in which a key occurs again after other keys.
REPEATED = "the key {} occurs again after other keys, which makes two samples, as in WebDataset"

#: The name, size and type in a plain header.
_Fields = tuple[str, int, bytes]


def key_and_field(name: str) -> Any:
    """Split a name as WebDataset's ``base_plus_ext``: the key of the sample, and the rest."""
    match = _split(name)
    return (None, None) if match is None else match.groups()


class TarWalk:
    """Iterates over the names of the regular files in an archive; `read` returns a file's data.

    The names, their order, the data and the exceptions are those of WebDataset's expander. With
    ``before=_NOT_FIRST``, the stream begins behind a member.
    """

    def __init__(self, stream: Any, before: bytes = b"") -> None:
        self._stream = stream
        self._before = before
        self._size = 0  # bytes of the current member
        self._left = 0  # bytes from the stream's position to the next header
        self._archive: Any = None  # tarfile's reader, once it has taken over
        self._member: tarfile.TarInfo | None = None  # current member, once tarfile has taken over

    def read(self) -> bytes:
        """Return the data of the current member. May be called at most once per member."""
        if self._member is not None:
            return self._archive.extractfile(self._member).read()  # type: ignore[no-any-return]
        data: bytes = self._stream.read(self._size)
        self._left -= len(data)
        if len(data) != self._size:
            raise _ended()
        return data

    def problem(self) -> str:
        """Describe what readers miss behind an end marker, once the walk is over, or return ""."""
        stream = self._stream
        is_seekable = type(stream) is io.BufferedReader and stream.seekable()
        if self._left != -_BLOCK or self._archive is not None or not is_seekable:
            return ""
        # `unread` reads the marker twice. A seek back could cost a request.
        rest = _Rejoined(2 * _ZEROS, stream)
        return unread(lambda size, _: rest.read(size), stream.tell() - _BLOCK)

    def __iter__(self) -> Iterator[str]:
        stream, before = self._stream, self._before
        # Streams of these types return as many bytes as requested, except at the end.
        is_exact = type(stream) in (io.BufferedReader, io.BytesIO, _Headers)
        header = stream.read(_BLOCK) if is_exact and tarfile.ENCODING == "utf-8" else b""
        fields = _fields(header)
        if fields is None or (header.startswith(_COMPRESSED) and not before):
            yield from self._by_tarfile(before + header)
            return
        while True:
            if fields is not None and fields[2] in _EXTENDED and fields[1] <= _EXTENDED_MAX:
                rest = stream.read(_padded(fields[1]) + _BLOCK)
                header, fields = header + rest, _extended(fields, rest)
            if fields is not None and fields[2] in _REGULAR:
                name, size, _ = fields
                self._size = size
                self._left = _padded(size)
                yield name
            elif fields is None or fields[2] not in _WITHOUT_DATA:
                self._left = -len(header)
                if header and header != _ZEROS:
                    yield from self._by_tarfile(before + header)
                return
            before, header = _NOT_FIRST, self._next_header()
            fields = _fields(header)

    def _next_header(self) -> bytes:
        """Return the block after the current member. It may be short at the end of the stream."""
        stream, left = self._stream, self._left
        self._left = 0
        if left and type(stream) is _Headers:
            stream.skip(left)
            left = 0
        while left > _PIECE:  # skip a member that was not read
            stream.read(_PIECE)
            left -= _PIECE
        block: bytes = stream.read(left + _BLOCK)
        if len(block) < left:
            raise _ended()
        return block[left:] if left else block

    def _by_tarfile(self, pending: bytes) -> Iterator[str]:
        """Yield the names that tarfile finds in ``pending`` and in the rest of the stream."""
        rest: Any = _Rejoined(pending, self._stream)
        self._archive = tarfile.open(fileobj=rest, mode="r|*")  # noqa: SIM115 - never closed
        for info in self._archive:
            if info.isreg():
                self._member = info
                self._left = self._archive.offset - rest.at
                yield info.name
            self._archive.members = []  # tarfile would keep all of them in memory
        self._left = self._archive.offset - rest.at


def members(read: Callable[[int, int], bytes], end: int) -> Iterator[tuple[int, str]]:
    """Find the regular files of an archive of ``end`` bytes without reading their data.

    ``read(size, offset)`` returns up to ``size`` bytes. Yields the offset at which a file ends, and
    its name; headers that concern the next file are behind that offset. The last item is the offset
    at which tarfile stops, and "". A CompressionError means a compressed archive, and a StreamError
    one that can only be read in sequence.
    """
    if read(_BLOCK, 0).startswith(_COMPRESSED):
        raise tarfile.CompressionError("it is compressed")
    stream = _Headers(read)
    walk = TarWalk(stream)
    for name in walk:
        if walk._archive is not None and any(map(_redefines, walk._archive.pax_headers)):
            raise tarfile.StreamError("it has a global header, which changes later members")
        if (at := stream.at + walk._left) > end:
            raise _ended()
        yield at, name
    yield stream.at + walk._left, ""


def files_in(data: bytes, shard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the files in the bytes from one member of an archive to another. Raises TarError."""
    walk = TarWalk(io.BytesIO(data), _NOT_FIRST)
    return [
        {"fname": name, "data": walk.read(), **shard}
        for name in walk
        if name[:2] != "__" or not is_meta(name)
    ]


def unread(read: Callable[[int, int], bytes], at: int) -> str:
    """Describe why an archive may have samples behind the end that tarfile sees, or return ""."""
    block, position = read(_BLOCK, at), at
    if len(block) < _BLOCK:
        return f"it ends at byte {at} without an end marker: its writer was not closed"
    while (piece := read(_PIECE, position)) and not (data := piece.lstrip(b"\0")):
        position += len(piece)
    if not piece:
        return ""
    position += len(piece) - len(data)
    what = "an end marker" if block == _ZEROS else "a damaged header"
    return f"readers stop at {what} at byte {at} and miss the data from byte {position} on"


class _Headers:
    """A stream of an archive in which `TarWalk` moves from header to header."""

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._read = read
        self.at = 0

    def read(self, size: int) -> bytes:
        data = self._read(size, self.at)
        self.at += len(data)
        return data

    def skip(self, size: int) -> None:
        self.at += size


#: Empty reads after which reading fails. If the size of a member is damaged, tarfile would keep
#: reading at the end of the archive, for up to 2^500 bytes.
_MAX_EMPTY_READS = 1000


class _Rejoined:
    """A stream of the bytes in ``pending``, followed by those of ``stream``."""

    def __init__(self, pending: bytes, stream: Any) -> None:
        self._pending = pending
        self._stream = stream
        self._empty_reads = 0
        self.at = 0  # bytes that were read

    def read(self, size: int) -> bytes:
        data, self._pending = self._pending[:size], self._pending[size:]
        if len(data) < size:
            data += self._stream.read(size - len(data))
        self.at += len(data)
        if not data:
            self._empty_reads += 1
            if self._empty_reads > _MAX_EMPTY_READS:
                raise _ended()
        return data


def _ended() -> tarfile.ReadError:
    return tarfile.ReadError("unexpected end of data")  # with tarfile's text


def _fields(header: bytes) -> _Fields | None:
    """Return the fields of a header, or None if it is not plain, is incomplete or is damaged."""
    return _known(header) if header.startswith(_EXTENDED_NAME) else _parsed(header)


def _parsed(header: bytes) -> _Fields | None:
    if (match := _match(header)) is None:
        return None
    name, size, checksum, kind, prefix = match.groups()
    # The lower half of Adler-32 is 1 + the sum of the bytes, modulo 65521, which 512 bytes of ASCII
    # cannot reach.
    total = adler32(header) & 0xFFFF if header.isascii() else 1 + sum(header)
    if total != _total(checksum):
        return None
    if prefix and kind not in _EXTENDED:
        name = prefix + b"/" + name
    return name.decode("utf-8", "surrogateescape"), int(size, 8), kind


#: The extended headers of an archive differ only in a few sizes, so each is parsed only once.
_known = lru_cache(64)(_parsed)


@lru_cache(1024)
def _total(checksum: bytes) -> int:
    """Return 1 + the sum of the bytes of a header, according to its checksum field."""
    return 1 + int(checksum[:6], 8) - 8 * 32 + sum(checksum)  # the field itself counts as 8 spaces


def _padded(size: int) -> int:
    return size + (-size & 511)


def _extended(fields: _Fields, rest: bytes) -> _Fields | None:
    """Return the fields of a member from what follows its extended header; None if not plain."""
    _, size, kind = fields
    padded = _padded(size)
    inner = _parsed(rest[padded:])
    if inner is None or inner[2] not in _REGULAR:
        return None
    if kind == b"L":
        name: str | None = rest[:padded].partition(b"\0")[0].decode("utf-8", "surrogateescape")
    else:
        name = _name(inner[0], rest, size)
    return None if name is None else (name, *inner[1:])


def _name(name: str, records: bytes, size: int) -> str | None:
    """Return the name in ``size`` bytes of records, else ``name``; None if tarfile must read."""
    if size & 511 and records[size]:
        return None
    position = 0
    while position < size:
        match = _record(records, position)
        if match is None or match.end() - position != int(match[1]):
            return None
        if match[2] == b"path":
            try:
                name = match[3].decode("utf-8").rstrip("/")
            except UnicodeDecodeError:
                return None
        position = match.end()
    return name if position == size else None


def check_archive(fd: int, basename: str, url: str) -> None:
    """Raise IntegrityError if a file with the name of a tar archive does not begin like one."""
    if not basename.lower().endswith(_SUFFIXES):
        return
    head = os.pread(fd, _BLOCK, 0)
    if head == _ZEROS or head.startswith(_COMPRESSED) or _parsed(head):
        return  # a block of zeros is an archive without members
    try:
        tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except tarfile.HeaderError as exn:
        problem = f"begins with {head[:5]!r}" if head else "is empty (0 bytes)"
        raise IntegrityError(
            f"{url} is not a tar archive: it {problem}. Check the object, and upload it again; an "
            "error page may have been uploaded or served in its place.",
            url=url,
        ) from exn


def archive_problem(fd: int, basename: str, size: int, *, is_quick: bool = False) -> str:
    """Describe why readers of a tar archive miss a part of it, or return "".

    If ``is_quick``, a file that ends with zeros, as archives do, is not read.
    """
    if not basename.lower().endswith(_SUFFIXES):
        return ""
    read = partial(os.pread, fd)
    if is_quick and read(_BLOCK, max(0, size - _BLOCK)) == _ZEROS:
        return ""
    at = 0
    try:
        for at, _ in members(read, size):  # noqa: B007 - the last one matters
            pass
    except (tarfile.CompressionError, tarfile.StreamError):
        return ""  # its members are not walked
    except (tarfile.TarError, ValueError) as exn:
        return f"readers fail after byte {at} ({exn})"
    return unread(read, at)
