"""What S3 and plain HTTP have in common: range answers and their bytes.

A `RangeBody` belongs to one thread, apart from `RangeBody.abort`, which any
other may call.
"""

from __future__ import annotations

import io
import logging
import math
import re
import select
from collections.abc import Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any

from shardcache.origins.base import ObjectInfo, TransientError

__all__ = ["TRANSIENT_STATUS", "RangeBody", "content_length", "content_range", "retry_after"]

logger = logging.getLogger(__name__)

#: Answers that another attempt may not get: time-outs, throttling, trouble inside.
TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
# As many digits as 64 bits need: Python refuses to read numbers of thousands.
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})\Z")
#: Bytes of one TLS record at most (RFC 8446, section 5.1), and how many are taken together.
_RECORD = 1 << 14
_PIECES = 1 << 18
_LENGTH = re.compile(r"[0-9]{1,19}\Z")


def content_range(
    text: str | None, length: int | None, start: int, stop: int | None
) -> tuple[int, int]:
    """Check a 206 answer against what was asked.

    Args:
        text: its Content-Range.
        length: its Content-Length, if stated.
        start: first byte asked for.
        stop: behind the last byte asked for, or None for all the rest.

    Returns:
        Size of the object, and the offset behind the last byte that will come.

    Raises:
        TransientError: it is another range, or not the length of that range.
    """
    match = _CONTENT_RANGE.match(text or "")
    if match:
        first, last, total = (int(group) for group in match.groups())
        wanted = total if stop is None else min(total, stop)
        if first == start <= last and last + 1 == wanted and length in (None, wanted - start):
            return total, wanted
    raise TransientError(
        f"asked for bytes {start} to {stop}, the origin sent {text!r} with {length} bytes"
    )


def content_length(headers: Mapping[str, str]) -> int | None:
    """What Content-Length says, if that is a length."""
    text = headers.get("content-length") or ""
    return int(text) if _LENGTH.match(text) else None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to stay away, where the answer says so in seconds."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None  # absent, or a date: full jitter will do
    return max(0.0, seconds) if math.isfinite(seconds) else None


class _Reader:
    """A response's bytes as they come, in pieces of some size.

    Behind TLS one call brings one record, and what is done for each piece costs as much as
    deciphering it. So what is there already is taken along; nothing is waited for twice.

    Args:
        stream: the connection's.
    """

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = stream
        self._poll: select.poll | None = None
        self._error: Exception | None = None

    def read(self, buffer: memoryview) -> int:
        """At least a byte, or 0 at the end."""
        if self._error is not None:
            raise self._error
        count = last = self._stream.readinto1(buffer)
        most = min(len(buffer), _PIECES)
        while 0 < last <= _RECORD and count < most and self._is_ready():
            try:
                last = self._stream.readinto1(buffer[count:])
            except (OSError, ValueError) as exn:
                self._error = exn  # a socket says only once that it was reset
                break
            count += last
        return count

    def _is_ready(self) -> bool:
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._stream.fileno(), select.POLLIN)
        return bool(self._poll.poll(0))


class RangeBody:
    """One response's bytes; see `origin.Body`.

    Args:
        info: the version.
        start: offset of its first byte.
        stop: behind its last byte, or None when only its end tells.
        raw: the `urllib3` response, unread.
    """

    def __init__(self, info: ObjectInfo, start: int, stop: int | None, raw: Any) -> None:
        self.info = info
        self.start = start
        self.stop: int | None = stop
        self._left = None if stop is None else stop - start
        self._raw = raw
        self._ended = False
        # urllib3 and botocore copy every byte once more and return only when
        # the whole buffer is full, which hides a trickling origin; the reader
        # below them receives straight into ours what is there.
        response = getattr(self._raw, "_fp", None)
        self._response: HTTPResponse | None = None
        if isinstance(response, HTTPResponse) and response.length is not None:
            self._response, self._reader = response, _Reader(response.fp)

    def end_at(self, stop: int) -> None:
        """Deliver nothing from that offset on; before anything was read, and its end is known."""
        assert self.stop is not None
        self.stop = min(self.stop, stop)
        self._left = self.stop - self.start

    def readinto(self, buffer: memoryview) -> int:
        """See `origin.Body.readinto`."""
        from urllib3.exceptions import HTTPError

        if self._left == 0:
            return 0
        try:
            count = self._receive(buffer if self._left is None else buffer[: self._left])
        except (HTTPError, HTTPException, OSError, ValueError, AttributeError) as exn:
            # ValueError, AttributeError: another thread has aborted the response.
            timed_out = "timed out" in str(exn).lower()
            raise TransientError(f"the connection broke: {exn}", timed_out=timed_out) from exn
        if self._left is None:
            self._ended = count == 0
            return count
        if count == 0:
            raise TransientError(f"the origin stopped {self._left} bytes before the end")
        self._left -= count
        return count

    def _receive(self, buffer: memoryview) -> int:
        response = self._response
        if response is None:
            data = self._raw.read(len(buffer))
            buffer[: len(data)] = data
            return len(data)
        count = self._reader.read(buffer)
        # The bookkeeping of http.client.HTTPResponse.readinto: at its end the
        # response must count as read, or the connection could not be reused.
        assert response.length is not None
        response.length -= count
        if response.length == 0 or count == 0:
            response._close_conn()  # type: ignore[attr-defined]
        return count

    def abort(self) -> None:
        """See `origin.Body.abort`."""
        try:
            self._raw.shutdown()
        except (OSError, ValueError, RuntimeError, AttributeError) as exn:
            logger.debug("nothing to shut down: %s", exn)  # already closed or at its end

    def close(self) -> None:
        """See `origin.Body.close`."""
        response = self._response
        if response is not None and response.length == 0 and not response.isclosed():
            # An empty body, of which nothing was read: only then does it count as read.
            response._close_conn()  # type: ignore[attr-defined]
        chunks = response is None and not self._ended  # their end mark is unread
        cut = response is not None and response.length  # see `end_at`
        if self._left or chunks or cut:
            # Bytes are still coming: this connection cannot be reused. Nor is it handed back: that
            # takes a lock of the pool's which is not reentrant, and who closes an answer before
            # its end may be the garbage collector, in the midst of that very lock.
            self._raw.close()
        else:
            self._raw.release_conn()
