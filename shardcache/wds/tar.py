"""From a binary stream to the members of a tar archive: those that tarfile finds, sooner.

Nearly all headers of a shard say little: a regular file, its name, its size. These are
parsed here, by one regular expression and a checksum in C. Whatever is not plain is left
to tarfile itself, on the same bytes: sparse files, global headers, numbers in odd
spellings, damage, compression. So there is no second opinion: an archive has the members
that the installed tarfile says, and ends, or breaks, where and how it says so.

    header --- plain, checksum right ----------------------> name, size
       | odd, at the very start: perhaps compressed
       |   `--> tarfile.open(mode="r|*"), for all of it ---> name, data
       | odd, later
       `------> put back on a `_Tape`, TarFile.next() -----> name, data

Only ``read(n)`` of the stream is called, and it is never closed. In memory are one
member and one buffer. Nothing is read beyond a member before the next one is asked for,
so a shard that is still on its way is not waited for. For one thread.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any
from zlib import adler32

__all__ = ["TarWalk"]

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
#: tarfile reads a stream by records of twenty blocks, behind one block that it looks at.
_RECORD = 20 * _BLOCK
#: `io.BufferedReader` allocates what it is asked for, also where a damaged header asks
#: for 8 GB of a small file. What is larger than this is read in such pieces.
_PIECE = 1 << 24
#: An extended header holds a name and some times; a larger one is left to tarfile.
_EXTENDED_MAX = 1 << 16
#: What compressed data begins with, and a little more; no sample is called so.
_PACKED = (b"\x1f\x8b", b"BZh", b"]\0\0", b"\xfd7z", b"\x28\xb5\x2f")
_ENCODING = tarfile.ENCODING
#: In these every name can be decoded; in others tarfile may fail on fields not read here.
_ENCODING_IS_SAFE = _ENCODING.lower() in ("utf-8", "ascii", "latin-1", "iso8859-1")
_ENDED = "unexpected end of data"  # as tarfile says it

# Ways to write a number that every tar reads alike: octal digits, ended by NUL or space;
# a field of NULs; GNU's base 256. There are other ways, and they are tarfile's to judge.
_NUMBER = rb"(?:[0-7]{7}[\0 ]|[0-7]{6}[\0 ]{2}|\0{8}|[\x80\xff].{7})"
_match = re.compile(
    rb"(?=([^\0]{0,100})).{100}"  # 1: name
    + _NUMBER * 3  # mode, user, group
    + rb"([0-7]{11})[\0 ]"  # 2: size
    + rb"(?:[0-7]{11}[\0 ]|\0{12}|[\x80\xff].{11})"  # time
    + rb"([0-7]{6})[\0 ]{2}"  # 3: checksum
    + rb"(.)"  # 4: type
    + rb".{172}"  # link, magic, user, group
    + _NUMBER * 2  # device
    + rb"(?=([^\0]{0,155})).{167}",  # 5: prefix
    re.DOTALL,
).fullmatch
#: A record of an extended header: its length, its keyword.
_record = re.compile(rb"([1-9][0-9]{0,5}) ([^=\n\0]+)=").match

_REGULAR = (b"0", b"\0", b"7")
_WITHOUT_DATA = (b"5", b"2", b"1", b"3", b"4", b"6")
_EXTENDED = (b"x", b"L")

#: Name, size and type in a plain header.
_Fields = tuple[str, int, bytes]
_Take = Callable[[int], bytes]


class TarWalk:
    """Iterates over the names of an archive's regular files; `read` gives their data.

    What tarfile raises in mode ``r|*`` is raised: by the iteration what its iteration
    raises, by `read` what reading an extracted file raises.

    Args:
        stream: has ``read(n)``. It stays open.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._buffered = type(stream) in (io.BufferedReader, io.BytesIO)
        #: As ``read``, but short only at the end of the stream.
        self._take: _Take = stream.read if self._buffered else _Records(stream).read
        self._size = 0  # of this member
        self._left = 0  # bytes up to the next header
        self._tape = _Tape(self._take)
        self._archive: Any = None  # reads what is odd from the tape
        self._odd: tarfile.TarInfo | None = None  # this member, if it is

    def read(self) -> bytes:
        """The data of the member whose name came last; once for each.

        Raises:
            tarfile.ReadError: the archive ends in it.
        """
        if self._odd is not None:
            data: bytes = self._archive.extractfile(self._odd).read()
            return data
        size = self._size
        data = _large(self._take, size) if size > _PIECE and self._buffered else self._take(size)
        self._left -= len(data)
        if len(data) != size:
            raise tarfile.ReadError(_ENDED)
        return data

    def __iter__(self) -> Iterator[str]:
        header = self._stream.read(_BLOCK) if self._stream else b""
        fields = _fields(header)
        if fields is None or header.startswith(_PACKED) or not _ENCODING_IS_SAFE:
            yield from self._all_by_tarfile(header)
            return
        offset = 0  # of the header
        while True:
            if fields is not None and fields[2] in _EXTENDED:
                header, fields = self._extended(header, fields)
            if fields is not None and fields[2] in _REGULAR:
                name, size, _ = fields
                self._size = size
                self._left = left = size + (-size & 511)
                offset += len(header) + left
                yield name
            elif fields is not None and fields[2] in _WITHOUT_DATA:
                offset += len(header)
            elif header == _ZEROS:
                return
            else:
                resumed = yield from self._by_tarfile(header, offset)
                if resumed is None:
                    return
                offset = resumed
            header = self._next_header()
            fields = _fields(header)

    def _next_header(self) -> bytes:
        """The block behind this member; shorter, or empty, where the archive ends."""
        left, self._left = self._left, 0
        while left > _RECORD:  # a member that was not read
            if len(self._take(_RECORD)) < _RECORD:
                raise tarfile.ReadError(_ENDED)
            left -= _RECORD
        block = self._take(left + _BLOCK)
        if not left:
            return block
        if len(block) < left:
            raise tarfile.ReadError(_ENDED)
        return block[left:]

    def _extended(self, header: bytes, fields: _Fields) -> tuple[bytes, _Fields | None]:
        """What follows an extended header: all bytes of the headers, and what they say.

        That is None if any of it is odd.
        """
        _, size, kind = fields
        if not 0 < size <= _EXTENDED_MAX:
            return header, None
        padded = size + (-size & 511)
        rest = self._take(padded + _BLOCK)
        header += rest
        inner = _fields(rest[padded:])
        if inner is None or inner[2] not in _REGULAR:
            return header, None
        if kind == b"L":
            return header, (_text(rest[:padded].partition(b"\0")[0]), *inner[1:])
        return header, _overridden(inner, rest, size)

    def _by_tarfile(self, header: bytes, offset: int) -> Generator[str, None, int | None]:
        """The members that start at ``offset``, until tarfile is not needed any more.

        Args:
            header: what was read from there on.
            offset: where that is.

        Returns:
            Where the next header is; None at the end of the archive.
        """
        tape = self._tape
        if self._archive is None:
            # Made as an empty archive: one that is made of the tape reads a header at once.
            self._archive = tarfile.TarFile(fileobj=io.BytesIO(_ZEROS))
            self._archive.fileobj = tape
        archive = self._archive
        tape.pending = header
        tape.position = archive.offset = offset
        while (info := archive.next()) is not None:
            if info.isreg():
                self._odd = info
                yield info.name
                self._odd = None
            archive.members = []
            self._left = archive.offset - tape.position
            if self._left >= 0 and not tape.pending and not _matter(archive.pax_headers):
                end: int = archive.offset
                return end
        return None

    def _all_by_tarfile(self, first: bytes) -> Iterator[str]:
        stream: Any = _Replay(first, self._stream) if self._stream else self._stream
        archive: Any
        with tarfile.open(fileobj=stream, mode="r|*") as archive:
            self._archive = archive
            for info in archive:
                if info.isreg():
                    self._odd = info
                    yield info.name
                archive.members = []


def _fields(header: bytes) -> _Fields | None:
    """What a plain header says; None if it is not plain, not whole or damaged."""
    found = _match(header)
    if found is None:
        return None
    name, size, checksum, kind, prefix = found.groups()
    if header.isascii():
        # Adler's lower half is 1 + the sum, modulo 65521; 504 bytes of ASCII stay below.
        total = (adler32(header[156:], adler32(header[:148])) & 0xFFFF) - 1
    else:
        total = sum(header) - sum(header[148:156])
    if int(checksum, 8) != total + 256:  # its own field counts as spaces
        return None
    if kind == b"\0" and name.endswith(b"/"):
        kind = b"5"  # that is how old archives say it
    if prefix and kind not in _EXTENDED:
        name = prefix + b"/" + name
    return _text(name), int(size, 8), kind


def _overridden(fields: _Fields, records: bytes, size: int) -> _Fields | None:
    """The fields, with what an extended header of ``size`` bytes says; None if it is odd."""
    if size & 511 and records[size]:
        return None
    name, length, kind = fields
    position = 0
    while position < size:
        found = _record(records, position)
        if found is None:
            return None
        keyword = found[2]
        start, end = found.end(), position + int(found[1])
        if not start < end <= size or records[end - 1] != 10:
            return None
        if keyword == b"path":
            try:
                name = records[start : end - 1].decode("utf-8").rstrip("/")
            except UnicodeDecodeError:
                return None
        elif keyword == b"size":
            digits = records[start : end - 1]
            if not digits.isdigit() or len(digits) > 18:
                return None
            length = int(digits)
        elif keyword.startswith(b"GNU."):
            return None
        position = end
    if records.find(b"hdrcharset", 0, size) >= 0:
        return None
    return name, length, kind


def _matter(headers: Mapping[str, str]) -> bool:
    """Whether global headers say anything about the names and sizes of members."""
    return any(key in ("path", "size", "hdrcharset") or key.startswith("GNU.") for key in headers)


def _text(name: bytes) -> str:
    return name.decode(_ENCODING, "surrogateescape")


def _large(take: _Take, size: int) -> bytes:
    """As ``take(size)``, with memory for what is there only."""
    data = io.BytesIO()
    while size > 0:
        piece = take(min(size, _PIECE))
        if not piece:
            break
        data.write(piece)
        size -= len(piece)
    return data.getvalue()


class _Records:
    """Reads a stream of any kind as tarfile does, so that its faults strike in the same place."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._buffer = b""

    def read(self, size: int) -> bytes:
        """Read ``size`` bytes; fewer only at the end."""
        data = self._buffer
        if len(data) < size:
            parts, count = [data], len(data)
            while count < size:
                part = self._stream.read(_RECORD)
                if not part:
                    break
                parts.append(part)
                count += len(part)
            data = b"".join(parts)
        self._buffer = data[size:]
        return data[:size]


class _Tape:
    """What is left of the stream, for tarfile: forwards only.

    Attributes:
        pending: bytes that were read already, and are to be read again.
        position: of the next byte.
    """

    def __init__(self, take: _Take) -> None:
        self._take = take
        self.pending = b""
        self.position = 0

    def read(self, size: int) -> bytes:
        """Read ``size`` bytes; fewer only at the end."""
        kept = self.pending
        wanted = size
        if size < 0:
            # A damaged header asks for less than nothing. tarfile gives what is in its
            # buffer, which ends with a record, but for so many bytes of it.
            wanted = max(len(kept), (_BLOCK - self.position) % _RECORD)
        if len(kept) < wanted:
            kept += _large(self._take, wanted - len(kept))
        data, self.pending = kept[:size], kept[size:]
        self.position += len(data)
        return data

    def tell(self) -> int:
        """The position."""
        return self.position

    def seek(self, position: int) -> int:
        """Go forwards to ``position``, or to the end of the stream."""
        if position < self.position:
            raise tarfile.StreamError("seeking backwards is not allowed")
        while self.position < position:
            if not self.read(min(position - self.position, _RECORD)):
                break
        return self.position


class _Replay:
    """A stream whose first bytes were read already."""

    def __init__(self, first: bytes, stream: Any) -> None:
        self._first: bytes | None = first
        self._stream = stream

    def read(self, size: int) -> bytes:
        """Read the first bytes, all of them; then as the stream itself."""
        first, self._first = self._first, None
        if first is not None:
            return first
        data: bytes = self._stream.read(size)
        return data
