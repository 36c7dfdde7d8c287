"""From streams of shards to files and samples: those that WebDataset finds with tarfile, sooner.

`tar_files` takes the place of WebDataset's expander. It yields the same names in the same order
and the same bytes, and calls handlers at the same places, with the same exceptions. A member that
cannot be read is the handler's for once. An archive that cannot be read goes to it a second time,
with the stream and the URL; what it lets pass leaves no mark of the shard's end.

Nearly all headers of a shard are plain: a regular file, its name, its size. These are parsed here,
by one regular expression and a checksum in C. At the first header that is not plain, tarfile itself
takes over, on the same bytes: sparse files, global headers, numbers in odd spellings, damage,
compression. So there is no second opinion: an archive has the members that the installed tarfile
finds, and ends, or breaks, where and how it says so.

Streams are never closed. In memory are one member and one buffer. Nothing is read beyond a
member before the next one is asked for, so a shard that is still on its way is not waited for.
"""

from __future__ import annotations

import inspect
import io
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any
from zlib import adler32

if TYPE_CHECKING:
    from shardcache.cache import Handler

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
#: A member that nobody wants is read in such pieces.
_PIECE = 20 * _BLOCK
#: An extended header holds a name and some times; a larger one is left to tarfile.
_EXTENDED_MAX = 1 << 16
#: What compressed data begins with, and a little more; no sample has such a name.
_PACKED = (b"\x1f\x8b", b"BZh", b"]\0\0", b"\xfd7z", b"\x28\xb5\x2f")
#: A header in place of those before an odd one: tarfile judges the first of an archive otherwise.
_DIRECTORY = tarfile.TarInfo("x")
_DIRECTORY.type = tarfile.DIRTYPE
_NOT_FIRST = _DIRECTORY.tobuf(tarfile.USTAR_FORMAT)

# Ways to write a number that every tar reads alike: octal digits, ended by NUL or space;
# a field of NULs; GNU's base 256. There are other ways, and they are tarfile's to judge.
_NUMBER = rb"(?:[0-7]{7}[\0 ]|[0-7]{6}[\0 ]{2}|\0{8}|[\x80\xff].{7})"
_match = re.compile(
    rb"(?=([^\0]{0,100})).{100}"  # 1: name
    + _NUMBER * 3  # mode, user, group
    + rb"(0[0-7]{10})[\0 ]"  # 2: size, below a GiB: a damaged one must not ask for all memory
    + rb"(?:[0-7]{11}[\0 ]|\0{12}|[\x80\xff].{11})"  # time
    + rb"([0-7]{6})[\0 ]{2}"  # 3: checksum
    + rb"(.)"  # 4: type
    + rb".{172}"  # link, magic, user, group
    + _NUMBER * 2  # device
    + rb"(?=([^\0]{0,155})).{167}",  # 5: prefix
    re.DOTALL,
).fullmatch
#: A record of an extended header that says nothing but a name or what is not needed here.
_record = re.compile(rb"([1-9][0-9]{0,5}) (path|[acm]time|[ug]id|[ug]name)=([^\n]+)\n").match

_REGULAR = (b"0", b"\0", b"7")
_WITHOUT_DATA = (b"5", b"2", b"1", b"3", b"4", b"6")
_EXTENDED = (b"x", b"L")

#: Members that WebDataset keeps for itself.
_is_meta = re.compile(r"__[^/]*__($|/)").match

#: Name, size and type in a plain header.
_Fields = tuple[str, int, bytes]


def reraise(exn: Exception) -> bool:
    """The default handler."""
    raise exn


def tar_files(
    data: Iterable[dict[str, Any]],
    handler: Handler = reraise,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
    eof_value: Any = ...,
) -> Iterator[Any]:
    """Expand opened shards into files; a drop-in for WebDataset's ``tar_file_expander``.

    Args:
        data: ``dict(url=..., stream=...)``, perhaps with ``local_path``.
        handler: called with what a member or an archive raises: True goes on with the
            next, False stops. The default raises.
        select_files: tells by its name whether a file is wanted.
        rename_files: gives files other names, before they are selected.
        eof_value: yielded behind each shard, unless it is None. The default is that of the
            installed WebDataset: ``{}``, and None before 1.0, which does not know it.

    Yields:
        ``dict(fname=..., data=..., __url__=...)``, with ``__local_path__`` if there is one.
    """
    if eof_value is ...:
        from webdataset.tariterators import tar_file_expander

        parameters = inspect.signature(tar_file_expander).parameters
        eof_value = {} if "eof_value" in parameters else None
    for source in data:
        url = source["url"]
        local_path = source.get("local_path")
        try:
            stream = source["stream"]
            walk = TarWalk(stream)
            for name in walk:
                try:
                    if name.startswith("__") and (
                        ("/" not in name and name.endswith("__")) or _is_meta(name)
                    ):
                        continue
                    if rename_files:
                        name = rename_files(name)
                    if select_files is not None and not select_files(name):
                        continue
                    sample = {"fname": name, "data": walk.read(), "__url__": url}
                except Exception as exn:  # noqa: BLE001 - the handler decides
                    if hasattr(exn, "args") and len(exn.args) > 0:
                        exn.args = (f"{exn.args[0]!s} @ {stream!s}", *exn.args[1:])
                    if handler(exn):
                        continue
                    break
                if local_path is not None:
                    sample["__local_path__"] = local_path
                yield sample
            if eof_value is not None:
                yield eof_value
        except Exception as exn:  # noqa: BLE001 - the handler decides
            exn.args = (*exn.args, source.get("stream"), source.get("url"))
            if not handler(exn):
                return


def tar_samples(
    data: Iterable[dict[str, Any]],
    handler: Handler = reraise,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Expand opened shards into samples: `tar_files`, grouped by WebDataset's ``group_by_keys``.

    Args:
        data, handler, select_files, rename_files: as for `tar_files`.

    Yields:
        ``dict(__key__=..., __url__=..., field=bytes, ...)``.
    """
    from webdataset.tariterators import group_by_keys

    files = tar_files(data, handler, select_files, rename_files)
    samples: Iterator[dict[str, Any]] = group_by_keys(files, handler=handler)
    return samples


class TarWalk:
    """Iterates over the names of an archive's regular files; `read` gives their data.

    What tarfile raises in mode ``r|*`` is raised: by the iteration what its iteration
    raises, by `read` what reading an extracted file raises.

    Args:
        stream: has ``read(n)``. One that may give less than is asked for is left to tarfile.
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
        data: bytes
        if self._odd is not None:
            data = self._archive.extractfile(self._odd).read()
            return data
        data = self._stream.read(self._size)
        self._left -= len(data)
        if len(data) != self._size:
            raise _ended()
        return data

    def __iter__(self) -> Iterator[str]:
        stream, header, fields = self._stream, b"", None
        if type(stream) in (io.BufferedReader, io.BytesIO) and tarfile.ENCODING == "utf-8":
            header = stream.read(_BLOCK)
            fields = _fields(header)
        if fields is None or header.startswith(_PACKED):
            yield from self._by_tarfile(header)
            return
        before = b""
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
                yield from self._by_tarfile(before + header)
                return
            before, header = _NOT_FIRST, self._next_header()
            fields = _fields(header)

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
        """All bytes of an extended header and of the one behind it, and what they say.

        That is None if any of it is odd.
        """
        _, size, kind = fields
        if not 0 < size <= _EXTENDED_MAX:
            return header, None
        padded = size + (-size & 511)
        rest = self._stream.read(padded + _BLOCK)
        inner = _fields(rest[padded:])
        if inner is None or inner[2] not in _REGULAR:
            return header + rest, None
        if kind == b"L":
            name: str | None = _text(rest[:padded].partition(b"\0")[0])
        else:
            name = _name(inner[0], rest, size)
        return header + rest, None if name is None else (name, *inner[1:])

    def _by_tarfile(self, pending: bytes) -> Iterator[str]:
        """Leave the archive to tarfile, from bytes on that were read already."""
        rest: Any = _Rejoined(pending, self._stream)
        self._archive = tarfile.open(fileobj=rest, mode="r|*")  # noqa: SIM115 - never closed
        for info in self._archive:
            if info.isreg():
                self._odd = info
                yield info.name
            self._archive.members = []  # it would keep them all


#: tarfile reads on behind the end for as long as a damaged size says, up to 2^500 bytes.
_MOST_ENDS = 1000


class _Rejoined:
    """A stream, with some bytes before it."""

    def __init__(self, pending: bytes, stream: Any) -> None:
        self._pending = pending
        self._stream = stream
        self._ends = 0  # how often its end was met

    def read(self, size: int) -> bytes:
        data, self._pending = self._pending[:size], self._pending[size:]
        if len(data) < size:
            data += self._stream.read(size - len(data))
        if not data:
            self._ends += 1
            if self._ends > _MOST_ENDS:
                raise _ended()
        return data


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


def _name(name: str, records: bytes, size: int) -> str | None:
    """The name, unless an extended header of ``size`` bytes has another; None if that is odd."""
    if size & 511 and records[size]:
        return None
    position = 0
    while position < size:
        found = _record(records, position)
        if found is None or found.end() - position != int(found[1]):
            return None
        if found[2] == b"path":
            try:
                name = found[3].decode("utf-8").rstrip("/")
            except UnicodeDecodeError:
                return None
        position = found.end()
    return name if position == size else None


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
