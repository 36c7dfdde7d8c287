"""Shards on web servers: ``http://`` and ``https://``.

Not through fsspec: its ``info`` reports every failure, a refused connection
too, as "file not found", and its reads cannot insist on a version. Here every
answer is compared with the version that was pinned (``If-Match`` where the
server has a strong validator), as it is done for S3.

An origin may be used by many threads; make one per process. Proxies come from
the environment (``https_proxy``, ``no_proxy``), certificates from the system or
``SSL_CERT_FILE``.
"""

from __future__ import annotations

import logging
import threading
import urllib.request
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from shardcache.errors import AccessDeniedError, ConfigError, ShardNotFoundError
from shardcache.origins.base import ObjectInfo, TransientError, VersionChangedError, unchained
from shardcache.origins.rangebody import (
    TRANSIENT_STATUS,
    RangeBody,
    content_length,
    content_range,
    retry_after,
)
from shardcache.urls import ShardURL, redact
from shardcache.version import __version__

__all__ = ["WebOrigin"]

_REDIRECTS = 5


def _hide_signatures(record: logging.LogRecord) -> bool:
    """urllib3 shows whole URLs: of heads it cannot read, and of every request at DEBUG."""
    record.msg, record.args = redact(record.getMessage()), ()
    return True


for _name in ("urllib3.connection", "urllib3.connectionpool"):
    logging.getLogger(_name).addFilter(_hide_signatures)


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
        """See `origin.Origin.open`."""
        headers = {"Range": f"bytes={start}-" if stop is None else f"bytes={start}-{stop - 1}"}
        if pin is not None and pin.etag and not pin.etag.startswith("W/"):
            headers["If-Match"] = pin.etag
        response = self._request("GET", url, headers)
        if response.status == 416 and start == 0:
            response.release_conn()
            response = self._request("GET", url, {})  # an empty file has no range at all
        try:
            self._check(response, url)
            return _body(response, start, stop)
        except BaseException:
            response.close()
            raise

    def stat(self, url: ShardURL) -> ObjectInfo:
        """See `origin.Origin.stat`."""
        response = self._request("HEAD", url, {})
        try:
            self._check(response, url)
            return _info(response, content_length(response.headers))
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


def _body(response: Any, start: int, stop: int | None) -> RangeBody:
    length = content_length(response.headers)
    if response.status == 206:
        total, end = content_range(response.headers.get("content-range"), length, start, stop)
        return RangeBody(_info(response, total), start, end, response)
    # The range was ignored: all bytes will come, from the first.
    return RangeBody(_info(response, length), 0, length, response)


def _info(response: Any, size: int | None) -> ObjectInfo:
    headers = response.headers
    return ObjectInfo(size=size, etag=headers.get("etag"), modified=headers.get("last-modified"))
