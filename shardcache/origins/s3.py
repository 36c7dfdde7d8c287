"""Shards in S3 and in everything that speaks its protocol.

Built on the synchronous botocore client that s3fs brings along: it knows every
way to find credentials (environment, profile, SSO, role, web identity,
container, instance), every endpoint and addressing rule. Its retries are off;
`retry` is the only layer that repeats a request.

Each range request carries ``If-Match`` (or the version id), and the answer is
checked against what was asked: status, Content-Range and length. A client may
be used by many threads; make one per process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any, NoReturn

from shardcache.errors import AccessDeniedError, ConfigError, ShardNotFoundError
from shardcache.origins.base import (
    Checksum,
    ObjectInfo,
    TransientError,
    VersionChangedError,
    unchained,
)
from shardcache.origins.rangebody import TRANSIENT_STATUS, RangeBody, content_range, retry_after
from shardcache.origins.s3client import make_client
from shardcache.origins.s3shortcut import Shortcut
from shardcache.threads import undivided
from shardcache.urls import ShardURL, redact

__all__ = ["S3Origin"]

logger = logging.getLogger(__name__)

_EXPIRED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
)
_DENIED = _EXPIRED | {"InvalidToken"}
_TRANSIENT_CODES = frozenset(
    {"InternalError", "RequestTimeout", "RequestTimeoutException", "ServiceUnavailable"}
    | {"SlowDown", "Throttling", "ThrottlingException", "TooManyRequests"}
)
_HINTS = {
    "InvalidAccessKeyId": "the access key is unknown to this endpoint; check AWS_ACCESS_KEY_ID, "
    "the profile and endpoint_url",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key; check "
    "AWS_SECRET_ACCESS_KEY",
    "InvalidToken": "the session token is not valid here; check AWS_SESSION_TOKEN, or log in again",
    "InvalidObjectState": "it is archived (Glacier or Intelligent-Tiering); restore it first",
    "RequestTimeTooSkewed": "this machine's clock is off; synchronise it",
    "AccessDenied": "these credentials may not read it (a missing object looks the same to "
    "credentials without s3:ListBucket); check the policy, or pass another profile",
}
#: What errors and portals send, with status 200 too. Stores name the version of what they hold.
_PAGES = ("text/html", "text/xml", "application/xml")
_CHECKSUM_FIELDS = {
    "ChecksumCRC32": "crc32",
    "ChecksumCRC32C": "crc32c",
    "ChecksumCRC64NVME": "crc64nvme",
    "ChecksumSHA256": "sha256",
    "ChecksumSHA1": "sha1",
}


class S3Origin:
    """Reads ``s3://`` shards.

    Args:
        storage_options: as s3fs takes them: key, secret, token, profile, anon,
            requester_pays, endpoint_url, client_kwargs, config_kwargs.
        endpoint_url: overrides the endpoint of storage_options.
        connections: size of the connection pool.
        timeout: seconds without a byte before a connection counts as dead.
    """

    pins = True
    states_checksums = True

    def __init__(
        self,
        storage_options: Mapping[str, Any],
        *,
        endpoint_url: str | None = None,
        connections: int,
        timeout: float,
    ) -> None:
        self._options = dict(storage_options)
        self._endpoint = endpoint_url
        self._connections = connections
        self._timeout = timeout
        self._client: tuple[Any, Shortcut] | None = None
        self._guard = threading.Lock()
        self._extra: dict[str, str] = {}
        if self._options.get("requester_pays"):
            self._extra["RequestPayer"] = "requester"

    @property
    def endpoint(self) -> str:
        """The URL of the server that is asked, without credentials.

        Raises:
            ConfigError: the client cannot be set up.
        """
        return self._place(self._ready_client()[0])

    def prepare(self) -> None:
        """Make the client.

        Raises:
            ConfigError: it cannot be set up.
        """
        self._ready_client()

    def open(
        self, url: ShardURL, start: int, stop: int | None, pin: ObjectInfo | None = None
    ) -> RangeBody:
        """See `origin.Origin.open`."""
        arguments: dict[str, Any] = self._arguments(url, pin)
        if pin is not None and pin.etag and not pin.etag.startswith("W/"):  # those never match
            arguments["IfMatch"] = pin.etag
        # Also where it is all of it: what a gateway compresses on its way is no such range.
        span = f"bytes={start}-" if stop is None else f"bytes={start}-{stop - 1}"
        try:
            response = self._call("get_object", url, Range=span, **arguments)
        except _EmptyObjectError:
            # No range of an empty object is satisfiable; ask for all of it.
            response = self._call("get_object", url, **arguments)
        return _body(response, url, start, stop)

    def whole(self, url: ShardURL, most: int, listed: int | None) -> RangeBody | None:
        """See `origin.WholeOrigin.whole`. A range is answered without a checksum."""
        response = self._call(
            "get_object", url, ChecksumMode="ENABLED", **self._arguments(url, None)
        )
        body = _body(response, url, 0, None)
        size = body.info.size
        # What a gateway compresses on its way has another size than it has; no range is.
        plain = size == listed or not response.get("ContentEncoding")
        if size is None or body.stop != size or not plain:
            body.close()
            return None
        body.end_at(most)
        return body

    def stat(self, url: ShardURL) -> ObjectInfo:
        """See `origin.Origin.stat`."""
        response = self._call(
            "head_object", url, ChecksumMode="ENABLED", **self._arguments(url, None)
        )
        size = _length(response)
        if size is None:  # then it cannot be compared with any version
            raise ConfigError(f"{url}: the origin states no size without sending it", url=str(url))
        return _info(response, size)

    def _arguments(self, url: ShardURL, pin: ObjectInfo | None) -> dict[str, Any]:
        arguments: dict[str, Any] = dict(self._extra)
        version = url.version_id or (pin.version_id if pin else None)
        if version and version != "null":
            arguments["VersionId"] = version
        return arguments

    @unchained
    def _call(self, operation: str, url: ShardURL, **arguments: Any) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError
        from urllib3.exceptions import HTTPError

        bucket, key = url.bucket_and_key()
        for renewed in (False, True):
            client, shortcut = self._ready_client()
            try:
                response: dict[str, Any] | None = None
                if operation == "get_object":
                    response = shortcut.get(bucket, key, arguments)
                if response is None:
                    response = getattr(client, operation)(Bucket=bucket, Key=key, **arguments)
                    shortcut.learn(bucket, key)
            except (BotoCoreError, ClientError, OSError) as exn:
                if not renewed and _code(exn) in _EXPIRED:
                    logger.info("credentials expired; asking the chain for new ones")
                    self._forget(client)
                    continue
                _translate(exn, url, self._place(client))
            except (HTTPError, HTTPException) as exn:  # botocore reads errors unguarded
                raise TransientError(
                    f"{self._place(client)} broke off its answer: {redact(str(exn))}"
                ) from None
            except (ResponseParserError, ValueError, RuntimeError, OverflowError) as exn:
                raise ConfigError(
                    f"{url}: what {self._place(client)} answers is not S3: {redact(str(exn))}. "
                    "Check endpoint_url.",
                    url=str(url),
                ) from None
            return response
        raise AssertionError("unreachable")  # pragma: no cover

    def _place(self, client: Any) -> str:
        return redact(str(client.meta.endpoint_url))

    def _forget(self, client: Any) -> None:
        with self._guard:
            if self._client is not None and self._client[0] is client:
                self._client = None

    def _ready_client(self) -> tuple[Any, Shortcut]:
        with self._guard:
            if self._client is None:
                with undivided():  # a fork: it imports, and makes a context of OpenSSL
                    client = self._make_client()
                self._client = client, Shortcut(client)
            return self._client

    def _make_client(self) -> Any:
        return make_client(
            self._options,
            endpoint_url=self._endpoint,
            connections=self._connections,
            timeout=self._timeout,
        )


class _EmptyObjectError(TransientError):
    """416 for a range that starts at 0; in answer to anything else it is mere trouble."""


def _body(response: dict[str, Any], url: ShardURL, start: int, stop: int | None) -> RangeBody:
    stream = response["Body"]
    length = _length(response)  # a gateway may send chunks instead
    status = response["ResponseMetadata"]["HTTPStatusCode"]
    if status not in (200, 206):
        stream.close()
        raise ConfigError(f"{url}: {status} is no answer to a read. Check endpoint_url.")
    if status == 200:
        info = _info(response, length)
        if not info.identifiable and response.get("ContentType", "").startswith(_PAGES):
            stream.close()
            raise TransientError(f"a page of {response['ContentType']} came in place of the object")
        # The range was ignored: all bytes will come, from the first.
        return RangeBody(info, 0, length, stream._raw_stream)
    try:
        total, end = content_range(response.get("ContentRange"), length, start, stop)
    except TransientError:
        stream.close()
        raise
    return RangeBody(_info(response, total), start, end, stream._raw_stream)


def _length(response: dict[str, Any]) -> int | None:
    length: int | None = response.get("ContentLength")
    return None if length is None or length < 0 else length


def _info(response: dict[str, Any], size: int | None) -> ObjectInfo:
    modified = response.get("LastModified")
    checksum = None
    if response.get("ChecksumType") != "COMPOSITE":
        for name, algorithm in _CHECKSUM_FIELDS.items():
            if response.get(name):
                checksum = Checksum(algorithm, response[name])
                break
    return ObjectInfo(
        size=size,
        etag=response.get("ETag"),
        version_id=response.get("VersionId"),
        modified=modified.isoformat() if modified is not None else None,
        checksum=checksum,
    )


def _code(exn: Exception) -> str:
    response = getattr(exn, "response", None)
    if not isinstance(response, dict):
        return ""
    return str(response.get("Error", {}).get("Code", ""))


def _login_errors() -> tuple[type[Exception], ...]:
    """What botocore raises when somebody has to log in again; the last is not in old ones."""
    from botocore import exceptions

    names = ("SSOError", "TokenRetrievalError", "LoginError")
    return tuple(getattr(exceptions, name) for name in names if hasattr(exceptions, name))


def _translate(exn: Exception, url: ShardURL, place: str) -> NoReturn:
    """Raise what the engine understands instead of what botocore says.

    Not "from" it: botocore's texts name whole URLs, user part included, and would be
    printed with every traceback.
    """
    from botocore import exceptions

    if isinstance(exn, exceptions.ClientError):
        _translate_response(exn, url, place)
    if isinstance(exn, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
        raise AccessDeniedError(
            f"{url} cannot be read: no AWS credentials were found. Set AWS_PROFILE or "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass "
            "storage_options={'anon': True} for a public bucket.",
            url=str(url),
        ) from None
    if isinstance(exn, (exceptions.ParamValidationError, exceptions.InvalidRegionError)):
        raise ConfigError(f"{url} is not a valid S3 object: {redact(str(exn))}") from None
    if isinstance(exn, (exceptions.CredentialRetrievalError, *_login_errors())):
        raise AccessDeniedError(
            f"{url} cannot be read: credentials could not be had: {redact(str(exn))}. "
            "Log in again (aws sso login), or check the role and the profile.",
            url=str(url),
        ) from None
    if isinstance(exn, exceptions.SSLError) and "[Errno 2]" in str(exn):
        raise ConfigError(
            f"{url}: the certificates to trust are not where AWS_CA_BUNDLE or verify say. "
            "Correct the path.",
            url=str(url),
        ) from None
    if isinstance(exn, exceptions.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(exn):
        raise ConfigError(
            f"{url}: the certificate of {place} is not trusted here. Set AWS_CA_BUNDLE, or pass "
            "storage_options={'client_kwargs': {'verify': '/path/to/ca.pem'}}.",
            url=str(url),
        ) from None
    if isinstance(exn, (exceptions.ConnectionError, exceptions.HTTPClientError, OSError)):
        timed_out = isinstance(
            exn, (exceptions.ConnectTimeoutError, exceptions.ReadTimeoutError, TimeoutError)
        )
        reason = redact(str(exn)).partition("\n")[0]
        raise TransientError(f"{place} does not answer: {reason}", timed_out=timed_out) from None
    if isinstance(exn, exceptions.BotoCoreError):
        raise ConfigError(
            f"{url} cannot be read from {place}: {redact(str(exn))}", url=str(url)
        ) from None
    raise exn


def _translate_response(exn: Any, url: ShardURL, place: str) -> NoReturn:
    code = _code(exn)
    meta = exn.response.get("ResponseMetadata", {})
    status = int(meta.get("HTTPStatusCode", 0))
    headers = meta.get("HTTPHeaders", {})
    said = redact(str(exn.response.get("Error", {}).get("Message", "")))
    if status == 412 or code == "PreconditionFailed":
        raise VersionChangedError(str(url)) from None
    if status == 416 or code == "InvalidRange":
        if headers.get("content-range", "bytes */0").endswith("/0"):
            raise _EmptyObjectError(f"{place} answered {status} {code}") from None
        raise VersionChangedError(f"{url} became shorter") from None
    if code in _TRANSIENT_CODES or status in TRANSIENT_STATUS:
        raise TransientError(
            f"{place} answered {status} {code}", retry_after=retry_after(headers)
        ) from None
    if status == 404:
        bucket, _ = url.bucket_and_key()
        what = f"the bucket {bucket} does not exist" if code == "NoSuchBucket" else "not found"
        raise ShardNotFoundError(
            f"{url}: {what} at {place} (404). Check the pattern and the endpoint.",
            url=str(url),
        ) from None
    if status in (401, 403) or code in _DENIED:
        hint = _HINTS.get(code, "log in again" if code in _EXPIRED else _HINTS["AccessDenied"])
        raise AccessDeniedError(
            f"{url}: access denied by {place} ({status} {code}): {hint}.", url=str(url)
        ) from None
    raise ConfigError(
        f"{url}: {place} refused the request ({status} {code}: {said}). "
        "Check the region, the endpoint and the bucket's name.",
        url=str(url),
    ) from None
