"""A table of HTTP responses, with the outcome that a read of the shard must have.

No response may lead to a wrong entry, to wrong bytes without an error, or to a connection on which
the next request fails.
"""

import gzip
import re
import ssl
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, count, islice, product, repeat
from typing import NamedTuple, TypeAlias

import pytest

from shardcache import Cache
from shardcache.errors import (
    AccessDeniedError,
    ConfigError,
    IntegrityError,
    ShardCacheError,
    ShardNotFoundError,
    TransferError,
)
from shardcache.origins import retry
from tests.origins.test_tls import authority  # noqa: F401 - a fixture
from tests.support.caches import read
from tests.support.tars import make_tar, tar_of
from tests.support.webservers import Scripted, answer, part_of, running

MIB = 1 << 20
SMALL = make_tar(1, members=3, size=700)
MIDDLE = make_tar(2, members=3, size=50_000)
LARGE, REPLACED = (make_tar(seed, members=3, size=520_000) for seed in (3, 4))  # of equal length
GOOD = make_tar(5)
#: Short, so that it arrives in one TLS record with the response before it.
FORGED = tar_of([("a.txt", b"forged")], whole_records=False)


class Request(NamedTuple):
    head: str
    base: str  # URL of the server
    number: int  # of earlier requests for this path

    @property
    def path(self) -> str:
        return self.head.split(" ")[1]

    @property
    def is_first(self) -> bool:
        """Whether its range begins with the first byte."""
        return "bytes=0-" in self.head or "\r\nRange:" not in self.head


class Refused(NamedTuple):
    """Outcome: the read ends in this error, and nothing is published."""

    error: type[ShardCacheError]
    message: str = ""  # a part of it


RIGHT = "right"  # the shard is read and published
STREAMED = "streamed"  # the shard is read but not published, because it may be incomplete
TRUNCATED = "truncated"  # it is incomplete and not published, and a read may end early
RIGHT_OR_REFUSED = "right or refused"  # RFC 9110 and 9112 allow both

Sent: TypeAlias = bytes | Iterator[bytes]


class Row(NamedTuple):
    name: str
    sent: bytes | Callable[[Request], Sent]
    wanted: str | Refused
    objects: tuple[bytes, ...] = (SMALL,)  # the correct versions
    closes: bool = False  # the server closes the connection, against its own headers
    file: str = "a.tar"


def raw(*lines: str, body: bytes = SMALL, end: str = "\r\n") -> bytes:
    return end.join([*lines, "", ""]).encode("latin-1") + body


def whole(*lines: str, body: bytes = SMALL, status: str = "HTTP/1.1 200 OK") -> bytes:
    """A response with ETag, Content-Length and further header lines."""
    return raw(status, 'ETag: "1"', f"Content-Length: {len(body)}", *lines, body=body)


def unframed(*lines: str, body: bytes = SMALL) -> bytes:
    """A response framed by ``lines``, or else by the end of the connection."""
    return raw("HTTP/1.1 200 OK", 'ETag: "1"', "Connection: close", *lines, body=body)


def chunks(data: bytes, line: str = "{:x}", end: bytes = b"0\r\n\r\n") -> bytes:
    pieces = [data[at : at + 4000] for at in range(0, len(data), 4000)]
    return b"".join(b"%b\r\n%b\r\n" % (line.format(len(p)).encode(), p) for p in pieces) + end


def coded(*lines: str, body: bytes, coding: str = "chunked") -> bytes:
    return unframed(f"Transfer-Encoding: {coding}", *lines, body=body)


def part(data: bytes, request: Request, **headers: object) -> bytes:
    """The requested range, or without a Range header the whole object."""
    return b"".join(part_of(data, request.head, **{"ETag": '"1"', **headers}))


def parts(data: bytes, **headers: object) -> Callable[[Request], bytes]:
    return lambda request: part(data, request, **headers)


def first_part(**headers: object) -> Callable[[Request], bytes]:
    """Serve ranges of the large object; only the first range has these headers."""
    return lambda request: part(LARGE, request, **(headers if request.is_first else {}))


def later_parts(**headers: object) -> Callable[[Request], bytes]:
    """Serve ranges of the large object; all ranges but the first have these headers."""
    return lambda request: part(LARGE, request, **({} if request.is_first else headers))


def replaced(
    before: dict[str, object], after: dict[str, object] | None = None, *, cut: int | None = None
) -> Callable[[Request], bytes]:
    """Replace the object after the first request, whose response ends after ``cut`` bytes."""

    def sent(request: Request) -> bytes:
        if request.number:
            return part(REPLACED, request, **(before if after is None else after))
        return part(LARGE, request, **before)[:cut]

    return sent


def insisting(request: Request) -> bytes:
    """Replace the object after the first request, and honour If-Match."""
    if request.number and 'If-Match: "1"' in request.head:
        return answer("412 Precondition Failed")
    return replaced({}, {"ETag": '"2"'})(request)


def capped(data: bytes, most: int, **headers: object) -> Callable[[Request], bytes]:
    """Serve at most ``most`` bytes of a range."""

    def sent(request: Request) -> bytes:
        def shorten(span: re.Match[str]) -> str:
            return f"{span[1]}-{min(int(span[1]) + most - 1, int(span[2] or len(data)))}"

        head = re.sub(r"(?<=Range: bytes=)(\d+)-(\d*)", shorten, request.head)
        return part(data, request._replace(head=head), **headers)

    return sent


def ignoring(data: bytes, start: int = 0) -> Callable[[Request], bytes]:
    """Ignore the ranges that begin at ``start`` or later."""

    def sent(request: Request) -> bytes:
        ignored = start == 0 or not request.is_first
        return whole(body=data) if ignored else part(data, request)

    return sent


def replaced_without_ranges(request: Request) -> bytes:
    """Cut the first response, then replace the object under the same weak ETag."""
    body = REPLACED if request.number else LARGE
    stated = raw("HTTP/1.1 200 OK", 'ETag: W/"1"', f"Content-Length: {len(body)}", body=b"")
    return stated + (body if request.number else body[:2_000_000])


def moved(
    location: str, status: str = "302 Found", path: str = "/b.tar"
) -> Callable[[Request], bytes]:
    """Redirect to b.tar, and serve that."""

    def sent(request: Request) -> bytes:
        if request.path.endswith(path):
            return whole()
        where = location.format(base=request.base, host=request.base.partition("//")[2])
        return answer(status, Location=where, Connection=None)

    return sent


def cut_at(size: int) -> Callable[[Request], bytes]:
    """End every response after ``size`` bytes of its body."""

    def sent(request: Request) -> bytes:
        head, body = part_of(MIDDLE, request.head, Connection="close")
        return head + body[:size]

    return sent


def multipart(request: Request) -> bytes:
    half = len(SMALL) // 2
    spans = [(0, half), (half, len(SMALL))]
    body = b"".join(
        b"--cut\r\nContent-Range: bytes %d-%d/%d\r\n\r\n%b\r\n"
        % (start, stop - 1, len(SMALL), SMALL[start:stop])
        for start, stop in spans
    )
    kind = "multipart/byteranges; boundary=cut"
    return answer("206 Partial Content", body + b"--cut--\r\n", Content_Type=kind)


SIZE, HALF = len(SMALL), len(SMALL) // 2
SPAN = f"Content-Range: bytes 0-{SIZE - 1}/{SIZE}"
KEPT = whole()
FORGERY = whole(body=FORGED)
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\nLink: </b>; rel=preload\r\n\r\n"
BROKEN = Refused(TransferError)
GONE = Refused(ShardNotFoundError, "not found")
PACKED = gzip.compress(SMALL, mtime=0)
NOW, YESTERDAY = "Sun, 06 Nov 1994 08:49:37 GMT", "Sat, 05 Nov 1994 08:49:37 GMT"
NO_TAG: dict[str, object] = {"ETag": None, "Date": NOW}
SAME_SECOND: dict[str, object] = {**NO_TAG, "Last_Modified": NOW}
OLD: dict[str, object] = {**NO_TAG, "Last_Modified": YESTERDAY}
WEAK: dict[str, object] = {"ETag": 'W/"1"'}
BOTH = (LARGE, REPLACED)
ENDLESS = repeat(b"X-Note: x\r\n" * 1000)


def status_rows() -> Iterator[Row]:
    for status, wanted in {
        "204 No Content": Refused(ConfigError, "204"),
        "304 Not Modified": Refused(ShardCacheError, "304"),
        "401 Unauthorized": Refused(AccessDeniedError, "401"),
        "403 Forbidden": Refused(AccessDeniedError, "403"),
        "404 Not Found": GONE,
        "407 Proxy Authentication Required": Refused(AccessDeniedError, "proxy demands a login"),
        "410 Gone": GONE,
        "412 Precondition Failed": BROKEN,
        "416 Range Not Satisfiable": BROKEN,
        "429 Too Many Requests": Refused(TransferError, "429"),
        "500 Internal Server Error": Refused(TransferError, "500"),
        "501 Not Implemented": Refused(ConfigError, "501"),
        "503 Service Unavailable": Refused(TransferError, "503"),
        "522 Connection Timed Out": Refused(TransferError, "522"),
    }.items():
        # The body of an error is not the object, even if it has the same bytes.
        yield Row(status, answer(status, SMALL), wanted)
    yield Row("200", answer("200 OK", SMALL), RIGHT)
    yield Row("206", parts(SMALL), RIGHT)
    for name, line, wanted in [
        ("no reason phrase", "HTTP/1.1 200 ", RIGHT),
        ("no space after the status", "HTTP/1.1 200", RIGHT),
        ("a long reason in Latin-1", "HTTP/1.1 200 \xe9t\xe9 " + "x" * 500, RIGHT),
        ("HTTP/1.0", "HTTP/1.0 200 OK", RIGHT),
        ("extra spaces", "HTTP/1.1  200  OK", RIGHT_OR_REFUSED),
        ("lower-case http", "http/1.1 200 OK", BROKEN),
        ("HTTP/3.7", "HTTP/3.7 200 OK", BROKEN),
        ("a status of two digits", "HTTP/1.1 20 OK", BROKEN),
        ("a status of four digits", "HTTP/1.1 2000 OK", BROKEN),
        ("a status of letters", "HTTP/1.1 OK 200", BROKEN),
    ]:
        yield Row(f"status line: {name}", whole(status=line), wanted)
    kept = whole("Connection: keep-alive", status="HTTP/1.0 200 OK")
    yield Row("HTTP/1.0 kept alive", kept, RIGHT)
    yield Row("HTTP/0.9", SMALL, BROKEN, closes=True)
    yield Row("HTTP/0.9 text", b"it works\r\n\r\n", BROKEN)


def interim_rows() -> Iterator[Row]:
    yield Row("100 before 200", INTERIM + KEPT, RIGHT)
    yield Row("102 before 206", lambda r: b"HTTP/1.1 102 Wait\r\n\r\n" + parts(SMALL)(r), RIGHT)
    yield Row("103 with links", HINTS + KEPT, RIGHT)
    yield Row("interim in its own packet", lambda r: iter([INTERIM, HINTS, INTERIM, KEPT]), RIGHT)
    yield Row("interim on each request", lambda r: HINTS + part(LARGE, r), RIGHT, (LARGE,))
    yield Row("interim before 404", INTERIM + answer("404 Not Found"), GONE)
    yield Row("interim with a length", whole(status="HTTP/1.1 103 Hints", body=b"") + KEPT, RIGHT)
    yield Row("10,000 interim answers", INTERIM * 10_000 + KEPT, RIGHT_OR_REFUSED)
    yield Row("interim and nothing else", INTERIM, BROKEN, closes=True)
    switch = b"HTTP/1.1 101 Switch\r\nUpgrade: x\r\n\r\n"
    yield Row("unwanted 101", switch + KEPT, Refused(ShardCacheError))


def length_rows() -> Iterator[Row]:
    long = "1" * 30
    for length in ("-5", f"+{SIZE}", hex(SIZE), long, f"{SIZE};", f"{SIZE}.0", f"{HALF}, {SIZE}"):
        yield Row(f"length {length}", unframed(f"Content-Length: {length}"), BROKEN)
    for name, length in {"empty": "", "spaced": "10 240", "underscored": "10_240"}.items():
        yield Row(f"length {name}", unframed(f"Content-Length: {length}"), BROKEN)
    for name, lengths in {"one larger": (SIZE, SIZE + 9), "one smaller": (HALF, SIZE)}.items():
        lines = [f"Content-Length: {length}" for length in lengths]
        yield Row(f"two lengths, {name}", unframed(*lines), BROKEN)
        yield Row(f"two lengths, {name}, reversed", unframed(*lines[::-1]), BROKEN)
    yield Row("two equal lengths", whole(f"Content-Length: {SIZE}"), RIGHT_OR_REFUSED)
    yield Row("a list of lengths", unframed(f"Content-Length: {SIZE}, {SIZE}"), RIGHT_OR_REFUSED)
    yield Row("length too long", unframed(f"Content-Length: {SIZE + 512}"), BROKEN, closes=True)
    long = whole("Connection: close", body=MIDDLE)[:-10_240]
    yield Row("cut before the length", long, BROKEN, (MIDDLE,), closes=True)
    for name, length in {"short": SIZE - 512, "long": SIZE + 512}.items():
        lines = (SPAN, f"Content-Length: {length}")
        partial = raw("HTTP/1.1 206 Partial", 'ETag: "1"', *lines)
        yield Row(f"length of a range too {name}", partial, BROKEN, closes=True)
    yield Row("cut parts go on", cut_at(100_000), RIGHT, (MIDDLE,), closes=True)
    yield Row("cut parts without progress", cut_at(1000), BROKEN, (MIDDLE,), closes=True)


def close_rows() -> Iterator[Row]:
    """Yield responses that end with their connection."""
    yield Row("closed, small", unframed(), STREAMED, closes=True)
    yield Row("closed, large", unframed(body=LARGE), STREAMED, (LARGE,), closes=True)
    yield Row("closed, HTTP/1.0", raw("HTTP/1.0 200 OK", 'ETag: "1"'), STREAMED, closes=True)
    yield Row("closed, no validator", raw("HTTP/1.1 200 OK"), STREAMED, closes=True)
    yield Row("closed, compressed", unframed(body=PACKED), STREAMED, (PACKED,), file="a.tar.gz")
    for name, data, size in [
        ("in a member", SMALL, 700),
        ("behind all members", SMALL, 6 * (512 + 1024)),
        ("behind 2 MiB", LARGE, 2 * MIB),
        ("before the first byte", SMALL, 0),
    ]:
        yield Row(f"closed {name}", unframed(body=data[:size]), TRUNCATED, (data,), closes=True)
    ranged = parts(MIDDLE, Content_Length=None)
    yield Row("closed range", ranged, RIGHT, (MIDDLE,), closes=True)
    yield Row("closed range, cut", lambda r: ranged(r)[:-10_240], BROKEN, (MIDDLE,), closes=True)


def chunk_rows() -> Iterator[Row]:
    yield Row("chunks", coded(body=chunks(SMALL)), RIGHT)
    yield Row("chunks, middle", coded(body=chunks(MIDDLE)), RIGHT, (MIDDLE,))
    bare = raw("HTTP/1.1 200 OK", "Transfer-Encoding: chunked", body=chunks(LARGE))
    yield Row("chunks, no validator", bare, RIGHT, (LARGE,))
    pieces = [coded(body=b""), b"28", b"00\r", b"\n" + SMALL + b"\r", b"\n0", b"\r\n\r", b"\n"]
    yield Row("chunks in many packets", lambda r: iter(pieces), RIGHT)
    for name, line in {
        "extensions": '{:x};name=value;other="a;b"',
        "upper-case sizes": "{:X}",
        "leading zeros": "000{:x}",
    }.items():
        yield Row(f"chunks with {name}", coded(body=chunks(SMALL, line)), RIGHT)
    trailers = chunks(SMALL, end=b"0\r\nDigest: x\r\nContent-Length: 3\r\n\r\n")
    yield Row("chunks with trailers", coded(body=trailers), RIGHT)
    kept = raw("HTTP/1.1 200 OK", 'ETag: "1"', "Transfer-Encoding: chunked", body=trailers)
    yield Row("chunks with trailers, kept alive", kept, RIGHT)
    long = f"X-Note: {'x' * 200_000}"
    extended = coded(body=chunks(SMALL, "{:x};" + long))
    yield Row("chunks with long extensions", extended, RIGHT_OR_REFUSED)
    trailers = chunks(SMALL, end=f"0\r\n{long}\r\n\r\n".encode())
    yield Row("chunks with a long trailer", coded(body=trailers), RIGHT_OR_REFUSED)
    bare = coded(body=b"")
    yield Row("trailers without an end", lambda r: chain([bare + b"0\r\n"], ENDLESS), BROKEN)
    yield Row("extension without an end", lambda r: chain([bare + b"9;"], ENDLESS), BROKEN)
    yield Row("chunks, coding in upper case", coded(body=chunks(SMALL), coding="Chunked"), RIGHT)
    ranged = raw("HTTP/1.1 206 Partial", 'ETag: "1"', SPAN, "Transfer-Encoding: chunked", body=b"")
    yield Row("chunks of a range", ranged + chunks(SMALL), RIGHT)
    yield Row("too few chunks of a range", ranged + chunks(SMALL[:-512]), BROKEN)
    yield Row("too many chunks of a range", ranged + chunks(SMALL + bytes(512)), RIGHT_OR_REFUSED)
    for name, body in {
        "no last chunk": chunks(SMALL, end=b""),
        "half a last chunk": chunks(SMALL, end=b"0\r\n"),
        "cut in a chunk": chunks(SMALL)[:-1000],
        "cut in a size": chunks(SMALL, end=b"2"),
        "cut in a chunk's end": chunks(SMALL, end=b"")[:-1],
    }.items():
        # If only the line after the last chunk is missing, the object is complete.
        wanted = RIGHT_OR_REFUSED if name == "half a last chunk" else BROKEN
        yield Row(f"chunks: {name}", coded(body=body), wanted, closes=True)
    for name, line in {
        "no size": "",
        "0x": "0x{:x}",
        "plus": "+{:x}",
        "minus": "-{:x}",
        "letters": "size",
        "a space before": " {:x}",
        "an overflow of 64 bits": "1000000000000{:04x}",
        "a size of 30 digits": "f" * 30,
    }.items():
        yield Row(f"chunk size: {name}", coded(body=chunks(SMALL, line)), BROKEN)
    long = coded(body=b"100\r\n" + SMALL + b"\r\n0\r\n\r\n")
    yield Row("chunk longer than its size", long, BROKEN)


def coding_rows() -> Iterator[Row]:
    for name, length in {"right": SIZE, "short": HALF, "long": SIZE + 512}.items():
        lines = ("Transfer-Encoding: chunked", f"Content-Length: {length}")
        for order in (lines, lines[::-1]):
            both = unframed(*order, body=chunks(SMALL))
            yield Row(f"{order[0]} and {order[1]} ({name})", both, RIGHT_OR_REFUSED)
    for coding in ("gzip, chunked", "lzma, chunked"):
        refused = Refused(ShardCacheError)
        yield Row(f"transfer coding {coding}", coded(body=chunks(PACKED), coding=coding), refused)
    for coding in ("chunked, gzip", "xchunked", "chunked, chunked", "gzip", "lzma"):
        body = chunks(SMALL) if "chunked" in coding else SMALL
        refused = Refused(ShardCacheError)
        yield Row(f"transfer coding {coding}", coded(body=body, coding=coding), refused)
    split = coded("Transfer-Encoding: gzip", body=chunks(SMALL), coding="chunked")
    yield Row("transfer codings in two lines", split, Refused(ShardCacheError))
    identity = coded(f"Content-Length: {SIZE}", body=SMALL, coding="identity")
    yield Row("transfer coding identity", identity, RIGHT_OR_REFUSED)
    old = raw("HTTP/1.0 200 OK", "Transfer-Encoding: chunked", body=chunks(SMALL))
    yield Row("chunks from HTTP/1.0", old, RIGHT_OR_REFUSED)
    for coding in ("gzip", "br", "zstd"):
        refused = Refused(ShardCacheError, coding)
        packed = whole(f"Content-Encoding: {coding}", body=PACKED)
        yield Row(f"content coding {coding}", packed, refused)
    ranged = parts(PACKED, Content_Encoding="gzip")
    yield Row("content coding of a range", ranged, Refused(ShardCacheError, "gzip"))
    packed = coded("Content-Encoding: gzip", body=chunks(PACKED))
    yield Row("content coding in chunks", packed, Refused(ShardCacheError, "gzip"))
    listed = whole("Content-Encoding: identity, gzip", body=PACKED)
    yield Row("content coding in a list", listed, Refused(ShardCacheError, "gzip"))
    yield Row("content coding identity", whole("Content-Encoding: identity"), RIGHT)
    yield Row("content coding empty", whole("Content-Encoding:"), RIGHT_OR_REFUSED)


def range_rows() -> Iterator[Row]:
    length = len(LARGE)
    yield Row("ranges", parts(LARGE), RIGHT, (LARGE,))
    yield Row("ranges ignored", ignoring(LARGE), RIGHT, (LARGE,))
    yield Row("later ranges ignored", ignoring(LARGE, start=1), RIGHT, (LARGE,))
    for name, span in {
        "wrong start": f"bytes 512-{MIB - 1}/{length}",
        "wrong end": f"bytes 0-{MIB}/{length}",
        "backwards": f"bytes {MIB}-0/{length}",
        "total below the end": f"bytes 0-{MIB - 1}/512",
        "another unit": f"blocks 0-{MIB - 1}/{length}",
        "no span": f"bytes */{length}",
        "nonsense": "nonsense",
        "missing": None,
    }.items():
        wrong = first_part(Content_Range=span)
        yield Row(f"Content-Range: {name}", wrong, BROKEN, (LARGE,))
    for name, total in {"smaller": 2 * MIB, "larger": length + MIB}.items():
        lying = first_part(Content_Range=f"bytes 0-{MIB - 1}/{total}")
        yield Row(f"Content-Range: {name} first total", lying, BROKEN, (LARGE,))
    unknown = first_part(Content_Range=f"bytes 0-{MIB - 1}/*")
    yield Row("Content-Range: total unknown", unknown, RIGHT, (LARGE,))
    yield Row("ranges shorter than asked", capped(LARGE, 700_001), RIGHT, (LARGE,))
    yield Row("ranges of 5,000 bytes", capped(MIDDLE, 5_000), RIGHT, (MIDDLE,))
    unnamed = capped(LARGE, 700_001, ETag=None)  # two of them may be of two versions
    yield Row("ranges shorter than asked, no validator", unnamed, BROKEN, (LARGE,))
    chunked = coded(SPAN.replace(str(SIZE - 1), str(HALF)), body=chunks(SMALL))
    chunked = chunked.replace(b"200 OK", b"206 Partial")
    yield Row("a longer body than its short range", chunked, BROKEN)
    later = {"wrong later start": f"bytes 0-{MIB - 1}/{length}", "missing later": None}
    for name, span in later.items():
        wrong = later_parts(Content_Range=span)
        yield Row(f"Content-Range: {name}", wrong, BROKEN, (LARGE,))
    yield Row("range in two parts", multipart, BROKEN)


def validator_rows() -> Iterator[Row]:
    for name, headers in {
        "a weak ETag": WEAK,
        "Last-Modified of this second": SAME_SECOND,
        "Last-Modified of yesterday": OLD,
        "a Last-Modified that is no date": {**NO_TAG, "Last_Modified": "yesterday"},
        "no validator": {"ETag": None},
        "an ETag without quotes": {"ETag": "abc"},
        "an empty ETag": {"ETag": '""'},
        "an ETag without a value": {"ETag": ""},
    }.items():
        yield Row(name, parts(LARGE, **headers), RIGHT, (LARGE,))
    for name, before, after in [
        ("weak ETag stays", WEAK, WEAK),
        ("weak ETag becomes strong", WEAK, {"ETag": '"1"'}),
        ("weak ETag changes", WEAK, {"ETag": 'W/"2"'}),
        ("strong ETag changes", {"ETag": '"1"'}, {"ETag": '"2"'}),
        ("ETag without quotes changes", {"ETag": "abc"}, {"ETag": "abd"}),
        ("ETag goes", {"ETag": '"1"'}, NO_TAG),
        ("empty ETag stays", {"ETag": '""'}, {"ETag": '""'}),
        ("ETag without a value stays", {"ETag": ""}, {"ETag": ""}),
        ("Last-Modified of this second stays", SAME_SECOND, SAME_SECOND),
        ("Last-Modified changes", OLD, {**OLD, "Last_Modified": "Sat, 05 Nov 1994 08:49:38 GMT"}),
        ("no validator", NO_TAG, NO_TAG),
    ]:
        yield Row(f"replaced: {name}", replaced(before, after), RIGHT_OR_REFUSED, BOTH)
        again = replaced(before, after, cut=700_000)
        yield Row(f"cut and replaced: {name}", again, RIGHT_OR_REFUSED, BOTH, closes=True)
    yield Row("replaced: If-Match is honoured", insisting, RIGHT_OR_REFUSED, BOTH)
    sent = replaced_without_ranges
    yield Row("cut and replaced without ranges", sent, RIGHT_OR_REFUSED, BOTH, closes=True)


def redirect_rows() -> Iterator[Row]:
    permanent, temporary = "301 Moved Permanently", "307 Temporary Redirect"
    for status in (permanent, "302 Found", "303 See Other", temporary, "308 Permanent Redirect"):
        yield Row(f"redirect {status[:3]}", moved("b.tar", status), RIGHT)
    for name, location in {
        "absolute": "{base}/moved/b.tar",
        "to a path": "/moved/b.tar",
        "without a scheme": "//{host}/moved/b.tar",
        "upwards": "../moved/b.tar",
    }.items():
        yield Row(f"redirect {name}", moved(location), RIGHT)
    for name, location in {
        "in a loop": "a.tar",
        "to itself": "",
        "to ftp": "ftp://127.0.0.1/b.tar",
        "to a file": "file:///etc/passwd",
        "to no URL": "http://[::1",
    }.items():
        message = {"a.tar": "redirects more than 5 times", "": "302"}.get(location, "redirects to")
        yield Row(f"redirect {name}", moved(location), Refused(ConfigError, message))
    yield Row("redirect without Location", answer("302 Found", SMALL), Refused(ConfigError, "302"))
    yield Row("redirect in UTF-8", moved("{base}/\xfc/b.tar", path="/%C3%BC/b.tar"), RIGHT)
    dead = moved("http://127.0.0.1:1/b.tar")
    yield Row("redirect to no server", dead, Refused(TransferError, ":1 (after a redirect of "))
    yield Row("redirect after an interim answer", lambda r: HINTS + moved("b.tar")(r), RIGHT)


def head_rows() -> Iterator[Row]:
    yield Row("folded header", whole("X-Note: a", " b"), RIGHT_OR_REFUSED)
    folded = unframed("Content-Length:", f" {SIZE}")
    yield Row("folded length", folded, RIGHT_OR_REFUSED)
    yield Row("length folded in two", unframed("Content-Length: 10", " 240"), BROKEN)
    folded = unframed("Transfer-Encoding:", " chunked", body=chunks(SMALL))
    yield Row("folded coding", folded, RIGHT_OR_REFUSED)
    first = raw("HTTP/1.1 200 OK", " X: folded", f"Content-Length: {SIZE}")
    yield Row("fold behind the status line", first, RIGHT_OR_REFUSED)
    for name, line in {
        "without a colon": "nonsense",
        "with a NUL": "X-Note: a\0b",
        "with a lone CR": "X-Note: a\rContent-Length: 5",
        "without a name": ": value",
        "with a space in its name": "X Note: a",
        "with a letter outside ASCII in its name": "X-N\xf6te: a",
    }.items():
        yield Row(f"header {name}", whole(line), RIGHT_OR_REFUSED)
    spaced = unframed(f"Content-Length : {HALF}")
    yield Row("space before the colon of a length", spaced, RIGHT_OR_REFUSED)
    spaced = unframed("Transfer-Encoding : chunked", body=chunks(SMALL))
    yield Row("space before the colon of a coding", spaced, RIGHT_OR_REFUSED)
    yield Row("header bytes outside ASCII", whole("X-Note: \xe4\xff\x80"), RIGHT)
    yield Row("names in odd case", raw("HTTP/1.1 200 OK", f"cOnTeNt-LeNgTh:\t{SIZE} \t"), RIGHT)
    bare = raw("HTTP/1.1 200 OK", 'ETag: "1"', f"Content-Length: {SIZE}", end="\n")
    yield Row("bare line feeds", bare, RIGHT)
    bare = raw("HTTP/1.1 200 OK", "Transfer-Encoding: chunked", body=chunks(SMALL), end="\n")
    yield Row("bare line feeds and chunks", bare, RIGHT)
    bare = raw("HTTP/1.1 103 Early Hints", "Link: </a>", body=b"", end="\n") + KEPT
    yield Row("bare line feeds of an interim answer", bare, RIGHT)
    yield Row("empty line before the answer", b"\r\n" + KEPT, RIGHT_OR_REFUSED)
    yield Row("long header", whole("X-Note: " + "x" * 200_000), RIGHT_OR_REFUSED)
    yield Row("many headers", whole(*[f"X-{n}: {'x' * 90}" for n in range(2000)]), RIGHT_OR_REFUSED)
    yield Row("head without an end", KEPT[:40] + b"x" * 200_000, BROKEN)
    page = answer("200 OK", b"<html>" * 9, ETag=None, Content_Type="text/html")
    yield Row("page without an ETag", page, Refused(TransferError, "text/html"))
    for kind in ("Text/HTML; charset=utf-8", "application/xhtml+xml"):
        page = answer("200 OK", b"<html>" * 9, ETag=None, Content_Type=kind)
        yield Row(f"page of {kind}", page, Refused(TransferError, kind))
    page = answer("200 OK", b"<html>" * 99, Content_Type="text/html")
    yield Row("page with an ETag", page, Refused(IntegrityError, "not a tar archive"))
    empty = Refused(IntegrityError, "is empty (0 bytes)")
    yield Row("empty object", answer("200 OK"), empty)
    yield Row("empty object in chunks", coded(body=chunks(b"")), empty)


def connection_rows() -> Iterator[Row]:
    yield Row("ends at once", b"", BROKEN, closes=True)
    yield Row("ends in the status line", KEPT[:12], BROKEN, closes=True)
    yield Row("ends in a header", KEPT[:30], BROKEN, closes=True)
    headers = KEPT[: KEPT.index(b"\r\n\r\n") + 2]
    yield Row("ends before the empty line", headers, BROKEN, closes=True)
    yield Row("ends behind the head", KEPT[:-SIZE], BROKEN, closes=True)
    yield Row("ends at once, once", lambda r: KEPT if r.number else b"", RIGHT, closes=True)
    yield Row("ends although it may be kept", KEPT, RIGHT, closes=True)
    kept_chunks = raw("HTTP/1.1 200 OK", "Transfer-Encoding: chunked", body=chunks(SMALL))
    kept = {
        "the body": (lambda r: KEPT, RIGHT),
        "the chunks": (lambda r: kept_chunks, RIGHT),
        "a range": (lambda r: part(SMALL, r), RIGHT),
        "204": (lambda r: raw("HTTP/1.1 204 No Content", body=b""), Refused(ConfigError, "204")),
        "304": (lambda r: raw("HTTP/1.1 304 Same", body=b""), Refused(ConfigError, "304")),
        "404": (lambda r: whole(body=b"", status="HTTP/1.1 404 Not Found"), GONE),
        "a redirect": (moved("b.tar"), RIGHT),
    }
    surplus = {"garbage": b"garbage", "line ends": b"\r\n", "a forged answer": FORGERY}
    for (where, (sent, wanted)), (what, extra) in product(kept.items(), surplus.items()):
        name = f"{what} behind {where}"
        yield Row(name, lambda r, sent=sent, extra=extra: sent(r) + extra, wanted)


GROUPS = (
    status_rows,
    interim_rows,
    length_rows,
    close_rows,
    chunk_rows,
    coding_rows,
    range_rows,
    validator_rows,
    redirect_rows,
    head_rows,
    connection_rows,
)
NEXT = Row("the next shard", whole(body=GOOD), RIGHT, (GOOD,))
ROWS = [row for group in GROUPS for row in group()]
#: With "torn TLS" the server ends connections without close_notify, as an attacker does.
WIRES = ("TCP", "TLS", "torn TLS")
CASES = [
    pytest.param(row, wire, id=f"{row.name} - {wire}")
    for row in ROWS
    for wire in WIRES
    if wire != "torn TLS" or row.closes or row.wanted == STREAMED
]


@pytest.fixture(scope="module")
def servers(authority):  # noqa: F811
    """Yield the certificate to trust, and a server and its URL for each wire."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority)
    found = {}
    with ExitStack() as stack:
        for wire in WIRES:
            server = Scripted(lambda head: b"", most=1000, close_notify=wire == "TLS")
            stack.enter_context(running(server, None if wire == "TCP" else context))
            secure = server.url.replace("http:", "https:")
            found[wire] = server, server.url if wire == "TCP" else secure
        yield authority[0], found


def faults(row: Row, way: str, data: bytes | None, error: Exception | None, entries: list[bytes]):
    """Compare the outcome of one way to read the shard with the row, and yield the faults."""
    outcome = f"{type(error).__name__}: {error}" if error else f"{len(data or b'')} bytes were read"
    if error is not None and not isinstance(error, ShardCacheError):
        yield f"{way}: this is no error of the library: {outcome}"
    may_end_early = row.wanted == TRUNCATED and row.objects[0].startswith(data or b"")
    if data is not None and data not in row.objects and not may_end_early:
        yield f"{way}: WRONG BYTES were read: {outcome}"
    if row.wanted == RIGHT and (error is not None or entries != [data]):
        yield f"{way}: the shard was not read and published: {outcome}"
    # `fetch` returns a path, so it needs an entry.
    if row.wanted == STREAMED and way != "fetch" and error is not None:
        yield f"{way}: the shard was not streamed: {outcome}"
    if isinstance(row.wanted, Refused) and not (
        isinstance(error, row.wanted.error) and row.wanted.message in str(error)
    ):
        yield f"{way}: not refused with {row.wanted.error.__name__}: {outcome}"
    if entries and row.wanted not in (RIGHT, RIGHT_OR_REFUSED):
        yield f"{way}: an entry was published"


def fetched(cache: Cache, url: str) -> bytes:
    return cache.fetch(url).data.read_bytes()


#: The ways to read a shard, by the option ``fill``. TLS is tested with ``follow`` only, because
#: ``complete`` differs above the connections only.
WAYS = {"follow": {"fetch": fetched, "open": read}, "complete": {"complete": read}}


@pytest.mark.parametrize(("row", "wire"), CASES)
def test_a_response_is_read_correctly_or_refused(row, wire, servers, tmp_path, monkeypatch):
    trusted, by_wire = servers
    server, base = by_wire[wire]
    found: list[str] = []
    counts: defaultdict[str, Iterator[int]] = defaultdict(count)

    def answered(head: str) -> Iterator[bytes]:
        request = Request(head, base, next(counts[head.split(" ")[1]]))
        if request.path == "/next.tar":
            yield NEXT.sent
            return
        try:
            made = row.sent(request) if callable(row.sent) else row.sent
        except Exception as exn:
            found.append(f"the row is wrong: {exn!r}")
            raise
        closes = row.closes
        for piece in [made] if isinstance(made, bytes) else made:
            closes = closes or b"Connection: close" in piece
            yield piece
        if closes:
            raise ConnectionAbortedError("the server ends the connection")

    server.answer = answered
    monkeypatch.setenv("SSL_CERT_FILE", trusted)
    monkeypatch.setattr(retry, "BASE", 0)  # retries do not wait
    options = {"timeout": 10, "attempts": 2, "patience": 0, "connections": 2, "part_size": MIB}
    for fill, ways in islice(WAYS.items(), 2 if wire == "TCP" else 1):
        with Cache(tmp_path / fill, fill=fill, min_free=0, **options) as cache:
            outcomes = {}
            for way, get in {**ways, "next": read}.items():
                url = f"{base}/next.tar" if way == "next" else f"{base}/{way}/{row.file}"
                data = error = None
                try:
                    data = get(cache, url)
                except Exception as exn:
                    error = exn
                outcomes[way] = cache.parse(url).key, data, error
            published = [(entry.key, entry.data.read_bytes()) for entry in cache.entries()]
        for way, (key, data, error) in outcomes.items():
            wanted = NEXT if way == "next" else row
            entries = [content for owner, content in published if owner == key]
            found += faults(wanted, way, data, error, entries)
            if not set(entries) <= set(wanted.objects):
                found.append(f"{way}: A WRONG ENTRY was published")
        assert {owner for owner, _ in published} <= {key for key, _, _ in outcomes.values()}
    assert found == []


@pytest.mark.parametrize("wire", WIRES)
def test_a_kept_connection_that_ends_costs_no_attempt(wire, servers, tmp_path, monkeypatch):
    trusted, by_wire = servers
    server, base = by_wire[wire]
    numbers = count()

    def answered(head: str) -> Iterator[bytes]:
        if next(numbers) == 1:
            raise ConnectionAbortedError("the server ends the connection")
        yield KEPT

    server.answer = answered
    monkeypatch.setenv("SSL_CERT_FILE", trusted)
    with Cache(tmp_path, min_free=0, attempts=1, patience=0, connections=1) as cache:
        for name in ("a.tar", "b.tar"):
            assert read(cache, f"{base}/{name}") == SMALL
    assert next(numbers) == 3


def test_a_stream_that_cannot_be_continued_is_not_said_to_be_replaced(serve, tmp_path):
    """The server states no version, so nothing is known about the rest."""
    server = serve(answer("200 OK", LARGE, ETag=None)[:2_000_000], most=1)
    message = "cannot be continued.*names no version"
    with (
        Cache(tmp_path, min_free=0, attempts=2, max_size=MIB) as cache,
        pytest.raises(TransferError, match=message),
    ):
        read(cache, f"{server.url}/a.tar")


def test_connections_that_a_network_forgot_cost_one_attempt(serve, tmp_path, monkeypatch):
    """New connections work, while the server never receives what is sent on idle ones."""
    met, old, over = threading.Barrier(2), threading.local(), threading.Event()

    def answered(head: str) -> bytes:
        if "/old" in head:
            old.connection = True  # each connection has a thread
            met.wait()
        elif hasattr(old, "connection"):
            over.wait()
        return KEPT

    server = serve(answered, most=9)
    monkeypatch.setattr(retry, "BASE", 0)
    with (
        Cache(tmp_path, min_free=0, attempts=2, timeout=0.5) as cache,
        ThreadPoolExecutor(2) as pool,
    ):
        for data in pool.map(lambda n: read(cache, f"{server.url}/old-{n}.tar"), range(2)):
            assert data == SMALL
        assert read(cache, f"{server.url}/new.tar") == SMALL
    over.set()
