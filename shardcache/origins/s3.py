"""Shards in S3 and in everything that speaks its protocol.

Botocore, which s3fs brings along, knows every way to find credentials and every addressing rule. It
is asked once per bucket, by a presigned URL; then requests are signed here (Signature Version 4)
and go over `connection`. What botocore signs in another way (S3 Express, multi-region access
points, a ``signature_version`` of the user's) it presigns request by request.

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
from shardcache.origins.http import (
    HEADERS,
    RangeBody,
    body_of,
    object_info,
    open_range,
    page_of,
    unanswered,
)
from shardcache.threads import undivided
from shardcache.urls import ShardURL, redact

if TYPE_CHECKING:
    import ssl

__all__ = ["S3Origin"]

logger = logging.getLogger(__name__)

_EXPIRED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
)
#: Of a bucket in another region.
_ELSEWHERE = frozenset({"AuthorizationHeaderMalformed", "IllegalLocationConstraintException"})
#: What codes mean that come with 400.
_STATUS = {
    **dict.fromkeys(_EXPIRED | {"InvalidToken"}, 403),
    **dict.fromkeys(("RequestTimeout", "RequestTimeoutException"), 503),
    **dict.fromkeys(("Throttling", "ThrottlingException"), 503),
}
_HINTS = {
    **dict.fromkeys(_EXPIRED, "log in again"),
    "InvalidAccessKeyId": "the access key is unknown to this endpoint; check AWS_ACCESS_KEY_ID, "
    "the profile and endpoint_url",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key; check "
    "AWS_SECRET_ACCESS_KEY",
    "InvalidToken": "the session token is not valid here; check AWS_SESSION_TOKEN, or log in again",
    "InvalidObjectState": "it is archived (Glacier or Intelligent-Tiering); restore it first",
    "RequestTimeTooSkewed": "this machine's clock is off; synchronise it",
}
_MAY_NOT = (
    "these credentials may not read it (a missing object looks the same to "
    "credentials without s3:ListBucket); check the policy, or pass another profile"
)
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
#: Parameters of operations: botocore's names, and those of headers (x-amz-) or of the query.
_NAMES = {
    "RequestPayer": "x-amz-request-payer",
    "ChecksumMode": "x-amz-checksum-mode",
    "VersionId": "versionId",
    "Prefix": "prefix",
    "Delimiter": "delimiter",
    "MaxKeys": "max-keys",
    "StartAfter": "start-after",
    "ContinuationToken": "continuation-token",
}
_LISTING = {"list-type": "2", "encoding-type": "url"}
#: Bytes of a listing; a thousand keys take a megabyte at most.
_LISTING_BYTES = 16 * 1024 * 1024
#: Seconds that a URL is signed for by botocore.
_PRESIGNED = 300
_UNSIGNED = "UNSIGNED-PAYLOAD"


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
    ) -> RangeBody:
        """See `base.Origin.open`."""
        version = _version(url, pin)
        # A range also where it is all: what a gateway compresses on its way is no such range.
        return open_range(
            lambda headers: self._ask("get_object", url, headers, version), start, stop, pin, _info
        )

    def whole(self, url: ShardURL, most: int, listed: int | None) -> RangeBody | None:
        """An object from its start, its checksum in ``info``: a range is answered without one.

        Args:
            url: the shard.
            most: bytes to deliver; of a longer one the rest is dropped with the connection.
            listed: bytes that a listing says it has; None without one.

        Returns:
            None if it comes in a form in which its size is another one.

        Raises:
            As `open`.
        """
        response = self._ask("get_object", url, {}, {**_version(url), "ChecksumMode": "ENABLED"})
        body = body_of(response, 0, None, _info)
        size = body.info.size
        # What a gateway compresses on its way has another size than it has; no range is.
        packed = size != listed and response.headers.get("content-encoding")
        if size is None or body.stop != size or packed:
            body.close()
            return None
        body.stop = min(most, size)
        return body

    def stat(self, url: ShardURL) -> ObjectInfo:
        """See `base.Origin.stat`."""
        response = self._ask("head_object", url, {}, {**_version(url), "ChecksumMode": "ENABLED"})
        response.close()
        size = content_length(response.headers)
        if size is None:  # then it cannot be compared with any version
            raise ConfigError(f"{url}: the origin states no size without sending it", url=str(url))
        return _info(response.headers, size)

    def list_page(self, url: ShardURL, **options: Any) -> tuple[list[tuple[str, int]], str]:
        """One answer of ListObjectsV2 on the keys that begin as ``url``, maybe a bucket, does.

        Args:
            url: bucket and prefix.
            options: Delimiter, MaxKeys, StartAfter, ContinuationToken.

        Returns:
            Keys with their sizes in bytes, and the token that asks for the next page.
        """
        response = self._ask("list_objects_v2", url, {}, options)
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
        self, operation: str, url: ShardURL, headers: dict[str, str], parameters: dict[str, Any]
    ) -> Response:
        """An answer of 200 or 206; other regions and renewed credentials are tried once each."""
        if self._options.get("requester_pays"):
            parameters = {**parameters, "RequestPayer": "requester"}
        region, renewed = None, False
        while True:
            account = self.prepare()
            asked, response = account.send(operation, url, region, headers, parameters)
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
                said = f"{account.place} answered {response.status} {code}: {message}"
                raise refusal(
                    url,
                    _STATUS.get(code, response.status),
                    said,
                    missing="its bucket does not exist" if code == "NoSuchBucket" else "not found",
                    hint=_HINTS.get(code, _MAY_NOT),
                    headers=response.headers,
                )


class _Keys(NamedTuple):  # named as botocore's are
    access_key: str
    secret_key: str
    token: str = ""


class _Bucket(NamedTuple):
    """How a bucket is reached."""

    base: str  # the URL that keys follow
    region: str
    service: str  # that signatures are made for; without one, none are made here
    client: Any = None  # makes them, where only botocore knows how


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

        client_kwargs = dict(options.get("client_kwargs") or {})
        client_kwargs["endpoint_url"] = self._endpoint or None
        client_kwargs.setdefault("use_ssl", options.get("use_ssl", True))
        self._client_kwargs = client_kwargs
        self._client = functools.cache(self._make_client)
        self._settings: dict[str, Any] = {
            "connect_timeout": min(timeout, 10.0),
            "read_timeout": timeout,
            **(options.get("config_kwargs") or {}),
            # Whatever config_kwargs say for s3fs: attempts must not multiply.
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "ignore_configured_endpoint_urls": True,  # `s3_endpoint` has looked at them
        }
        if options.get("anon"):
            self._settings["signature_version"] = botocore.UNSIGNED
        try:
            session = self._session = botocore.session.Session(profile=options.get("profile"))
            loader = _loader(session.get_config_variable("data_path"))
            session.register_component("data_loader", loader)
            names = "aws_access_key_id", "aws_secret_access_key", "aws_session_token"
            keys = [client_kwargs.pop(name, None) for name in names]
            keys = keys if keys[0] else [options.get(name) for name in ("key", "secret", "token")]
            if keys[0]:
                session.set_credentials(*keys)
            # Any region will do: S3 answers with the right one.
            region = client_kwargs.pop("region_name", None)
            self._region = region or session.get_config_variable("region") or "us-east-1"
            client = self._client(self._region)
        except (botocore.exceptions.BotoCoreError, ValueError, TypeError) as exn:
            client, reason = None, redact(str(exn))
        if client is None:
            raise ConfigError(
                f"the S3 client cannot be set up: {reason}. "
                "Check endpoint_url, the profile and storage_options.",
            )
        config = client.meta.config
        self.place = redact(str(client.meta.endpoint_url))
        self._transport = Transport(
            timeout=config.read_timeout or timeout,
            connect_timeout=config.connect_timeout,
            proxies=config.proxies,
            context=functools.partial(self._trust, config.client_cert),
        )

    def _make_client(self, region: str) -> Any:
        from botocore.config import Config

        config = Config(**self._settings)
        client = self._session.create_client("s3", region, config=config, **self._client_kwargs)
        client.meta.events.register_first("choose-signer.s3", _prefer_v4)
        return client

    def _trust(self, own: str | tuple[str, str] | None) -> ssl.SSLContext:
        from botocore.httpsession import get_cert_path

        trusted = [self._client_kwargs.get("verify")]
        trusted += [self._session.get_config_variable("ca_bundle")]
        trusted += [os.environ.get("REQUESTS_CA_BUNDLE"), True]
        try:
            return tls_context(get_cert_path(next(t for t in trusted if t is not None)), own)
        except OSError as exn:
            raise ConfigError(
                "the certificates to trust are not where AWS_CA_BUNDLE or verify say "
                f"({exn.strerror or type(exn).__name__}). Correct the path."
            ) from None

    def send(
        self,
        operation: str,
        url: ShardURL,
        region: str | None,
        headers: dict[str, str],
        parameters: dict[str, Any],
    ) -> tuple[str, Response]:
        """Sign and send a request: the region it was signed for, and the answer.

        Args:
            operation, parameters: in botocore's words.
            url: the shard, or what keys of a listing begin with.
            region: where the bucket is said to be.
            headers: what needs no signature.
        """
        method = "HEAD" if operation == "head_object" else "GET"
        name, key = url.bucket_and_key()
        parameters = {**parameters, "Prefix" if operation == "list_objects_v2" else "Key": key}
        try:
            bucket = self._bucket(name, region)
            if bucket.client is not None:
                target, signed = _presigned(bucket.client, operation, name, parameters)
            else:
                target, signed = _unsigned(bucket.base, parameters)
            if bucket.service:
                keys = self._stated or self._session.get_credentials().get_frozen_credentials()
                signed = _sign(method, target, signed, bucket, keys)
            response = self._transport.request(method, target, {**HEADERS, **headers, **signed})
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
        if self._stated is not None:  # as botocore does for an endpoint that is given
            base = f"{self._endpoint.rstrip('/')}/{quote(name)}"
            return _Bucket(base, region, "s3" if self._stated.access_key else "")
        client = self._client(region)
        url = client.generate_presigned_url("get_object", Params={"Bucket": name, "Key": "k"})
        parts = urlsplit(url)
        port = {"http": ":80", "https": ":443"}[parts.scheme]
        base = f"{parts.scheme}://{parts.netloc.removesuffix(port)}{parts.path.removesuffix('/k')}"
        if not parts.query:
            return _Bucket(base, region, "")
        said = dict(parse_qsl(parts.query))
        # Express buckets have credentials of their own, by the session.
        if said.get("X-Amz-Algorithm") != "AWS4-HMAC-SHA256" or "X-Amz-S3session-Token" in said:
            return _Bucket(base, region, "", client)
        *_, region, service, _ = said["X-Amz-Credential"].split("/")
        return _Bucket(base, region, service)


@functools.cache
def _loader(where: str | None) -> Any:
    """Botocore's loader, with all it has read.

    The first client of a process takes a fifth of a second, most of it for a megabyte of JSON
    that describes S3's interface; later ones take a tenth of that, those of forked workers as well.
    """
    import botocore.loaders

    loader = botocore.loaders.create_loader(where)
    # Botocore looks through the directories of all its 400 services for one name,
    # which is a third of the time that a client takes.
    loader.list_available_services = lambda type_name: ["s3"]
    return loader


def _prefer_v4(signature_version: Any, **_: Any) -> Any:
    """Keep botocore from presigning in the oldest way it knows, which is its default."""
    return "s3v4-query" if signature_version in ("v4-query", "s3v4-query") else None


def _presigned(
    client: Any, operation: str, bucket: str, parameters: dict[str, Any]
) -> tuple[str, dict[str, str]]:
    """A URL that botocore signs, and the headers that its signature covers."""
    target = client.generate_presigned_url(
        operation, Params={"Bucket": bucket, **parameters}, ExpiresIn=_PRESIGNED
    )
    covered = dict(parse_qsl(urlsplit(target).query)).get("X-Amz-SignedHeaders", "").split(";")
    _, headers = _unsigned("", parameters)
    return target, {name: value for name, value in headers.items() if name in covered}


def _unsigned(base: str, parameters: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """URL and headers of a request; the query is in the order that signatures want."""
    given = {_NAMES[name]: str(v) for name, v in parameters.items() if name != "Key"}
    headers = {name: value for name, value in given.items() if name.startswith("x-amz-")}
    query = {name: value for name, value in given.items() if name not in headers}
    if "Key" in parameters:
        base += f"/{quote(parameters['Key'], safe='/~')}"
    else:
        query |= _LISTING
    pairs = sorted((quote(name, safe="~"), quote(value, safe="~")) for name, value in query.items())
    text = "&".join(f"{name}={value}" for name, value in pairs)
    return f"{base}?{text}" if text else base, headers


def _sign(
    method: str, url: str, headers: dict[str, str], bucket: _Bucket, keys: Any
) -> dict[str, str]:
    """``headers`` with a signature (AWS Signature Version 4); Range and If-Match need none."""
    place, slash, rest = url.partition("://")[2].partition("/")
    path, _, query = rest.partition("?")
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    headers = {**headers, "x-amz-content-sha256": _UNSIGNED, "x-amz-date": moment}
    if keys.token:
        headers["x-amz-security-token"] = keys.token
    covered = sorted({**headers, "host": place}.items())
    names = ";".join(name for name, _ in covered)
    lines = (f"{name}:{value.strip()}" for name, value in covered)
    canonical = "\n".join([method, f"{slash}{path}", query, *lines, "", names, _UNSIGNED])
    scope = f"{moment[:8]}/{bucket.region}/{bucket.service}/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{digest}"
    key = _signing_key(keys.secret_key, scope)
    headers["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={keys.access_key}/{scope}, SignedHeaders={names}, "
        f"Signature={hmac.new(key, text.encode(), 'sha256').hexdigest()}"
    )
    return headers


@functools.lru_cache(maxsize=16)
def _signing_key(secret: str, scope: str) -> bytes:
    """The key of one day, region and service."""
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def _version(url: ShardURL, pin: ObjectInfo | None = None) -> dict[str, str]:
    version = url.version_id or (pin.version_id if pin else None)
    return {"VersionId": version} if version and version != "null" else {}


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
        found = ElementTree.fromstring(page_of(response))  # noqa: S314 - by expat
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
    said = getattr(exn, "response", {}).get("ResponseMetadata", {})
    if kinds & {"ConnectionError", "HTTPClientError"} or said.get("HTTPStatusCode", 0) >= 500:
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
