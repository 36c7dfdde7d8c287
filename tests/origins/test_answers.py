"""A table of HTTP responses, with the outcome that a read of the shard must have.

No response may lead to a wrong entry, to wrong bytes without an error, or to a connection on which
the next request fails.
"""

import gzip
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain, count, repeat
from typing import NamedTuple, TypeAlias

import pytest

from shardcache.errors import (
    AccessDeniedError,
    ConfigError,
    IntegrityError,
    ShardCacheError,
    ShardNotFoundError,
    TransferError,
)
from tests.support.caches import read
from tests.support.storetools import PATIENCE
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

Sender: TypeAlias = Callable[[Request], bytes]
Headers: TypeAlias = dict[str, object]


class Row(NamedTuple):
    name: str
    sent: bytes | Callable[[Request], bytes | Iterator[bytes]]
    wanted: str | Refused
    objects: tuple[bytes, ...] = (SMALL,)  # the correct versions
    closes: bool = False  # the server closes the connection, against its own headers
    attempts: int = 2


def raw(*lines: str, body: bytes = SMALL, end: str = "\r\n") -> bytes:
    return end.join([*lines, "", ""]).encode("latin-1") + body


#: Responses with an ETag. The first one keeps the connection; it frames the second one.
whole = partial(answer, "200 OK", Connection=None)
unframed = partial(answer, "200 OK", Content_Length=None)
coded = partial(unframed, Transfer_Encoding="chunked")


def chunks(data: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    pieces = [data[at : at + 4000] for at in range(0, len(data), 4000)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + end


def part(data: bytes, request: Request, **headers: object) -> bytes:
    """The requested range, or without a Range header the whole object."""
    return b"".join(part_of(data, request.head, **headers))


def parts(data: bytes, **headers: object) -> Sender:
    return lambda request: part(data, request, **headers)


def ranged(first: Headers, later: Headers) -> Sender:
    """Serve ranges of the large object, with more headers for the first one and for later ones."""
    return lambda request: part(LARGE, request, **(first if request.is_first else later))


def replaced(before: Headers, after: Headers, cut: int | None = None) -> Sender:
    """Replace the object after the first request, whose response ends after ``cut`` bytes."""

    def sent(request: Request) -> bytes:
        if request.number:
            return part(REPLACED, request, **after)
        return part(LARGE, request, **before)[:cut]

    return sent


def capped(data: bytes, most: int, **headers: object) -> Sender:
    """Serve at most ``most`` bytes of a range."""

    def sent(request: Request) -> bytes:
        def shorten(span: re.Match[str]) -> str:
            return f"{span[1]}-{min(int(span[1]) + most - 1, int(span[2] or len(data)))}"

        head = re.sub(r"(?<=Range: bytes=)(\d+)-(\d*)", shorten, request.head)
        return part(data, request._replace(head=head), **headers)

    return sent


def moved(location: str, status: str = "302 Found", path: str = "/b.tar") -> Sender:
    """Redirect to b.tar, and serve that."""

    def sent(request: Request) -> bytes:
        if request.head.split(" ")[1].endswith(path):
            return whole(SMALL)
        where = location.format(base=request.base, host=request.base.partition("//")[2])
        return answer(status, Location=where, Connection=None)

    return sent


def cut_at(size: int, **headers: object) -> Sender:
    """End every response after ``size`` bytes of its body."""

    def sent(request: Request) -> bytes:
        head, body = part_of(MIDDLE, request.head, Connection="close", **headers)
        return head + body[:size]

    return sent


def kept_until_opened(request: Request) -> Iterator[bytes]:
    """End the connection of an earlier request at the next one."""
    if "/open/" in request.head and not request.number:
        raise ConnectionAbortedError("the server ends the connection")
    yield KEPT


page = partial(answer, "200 OK", b"<html>" * 99)
SIZE, HALF = len(SMALL), len(SMALL) // 2
SPAN = f"Content-Range: bytes 0-{SIZE - 1}/{SIZE}"
KEPT, WHOLE = whole(SMALL), whole(LARGE)
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\nLink: </b>; rel=preload\r\n\r\n"
PARTIAL = raw("HTTP/1.1 206 Partial", 'ETag: "1"', SPAN, "Transfer-Encoding: chunked", body=b"")
SHORT = PARTIAL.replace(b"-%d/" % (SIZE - 1), b"-%d/" % HALF)
CHUNKED = raw("HTTP/1.1 200 OK", "Transfer-Encoding: chunked", body=chunks(SMALL))
BROKEN, REFUSED = Refused(TransferError), Refused(ShardCacheError)
GONE = Refused(ShardNotFoundError, "not found")
EMPTY = Refused(IntegrityError, "is empty (0 bytes)")
NO_RANGE = answer("416 Range Not Satisfiable", Connection=None)
NOTHING = whole()
PACKED = gzip.compress(SMALL, mtime=0)
GZIP = Refused(ShardCacheError, "gzip")
NOW, YESTERDAY = "Sun, 06 Nov 1994 08:49:37 GMT", "Sat, 05 Nov 1994 08:49:37 GMT"
NO_TAG: Headers = {"ETag": None, "Date": NOW}
SAME_SECOND: Headers = {**NO_TAG, "Last_Modified": NOW}
OLD: Headers = {**NO_TAG, "Last_Modified": YESTERDAY}
WEAK: Headers = {"ETag": 'W/"1"'}
BOTH = (LARGE, REPLACED)
ENDLESS = repeat(b"X-Note: %b\r\n" % (b"x" * 8000))
TRAILERS = chunks(SMALL, end=b"0\r\nDigest: x\r\nContent-Length: 3\r\n\r\n")
PIECES = [coded(), b"28", b"00\r", b"\n" + SMALL + b"\r", b"\n0", b"\r\n\r", b"\n"]
STATUSES = {
    "204 No Content": Refused(ConfigError, "204"),
    "304 Not Modified": Refused(ShardCacheError, "304"),
    "403 Forbidden": Refused(AccessDeniedError, "403"),
    "404 Not Found": GONE,
    "407 Proxy Authentication Required": Refused(AccessDeniedError, "proxy demands a login"),
    "412 Precondition Failed": BROKEN,
    "416 Range Not Satisfiable": BROKEN,
    "429 Too Many Requests": Refused(TransferError, "429"),
    "501 Not Implemented": Refused(ConfigError, "501"),
    "503 Service Unavailable": Refused(TransferError, "503"),
    "522 Connection Timed Out": Refused(TransferError, "522"),
}
#: Content-Range of the first part of the large object.
SPANS = {
    "wrong start": f"bytes 512-{MIB - 1}/{len(LARGE)}",
    "wrong end": f"bytes 0-{MIB}/{len(LARGE)}",
    "smaller first total": f"bytes 0-{MIB - 1}/{2 * MIB}",
    "larger first total": f"bytes 0-{MIB - 1}/{len(LARGE) + MIB}",
    "endless total": f"bytes 0-{MIB - 1}/" + "9" * 5000,
    "no span": f"bytes */{len(LARGE)}",
    "missing": None,
}
#: Headers of the large object, and of another one of the same length that replaces it.
REPLACEMENTS = {
    "weak ETag stays": (WEAK, WEAK),
    "weak ETag becomes strong": (WEAK, {"ETag": '"1"'}),
    "strong ETag changes": ({"ETag": '"1"'}, {"ETag": '"2"'}),
    "ETag goes": ({"ETag": '"1"'}, NO_TAG),
    "empty ETag stays": ({"ETag": '""'}, {"ETag": '""'}),
    "Last-Modified of this second stays": (SAME_SECOND, SAME_SECOND),
    "Last-Modified changes": (OLD, {**OLD, "Last_Modified": "Sat, 05 Nov 1994 08:49:38 GMT"}),
    "no validator": (NO_TAG, NO_TAG),
}
LOCATIONS = {
    "b.tar": RIGHT,
    "{base}/moved/b.tar": RIGHT,
    "//{host}/moved/b.tar": RIGHT,
    "a.tar": Refused(ConfigError, "redirects more than 5 times"),
    "": Refused(ConfigError, "302"),
    "ftp://127.0.0.1/b.tar": Refused(ConfigError, "redirects to"),
    "file:///etc/passwd": Refused(ConfigError, "redirects to"),
    "http://[::1": Refused(ConfigError, "redirects to"),
    "http://127.0.0.1:1/b.tar": Refused(TransferError, ":1 (after a redirect of "),
}
ROWS = [
    # The body of an error is not the object, even if it has the same bytes.
    *(Row(status, answer(status, SMALL), wanted) for status, wanted in STATUSES.items()),
    Row("200", answer("200 OK", SMALL), RIGHT),
    Row("HTTP/1.0", KEPT.replace(b"HTTP/1.1", b"HTTP/1.0"), RIGHT),
    # Interim responses
    Row("interim in its own packet", lambda r: iter([INTERIM, HINTS, INTERIM, KEPT]), RIGHT),
    Row("interim with a length", answer("103 Hints", Connection=None) + KEPT, RIGHT),
    Row("interim without an end", lambda r: repeat(INTERIM), BROKEN),
    # Content-Length
    Row("length of another spelling", unframed(SMALL, Content_Length="10_240"), BROKEN),
    Row("length too long", unframed(SMALL, Content_Length=SIZE + 512), BROKEN, closes=True),
    Row("cut before the length", whole(MIDDLE)[:-10_240], BROKEN, (MIDDLE,), closes=True),
    Row("short length of a range", parts(SMALL, Content_Length=SIZE - 512), BROKEN, closes=True),
    Row("cut parts go on", cut_at(100_000), RIGHT, (MIDDLE,), closes=True),
    Row("cut parts without progress", cut_at(1000), BROKEN, (MIDDLE,), closes=True),
    # The body ends with its connection.
    Row("unit in capitals", parts(SMALL, Content_Range=f"Bytes 0-{SIZE - 1}/{SIZE}"), RIGHT),
    Row("closed, large", unframed(LARGE), STREAMED, (LARGE,), closes=True),
    Row("closed, no validator", raw("HTTP/1.1 200 OK"), STREAMED, closes=True),
    *(
        Row(f"closed {name}", unframed(data[:size]), TRUNCATED, (data,), closes=True)
        for name, data, size in [
            ("in a member", SMALL, 700),
            ("behind all members", SMALL, 6 * (512 + 1024)),
            ("behind 2 MiB", LARGE, 2 * MIB),
        ]
    ),
    Row("closed range", parts(MIDDLE, Content_Length=None), RIGHT, (MIDDLE,), closes=True),
    Row("closed range, cut", cut_at(1000, Content_Length=None), BROKEN, (MIDDLE,), closes=True),
    # Chunks
    Row("chunks, no validator", CHUNKED, RIGHT),
    Row("chunks, large", coded(chunks(LARGE)), RIGHT, (LARGE,)),
    Row("chunks in many packets", lambda r: iter(PIECES), RIGHT),
    Row("chunks with trailers", coded(TRAILERS), RIGHT),
    Row("no end of trailers", lambda r: chain([coded(b"0\r\n")], ENDLESS), BROKEN),
    Row("too few chunks of a range", PARTIAL + chunks(SMALL[:-512]), BROKEN),
    Row("no last chunk", coded(chunks(SMALL, end=b"")), BROKEN, closes=True),
    # Codings
    Row("chunks, short", coded(chunks(SMALL), Content_Length=HALF), RIGHT_OR_REFUSED),
    *(
        Row(f"transfer coding {coding}", coded(chunks(PACKED), Transfer_Encoding=coding), REFUSED)
        for coding in ("gzip, chunked", "chunked, gzip", "gzip")
    ),
    Row("two lines", coded(chunks(SMALL), transfer_encoding="gzip"), REFUSED),
    Row("content coding", whole(PACKED, Content_Encoding="gzip"), GZIP),
    Row("content coding of a range", parts(PACKED, Content_Encoding="gzip"), GZIP),
    Row("content coding identity", whole(SMALL, Content_Encoding="identity"), RIGHT),
    # Ranges
    Row("ranges", parts(LARGE), RIGHT, (LARGE,)),
    Row("ranges ignored", WHOLE, RIGHT, (LARGE,)),
    Row("later ranges ignored", lambda r: part(LARGE, r) if r.is_first else WHOLE, RIGHT, (LARGE,)),
    *(
        Row(f"Content-Range: {name}", ranged({"Content_Range": span}, {}), BROKEN, (LARGE,))
        for name, span in SPANS.items()
    ),
    Row("total unknown", ranged({"Content_Range": f"bytes 0-{MIB - 1}/*"}, {}), RIGHT, (LARGE,)),
    Row("no later start", ranged({}, {"Content_Range": None}), BROKEN, (LARGE,)),
    Row("short ranges", capped(LARGE, 700_001), RIGHT, (LARGE,)),
    Row("ranges of 4,000 bytes", capped(MIDDLE, 4_000), BROKEN, (MIDDLE,)),
    # Two of them may be of two versions.
    Row("short ranges without a validator", capped(LARGE, 700_001, ETag=None), BROKEN, (LARGE,)),
    Row("long body of a short range", SHORT + chunks(SMALL), BROKEN),
    # Validators
    *(
        Row(name, parts(LARGE, **headers), RIGHT, (LARGE,))
        for name, headers in {
            "a weak ETag": WEAK,
            "Last-Modified of this second": SAME_SECOND,
            "a Last-Modified that is no date": {**NO_TAG, "Last_Modified": "yesterday"},
            "an empty ETag": {"ETag": '""'},
        }.items()
    ),
    *(
        Row(
            f"{name}, first response {'cut' if cut else 'whole'}",
            replaced(before, after, cut),
            RIGHT_OR_REFUSED,
            BOTH,
            closes=cut is not None,
        )
        for name, (before, after) in REPLACEMENTS.items()
        for cut in (None, 700_000)
    ),
    # Redirects
    *(
        Row(f"redirect {status}", moved("../b.tar", status), RIGHT)
        for status in ("301 Moved", "303 See", "307 Temporary", "308 Permanent")
    ),
    *(Row(f"redirect to {place!r}", moved(place), wanted) for place, wanted in LOCATIONS.items()),
    Row("redirect in UTF-8", moved("{base}/\xfc/b.tar", path="/%C3%BC/b.tar"), RIGHT),
    # Heads and pages
    Row("bare LF", raw("HTTP/1.1 200 OK", f"Content-Length: {SIZE}", end="\n"), RIGHT),
    Row("head without an end", KEPT[:40] + b"x" * 200_000, BROKEN),
    *(
        Row(f"page in {kind}", page(ETag=None, Content_Type=kind), Refused(TransferError, kind))
        for kind in ("Text/HTML; charset=utf-8", "application/xml", "text/xml")
    ),
    Row("page with an ETag", page(Content_Type="text/html"), Refused(IntegrityError, "not a tar")),
    Row("empty object", answer("200 OK"), EMPTY),
    Row(
        "empty object without ranges", lambda r: NO_RANGE if "Range:" in r.head else NOTHING, EMPTY
    ),
    # Connections
    *(
        Row(f"ends after {size} bytes", KEPT[:size], BROKEN, closes=True)
        for size in (0, 12, 30, KEPT.index(b"\r\n\r\n") + 2, len(KEPT) - SIZE)
    ),
    Row("ends at once, once", lambda r: KEPT if r.number else b"", RIGHT, closes=True),
    Row("ends although it may be kept", KEPT, RIGHT, closes=True),
    Row("ends when it is used again, which costs no attempt", kept_until_opened, RIGHT, attempts=1),
    *(
        Row(f"a forged one behind {where}", lambda r, s=sent: s(r) + whole(FORGED), wanted)
        for where, sent, wanted in [
            ("the body", parts(SMALL), RIGHT),
            ("the chunks", lambda r: CHUNKED, RIGHT),
            ("204", lambda r: raw("HTTP/1.1 204 None", body=b""), Refused(ConfigError, "204")),
            ("404", lambda r: answer("404 Not Found", Connection=None), GONE),
            ("a redirect", moved("b.tar"), RIGHT),
        ]
    ),
]
NEXT = Row("the next shard", whole(GOOD), RIGHT, (GOOD,))
#: With "torn TLS" the server ends connections without close_notify, as an attacker does.
WIRES = ("TCP", "TLS", "torn TLS")
#: More rows that run over TLS with close_notify, too.
ENDS = ("interim", "chunks", "ranges", "a forged one", "200")


def wires(row: Row) -> tuple[str, ...]:
    if row.closes or row.attempts == 1:
        return WIRES
    return WIRES[:2] if row.name.startswith(ENDS) else WIRES[:1]


CASES = [pytest.param(row, wire, id=f"{row.name} - {wire}") for row in ROWS for wire in wires(row)]


@pytest.fixture(scope="module")
def servers(context):
    """Yield a server for each wire."""
    found = {}
    with ExitStack() as stack:
        for wire in WIRES:
            server = Scripted(lambda head: b"", most=1000, close_notify=wire == "TLS")
            stack.enter_context(running(server, None if wire == "TCP" else context))
            found[wire] = server
        yield found


def check(row: Row, way: str, data: bytes | None, error: Exception | None, entries: list[bytes]):
    """Assert that one way to read the shard has the outcome of the row."""
    read = f"{type(error).__name__}: {error}" if error else f"{len(data or b'')} bytes were read"
    outcome = f"{way}: {read}, and {len(entries)} entries"
    may_end_early = row.wanted == TRUNCATED and row.objects[0].startswith(data or b"")
    is_right = data is None or data in row.objects or may_end_early
    is_right_on_disk, is_stored = set(entries) <= set(row.objects), entries == [data]
    assert is_right and is_right_on_disk, f"WRONG BYTES: {outcome}"
    assert error is None or isinstance(error, ShardCacheError), outcome
    assert not entries or row.wanted in (RIGHT, RIGHT_OR_REFUSED), outcome
    if row.wanted == RIGHT:
        assert error is None and is_stored, outcome
    elif row.wanted == STREAMED:  # `fetch` returns a path, so it needs an entry
        assert error is None or way == "fetch", outcome
    elif isinstance(row.wanted, Refused):
        assert isinstance(error, row.wanted.error) and row.wanted.message in str(error), outcome


#: The ways to read a shard, and then another one.
WAYS = {"fetch": lambda cache, url: cache.fetch(url).data.read_bytes(), "open": read, "next": read}


@pytest.mark.parametrize(("row", "wire"), CASES)
def test_a_response_is_read_correctly_or_refused(
    row, wire, servers, authority, make_cache, monkeypatch
):
    server, base = servers[wire], servers[wire].url
    counts = defaultdict[str, Iterator[int]](count)

    def answered(head: str) -> Iterator[bytes]:
        request = Request(head, base, next(counts[head.split(" ")[1]]))
        if "/next/" in head:
            yield NEXT.sent
            return
        made = row.sent(request) if callable(row.sent) else row.sent
        closes = row.closes
        for piece in [made] if isinstance(made, bytes) else made:
            closes = closes or b"Connection: close" in piece
            yield piece
        if closes:
            raise ConnectionAbortedError("the server ends the connection")

    server.answer = answered
    monkeypatch.setenv("SSL_CERT_FILE", authority[0])
    options = {"timeout": 10, "patience": 0, "connections": 2, "part_size": MIB}
    cache = make_cache(attempts=row.attempts, **options)
    for way, get in WAYS.items():
        url, data, error = f"{base}/{way}/a.tar", None, None
        try:
            data = get(cache, url)
        except Exception as exn:
            error = exn
        key = cache.parse(url).key
        entries = [entry.data.read_bytes() for entry in cache.entries() if entry.key == key]
        check(NEXT if way == "next" else row, way, data, error, entries)
    assert row.wanted != STREAMED or next(counts["/open/a.tar"]) == 1  # one request


@pytest.mark.parametrize("max_size", [None, 1000])
def test_an_object_may_come_in_chunks_and_then_with_a_length(serve, make_cache, max_size):
    """A web cache does so while it stores the object."""
    requests, is_read = count(), threading.Event()

    def sent(head: str) -> Iterator[bytes]:
        if next(requests):
            yield b"".join(part_of(LARGE, head, Connection="close"))
        else:
            yield coded(chunks(LARGE))[: 5 * MIB // 2]
            is_read.wait(PATIENCE)

    server = serve(sent, most=1)
    with make_cache(max_size=max_size).open(f"{server.url}/a.tar") as stream:
        first = stream.read(MIB // 2)
        is_read.set()
        assert first + stream.read() == LARGE


def test_a_stream_that_cannot_be_continued_is_not_said_to_be_replaced(serve, make_cache):
    """The server states no version, so nothing is known about the rest."""
    server = serve(answer("200 OK", LARGE, ETag=None)[:2_000_000], most=1)
    with pytest.raises(TransferError, match=r"cannot be continued.*names no version"):
        read(make_cache(attempts=2, max_size=MIB), f"{server.url}/a.tar")


def test_connections_that_a_network_forgot_cost_one_attempt(serve, make_cache, pool):
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
    cache = make_cache(attempts=2, timeout=0.5)
    for data in pool.map(lambda n: read(cache, f"{server.url}/old-{n}.tar"), range(2)):
        assert data == SMALL
    assert read(cache, f"{server.url}/new.tar") == SMALL
    over.set()
