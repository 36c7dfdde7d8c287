"""Read shards from S3, and from stores with the same protocol.

Botocore, a dependency of s3fs, finds the credentials, the region and the address of a bucket if
`aws.written_keys` and `_usual_address` do not know them: its client takes long to make. This
module signs the requests (Signature Version 4) and sends them with `connection`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote_plus, unquote_to_bytes, urlsplit
from xml.etree import ElementTree

from shardcache.errors import AccessDeniedError, ConfigError, ShardCacheError
from shardcache.faults import is_local_error
from shardcache.origins import http
from shardcache.origins.aws import (
    KEY_NAMES,
    aws_files,
    chain_error,
    is_throttling,
    login_ended,
    one_at_a_time,
    s3_endpoint,
    s3_region,
    session,
    within_timeout,
    written_keys,
)
from shardcache.origins.base import (
    ObjectInfo,
    Origin,
    RepeatError,
    TransientError,
    read_all,
    refusal,
)
from shardcache.origins.connection import MalformedError, Response, Transport, split_url
from shardcache.threads import no_fork
from shardcache.units import format_duration
from shardcache.urls import ShardURL, is_signed, quoted, redact, secret_forms

logger = logging.getLogger(__name__)

#: Error codes for expired credentials.
_EXPIRED = frozenset({"ExpiredToken", "RequestExpired", "TokenRefreshRequired"})
#: Error codes of faults that the next attempt may not meet, although the status is 400.
_TRANSIENT = frozenset({"PriorRequestNotComplete", "RequestTimeout", "RequestTimeoutException"})
#: Error codes for a bucket in another region.
_ELSEWHERE = frozenset({"AuthorizationHeaderMalformed", "IllegalLocationConstraintException"})
_SKEWED = "RequestTimeTooSkewed"
#: Error codes, with status 400, for an unknown header. In January 2025, R2 sent status 501.
_UNKNOWN_HEADER = frozenset({"", "InvalidArgument", "InvalidRequest", "NotImplemented"})
#: Error codes for credentials that the store accepts for no bucket. S3 sends some with status 400,
#: but they mean 403.
_INVALID = (*_EXPIRED, "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch")
#: Advice for errors that deny access, by S3's error code.
_HINTS = {
    **dict.fromkeys(
        _INVALID,
        "log in again, or check the profile, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and "
        "AWS_SESSION_TOKEN against this endpoint",
    ),
    "InvalidObjectState": "it is archived; restore it first",
    _SKEWED: "this machine's clock is off; synchronise it",
}
_MAY_NOT = (
    "these credentials may not read it (a missing object looks the same to "
    "credentials without s3:ListBucket); check the policy, or pass another profile"
)
_ANONYMOUS = "no credentials were sent; if it is not public, omit anon (--no-sign-request)"
#: The header that requests the checksum of an object.
_CHECKSUM = {"x-amz-checksum-mode": "ENABLED"}
#: Keys of one page of a listing, the most that S3 allows, and the limit for reading it in bytes.
_PAGE, _LISTING_BYTES = 1000, 16 * 1024 * 1024
_UNSIGNED = "UNSIGNED-PAYLOAD"
_USUAL_ENDPOINT = r"https?://(?!s3-accelerate)[A-Za-z0-9.-]+(:(?!80/?$|443/?$)\d+)?/?"
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}")
#: Seconds before their expiry at which credentials are renewed, as in botocore.
_RENEWED_BEFORE = 15 * 60
#: Seconds to wait before another attempt to renew credentials that are still valid.
_RENEWAL_PAUSE = 10.0
_ALGORITHM = "AWS4-HMAC-SHA256"
_DIRECT = http.Route()  #: of a request that no server has redirected


class _Bucket(NamedTuple):
    """The address of a bucket, and the scope of the signatures of its requests."""

    server: str  # scheme, host and port
    path: str  # prefix of the objects' paths; "" if the host name includes the bucket
    region: str
    service: str  # name of the service in signatures; "" if requests are not signed


@dataclass(slots=True)
class _Store:
    """The knowledge of this process, or of its parent before the fork, about a store."""

    name: str  # for errors and logs: the endpoint, or "AWS"
    #: Returns the address of a bucket, from its name and region; for "", that of the store itself.
    address: Callable[[str, str], _Bucket]
    region: str  # the region to try first
    proxies: Mapping[str, str] | None
    trusted: str | bool | None  # the argument of `Transport`
    regions: dict[str, str] = field(default_factory=dict)  # of buckets elsewhere
    without_checksums: set[str] = field(default_factory=set)  # buckets that refuse `_CHECKSUM`
    keys: Any = None  # botocore's frozen credentials
    fresh_until: float = 0.0  # when to renew `keys`, on the clock of `time.time`
    expire_at: float = 0.0  # when `keys` expire; 0 if the store has refused them
    worked: bool = False  # whether the store has accepted a signed request
    ahead: float = 0.0  # seconds by which the store's clock is ahead of this machine's

    def renewed(self, keys: Any, end: float) -> None:
        """Use new credentials, which expire at ``end``."""
        fresh = end - _RENEWED_BEFORE
        if keys == self.keys:  # the service has no new ones yet
            fresh = min(end, max(fresh, time.time() + _RENEWAL_PAUSE))
        self.keys, self.fresh_until, self.expire_at = keys, fresh, end

    def not_renewed(self) -> None:
        self.fresh_until = time.time() + _RENEWAL_PAUSE

    def refused(self) -> None:
        self.fresh_until = self.expire_at = 0.0

    def accepted(self, keys: Any) -> None:
        self.worked |= keys is not None

    def set_clock(self, moment: float) -> float:
        """Sign with the store's time, which is ``moment`` now. Return by how much it is ahead."""
        self.ahead = moment - time.time()
        return self.ahead


#: The stores, keyed by the options, the endpoint, and AWS's environment variables and files. A
#: forked child inherits them, with the credentials of its parent.
_stores: dict[str, _Store] = {}


class S3Origin(Origin):
    """Reads ``s3://`` shards; a `base.Origin`.

    The options have the names of s3fs: key, secret, token, profile, anon, requester_pays,
    endpoint_url, client_kwargs, config_kwargs.
    """

    proves_version = True
    states_checksums = True
    lists_pages = True
    transport: Transport

    def __init__(self, scheme: str, options: Mapping[str, Any], timeout: float) -> None:
        self._options = dict(options)
        self._timeout = timeout
        self._guard = threading.Lock()
        self._chain = threading.Lock()  # held while botocore searches for credentials
        self._chain_failed = False
        self._credentials: Any = None  # botocore's object, once it has found them
        self._store: _Store | None = None  # None until `prepare`

    def prepare(self) -> _Store:
        """Return the store. The first call determines its settings, or raises ConfigError."""
        with self._guard:
            if self._store is None:
                with no_fork():  # a fork must not copy the locks of an import
                    endpoint = s3_endpoint(self._options) or ""
                    settings = sorted(item for item in os.environ.items() if "AWS_" in item[0])
                    key = repr((self._options, endpoint, settings, aws_files()))
                    known = _stores.get(key) or _look_up(self._options, endpoint)
                    store = _stores.setdefault(key, known)
                    if not endpoint.startswith("http:"):
                        from shardcache.origins.tls import context  # here: HTTP needs no `ssl`

                        context(store.trusted)  # loads the certificates, before a fork if possible
                self.transport = Transport(
                    timeout=self._timeout, proxies=store.proxies, trusted=store.trusted
                )
                self._store = store
            return self._store

    def _keys(self, shard: ShardURL) -> Any:
        """Return the credentials for a request, and renew them before they expire."""
        store = self.prepare()
        if time.time() >= store.fresh_until:
            try:
                within_timeout(partial(self._run_chain, shard))
            except (TransientError, ShardCacheError) as exn:
                if isinstance(exn, TransientError):
                    self._chain = threading.Lock()  # so that the next run does not wait for this
                if time.time() >= store.expire_at:
                    raise
                logger.info("the credentials for %s are not renewed: %s", store.name, exn)
                store.not_renewed()
        return store.keys

    def _run_chain(self, shard: ShardURL) -> None:
        """Run botocore's credential chain in a thread, where no signal handler may raise."""
        store = self.prepare()
        try:
            with self._chain:
                if self._credentials is None:
                    # Processes take turns only after a failure, so that the workers of a node need
                    # not wait for each other if the chain works.
                    with one_at_a_time() if self._chain_failed else contextlib.nullcontext():
                        self._chain_failed = True
                        with no_fork():  # a fork must not copy the locks of a TLS handshake
                            self._credentials = (
                                written_keys(self._options)
                                or session(self._options).get_credentials()
                            )
                        if self._credentials is None:
                            from botocore.exceptions import NoCredentialsError

                            raise NoCredentialsError
                    self._chain_failed = False
                credentials = self._credentials
            with no_fork():  # as above: this call may renew the credentials
                keys = credentials.get_frozen_credentials()
        except Exception as exn:  # noqa: BLE001 - botocore has its own exceptions
            error = chain_error(exn, shard, self._profile, worked=store.worked)
        else:
            expiry = getattr(credentials, "_expiry_time", None)
            store.renewed(keys, expiry.timestamp() if expiry else math.inf)
            return
        raise error  # not in the handler: the exception quotes what a program or service has sent

    def server(self, shard: ShardURL) -> str:
        return self._bucket(shard.bucket_and_key()[0]).server

    def accepts_credentials(self) -> bool:
        """Return whether the response to a signed request proves that the credentials are valid.

        The request is for the names of all buckets, which valid credentials may not list. Raises
        AccessDeniedError if the store refuses the credentials.
        """
        *_, response = self._send("GET", ShardURL("", "s3", "s3://", "", ""), {}, {}, _DIRECT)
        code, reason, _ = _read_refusal(response)
        if code in _INVALID:
            name = self.prepare().name
            raise AccessDeniedError(f"{name} answered {response.status} {reason}: {_HINTS[code]}.")
        return response.status == 200 or code == "AccessDenied"

    def open(
        self, shard: ShardURL, start: int, stop: int | None, expected: ObjectInfo | None = None
    ) -> Response:
        """Request a range of bytes. The response to a request for the whole has a checksum."""
        if start == 0 and stop is None and expected is None:
            response = self._request("GET", shard, _CHECKSUM)
            # A gateway may compress whole objects, but not ranges. So a range is requested instead.
            if "content-encoding" not in response.headers:
                return http.checked(response, 0, None)
            response.close()
        return http.open_range(partial(self._request, "GET", shard), start, stop, expected)

    def stat(self, shard: ShardURL) -> ObjectInfo:
        head = partial(self._request, "HEAD", shard, _CHECKSUM)
        info = http.stat(head, partial(self.open, shard, 0, 1))
        if info.size is None:  # without a size, versions cannot be compared
            raise ConfigError(f"{shard}: the origin describes it without a size.", url=str(shard))
        return info

    def list_page(
        self, directory: ShardURL, prefix: str, token: str, *, deep: bool
    ) -> tuple[dict[str, int], str]:
        folder = directory.bucket_and_key()[1]
        query = {"list-type": "2", "encoding-type": "url", "max-keys": str(_PAGE)}
        query |= {"prefix": folder + prefix} | ({} if deep else {"delimiter": "/"})
        query |= {"continuation-token": token} if token else {}
        response, name = self._request("GET", directory, {}, query), self.prepare().name
        try:
            page = ElementTree.fromstring(read_all(response, _LISTING_BYTES))  # noqa: S314 - by expat
            kind = page.tag.rpartition("}")[2]
            if kind not in ("ListBucketResult", "Error"):
                raise ValueError(f"it begins with {kind}")
            decode = unquote_plus if page.findtext("{*}EncodingType") == "url" else str
            found = page.iterfind("{*}Contents")
            pairs = ((item.findtext("{*}Key"), item.findtext("{*}Size")) for item in found)
            keys = {decode(key or ""): int(size or 0) for key, size in pairs}
            if wrong := [key for key in keys if not key.startswith(folder)]:
                raise ValueError(f"it has {wrong[0]}, and not only what was asked for")
            sizes = {key[len(folder) :]: size for key, size in keys.items()}
        except (ElementTree.ParseError, ValueError, LookupError) as exn:
            text = f"{directory}: the response of {name} is not a listing of S3: "
            text += f"{quoted(str(exn))}. Check endpoint_url."
            raise ConfigError(text, url=str(directory)) from None
        if kind == "Error":  # the store sent status 200 before the error occurred
            raise TransientError(f"{name} answered {_reason(page, response)[1]}")
        is_truncated = page.findtext("{*}IsTruncated")
        token = page.findtext("{*}NextContinuationToken") or ""
        if is_truncated == "true" and not token:
            text = f"{directory}: {name} lists only part of the shards, because it does not know "
            raise ConfigError(f"{text}ListObjectsV2. Name them in braces.", url=str(directory))
        return sizes, "" if is_truncated == "false" else token

    def _request(
        self,
        method: str,
        shard: ShardURL,
        headers: Mapping[str, str],
        query: Mapping[str, str] | None = None,
        route: http.Route = _DIRECT,
    ) -> Response:
        """Send a request, follow redirects, and return a response of status 200 or 206.

        Raises a RepeatError with the remedy that a refusal suggests.
        """
        if query is None:
            # Not the version that an earlier response stated: that would need s3:GetObjectVersion.
            version = shard.version_id
            query = {"versionId": version} if version and version != "null" else {}
        if self._options.get("requester_pays"):
            headers = {**headers, "x-amz-request-payer": "requester"}
        name, store = shard.bucket_and_key()[0], self.prepare()
        plain = {key: value for key, value in headers.items() if key not in _CHECKSUM}
        if name in store.without_checksums:
            headers = plain
        bucket, keys, response = self._send(method, shard, headers, query, route)
        if response.status in (200, 206):
            store.accepted(keys)
            return response
        code, reason, elsewhere = _read_refusal(response)
        where = bucket.server.partition("://")[2] + route.after if route.target else store.name
        reason = f"{where} answered {response.status} {reason}".rstrip()
        error = self._refusal(method, shard, response, code, reason)
        if elsewhere not in (None, bucket.region):
            logger.info("%s is in %s", shard, elsewhere)
            raise RepeatError("region", error, lambda: store.regions.update({name: elsewhere}))
        is_signed = keys is not None
        if code != "PermanentRedirect" and (moved := route.redirected(response, shard, is_signed)):
            return self._request(method, shard, headers, query, moved)
        if code in _INVALID and is_signed:
            raise RepeatError("credentials", error, partial(self._renew, keys, shard))
        if code == _SKEWED:
            raise RepeatError("clock", error, partial(self._set_clock, response))
        is_unknown = response.status == 400 and code in _UNKNOWN_HEADER
        if headers != plain and (response.status == 501 or is_unknown):
            response = self._request(method, shard, plain, query)
            store.without_checksums.add(name)  # the header was the reason
            return response
        raise error

    def _refusal(
        self, method: str, shard: ShardURL, response: Response, code: str, reason: str
    ) -> Exception:
        if code in _EXPIRED and self.prepare().worked:
            return login_ended(self._profile)
        is_denied = code in _INVALID or (method == "HEAD" and response.status in (400, 405))
        status = 403 if is_denied else response.status
        hint = _ANONYMOUS if self._options.get("anon") else _HINTS.get(code, _MAY_NOT)
        return refusal(
            shard,
            500 if code in _TRANSIENT else status,
            reason,
            hint=hint,
            headers=response.headers,
            throttled=is_throttling(code) or response.status == 503,
        )

    def _set_clock(self, response: Response) -> bool:
        """Sign with the store's time from now on. Return False if the response has no Date."""
        from email.utils import parsedate_to_datetime

        store = self.prepare()
        try:
            moment = parsedate_to_datetime(response.headers.get("date", "")).timestamp()
        except ValueError:
            return False
        ahead = abs(store.set_clock(moment))
        text = "this machine's clock is %s off; requests to %s are signed with the store's time"
        level = logging.WARNING if ahead >= 60 else logging.INFO  # it was corrected
        logger.log(level, text, format_duration(ahead), store.name)
        return True

    def _renew(self, refused: Any, shard: ShardURL) -> bool:
        """Get new credentials, unless another thread did. Return whether they are different."""
        store = self.prepare()
        # Without `_chain`, which a thread may hold for as long as its source of credentials hangs.
        if store.keys == refused:
            store.refused()
            self._credentials = None
        return bool(self._keys(shard) != refused)

    def _send(
        self,
        method: str,
        shard: ShardURL,
        headers: Mapping[str, str],
        query: Mapping[str, str],
        route: http.Route,
    ) -> tuple[_Bucket, Any, Response]:
        """Sign and send one request. Return its bucket, its credentials and the response."""
        name, key = shard.bucket_and_key()
        secrets, server, where = list[str](), "", f"{self.prepare().name}{route.after}"
        try:
            bucket = self._bucket(name)
            path, values = f"{bucket.path}/{quote(key, safe='/~')}", [*query.items()]
            if "list-type" in query:
                path = bucket.path or "/"
            if route.target:
                scheme, authority, path = split_url(route.target)
                path, _, text = path.partition("?")
                path, values = quote(unquote_to_bytes(path), safe="/~"), parse_qsl(text, True)
                authority = authority.rpartition("@")[2]
                bucket = bucket._replace(server=f"{scheme}://{authority}")
                where = f"{authority}{route.after}"
                secrets = [*secret_forms(*(value for _, value in values))]
                if is_signed(text):  # stores refuse a second signature
                    bucket = bucket._replace(service="")
                    # They also refuse headers that the signature does not cover.
                    headers = {n: v for n, v in headers.items() if not n.startswith("x-amz-")}
            pairs = sorted((quote(n, safe="~"), quote(v, safe="~")) for n, v in values)
            if pairs:
                path += "?" + "&".join(f"{name}={value}" for name, value in pairs)
            headers, keys = {**http.HEADERS, **headers}, None
            if bucket.service:
                keys = self._keys(shard)
                now = time.time() + self.prepare().ahead
                headers |= _signature(method, bucket, path, headers, keys, now)
                signature = headers["Authorization"].rpartition("=")[2]
                secrets += [*secret_forms(keys.secret_key, keys.token), signature]
            server = bucket.server
            response = self.transport.request(method, server, path, headers, secrets)
            return bucket, keys, response
        except ShardCacheError:
            raise
        except Exception as exn:  # noqa: BLE001 - botocore has its own exceptions
            error = exn
            if _is_botocores(exn):
                error = chain_error(exn, shard, self._profile, worked=self.prepare().worked)
            elif is_local_error(exn) or isinstance(exn, MalformedError):
                error = http.no_answer(exn, shard, where + self.transport.via(server), secrets)
        raise error

    @property
    def _profile(self) -> str | None:
        return self._options.get("profile") or os.environ.get("AWS_PROFILE")

    def _bucket(self, name: str) -> _Bucket:
        store = self.prepare()
        return store.address(name, store.regions.get(name, store.region))


def _is_botocores(exn: Exception) -> bool:
    return type(exn).__module__.startswith("botocore")  # its types may not be imported


def _look_up(options: Mapping[str, Any], endpoint: str) -> _Store:
    """Determine the addresses, the region and the settings of a store, with botocore."""
    client_kwargs = dict(options.get("client_kwargs") or {})
    settings: dict[str, Any] = dict(options.get("config_kwargs") or {})
    for name in (*KEY_NAMES, "endpoint_url", "region_name"):
        client_kwargs.pop(name, None)

    @functools.cache
    def client(region: str) -> Any:
        from botocore import UNSIGNED
        from botocore.config import Config

        settings["signature_version"] = UNSIGNED if options.get("anon") else "s3v4"
        settings["ignore_configured_endpoint_urls"] = True  # `s3_endpoint` has already read them
        # This client only composes addresses. Its dummy credentials keep it from running the chain.
        return session(options).create_client(
            "s3",
            region,
            aws_access_key_id="none",
            aws_secret_access_key="none",  # noqa: S106
            **{"use_ssl": options.get("use_ssl", True), **client_kwargs},
            endpoint_url=endpoint or None,
            config=Config(**settings),
        )

    @functools.cache
    def address(name: str, region: str) -> _Bucket:
        service = "" if options.get("anon") else "s3"
        if is_plain and (usual := _usual_address(endpoint, name, region)):
            return _Bucket(*usual, region, service)
        s3, parameters = client(region), {"Bucket": name, "Key": "k"}
        url = s3.generate_presigned_url("get_object", parameters) if name else s3.meta.endpoint_url
        parts = urlsplit(url)
        port = {"http": ":80", "https": ":443"}[parts.scheme]
        server = f"{parts.scheme}://{parts.netloc.removesuffix(port)}"
        if parts.query:
            scope = dict(parse_qsl(parts.query))["X-Amz-Credential"]
            *_, region, service, _ = scope.split("/")
        path = parts.path.removesuffix("/k" if name else "/")
        return _Bucket(server, path, region, service)

    try:
        # Any region of the right partition will do, because S3 answers with the bucket's region.
        region = s3_region(options, endpoint)
        is_plain = not (
            client_kwargs.keys() - {"verify"}
            or options.get("config_kwargs")
            or not options.get("use_ssl", True)
        )
        bundle = os.environ.get("AWS_CA_BUNDLE")
        if not written_keys(options):  # there may be further settings
            aws = session(options)
            bundle = aws.get_config_variable("ca_bundle")
            is_plain &= not (
                aws.get_scoped_config().get("s3")
                or aws.get_config_variable("use_dualstack_endpoint")
                or aws.get_config_variable("use_fips_endpoint")
            )
        if (trusted := client_kwargs.get("verify")) is None:
            trusted = bundle or True
        if not (is_plain and _usual_address(endpoint, "bucket", region)):
            client(region)
    except Exception as exn:
        if not (isinstance(exn, (ValueError, TypeError)) or _is_botocores(exn)):
            raise
        reason = redact(str(exn))
    else:
        name, proxies = redact(endpoint) or "AWS", settings.get("proxies")
        return _Store(name, address, region, proxies, trusted)
    raise ConfigError(
        f"the S3 client cannot be set up: {reason}. "
        "Check endpoint_url (AWS_ENDPOINT_URL; http:// or https://), the profile, storage_options."
    )


def _usual_address(endpoint: str, name: str, region: str) -> tuple[str, str] | None:
    """Return the server and the path of a bucket, as a botocore client would compose them.

    At a custom endpoint, the bucket is part of the path; at AWS, it is part of the host name.
    Return None for unusual addresses: ARNs, names with dots, S3 Accelerate, other partitions.
    """
    if re.fullmatch(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]", name):
        if re.fullmatch(_USUAL_ENDPOINT, endpoint):
            return endpoint.rstrip("/"), f"/{name}"
        if not endpoint and re.fullmatch(r"(?!cn-)[a-z]{2}-[a-z]+-\d", region):
            return f"https://{name}.s3.{region}.amazonaws.com", ""
    return None


def _signature(
    method: str, bucket: _Bucket, target: str, headers: Mapping[str, str], keys: Any, now: float
) -> dict[str, str]:
    """Return the headers that sign a request and its x-amz- headers (Signature Version 4)."""
    path, _, query = target.partition("?")
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


@functools.lru_cache(maxsize=16)  # it is the same for a day
def _signing_key(secret: str, scope: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def _reason(page: ElementTree.Element, response: Response) -> tuple[str, str]:
    """Return the error code of a page, and a text with code and message."""
    texts = (page.findtext(f".//{{*}}{name}") or "" for name in ("Code", "Message"))
    code, message = (quoted(text, response.secrets) for text in texts)
    return code, ": ".join(filter(None, (code, message)))


def _read_refusal(response: Response) -> tuple[str, str, str | None]:
    """Return the error code, a text with code and message, and the region to try next, or None."""
    try:
        page = ElementTree.fromstring(http.refusal_page(response))  # noqa: S314 - by expat
    except (ElementTree.ParseError, ValueError, LookupError):  # LookupError: unknown encoding
        page = ElementTree.Element("")  # the page of a proxy, or an empty body
    code, reason = _reason(page, response)
    elsewhere = response.status in (301, 302, 307) or code in _ELSEWHERE
    elsewhere |= response.status == 400 and not code  # the response to a HEAD has no body
    region = response.headers.get("x-amz-bucket-region") or page.findtext(".//{*}Region") or ""
    return code, reason, region if elsewhere and _REGION.fullmatch(region) else None
