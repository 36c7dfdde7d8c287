"""What the S3-like server answers: ranges, conditions, listings, errors.

Pure: bytes of a head and which bytes of the file follow it. `linkserver` sends them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote
from xml.sax.saxutils import escape

__all__ = ["Answer", "listing", "ranged", "refused"]

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
#: As many keys as S3 puts into one page.
_PAGE = 1000
_XML = '<?xml version="1.0" encoding="UTF-8"?>\n'


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and fields, and the body: text of our own, or bytes of the file.

    Attributes:
        status: HTTP status.
        fields: header fields beside Content-Length.
        body: for answers that are not bytes of an object.
        start: first byte of the object that is sent.
        stop: the byte behind the last one.
    """

    status: int
    fields: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    start: int = 0
    stop: int = 0

    def head(self) -> bytes:
        """Status line and fields."""
        length = len(self.body) or self.stop - self.start
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in self.fields.items()]
        lines += [f"Content-Length: {length}", "Server: link", "", ""]
        return "\r\n".join(lines).encode("latin-1")


def refused(status: int, code: str) -> Answer:
    """An error as S3 words it."""
    body = f"{_XML}<Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return Answer(status, {"Content-Type": "application/xml"}, body.encode())


def ranged(headers: Mapping[str, str], size: int, etag: str, modified: str) -> Answer:
    """The object, or the part of it that ``headers`` ask for.

    Args:
        headers: of the request, names in lower case.
        size: of the object.
        etag: of the object, quoted.
        modified: as HTTP writes it.
    """
    wanted = headers.get("if-match")
    if wanted not in (None, "*", etag, etag.strip('"')):
        return refused(412, "PreconditionFailed")
    if headers.get("if-none-match") == etag:
        return Answer(304, {"ETag": etag})
    fields = {
        "Content-Type": "application/x-tar",
        "Accept-Ranges": "bytes",
        "ETag": etag,
        "Last-Modified": modified,
    }
    span = _RANGE.fullmatch(headers.get("range", ""))
    if span is None or not (span[1] or span[2]):
        return Answer(200, fields, start=0, stop=size)
    if span[1]:
        start, stop = int(span[1]), min(size, int(span[2]) + 1 if span[2] else size)
    else:
        start, stop = max(0, size - int(span[2])), size
    if start >= stop:
        answer = refused(416, "InvalidRange")
        return Answer(416, {**answer.fields, "Content-Range": f"bytes */{size}"}, answer.body)
    fields["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return Answer(206, fields, start=start, stop=stop)


def listing(
    home: Path,
    query: Mapping[str, list[str]],
    etag: Callable[[Path, os.stat_result], str],
) -> Answer:
    """One page of ListObjectsV2, or what clients ask a bucket before.

    Args:
        home: directory of the bucket.
        query: of the request.
        etag: makes the ETag of a file.
    """

    def asked(name: str, default: str = "") -> str:
        return query.get(name, [default])[0]

    if "location" in query:
        place = f"{_XML}<LocationConstraint>us-east-1</LocationConstraint>"
        return Answer(200, {"Content-Type": "application/xml"}, place.encode())
    prefix, delimiter = asked("prefix"), asked("delimiter")
    after = asked("continuation-token") or asked("start-after") or asked("marker")
    limit = min(_PAGE, int(asked("max-keys") or _PAGE))
    shown = quote if asked("encoding-type") == "url" else escape
    rows: list[str] = []
    last, truncated = "", False
    groups: set[str] = set()
    for key in _keys(home):
        if not key.startswith(prefix) or key <= after:
            continue
        group = _group(key, prefix, delimiter)
        if group and (group in groups or group <= after):
            continue
        if len(rows) + len(groups) == limit:
            truncated = True
            break
        last = group or key
        if group:
            groups.add(group)
            continue
        rows.append(_row(home / key, shown(key), etag))
    parts = [
        f"<Name>{escape(home.name)}</Name><Prefix>{shown(prefix)}</Prefix>",
        f"<KeyCount>{len(rows) + len(groups)}</KeyCount><MaxKeys>{limit}</MaxKeys>",
        f"<IsTruncated>{str(truncated).lower()}</IsTruncated>",
    ]
    if truncated:
        token = escape(last)
        parts.append(f"<NextContinuationToken>{token}</NextContinuationToken>")
    if shown is quote:
        parts.append("<EncodingType>url</EncodingType>")
    parts += rows
    parts += [
        f"<CommonPrefixes><Prefix>{shown(g)}</Prefix></CommonPrefixes>" for g in sorted(groups)
    ]
    name = 'ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    body = f"{_XML}<{name}>{''.join(parts)}</ListBucketResult>"
    return Answer(200, {"Content-Type": "application/xml"}, body.encode())


def _keys(home: Path) -> list[str]:
    return sorted(
        str(Path(folder, name).relative_to(home))
        for folder, _, names in os.walk(home)
        for name in names
    )


def _group(key: str, prefix: str, delimiter: str) -> str:
    """The common prefix that ``key`` is listed under, or an empty text."""
    if not delimiter:
        return ""
    first, found, _ = key[len(prefix) :].partition(delimiter)
    return f"{prefix}{first}{found}" if found else ""


def _row(path: Path, shown: str, etag: Callable[[Path, os.stat_result], str]) -> str:
    found = path.stat()
    moment = datetime.fromtimestamp(found.st_mtime, UTC).isoformat(timespec="milliseconds")
    return (
        f"<Contents><Key>{shown}</Key><LastModified>{moment[:-6]}Z</LastModified>"
        f"<ETag>{escape(etag(path, found))}</ETag><Size>{found.st_size}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
    )
