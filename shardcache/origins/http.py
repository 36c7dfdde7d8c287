"""Read shards from web servers, and check the responses of all HTTP servers, including S3's.

``http://`` and ``https://`` URLs do not go through fsspec: its ``info`` reports every failure, even
a refused connection, as "file not found", and its reads cannot insist on a version.
"""

from __future__ import annotations

import contextlib
import re
import string
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, urljoin

from shardcache.config import __version__
from shardcache.errors import AccessDeniedError, ConfigError
from shardcache.faults import system_error
from shardcache.origins.base import (
    Checksum,
    ObjectInfo,
    Origin,
    RepeatError,
    TransientError,
    VersionChangedError,
    read_all,
    refusal,
)
from shardcache.origins.connection import (
    MalformedError,
    Response,
    StaleError,
    Transport,
    basic_login,
    split_url,
)
from shardcache.urls import ShardURL, quoted, secret_forms

#: The headers of every request.
HEADERS = {"Accept-Encoding": "identity", "User-Agent": f"shardcache/{__version__}"}
#: Headers that each request states itself.
_RESERVED = ("Accept-Encoding", "Host", "If-Match", "Range")
#: Limit for reading the body of a refused request, in bytes.
_PAGE = 64 * 1024
#: Bytes of a range that ends early. With less, a shard would take thousands of requests.
_LEAST = 4096
#: Most redirects in a row of one request.
_REDIRECTS = 5
#: Content types of error pages and login portals, which may arrive with status 200. So a response
#: of such a type is taken for a shard only if it has a version.
_PAGES = ("text/html", "text/xml", "application/xml", "application/xhtml+xml")
#: Seconds by which Last-Modified must precede Date to identify a version: two versions of the same
#: second have the same timestamp, and the clocks of two servers differ (RFC 9110, 8.8.2.2).
_SETTLED = 60
# At most 19 digits, which 64 bits need: `int` raises for texts with thousands of digits.
_CONTENT_RANGE = re.compile(r"(?i)bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})\Z")
_SAFE = "/?%:@!$&'()*+,;=~"
#: Algorithms of checksums, in order of preference: the cheapest first.
_CHECKSUMS = ("crc32", "crc32c", "crc64nvme", "sha256", "sha1")
#: Options of fsspec's filesystem for the web: the headers, and those that change no response.
_OPTIONS = {
    *("headers", "simple_links", "same_scheme", "size_policy", "encoded", "block_size", "loop"),
    *("cache_type", "cache_options", "asynchronous", "skip_instance_cache"),
    *("use_listings_cache", "listings_expiry_time", "max_paths"),
}
_CERTIFICATES = (
    "Set SSL_CERT_FILE or AWS_CA_BUNDLE, or for s3:// in code "
    "storage_options={'client_kwargs': {'verify': '/path/to/ca.pem'}}."
)


def refusal_page(response: Response) -> bytes:
    """Read and return the body of a refused request, so that the connection can be used again."""
    try:
        return read_all(response, _PAGE)
    except TransientError:
        return b""


def no_answer(exn: Exception, shard: ShardURL, server: str, secrets: Collection[str]) -> Exception:
    """Return the exception that an origin raises for an exception of `Transport.request`."""
    import ssl  # here: plain HTTP does not need it

    reason = quoted(str(exn), secrets)
    if isinstance(exn, ssl.SSLCertVerificationError):
        text = f"{shard}: the certificate of {server} is not trusted here. {_CERTIFICATES}"
        return ConfigError(text, url=str(shard))
    if isinstance(exn, PermissionError):  # from a proxy, or a firewall of this machine
        text = f"{shard}: {server} cannot be reached: {reason}. Check https_proxy and its login, "
        text += "and the firewall of this machine."
        return AccessDeniedError(text, url=str(shard))
    if isinstance(exn, OSError):
        timed_out = isinstance(exn, TimeoutError)
        if getattr(exn, "reason", "") == "WRONG_VERSION_NUMBER":
            reason += " It may speak HTTP without TLS: then write http:// in the endpoint"
        error = TransientError(f"{server} does not answer: {reason}", timed_out=timed_out)
        return RepeatError("connection", error) if isinstance(exn, StaleError) else error
    text = f"{shard} cannot be requested from {server}: {reason}. "
    return ConfigError(f"{text}Check the endpoint, URL and proxy.", url=str(shard))


class Route(NamedTuple):
    """The redirects that a request has followed."""

    target: str = ""  # the URL to request; "" for that of the shard
    servers: tuple[str, ...] = ()  # those that redirected the request
    headers: Mapping[str, str] = {}  # for the server of ``target``, such as Authorization
    secrets: tuple[str, ...] = ()  # of all requests on the way

    @property
    def after(self) -> str:
        """A phrase for errors that names the last redirect, if any."""
        return f" (after a redirect of {self.servers[-1]})" if self.servers else ""

    def redirected(
        self, response: Response, shard: ShardURL, is_signed: bool = False
    ) -> Route | None:
        """Return the route to the target of a redirect, or None if the response is none.

        A signed request may only leave a server with TLS for another one with TLS, and no other
        server receives the headers. Raises ConfigError if the request may not be sent to the
        target.
        """
        location = response.headers.get("location")
        if response.status not in (301, 302, 303, 307, 308) or not location:
            return None
        here, there = split_url(response.url)[:2], None
        server = here[1].rpartition("@")[2]
        # `connection` decodes headers as Latin-1, but servers send UTF-8.
        location = quote(location.encode("latin-1"), safe=string.printable)
        with contextlib.suppress(MalformedError, ValueError):
            there = split_url(target := urljoin(response.url, location))[:2]
        servers = (*self.servers, server)
        if there is None:
            text = f"{server} redirects to a URL that is not one of a web server "
            text += f"({quoted(location.partition(':')[0])}). Check the URL and the endpoint."
        elif is_signed and here[0] == "https" != there[0]:
            text = f"{server} redirects credentials to a host without TLS. Check endpoint_url."
        elif len(servers) > _REDIRECTS:
            text = f"the server redirects more than {_REDIRECTS} times "
            text += f"({', '.join(dict.fromkeys(servers))}). Check the URL and the endpoint."
        else:
            headers = self.headers if there == here else {}
            return self._replace(target=target, servers=servers, headers=headers)
        raise ConfigError(f"{shard}: {text}", url=str(shard))


def object_info(response: Response, size: int | None) -> ObjectInfo:
    """Return the version that the headers of a response state.

    A weak or empty ETag and a recent Last-Modified are ignored, because they do not identify a
    version (RFC 9110, 8.8). Headers that repeat a secret of the request are ignored as well,
    because the entry's sidecar stores the version.
    """
    given, checksum = response.headers, None
    secrets = response.secrets
    headers = {n: v for n, v in given.items() if not any(map(v.__contains__, secrets))}
    if headers.get("x-amz-checksum-type") != "COMPOSITE":
        stated = ((name, headers.get(f"x-amz-checksum-{name}")) for name in _CHECKSUMS)
        checksum = next((Checksum(name, value) for name, value in stated if value), None)
    etag, version = headers.get("etag"), headers.get("x-amz-version-id")
    if not etag or etag.startswith("W/") or etag == '""':
        etag = None
    modified = headers.get("last-modified")
    if modified and not (etag or version or _is_settled(modified, headers.get("date", ""))):
        modified = None
    return ObjectInfo(size, etag, version, modified, checksum)


def _is_settled(modified: str, date: str) -> bool:
    from email.utils import parsedate_to_datetime  # here: rarely needed, most servers state an ETag

    try:
        age = parsedate_to_datetime(date) - parsedate_to_datetime(modified)
    except (TypeError, ValueError):  # not two dates, or only one with a time zone
        return False
    return age.total_seconds() >= _SETTLED


def open_range(
    request: Callable[[dict[str, str]], Response],
    start: int,
    stop: int | None,
    expected: ObjectInfo | None,
) -> Response:
    """Request bytes ``start`` to ``stop`` of one version, with the arguments of `base.Origin.open`.

    ``request`` sends a request with the given headers, and returns a response of status 200 or 206.
    """
    headers = {"Range": f"bytes={start}-" if stop is None else f"bytes={start}-{stop - 1}"}
    if expected is not None and expected.etag:
        headers["If-Match"] = expected.etag
    try:
        response = request(headers)
        if not response.headers.get("content-range", "").endswith("/*"):
            return checked(response, start, stop)
        response.close()  # without a size, only the whole object proves that no byte is missing
    except VersionChangedError:
        if start or expected is not None:
            raise
        # The object may be empty: no range of it is valid.
    del headers["Range"]
    return checked(request(headers), start, stop)


def checked(response: Response, start: int, stop: int | None) -> Response:
    """Return ``response``, with its version and range set; TransientError if the range differs.

    The range may end early if the response states its length and its version, so that a later
    response can continue.
    """
    headers, length = response.headers, response.length
    text = headers.get("content-range")
    wrong = f"asked for bytes {start} to {stop}, the origin sent {text!r} with {length} bytes"
    if response.status != 206:  # the range was ignored: the whole object follows
        response.describe(object_info(response, length), 0, length)
        page = headers.get("content-type", "")
        if response.info.identifiable or not page.lower().startswith(_PAGES):
            return response
        wrong = f"a page of {page} arrived instead of the object"
    elif match := _CONTENT_RANGE.match(text or ""):
        first, last, total = map(int, match.groups())
        wanted = total if stop is None else min(total, stop)
        response.describe(object_info(response, total), start, last + 1)
        is_right = first == start <= last < wanted and length in (None, last + 1 - start)
        may_end_early = length is not None and length >= _LEAST and response.info.identifiable
        if is_right and (last + 1 == wanted or may_end_early):
            return response
    response.close()
    raise TransientError(quoted(wrong, response.secrets))


def stat(request: Callable[[], Response], first: Callable[[], Response]) -> ObjectInfo:
    """Return the version that the response to a HEAD states, or to a request for the first byte.

    A presigned URL may permit GET only, and the response to a HEAD states no reason.
    """
    try:
        response = request()
        info = object_info(response, response.length)
    except (AccessDeniedError, ConfigError):
        response = first()
        info = response.info
    response.close()
    return info


class WebOrigin(Origin):
    """Reads shards over HTTP; a `base.Origin`."""

    proves_version = True
    transport: Transport

    def __init__(self, scheme: str, options: Mapping[str, Any], timeout: float) -> None:
        if unused := options.keys() - _OPTIONS:
            names = ", ".join(sorted(unused))
            raise ConfigError(f"{scheme}://: only headers can be a storage option. Remove {names}.")
        headers = options.get("headers") or {}
        named = {name.title(): str(value) for name, value in headers.items()}
        self._headers = {n: value for n, value in named.items() if n not in _RESERVED}
        self.transport = Transport(timeout=timeout)

    def open(
        self, shard: ShardURL, start: int, stop: int | None, expected: ObjectInfo | None = None
    ) -> Response:
        return open_range(partial(self._request, "GET", shard), start, stop, expected)

    def stat(self, shard: ShardURL) -> ObjectInfo:
        return stat(partial(self._request, "HEAD", shard, {}), partial(self.open, shard, 0, 1))

    def _request(
        self, method: str, shard: ShardURL, headers: dict[str, str], route: Route | None = None
    ) -> Response:
        """Send a request, follow redirects, and return a response of status 200 or 206."""
        if route is None:  # the login is from a `pipe:` command such as curl
            login = dict(shard.options).get("authorization", "")
            given = self._headers | ({"Authorization": login} if login else {})
            route = Route(shard.raw, headers=given)
        name, server, secrets, error = "", "", tuple[str, ...](), None
        try:
            scheme, name, path = split_url(route.target)
            user, at, name = name.rpartition("@")
            server, query = f"{scheme}://{name}", path.partition("?")[2]
            own = {**route.headers, **({"Authorization": basic_login(user)} if at else {})}
            values = (value for _, value in parse_qsl(query))
            sent = " ".join(own.values()).split()
            used = (*route.secrets, *sent, *user.split(":"), query, *values)
            route, secrets = route._replace(headers=own, secrets=used), secret_forms(*used)
            response = self.transport.request(
                method, server, quote(path, safe=_SAFE), {**HEADERS, **own, **headers}, secrets
            )
        except (MalformedError, system_error()) as exn:
            where = f"{name}{self.transport.via(server)}{route.after}"
            error = no_answer(exn, shard, where, secrets)
        if error is not None:
            raise error
        if response.status in (200, 206):
            coding = response.headers.get("content-encoding", "")
            if coding.strip().lower() in ("", "identity"):
                return response
            response.close()
            raise ConfigError(
                f"{shard}: the server sends it with Content-Encoding {quoted(coding, secrets)}, "
                "although the request asks for identity. Let the server send shards as they are "
                "stored.",
                url=str(shard),
            )
        refusal_page(response)
        if (moved := route.redirected(response, shard)) is not None:
            return self._request(method, shard, headers, moved)
        reason = f"{name}{self.transport.via(server)}{route.after} answered {response.status}"
        raise refusal(shard, response.status, reason, headers=response.headers)
