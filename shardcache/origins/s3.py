"""Shards in S3 and in everything that speaks its protocol.

Botocore, which s3fs brings along, knows every way to find credentials and every addressing rule. It
is asked once per bucket, by a presigned URL; then requests are signed here (Signature Version 4)
and go over `connection`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote_plus, urlsplit
from xml.etree import ElementTree

from shardcache.errors import ConfigError
from shardcache.origins.base import ObjectInfo, read_all, refusal
from shardcache.origins.connection import Response, Transport, content_length
from shardcache.origins.credentials import (
    chain_error,
    login_ended,
    one_at_a_time,
    throttling_codes,
)
from shardcache.origins.endpoints import aws_files, s3_endpoint
from shardcache.origins.http import HEADERS, checked, object_info, open_range, refused, unanswered
from shardcache.threads import undivided
from shardcache.units import format_duration
from shardcache.urls import ShardURL, quoted, redact, secret_forms

logger = logging.getLogger(__name__)

#: Codes of credentials that ended. They come with 400, and mean 403.
_EXPIRED = frozenset({"ExpiredToken", "RequestExpired", "TokenRefreshRequired"})
_STATUS = dict.fromkeys((*_EXPIRED, "InvalidToken"), 403)
#: Codes for a bucket in another region.
_ELSEWHERE = frozenset({"AuthorizationHeaderMalformed", "IllegalLocationConstraintException"})
#: Advice if access is denied.
_MAY_NOT = (
    "these credentials may not read it (a missing object looks the same to "
    "credentials without s3:ListBucket); check the policy, or pass another profile"
)
_LOGIN = (
    "log in again, or check the profile, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and "
    "AWS_SESSION_TOKEN against this endpoint"
)
_SKEWED = "RequestTimeTooSkewed"
#: Codes of 400 with which stores refuse a header that they do not know; R2 answered 501 in
#: January 2025.
_UNKNOWN_HEADER = frozenset({"", "InvalidArgument", "InvalidRequest", "NotImplemented"})
_WRONG_KEYS = ("InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch")
_HINTS = {
    **dict.fromkeys((*_EXPIRED, *_WRONG_KEYS), _LOGIN),
    "InvalidObjectState": "it is archived; restore it first",
    _SKEWED: "this machine's clock is off; synchronise it",
}
#: Asks for the checksum of the object.
_CHECKSUM = {"x-amz-checksum-mode": "ENABLED"}
#: Bytes of a listing; a thousand keys take a megabyte at most.
_LISTING_BYTES = 16 * 1024 * 1024
_UNSIGNED = "UNSIGNED-PAYLOAD"
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}")
#: Stores that this process, or the one that it was forked from, has read from with credentials.
_read_from: set[str] = set()
_ALGORITHM = "AWS4-HMAC-SHA256"


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
        self._endpoint_url = endpoint_url
        self._timeout = timeout
        self._guard = threading.Lock()
        self._chain = threading.Lock()  # held while credentials are looked for
        self._keys: Callable[[], Any] | None = None  # until it is prepared
        self._buckets: dict[str, _Bucket] = {}
        self._without_checksums: set[str] = set()  # buckets that refuse to state them
        self._ahead = 0.0  # seconds by which the store's clock is ahead of this machine's
        self._address: Callable[[str, str], _Bucket]

    def prepare(self) -> Callable[[], Any]:
        """Find endpoint, region and credentials, unless that is done (ConfigError: it fails).

        Returns what tells the credentials for a request.
        """
        with self._guard:
            if self._keys is None:
                with undivided():  # a fork: it imports
                    self._endpoint = s3_endpoint(self._options, self._endpoint_url) or ""
                    self._place = redact(self._endpoint) or "AWS"
                    self._keys = self._use_stated_keys() or self._ask_botocore()
            return self._keys

    def _use_stated_keys(self) -> Callable[[], Any] | None:
        """Do without botocore where options or environment state all there is to know.

        Botocore takes some tenths of a second to be imported and to make a client, which is a
        fifth of the time of a prewarm of 3 GB. It is asked for AWS, for profiles, where there are
        configuration files, and for whatever else is not stated here.
        """
        options = self._options
        profile = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
        known = {"key", "secret", "token", "anon", "requester_pays", "endpoint_url"}
        # Botocore knows AWS itself, and for TLS the certificates.
        plain = re.fullmatch(r"http://[^/?#@]+/?", self._endpoint)
        if not plain or profile or options.keys() - known or aws_files():
            return None
        if options.get("anon"):
            keys = _Keys("", "")
        elif options.get("key"):
            keys = _Keys(*(options.get(name) or "" for name in ("key", "secret", "token")))
        else:
            names = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
            keys = _Keys(*(os.environ.get(name, "") for name in names))
        if not options.get("anon") and not all(keys[:2]):
            return None
        self._region = os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        self._transport = Transport(timeout=self._timeout)
        service, server = "s3" if keys.access_key else "", self._endpoint.rstrip("/")

        def address(name: str, region: str) -> _Bucket:
            if name.startswith("arn:"):
                # Only botocore knows the addresses of access points; `client_kwargs` selects it.
                other = S3Origin(
                    {**options, "client_kwargs": {}},
                    endpoint_url=self._endpoint,
                    timeout=self._timeout,
                )
                other.prepare()
                return other._address(name, region)
            return _Bucket(server, f"/{quote(name)}", region, service)

        self._address = address
        return lambda: keys

    def _ask_botocore(self) -> Callable[[], Any]:
        """Let botocore find credentials, region and settings; its import takes a while."""
        import botocore.exceptions
        import botocore.session
        from botocore.config import Config
        from botocore.httpsession import get_cert_path

        options = self._options
        settings: dict[str, Any] = {
            **(options.get("config_kwargs") or {}),
            "signature_version": botocore.UNSIGNED if options.get("anon") else "s3v4",
            "ignore_configured_endpoint_urls": True,  # `s3_endpoint` has looked at them
        }
        client_kwargs = {
            "use_ssl": options.get("use_ssl", True),
            **(options.get("client_kwargs") or {}),
            "endpoint_url": self._endpoint or None,
        }
        try:
            session = botocore.session.Session(profile=options.get("profile"))
            names = "aws_access_key_id", "aws_secret_access_key", "aws_session_token"
            keys = [client_kwargs.pop(name, None) for name in names]
            keys = keys if keys[0] else [options.get(name) for name in ("key", "secret", "token")]
            if keys[0]:
                session.set_credentials(*keys)
            # Any region of the right partition will do: S3 answers with the bucket's.
            region = client_kwargs.pop("region_name", None)
            region = region or session.get_config_variable("region")
            if not self._endpoint:  # as in `s3_region`
                region = region or os.environ.get("AWS_REGION")
            self._region = region or "us-east-1"
            client_kwargs["config"] = Config(**settings)
            # It only tells addresses. With keys of its own it does not run the chain.
            client_in = functools.cache(
                lambda region: session.create_client(
                    "s3",
                    region,
                    aws_access_key_id="none",
                    aws_secret_access_key="none",  # noqa: S106
                    **client_kwargs,
                )
            )
            client = client_in(self._region)
        except (botocore.exceptions.BotoCoreError, ValueError, TypeError) as exn:
            client, reason = None, redact(str(exn))
        if client is None:
            raise ConfigError(
                f"the S3 client cannot be set up: {reason}. "
                "Check endpoint_url, the profile and storage_options.",
            )

        def address(name: str, region: str) -> _Bucket:
            presign = client_in(region).generate_presigned_url
            parts = urlsplit(presign("get_object", Params={"Bucket": name, "Key": "k"}))
            port = {"http": ":80", "https": ":443"}[parts.scheme]
            server = f"{parts.scheme}://{parts.netloc.removesuffix(port)}"
            path, service = parts.path.removesuffix("/k"), ""
            if parts.query:
                scope = dict(parse_qsl(parts.query))["X-Amz-Credential"]
                *_, region, service, _ = scope.split("/")
            return _Bucket(server, path, region, service)

        verify = client_kwargs.get("verify")
        if verify is None:
            named = session.get_config_variable("ca_bundle")
            verify = named or os.environ.get("REQUESTS_CA_BUNDLE") or True
        self._transport = Transport(
            timeout=self._timeout,
            proxies=client.meta.config.proxies,
            trusted=get_cert_path(verify),
        )
        self._address = address
        credentials, failed = None, False

        def find_keys() -> Any:
            nonlocal credentials, failed
            with self._chain:
                if credentials is None:
                    failed_before, failed = failed, True
                    # Only after a failure: otherwise a node full of workers would start in turns.
                    with one_at_a_time() if failed_before else contextlib.nullcontext():
                        credentials = session.get_credentials()
                        if credentials is None:
                            raise botocore.exceptions.NoCredentialsError
            return credentials.get_frozen_credentials()

        return find_keys

    def server(self, url: ShardURL) -> str:
        """Scheme, host and port of the server that has a shard."""
        self.prepare()
        return self._bucket(url.bucket_and_key()[0], None).server

    def open(
        self, url: ShardURL, start: int, stop: int | None, pin: ObjectInfo | None = None
    ) -> Response:
        """See `base.Origin.open`; the answer to a request for a whole object has its checksum."""
        query = _version(url, pin)
        if start == 0 and stop is None and pin is None:
            response = self._ask("GET", url, _CHECKSUM, query)
            # A gateway may compress a whole object, but not a range of it.
            if "content-encoding" not in response.headers:
                return checked(response, 0, None)
            response.close()
        return open_range(lambda headers: self._ask("GET", url, headers, query), start, stop, pin)

    def stat(self, url: ShardURL) -> ObjectInfo:
        """See `base.Origin.stat`."""
        response = self._ask("HEAD", url, _CHECKSUM, _version(url))
        response.close()
        size = content_length(response.headers)
        if size is None:  # then it cannot be compared with any version
            raise ConfigError(f"{url}: the origin states no size without sending it", url=str(url))
        return object_info(response, size)

    def list_page(self, url: ShardURL, query: Mapping[str, str]) -> tuple[dict[str, int], str]:
        """Keys that begin as ``url`` does, with their sizes, and a token for the next page.

        ``query`` has further parameters of ListObjectsV2.
        """
        response = self._ask("GET", url, {}, {"list-type": "2", "encoding-type": "url", **query})
        try:
            page = ElementTree.fromstring(read_all(response, _LISTING_BYTES))  # noqa: S314 - by expat
            decode = unquote_plus if page.findtext("{*}EncodingType") == "url" else str
            keys = {
                decode(found.findtext("{*}Key") or ""): int(found.findtext("{*}Size") or 0)
                for found in page.iterfind("{*}Contents")
            }
        except (ElementTree.ParseError, ValueError) as exn:
            text = f"{url}: what {self._place} answers is not S3: {quoted(str(exn))}. "
            text += "Check endpoint_url."
            raise ConfigError(text, url=str(url)) from None
        return keys, page.findtext("{*}NextContinuationToken") or ""

    def _ask(
        self, method: str, url: ShardURL, headers: Mapping[str, str], query: Mapping[str, str]
    ) -> Response:
        """An answer of 200 or 206.

        Each of these mends a refusal once: the bucket's own region, new credentials, the store's
        time, and doing without the checksum.
        """
        if self._options.get("requester_pays"):
            headers = {**headers, "x-amz-request-payer": "requester"}
        bucket, tried = url.bucket_and_key()[0], set[str]()
        plain = {name: value for name, value in headers.items() if name not in _CHECKSUM}
        if bucket in self._without_checksums:
            headers = plain
        region = None
        while True:
            find_keys = self.prepare()
            asked, keys, response = self._send(method, url, region, headers, query, find_keys)
            if response.status in (200, 206):
                if "plain" in tried:
                    self._without_checksums.add(bucket)
                if keys is not None and self._place not in _read_from:
                    _read_from.add(self._place)
                return response
            code, message, elsewhere = _read_refusal(response)
            if elsewhere not in (None, asked) and region is None:
                logger.info("%s is in %s", url, elsewhere)
                region = elsewhere
            elif code in _EXPIRED and "keys" not in tried and self._renew(find_keys, keys, url):
                logger.info("the credentials expired; the chain has new ones")
                tried.add("keys")
            elif code == _SKEWED and "time" not in tried and self._set_clock(response):
                tried.add("time")
            elif len(headers) > len(plain) and (
                response.status == 501 or (response.status == 400 and code in _UNKNOWN_HEADER)
            ):
                headers = plain
                tried.add("plain")
            elif code in _EXPIRED and self._place in _read_from:
                raise login_ended(self._profile)
            else:
                throttled, transient = throttling_codes()
                raise refusal(
                    url,
                    500 if code in transient else _STATUS.get(code, response.status),
                    f"{self._place} answered {response.status} {code}: {message}",
                    hint=_HINTS.get(code, _MAY_NOT),
                    headers=response.headers,
                    throttled=code in throttled or response.status == 503,
                )

    def _set_clock(self, response: Response) -> bool:
        """Sign with the store's time from now on; whether its answer tells the time."""
        from email.utils import parsedate_to_datetime

        try:
            self._ahead = parsedate_to_datetime(response.headers.get("date", "")).timestamp()
        except ValueError:
            return False
        self._ahead -= time.time()
        text = "this machine's clock is %s off; requests to %s are signed with the store's time"
        logger.warning(text, format_duration(abs(self._ahead)), self._place)
        return True

    def _renew(self, find_keys: Callable[[], Any], refused_keys: Any, url: ShardURL) -> bool:
        """Run the chain again; whether it finds other credentials than those refused."""
        with self._guard:
            if self._keys is find_keys:
                self._keys = None
        try:
            return bool(self.prepare()() != refused_keys)
        except Exception as exn:  # noqa: BLE001 - as in `_send`
            error = self._sorted(exn, url)
        raise error

    def _send(
        self,
        method: str,
        url: ShardURL,
        region: str | None,
        headers: Mapping[str, str],
        query: Mapping[str, str],
        find_keys: Callable[[], Any],
    ) -> tuple[str, Any, Response]:
        """The region and the credentials that a request was signed with, and its answer."""
        name, key = url.bucket_and_key()
        secrets: list[str] = []
        try:
            bucket = self._bucket(name, region)
            path = bucket.path or "/"
            if "list-type" in query:
                query = {**query, "prefix": key}
            else:
                path = f"{bucket.path}/{quote(key, safe='/~')}"
            pairs = sorted((quote(n, safe="~"), quote(v, safe="~")) for n, v in query.items())
            asked = "&".join(f"{name}={value}" for name, value in pairs)
            headers, keys = {**HEADERS, **headers}, None
            if bucket.service:
                keys = find_keys()
                now = time.time() + self._ahead
                headers |= _signature(method, bucket, path, asked, headers, keys, now)
                signature = headers["Authorization"].rpartition("=")[2]
                secrets = [*secret_forms(keys.secret_key, keys.token), signature]
            target = f"{bucket.server}{path}?{asked}" if asked else f"{bucket.server}{path}"
            response = self._transport.request(method, target, headers)
            response.secrets = secrets
            return bucket.region, keys, response
        except Exception as exn:  # noqa: BLE001 - sorted, or raised as it is
            error = self._sorted(exn, url, secrets)
        raise error

    def _sorted(self, exn: Exception, url: ShardURL, secrets: Collection[str] = ()) -> Exception:
        """The error of ours for a request that could not be signed, or had no answer."""
        if isinstance(exn, (OSError, ValueError, TypeError, AttributeError)):
            return unanswered(exn, url, self._place, secrets)
        if not type(exn).__module__.startswith("botocore"):  # which need not be imported
            return exn
        return chain_error(exn, url, self._profile, worked=self._place in _read_from)

    @property
    def _profile(self) -> str | None:
        return self._options.get("profile") or os.environ.get("AWS_PROFILE")

    def _bucket(self, name: str, region: str | None) -> _Bucket:
        if name.endswith(".mrap"):
            raise ConfigError(
                f"{name} is the alias of a multi-region access point; give its ARN, "
                f"s3://arn:aws:s3::ACCOUNT:accesspoint/{name}/key."
            )
        with self._guard:
            bucket = self._buckets.get(name)
            if bucket is None or region not in (None, bucket.region):
                bucket = self._buckets[name] = self._address(name, region or self._region)
            return bucket


def _signature(
    method: str,
    bucket: _Bucket,
    path: str,
    query: str,
    headers: Mapping[str, str],
    keys: Any,
    now: float,
) -> dict[str, str]:
    """Headers that sign a request (AWS Signature Version 4), with those that begin with x-amz-."""
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
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


def _read_refusal(response: Response) -> tuple[str, str, str | None]:
    """S3's code, its message or HTTP's, and the region of a bucket that is elsewhere."""
    try:
        found = ElementTree.fromstring(refused(response))  # noqa: S314 - by expat
    except ElementTree.ParseError:
        found = ElementTree.Element("")  # a page of a proxy, or none
    code = quoted(found.findtext(".//{*}Code") or "", response.secrets)
    message = quoted(found.findtext(".//{*}Message") or response.reason, response.secrets)
    elsewhere = response.status in (301, 302, 307) or code in _ELSEWHERE
    elsewhere |= response.status == 400 and not code  # which answers a HEAD
    region = response.headers.get("x-amz-bucket-region") or found.findtext(".//{*}Region") or ""
    return code, message, region if elsewhere and _REGION.fullmatch(region) else None
