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
       `------> put back on a `_Tape`, tarfile has the rest -> name, data

The stream is never closed. In memory are one member and one buffer. Nothing is read beyond a
member before the next one is asked for, so a shard that is still on its way is not waited for.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterable, Iterator
from typing import Any
from zlib import adler32

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
#: What is passed over is read in such pieces.
_PIECE = 20 * _BLOCK
#: What is larger is read in pieces of this.
_LARGE = 1 << 24
#: An extended header holds a name and some times; a larger one is left to tarfile.
_EXTENDED_MAX = 1 << 16
#: What compressed data begins with, and a little more; no sample is called so.
_PACKED = (b"\x1f\x8b", b"BZh", b"]\0\0", b"\xfd7z", b"\x28\xb5\x2f")
_ENCODING = tarfile.ENCODING
#: In these every name can be decoded; in others tarfile may fail on fields not read here.
_ENCODING_IS_SAFE = _ENCODING.lower() in ("utf-8", "ascii", "latin-1", "iso8859-1")

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


class TarWalk:
    """Iterates over the names of an archive's regular files; `read` gives their data.

    What tarfile raises in mode ``r|*`` is raised: by the iteration what its iteration
    raises, by `read` what reading an extracted file raises.

    Args:
        stream: has ``read(n)``. What may give less than is asked for is left to tarfile.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._size = 0  # of this member
        self._left = 0  # bytes up to the next header
        self._archive: Any = None  # reads what is odd, and all that follows
        self._odd: tarfile.TarInfo | None = None  # this member of it

    def read(self) -> bytes:
        """The data of the member whose name came last; once for each.

        Raises:
            tarfile.ReadError: the archive ends in it.
        """
        if self._odd is not None:
            data: bytes = self._archive.extractfile(self._odd).read()
            return data
        data = _read(self._stream, self._size)
        self._left -= len(data)
        if len(data) != self._size:
            raise _ended()
        return data

    def __iter__(self) -> Iterator[str]:
        stream, header = self._stream, b""
        fields = None
        if type(stream) in (io.BufferedReader, io.BytesIO):
            header = stream.read(_BLOCK)
            fields = _fields(header)
            stream = _Tape(stream, header, 0)
        if fields is None or header.startswith(_PACKED) or not _ENCODING_IS_SAFE:
            with tarfile.open(fileobj=stream, mode="r|*") as whole:
                yield from self._by_tarfile(whole, whole)
            return
        offset = 0
        while True:
            if fields is not None and fields[2] in _EXTENDED:
                header, fields = self._extended(header, fields)
            if fields is not None and fields[2] in _REGULAR:
                name, size, _ = fields
                self._size = size
                self._left = size + (-size & 511)
                yield name
            elif header == _ZEROS:
                return
            elif fields is None or fields[2] not in _WITHOUT_DATA:
                # Made as an empty archive: one that is made of the tape reads a header at once.
                archive: Any = tarfile.TarFile(fileobj=io.BytesIO(_ZEROS))
                archive.fileobj, archive.offset = _Tape(self._stream, header, offset), offset
                yield from self._by_tarfile(archive, iter(archive.next, None))
                return
            header = self._next_header()
            fields = _fields(header)
            offset = _BLOCK  # or any other: tarfile only wants to know where an archive begins

    def _next_header(self) -> bytes:
        """The block behind this member; shorter, or empty, where the archive ends."""
        left, self._left = self._left, 0
        while left > _PIECE:  # a member that was not read
            if len(self._stream.read(_PIECE)) < _PIECE:
                raise _ended()
            left -= _PIECE
        block: bytes = self._stream.read(left + _BLOCK)
        if len(block) < left:
            raise _ended()
        return block[left:] if left else block

    def _extended(self, header: bytes, fields: _Fields) -> tuple[bytes, _Fields | None]:
        """What follows an extended header: all bytes of the headers, and what they say.

        That is None if any of it is odd.
        """
        _, size, kind = fields
        if not 0 < size <= _EXTENDED_MAX:
            return header, None
        padded = size + (-size & 511)
        rest = self._stream.read(padded + _BLOCK)
        header += rest
        inner = _fields(rest[padded:])
        if inner is None or inner[2] not in _REGULAR:
            return header, None
        if kind == b"L":
            return header, (_text(rest[:padded].partition(b"\0")[0]), *inner[1:])
        return header, _overridden(inner, rest, size)

    def _by_tarfile(self, archive: Any, found: Iterable[tarfile.TarInfo]) -> Iterator[str]:
        self._archive = archive
        for info in found:
            if info.isreg():
                self._odd = info
                yield info.name
            archive.members = []  # it would keep them all


def _ended() -> tarfile.ReadError:
    return tarfile.ReadError("unexpected end of data")  # as tarfile says it


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


def _text(name: bytes) -> str:
    return name.decode(_ENCODING, "surrogateescape")


def _read(stream: Any, size: int) -> bytes:
    """As ``stream.read(size)``, with memory for what is there only: sizes may be damaged."""
    if size <= _LARGE:
        data: bytes = stream.read(size)
        return data
    parts = []
    while size > 0 and (part := stream.read(min(size, _LARGE))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class _Tape:
    """What is left of a stream, for tarfile: forwards only.

    Args:
        stream: where it is read on.
        pending: bytes that were read already, and are to be read again.
        position: of the first of them.
    """

    def __init__(self, stream: Any, pending: bytes, position: int) -> None:
        self._stream = stream
        self._pending = pending
        self._position = position

    def read(self, size: int) -> bytes:
        """Read ``size`` bytes; fewer only at the end."""
        kept, size = self._pending, max(0, size)
        if len(kept) < size:
            kept += _read(self._stream, size - len(kept))
        data, self._pending = kept[:size], kept[size:]
        self._position += len(data)
        return data

    def tell(self) -> int:
        """The position."""
        return self._position

    def seek(self, position: int) -> int:
        """Go forwards to ``position``, or to the end of the stream."""
        if position < self._position:
            raise tarfile.StreamError("seeking backwards is not allowed")
        while self._position < position:
            if not self.read(min(position - self._position, _PIECE)):
                break
        return self._position
