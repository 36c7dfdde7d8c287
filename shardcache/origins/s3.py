"""Shards in S3 and in everything that speaks its protocol.

Botocore, which s3fs brings along, knows every way to find credentials and every addressing rule. It
is asked once per bucket, by a presigned URL; then requests are signed here (Signature Version 4)
and go over `connection`.

Each range request carries ``If-Match`` (or the version id), and the answer is checked against
what was asked: status, Content-Range and length.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote_plus, urlsplit
from xml.etree import ElementTree

from shardcache.errors import AccessDeniedError, ConfigError
from shardcache.origins.base import Checksum, ObjectInfo, TransientError, refusal
from shardcache.origins.connection import Response, Transport, content_length, tls_context
from shardcache.origins.endpoints import aws_files, s3_endpoint
from shardcache.origins.http import HEADERS, checked, object_info, open_range, refused, unanswered
from shardcache.threads import undivided
from shardcache.urls import ShardURL, redact

if TYPE_CHECKING:
    import ssl

__all__ = ["S3Origin"]

logger = logging.getLogger(__name__)

#: Codes that come with 400: of credentials that may be renewed, or are no good, and of hiccups.
_EXPIRED = frozenset({"ExpiredToken", "RequestExpired", "TokenRefreshRequired"})
_STATUS = {
    **dict.fromkeys((*_EXPIRED, "InvalidToken"), 403),
    **dict.fromkeys(("RequestTimeout", "Throttling"), 503),
}
#: Of a bucket in another region.
_ELSEWHERE = frozenset({"AuthorizationHeaderMalformed", "IllegalLocationConstraintException"})
#: What to do where access is denied.
_MAY_NOT = (
    "these credentials may not read it (a missing object looks the same to "
    "credentials without s3:ListBucket); check the policy, or pass another profile"
)
_LOGIN = (
    "log in again, or check the profile, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and "
    "AWS_SESSION_TOKEN against this endpoint"
)
_HINTS = {
    **dict.fromkeys((*_EXPIRED, "InvalidToken"), _LOGIN),
    **dict.fromkeys(("InvalidAccessKeyId", "SignatureDoesNotMatch"), _LOGIN),
    "InvalidObjectState": "it is archived; restore it first",
    "RequestTimeTooSkewed": "this machine's clock is off; synchronise it",
}
#: Kinds of botocore's errors: no credentials, a login that ended, a role that may not be assumed.
_NO_CREDENTIALS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "SSOError"}
    | {"TokenRetrievalError", "LoginError", "ClientError"}
)
_CERTIFICATES = (
    "Set AWS_CA_BUNDLE, or pass storage_options={'client_kwargs': {'verify': '/path/to/ca.pem'}}."
)
#: Checksums, the ones that cost least first.
_CHECKSUMS = ("crc32", "crc32c", "crc64nvme", "sha256", "sha1")
_LISTING = {"list-type": "2", "encoding-type": "url"}
#: Bytes of a listing; a thousand keys take a megabyte at most.
_LISTING_BYTES = 16 * 1024 * 1024
_UNSIGNED = "UNSIGNED-PAYLOAD"
_ALGORITHM = "AWS4-HMAC-SHA256"
#: Asks for the checksum of the object.
_CHECKSUM = {"x-amz-checksum-mode": "ENABLED"}


class S3Origin:
    """Reads ``s3://`` shards.

    Args:
        storage_options: as s3fs takes them: key, secret, token, profile, anon,
            requester_pays, endpoint_url, client_kwargs, config_kwargs.
        endpoint_url: overrides the endpoint of storage_options.
        timeout: seconds without enough bytes before a connection counts as dead.
    """

    pins = True
    states_checksums = True

    def __init__(
        self, storage_options: Mapping[str, Any], *, endpoint_url: str | None = None, timeout: float
    ) -> None:
        self._options = dict(storage_options)
        self._endpoint = endpoint_url
        self._timeout = timeout
        self._made: _Account | None = None
        self._guard = threading.Lock()

    def prepare(self) -> _Account:
        """Make the client of botocore, if need be; ConfigError if it cannot be set up."""
        with self._guard:
            if self._made is None:
                with undivided():  # a fork: it imports
                    self._made = _Account(self._options, self._endpoint, self._timeout)
            return self._made

    def open(
        self, url: ShardURL, start: int, stop: int | None, pin: ObjectInfo | None = None
    ) -> Response:
        """See `base.Origin.open`; the answer to a request for a whole object has its checksum."""
        query = _version(url, pin)
        if start == 0 and stop is None and pin is None:
            response = self._ask("GET", url, _CHECKSUM, query)
            # What a gateway may compress on its way comes by ranges: those it cannot.
            if "content-encoding" not in response.headers:
                return checked(response, 0, None, _info)
            response.close()
        return open_range(
            lambda headers: self._ask("GET", url, headers, query), start, stop, pin, _info
        )

    def stat(self, url: ShardURL) -> ObjectInfo:
        """See `base.Origin.stat`."""
        response = self._ask("HEAD", url, _CHECKSUM, _version(url))
        response.close()
        size = content_length(response.headers)
        if size is None:  # then it cannot be compared with any version
            raise ConfigError(f"{url}: the origin states no size without sending it", url=str(url))
        return _info(response.headers, size)

    def list_page(self, url: ShardURL, **options: str) -> tuple[list[tuple[str, int]], str]:
        """One answer of ListObjectsV2 on the keys that begin as ``url``, maybe a bucket, does.

        ``options`` are ``delimiter``, ``max_keys`` and ``continuation_token``. Returns keys with
        their sizes in bytes, and the token that asks for the next page.
        """
        query = {name.replace("_", "-"): value for name, value in options.items()}
        response = self._ask("GET", url, {}, {**_LISTING, **query})
        try:
            page = ElementTree.fromstring(response.read(_LISTING_BYTES))  # noqa: S314 - by expat
            decode = unquote_plus if page.findtext("{*}EncodingType") == "url" else str
            keys = [
                (decode(found.findtext("{*}Key") or ""), int(found.findtext("{*}Size") or 0))
                for found in page.iterfind("{*}Contents")
            ]
        except (ElementTree.ParseError, ValueError) as exn:
            text = f"{url}: what {self.prepare().place} answers is not S3: {exn}."
            raise ConfigError(f"{text} Check endpoint_url.", url=str(url)) from None
        finally:
            response.close()
        return keys, page.findtext("{*}NextContinuationToken") or ""

    def _ask(
        self, method: str, url: ShardURL, headers: Mapping[str, str], query: Mapping[str, str]
    ) -> Response:
        """An answer of 200 or 206; other regions and renewed credentials are tried once each."""
        if self._options.get("requester_pays"):
            headers = {**headers, "x-amz-request-payer": "requester"}
        region, renewed = None, False
        while True:
            account = self.prepare()
            asked, response = account.send(method, url, region, headers, query)
            if response.status in (200, 206):
                return response
            code, message, elsewhere = _read_refusal(response)
            if elsewhere not in (None, asked) and region is None:
                logger.info("%s is in %s", url, elsewhere)
                region = elsewhere
            elif code in _EXPIRED and not renewed:
                logger.info("credentials expired; asking the chain for new ones")
                with self._guard:
                    if self._made is account:
                        self._made = None
                renewed = True
            else:
                reason = f"{account.place} answered {response.status} {code}: {message}"
                raise refusal(
                    url,
                    _STATUS.get(code, response.status),
                    reason,
                    missing="its bucket does not exist" if code == "NoSuchBucket" else "not found",
                    hint=_HINTS.get(code, _MAY_NOT),
                    headers=response.headers,
                )


class _Keys(NamedTuple):
    """Credentials, with the names that botocore gives them."""

    access_key: str
    secret_key: str
    token: str = ""


class _Bucket(NamedTuple):
    """How a bucket is reached."""

    server: str  # scheme, host and port
    path: str  # that objects are below; empty where the host's name has the bucket's
    region: str
    service: str  # that signatures are made for; empty where none are made


def _stated_keys(options: Mapping[str, Any], endpoint: str) -> _Keys | None:
    """The keys, where options or environment state all there is to know; empty ones for anon.

    Botocore takes some tenths of a second to be imported and to make a client, which is a fifth of
    the time of a prewarm of 3 GB. It is asked for AWS, for profiles, where there are configuration
    files, and for whatever else is not stated here.
    """
    profile = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    known = {"key", "secret", "token", "anon", "requester_pays", "endpoint_url"}
    # Botocore knows AWS itself, and for TLS the certificates.
    plain = re.fullmatch(r"http://[^/?#@]+/?", endpoint)
    if not plain or profile or options.keys() - known or aws_files():
        return None
    if options.get("anon"):
        return _Keys("", "")
    if options.get("key"):
        keys = [options.get(name) or "" for name in ("key", "secret", "token")]
    else:
        names = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
        keys = [os.environ.get(name, "") for name in names]
    return _Keys(*keys) if all(keys[:2]) else None


class _Account:
    """Credentials, the buckets they were used for, and connections; arguments as of `S3Origin`.

    Attributes:
        place: the endpoint, for people.
    """

    def __init__(
        self, options: Mapping[str, Any], endpoint_url: str | None, timeout: float
    ) -> None:
        self._endpoint = s3_endpoint(options, endpoint_url) or ""
        self._buckets: dict[str, _Bucket] = {}
        self._guard = threading.Lock()
        self._stated = _stated_keys(options, self._endpoint)
        if self._stated is not None:
            self._region = os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
            self.place = redact(self._endpoint)
            self._transport = Transport(timeout=timeout)
        else:
            self._ask_botocore(options, timeout)

    def _ask_botocore(self, options: Mapping[str, Any], timeout: float) -> None:
        """Let botocore find credentials, region and settings; its import takes a while."""
        import botocore.exceptions
        import botocore.session
        from botocore.config import Config

        settings: dict[str, Any] = {
            **(options.get("config_kwargs") or {}),
            "signature_version": botocore.UNSIGNED if options.get("anon") else "s3v4",
            "ignore_configured_endpoint_urls": True,  # `s3_endpoint` has looked at them
        }
        client_kwargs = dict(options.get("client_kwargs") or {})
        client_kwargs["endpoint_url"] = self._endpoint or None
        client_kwargs.setdefault("use_ssl", options.get("use_ssl", True))
        try:
            session = self._session = botocore.session.Session(profile=options.get("profile"))
            names = "aws_access_key_id", "aws_secret_access_key", "aws_session_token"
            keys = [client_kwargs.pop(name, None) for name in names]
            keys = keys if keys[0] else [options.get(name) for name in ("key", "secret", "token")]
            if keys[0]:
                session.set_credentials(*keys)
            # Any region will do: S3 answers with the right one.
            region = client_kwargs.pop("region_name", None)
            self._region = region or session.get_config_variable("region") or "us-east-1"
            self._client = functools.cache(
                lambda region: session.create_client(
                    "s3", region, config=Config(**settings), **client_kwargs
                )
            )
            client = self._client(self._region)
        except (botocore.exceptions.BotoCoreError, ValueError, TypeError) as exn:
            client, reason = None, redact(str(exn))
        if client is None:
            raise ConfigError(
                f"the S3 client cannot be set up: {reason}. "
                "Check endpoint_url, the profile and storage_options.",
            )
        self.place = redact(str(client.meta.endpoint_url))
        self._transport = Transport(
            timeout=timeout,
            proxies=client.meta.config.proxies,
            context=lambda: self._trusted(client_kwargs.get("verify")),
        )

    def _trusted(self, verify: str | bool | None) -> ssl.SSLContext:
        from botocore.httpsession import get_cert_path

        if verify is None:
            named = self._session.get_config_variable("ca_bundle")
            verify = named or os.environ.get("REQUESTS_CA_BUNDLE") or True
        try:
            return tls_context(get_cert_path(verify))
        except OSError as exn:
            raise ConfigError(
                "the certificates to trust are not where AWS_CA_BUNDLE or verify say "
                f"({exn.strerror or type(exn).__name__}). Correct the path."
            ) from None

    def send(
        self,
        method: str,
        url: ShardURL,
        region: str | None,
        headers: Mapping[str, str],
        query: Mapping[str, str],
    ) -> tuple[str, Response]:
        """Sign and send a request: the region it was signed for, and the answer.

        ``region`` is where the bucket is said to be.
        """
        name, key = url.bucket_and_key()
        try:
            bucket = self._bucket(name, region)
            path = bucket.path or "/"
            if "list-type" in query:
                query = {**query, "prefix": key}
            else:
                path = f"{bucket.path}/{quote(key, safe='/~')}"
            pairs = sorted((quote(n, safe="~"), quote(v, safe="~")) for n, v in query.items())
            asked = "&".join(f"{name}={value}" for name, value in pairs)
            headers = {**HEADERS, **headers}
            if bucket.service:
                keys = self._stated or self._session.get_credentials().get_frozen_credentials()
                headers |= _signature(method, bucket, path, asked, headers, keys)
            target = f"{bucket.server}{path}?{asked}" if asked else f"{bucket.server}{path}"
            response = self._transport.request(method, target, headers)
        except Exception as exn:  # noqa: BLE001 - sorted, or raised as it is
            error = _sorted(exn, url, self.place)
        else:
            return bucket.region, response
        raise error

    def _bucket(self, name: str, region: str | None) -> _Bucket:
        with self._guard:
            bucket = self._buckets.get(name)
            if bucket is None or region not in (None, bucket.region):
                bucket = self._buckets[name] = self._find(name, region or self._region)
            return bucket

    def _find(self, name: str, region: str) -> _Bucket:
        if name.endswith(("--x-s3", ".mrap")):
            raise ConfigError(
                f"{name} cannot be read: S3 Express buckets and multi-region access points take "
                "signatures that shardcache does not make. Give an ordinary bucket's URL."
            )
        if self._stated is not None:  # as botocore does for an endpoint that is given
            path, service = f"/{quote(name)}", "s3" if self._stated.access_key else ""
            return _Bucket(self._endpoint.rstrip("/"), path, region, service)
        presign = self._client(region).generate_presigned_url
        parts = urlsplit(presign("get_object", Params={"Bucket": name, "Key": "k"}))
        port = {"http": ":80", "https": ":443"}[parts.scheme]
        server = f"{parts.scheme}://{parts.netloc.removesuffix(port)}"
        path = parts.path.removesuffix("/k")
        if not parts.query:
            return _Bucket(server, path, region, "")
        *_, region, service, _ = dict(parse_qsl(parts.query))["X-Amz-Credential"].split("/")
        return _Bucket(server, path, region, service)


def _signature(
    method: str, bucket: _Bucket, path: str, query: str, headers: Mapping[str, str], keys: Any
) -> dict[str, str]:
    """Headers that sign a request (AWS Signature Version 4), with those that begin with x-amz-."""
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    added = {"x-amz-content-sha256": _UNSIGNED, "x-amz-date": moment}
    if keys.token:
        added["x-amz-security-token"] = keys.token
    covered = {name: value for name, value in headers.items() if name.startswith("x-amz-")}
    covered |= {**added, "host": bucket.server.partition("://")[2]}
    names = ";".join(sorted(covered))
    lines = (f"{name}:{value.strip()}" for name, value in sorted(covered.items()))
    canonical = "\n".join([method, path, query, *lines, "", names, _UNSIGNED])
    scope = f"{moment[:8]}/{bucket.region}/{bucket.service}/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = f"{_ALGORITHM}\n{moment}\n{scope}\n{digest}"
    signature = hmac.new(_signing_key(keys.secret_key, scope), text.encode(), "sha256").hexdigest()
    added["Authorization"] = (
        f"{_ALGORITHM} Credential={keys.access_key}/{scope}, SignedHeaders={names}, "
        f"Signature={signature}"
    )
    return added


@functools.lru_cache(maxsize=16)
def _signing_key(secret: str, scope: str) -> bytes:
    """The key of one day, region and service."""
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def _version(url: ShardURL, pin: ObjectInfo | None = None) -> dict[str, str]:
    version = url.version_id or (pin.version_id if pin else None)
    return {"versionId": version} if version and version != "null" else {}


def _info(headers: Mapping[str, str], size: int | None) -> ObjectInfo:
    checksum = None
    if headers.get("x-amz-checksum-type") != "COMPOSITE":
        for algorithm in _CHECKSUMS:
            if stated := headers.get(f"x-amz-checksum-{algorithm}"):
                checksum = Checksum(algorithm, stated)
                break
    version = headers.get("x-amz-version-id")
    return replace(object_info(headers, size), version_id=version, checksum=checksum)


def _read_refusal(response: Response) -> tuple[str, str, str | None]:
    """S3's code, its message or HTTP's, and the region of a bucket that is elsewhere."""
    try:
        found = ElementTree.fromstring(refused(response))  # noqa: S314 - by expat
    except ElementTree.ParseError:
        found = ElementTree.Element("")  # a page of a proxy, or none
    code = found.findtext(".//{*}Code") or ""
    message = redact(found.findtext(".//{*}Message") or response.reason)
    elsewhere = response.status in (301, 302, 307) or code in _ELSEWHERE
    elsewhere |= response.status == 400 and not code  # which answers a HEAD
    region = response.headers.get("x-amz-bucket-region") or found.findtext(".//{*}Region")
    return code, message, region if elsewhere else None


def _sorted(exn: Exception, url: ShardURL, place: str) -> Exception:
    """What it means that a request could not be signed, or had no answer."""
    if isinstance(exn, (OSError, ValueError, TypeError, AttributeError)):
        return unanswered(exn, url, place, _CERTIFICATES)
    if not type(exn).__module__.startswith("botocore"):  # which need not be imported
        return exn
    reason = redact(str(exn)).partition("\n")[0]
    kinds = {kind.__name__ for kind in type(exn).__mro__}
    answer = getattr(exn, "response", {}).get("ResponseMetadata", {})
    if kinds & {"ConnectionError", "HTTPClientError"} or answer.get("HTTPStatusCode", 0) >= 500:
        return TransientError(f"the source of credentials does not answer: {reason}")
    if kinds & _NO_CREDENTIALS:
        return AccessDeniedError(
            f"{url} cannot be read: {reason}. Log in (aws sso login), set AWS_PROFILE or "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass "
            "storage_options={'anon': True} for a public bucket.",
            url=str(url),
        )
    text = f"{url} cannot be read from {place}: {reason}. Check the profile and storage_options."
    return ConfigError(text, url=str(url))
