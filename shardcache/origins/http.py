"""Shards on web servers, and what all answers over HTTP have in common, S3's too.

``http://`` and ``https://`` do not go through fsspec: its ``info`` reports every failure, a
refused connection too, as "file not found", and its reads cannot insist on a version. Here
requests carry ``If-Match`` where the server has a strong validator, as S3's do.

Proxies come from the environment (``https_proxy``, ``no_proxy``), certificates from the system or
``SSL_CERT_FILE``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from urllib.parse import quote, urljoin

from shardcache.config import __version__
from shardcache.errors import AccessDeniedError, ConfigError
from shardcache.origins.base import (
    Checksum,
    ObjectInfo,
    TransientError,
    VersionChangedError,
    read_all,
    refusal,
)
from shardcache.origins.connection import (
    Response,
    Transport,
    basic_login,
    content_length,
    split_url,
)
from shardcache.urls import ShardURL, redact

#: What all requests carry.
HEADERS = {"Accept-Encoding": "identity", "User-Agent": f"shardcache/{__version__}"}
#: Bytes of a refusal that are read.
_PAGE = 64 * 1024
_REDIRECTS = 5
#: What errors and portals send, with status 200 too. Stores name the version of what they hold.
_PAGES = ("text/html", "text/xml", "application/xml")
# As many digits as 64 bits need: Python refuses to read numbers of thousands.
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})\Z")
_SAFE = "/?%:@!$&'()*+,;=~"
#: Checksums, the ones that cost least first.
_CHECKSUMS = ("crc32", "crc32c", "crc64nvme", "sha256", "sha1")
_CERTIFICATES = (
    "Set SSL_CERT_FILE, or for s3:// AWS_CA_BUNDLE or "
    "storage_options={'client_kwargs': {'verify': '/path/to/ca.pem'}}."
)


def refused(response: Response) -> bytes:
    """What a refusal says, to its end: a short one leaves a connection that can be used again."""
    try:
        return read_all(response, _PAGE)
    except TransientError:
        return b""


def unanswered(exn: Exception, url: ShardURL, place: str) -> Exception:
    """What it means that `Transport.request` raised ``exn``."""
    import ssl  # here: as in `connection`

    reason = redact(str(exn))
    if isinstance(exn, ssl.SSLCertVerificationError):
        text = f"{url}: the certificate of {place} is not trusted here. {_CERTIFICATES}"
        return ConfigError(text, url=str(url))
    if isinstance(exn, PermissionError):  # of a proxy, or a firewall of this machine
        text = f"{url}: {place} cannot be reached: {reason}. Check https_proxy and its login."
        return AccessDeniedError(text, url=str(url))
    if isinstance(exn, OSError):
        timed_out = isinstance(exn, TimeoutError)
        return TransientError(f"{place} does not answer: {reason}", timed_out=timed_out)
    text = f"{url} cannot be asked for at {place}: {reason}. Check the endpoint, URL and proxy."
    return ConfigError(text, url=str(url))


def object_info(headers: Mapping[str, str], size: int | None) -> ObjectInfo:
    """The version that an answer is of."""
    checksum = None
    if headers.get("x-amz-checksum-type") != "COMPOSITE":
        for algorithm in _CHECKSUMS:
            if stated := headers.get(f"x-amz-checksum-{algorithm}"):
                checksum = Checksum(algorithm, stated)
                break
    version, modified = headers.get("x-amz-version-id"), headers.get("last-modified")
    return ObjectInfo(size, headers.get("etag"), version, modified, checksum)


def open_range(
    ask: Callable[[dict[str, str]], Response], start: int, stop: int | None, pin: ObjectInfo | None
) -> Response:
    """Bytes ``start`` to ``stop`` of one version; see `base.Origin.open`.

    ``ask`` brings an answer of 200 or 206, given headers of the request.
    """
    headers = {"Range": f"bytes={start}-" if stop is None else f"bytes={start}-{stop - 1}"}
    if pin is not None and pin.etag and not pin.etag.startswith("W/"):  # those never match
        headers["If-Match"] = pin.etag
    try:
        response = ask(headers)
    except VersionChangedError:
        if start or pin is not None:
            raise
        del headers["Range"]  # an empty object has no range at all
        response = ask(headers)
    return checked(response, start, stop)


def checked(response: Response, start: int, stop: int | None) -> Response:
    """An answer of 200 or 206, if it is what was asked for (else TransientError)."""
    headers = response.headers
    length = content_length(headers)
    text = headers.get("content-range")
    wrong = f"asked for bytes {start} to {stop}, the origin sent {text!r} with {length} bytes"
    if response.status != 206:  # the range was ignored: all bytes will come, from the first
        response.info, response.start, response.stop = object_info(headers, length), 0, length
        page = headers.get("content-type", "")
        if response.info.identifiable or not page.startswith(_PAGES):
            return response
        wrong = f"a page of {page} came in place of the object"
    elif match := _CONTENT_RANGE.match(text or ""):
        first, last, total = (int(group) for group in match.groups())
        wanted = total if stop is None else min(total, stop)
        if first == start <= last and last + 1 == wanted and length in (None, wanted - start):
            response.info = object_info(headers, total)
            response.start, response.stop = start, wanted
            return response
    response.close()
    raise TransientError(wrong)


class WebOrigin:
    """Reads shards over HTTP."""

    pins = True  # every answer carries its version, and is compared
    states_checksums = False

    def __init__(self, *, timeout: float) -> None:
        self._transport = Transport(timeout=timeout)

    def open(
        self, url: ShardURL, start: int, stop: int | None, pin: ObjectInfo | None = None
    ) -> Response:
        """See `base.Origin.open`."""
        return open_range(lambda head: self._ask("GET", url, head), start, stop, pin)

    def stat(self, url: ShardURL) -> ObjectInfo:
        """See `base.Origin.stat`."""
        response = self._ask("HEAD", url, {})
        response.close()
        return object_info(response.headers, content_length(response.headers))

    def _ask(self, method: str, url: ShardURL, headers: dict[str, str]) -> Response:
        """An answer of 200 or 206, after redirects."""
        target, server, place = url.raw, "", ""
        login: dict[str, str] = {}
        for _ in range(_REDIRECTS + 1):
            error: Exception | None = None
            try:
                before = server
                scheme, place, path = split_url(target)
                user, at, place = place.rpartition("@")
                server = f"{scheme}://{place}"
                if at or server != before:  # a login is for the server that asked for it
                    login = {"Authorization": basic_login(user)} if at else {}
                asked = f"{server}{quote(path, safe=_SAFE)}"
                response = self._transport.request(method, asked, {**HEADERS, **login, **headers})
                location = response.headers.get("location")
                target = urljoin(asked, location or "")
            except (OSError, ValueError) as exn:
                error = unanswered(exn, url, place)
            if error is not None:
                raise error
            if response.status in (200, 206):
                return response
            refused(response)
            if response.status not in (301, 302, 303, 307, 308) or not location:
                reason = f"{place} answered {response.status} {response.reason}".rstrip()
                raise refusal(url, response.status, reason, headers=response.headers)
        text = f"{url}: the server redirects more than {_REDIRECTS} times."
        raise ConfigError(f"{text} Check the URL.", url=str(url))
