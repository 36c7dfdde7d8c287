"""Shards on web servers, and what all answers over HTTP have in common, S3's too.

``http://`` and ``https://`` do not go through fsspec: its ``info`` reports every failure, a
refused connection too, as "file not found", and its reads cannot insist on a version. Here every
answer is compared with the version that was pinned (``If-Match`` where the server has a strong
validator), as it is done for S3.

An origin may be used by many threads; make one per process. Proxies come from the environment
(``https_proxy``, ``no_proxy``), certificates from the system or ``SSL_CERT_FILE``. A `RangeBody`
belongs to one thread, apart from `RangeBody.abort`, which any other may call.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import threading
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from shardcache.config import __version__
from shardcache.errors import AccessDeniedError, ConfigError, ShardNotFoundError
from shardcache.origins.base import ObjectInfo, TransientError, VersionChangedError, unchained
from shardcache.urls import ShardURL, redact

_REDIRECTS = 5
#: Answers that another attempt may not get: time-outs, throttling, trouble inside.
TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
# As many digits as 64 bits need: Python refuses to read numbers of thousands.
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})\Z")
_LENGTH = re.compile(r"[0-9]{1,19}\Z")


def _hide_signatures(record: logging.LogRecord) -> bool:
    """urllib3 shows whole URLs: of heads it cannot read, and of every request at DEBUG."""
    record.msg, record.args = redact(record.getMessage()), ()
    return True


for _name in ("urllib3.connection", "urllib3.connectionpool"):
    logging.getLogger(_name).addFilter(_hide_signatures)


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


class RangeBody:
    """One response's bytes; see `base.Body`.

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
            self._response = response

    def end_at(self, stop: int) -> None:
        """Deliver nothing from that offset on; before anything was read, and its end is known."""
        assert self.stop is not None
        self.stop = min(self.stop, stop)
        self._left = self.stop - self.start

    def readinto(self, buffer: memoryview) -> int:
        """See `base.Body.readinto`."""
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
        count: int = response.fp.readinto1(buffer)
        # The bookkeeping of http.client.HTTPResponse.readinto: at its end the
        # response must count as read, or the connection could not be reused.
        assert response.length is not None
        response.length -= count
        if response.length == 0 or count == 0:
            response._close_conn()  # type: ignore[attr-defined]
        return count

    def abort(self) -> None:
        """See `base.Body.abort`."""
        # One that is closed, or at its end, has nothing to shut down.
        with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
            self._raw.shutdown()

    def close(self) -> None:
        """See `base.Body.close`."""
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


def object_info(headers: Mapping[str, str], size: int | None) -> ObjectInfo:
    """The version that an answer is of."""
    return ObjectInfo(size=size, etag=headers.get("etag"), modified=headers.get("last-modified"))


def range_body(
    status: int,
    headers: Mapping[str, str],
    raw: Any,
    start: int,
    stop: int | None,
    describe: Callable[[Mapping[str, str], int | None], ObjectInfo],
) -> RangeBody:
    """The bytes of an answer of 200 or 206 to a request for a range.

    Args:
        status, headers: of the answer; names of headers in lower case.
        raw: the `urllib3` response, unread.
        start: first byte asked for.
        stop: behind the last byte asked for, or None for all the rest.
        describe: tells the version from the headers and the size.

    Raises:
        TransientError: it is another range, or not the length of that range.
    """
    length = content_length(headers)
    if status != 206:  # the range was ignored: all bytes will come, from the first
        return RangeBody(describe(headers, length), 0, length, raw)
    text = headers.get("content-range")
    if match := _CONTENT_RANGE.match(text or ""):
        first, last, total = (int(group) for group in match.groups())
        wanted = total if stop is None else min(total, stop)
        if first == start <= last and last + 1 == wanted and length in (None, wanted - start):
            return RangeBody(describe(headers, total), start, wanted, raw)
    raise TransientError(
        f"asked for bytes {start} to {stop}, the origin sent {text!r} with {length} bytes"
    )


class WebOrigin:
    """Reads shards over HTTP.

    Args:
        connections: size of the connection pool per host.
        timeout: seconds without a byte before a connection counts as dead.
    """

    pins = True  # every answer carries its version, and is compared
    states_checksums = False

    def __init__(self, *, connections: int, timeout: float) -> None:
        self._connections = connections
        self._timeout = timeout
        self._pools: dict[str, Any] = {}
        self._guard = threading.Lock()

    def open(
        self, url: ShardURL, start: int, stop: int | None, pin: ObjectInfo | None = None
    ) -> RangeBody:
        """See `base.Origin.open`."""
        headers = {"Range": f"bytes={start}-" if stop is None else f"bytes={start}-{stop - 1}"}
        if pin is not None and pin.etag and not pin.etag.startswith("W/"):
            headers["If-Match"] = pin.etag
        response = self._request("GET", url, headers)
        if response.status == 416 and start == 0:
            response.release_conn()
            response = self._request("GET", url, {})  # an empty file has no range at all
        try:
            self._check(response, url)
            return range_body(response.status, response.headers, response, start, stop, object_info)
        except Exception:
            response.close()
            raise

    def stat(self, url: ShardURL) -> ObjectInfo:
        """See `base.Origin.stat`."""
        response = self._request("HEAD", url, {})
        try:
            self._check(response, url)
            return object_info(response.headers, content_length(response.headers))
        finally:
            response.release_conn()

    def _request(self, method: str, url: ShardURL, headers: dict[str, str]) -> Any:
        target, login = _split_credentials(url.raw)
        # Not urllib3's own following: it logs where to, signature included.
        for _ in range(_REDIRECTS + 1):
            response = self._ask(method, url, target, {**login, **headers})
            location = response.get_redirect_location()
            if not location:
                return response
            response.drain_conn()
            response.release_conn()
            try:
                following, own = _split_credentials(urljoin(target, location))
            except ValueError as exn:
                raise ConfigError(
                    f"{url}: the server redirects to what is no URL ({redact(str(exn))}). "
                    "Check the URL.",
                    url=str(url),
                ) from None
            if own or urlsplit(following)[:2] != urlsplit(target)[:2]:
                login = own  # a login is for the server that asked for it
            target = following
        raise ConfigError(
            f"{url}: the server redirects more than {_REDIRECTS} times. Check the URL.",
            url=str(url),
        )

    @unchained
    def _ask(self, method: str, url: ShardURL, target: str, headers: dict[str, str]) -> Any:
        from urllib3.exceptions import HTTPError, LocationValueError, ProxyError, SSLError
        from urllib3.exceptions import TimeoutError as PoolTimeoutError

        always = {"Accept-Encoding": "identity", "User-Agent": f"shardcache/{__version__}"}
        # None of the errors is raised "from" urllib3's: those may name the whole URL,
        # signature included, and would be printed with every traceback.
        try:
            return self._pool(target).request(
                method,
                target,
                headers={**always, **headers},
                preload_content=False,
                decode_content=False,
                redirect=False,
                retries=False,  # `retry` repeats what failed
            )
        except (LocationValueError, UnicodeError) as exn:
            raise ConfigError(
                f"{url} cannot be asked for: {redact(str(exn))}", url=str(url)
            ) from None
        except (HTTPError, OSError) as exn:
            if isinstance(exn, SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(exn):
                raise ConfigError(
                    f"{url}: the server's certificate is not trusted here. Set SSL_CERT_FILE.",
                    url=str(url),
                ) from None
            if isinstance(exn, ProxyError) and "failed: 407" in str(exn):
                raise AccessDeniedError(
                    f"{url}: the proxy wants a login (407). Put one into https_proxy.",
                    url=str(url),
                ) from None
            timed_out = isinstance(exn, (PoolTimeoutError, TimeoutError))
            raise TransientError(
                f"{urlsplit(target).netloc} does not answer: {redact(str(exn))}",
                timed_out=timed_out,
            ) from None

    def _pool(self, target: str) -> Any:
        import urllib3

        parts = urlsplit(target)
        proxy = None
        if not urllib.request.proxy_bypass(parts.hostname or ""):
            proxy = urllib.request.getproxies().get(parts.scheme)
        with self._guard:
            pool = self._pools.get(proxy or "")
            if pool is None:
                options: dict[str, Any] = {
                    "maxsize": self._connections,
                    "timeout": urllib3.Timeout(
                        connect=min(self._timeout, 10.0), read=self._timeout
                    ),
                }
                pool = _proxied(proxy, options) if proxy else urllib3.PoolManager(**options)
                self._pools[proxy or ""] = pool
            return pool

    @staticmethod
    def _check(response: Any, url: ShardURL) -> None:
        status = response.status
        if status in (200, 206):
            return
        what = f"{url}: the server answered {status} {response.reason or ''}".rstrip()
        if status in (412, 416):
            raise VersionChangedError(str(url))
        if status in TRANSIENT_STATUS:
            raise TransientError(what, retry_after=retry_after(response.headers))
        if status in (404, 410):
            raise ShardNotFoundError(f"{what}: not found. Check the pattern.", url=str(url))
        if status in (401, 403, 407):
            raise AccessDeniedError(
                f"{what}: access denied. Check the credentials, or whether a signed URL expired.",
                url=str(url),
            )
        raise ConfigError(f"{what}. Check the URL.", url=str(url))


def _proxied(proxy: str, options: dict[str, Any]) -> Any:
    import urllib3

    # As curl takes it, "host:port" is a proxy too.
    server, login = _split_credentials(proxy if "://" in proxy else f"http://{proxy}")
    headers = {f"Proxy-{name}": value for name, value in login.items()}
    return urllib3.ProxyManager(server, proxy_headers=headers, **options)


def _split_credentials(raw: str) -> tuple[str, dict[str, str]]:
    """The URL without its user part, and that part as a header."""
    from urllib3.util import make_headers

    parts = urlsplit(raw)
    user, at, host = parts.netloc.rpartition("@")
    target = urlunsplit((parts.scheme, host, parts.path, parts.query, ""))
    if not at:
        return target, {}
    login = make_headers(basic_auth=unquote(user))
    return target, {"Authorization": login["authorization"]}
