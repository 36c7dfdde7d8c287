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
from typing import Any, NoReturn

from shardcache.errors import AccessDeniedError, ConfigError, ShardNotFoundError
from shardcache.origin import Checksum, ObjectInfo, TransientError, VersionChangedError
from shardcache.rangebody import TRANSIENT_STATUS, RangeBody, content_range, retry_after
from shardcache.urls import ShardURL, redact

__all__ = ["S3Origin"]

logger = logging.getLogger(__name__)

_EXPIRED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
)
_TRANSIENT_CODES = frozenset(
    {"InternalError", "RequestTimeout", "RequestTimeoutException", "ServiceUnavailable"}
    | {"SlowDown", "Throttling", "ThrottlingException", "TooManyRequests"}
)
_HINTS = {
    "InvalidAccessKeyId": "the access key is unknown to this endpoint; check AWS_ACCESS_KEY_ID, "
    "the profile and endpoint_url",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key; check "
    "AWS_SECRET_ACCESS_KEY",
    "RequestTimeTooSkewed": "this machine's clock is off; synchronise it",
    "AccessDenied": "these credentials may not read it (a missing object looks the same to "
    "credentials without s3:ListBucket); check the policy, or pass another profile",
}
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
        self._client: Any = None
        self._guard = threading.Lock()
        self._extra: dict[str, str] = {}
        if self._options.get("requester_pays"):
            self._extra["RequestPayer"] = "requester"

    def open(
        self, url: ShardURL, start: int, stop: int | None, pin: ObjectInfo | None = None
    ) -> RangeBody:
        """See `origin.Origin.open`."""
        span = f"bytes={start}-" if stop is None else f"bytes={start}-{stop - 1}"
        arguments: dict[str, Any] = self._arguments(url, pin)
        if pin is not None and pin.etag:
            arguments["IfMatch"] = pin.etag
        try:
            response = self._call("get_object", url, Range=span, **arguments)
        except _EmptyObjectError:
            # No range of an empty object is satisfiable; ask for all of it.
            response = self._call("get_object", url, **arguments)
        return _body(response, url, start, stop)

    def stat(self, url: ShardURL) -> ObjectInfo:
        """See `origin.Origin.stat`."""
        response = self._call(
            "head_object", url, ChecksumMode="ENABLED", **self._arguments(url, None)
        )
        return _info(response, int(response["ContentLength"]))

    def _arguments(self, url: ShardURL, pin: ObjectInfo | None) -> dict[str, Any]:
        arguments: dict[str, Any] = dict(self._extra)
        version = url.version_id or (pin.version_id if pin else None)
        if version and version != "null":
            arguments["VersionId"] = version
        return arguments

    def _call(self, operation: str, url: ShardURL, **arguments: Any) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError

        bucket, key = url.bucket_and_key()
        for renewed in (False, True):
            client = self._ready_client()
            try:
                response: dict[str, Any] = getattr(client, operation)(
                    Bucket=bucket, Key=key, **arguments
                )
            except (BotoCoreError, ClientError, OSError) as exn:
                if not renewed and _code(exn) in _EXPIRED:
                    logger.info("credentials expired; asking the chain for new ones")
                    self._forget(client)
                    continue
                _translate(exn, url, self._place(client))
            return response
        raise AssertionError("unreachable")  # pragma: no cover

    def _place(self, client: Any) -> str:
        return redact(str(client.meta.endpoint_url))

    def _forget(self, client: Any) -> None:
        with self._guard:
            if self._client is client:
                self._client = None

    def _ready_client(self) -> Any:
        with self._guard:
            if self._client is None:
                self._client = self._make_client()
            return self._client

    def _make_client(self) -> Any:
        import botocore.exceptions
        import botocore.session
        from botocore import UNSIGNED
        from botocore.config import Config

        options = self._options
        client_kwargs = dict(options.get("client_kwargs") or {})
        settings: dict[str, Any] = {
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "max_pool_connections": self._connections + 1,  # and one for the checksum
            "connect_timeout": min(self._timeout, 10.0),
            "read_timeout": self._timeout,
            "tcp_keepalive": True,
            # Whole-object checksums are compared by the engine, which sees all parts.
            "response_checksum_validation": "when_required",
            **(options.get("config_kwargs") or {}),
        }
        if options.get("anon"):
            settings["signature_version"] = UNSIGNED
        endpoint = (
            self._endpoint or options.get("endpoint_url") or client_kwargs.get("endpoint_url")
        )
        client_kwargs["endpoint_url"] = endpoint
        client_kwargs.setdefault("use_ssl", options.get("use_ssl", True))
        try:
            session = botocore.session.Session(profile=options.get("profile"))
            if options.get("key"):
                session.set_credentials(options["key"], options.get("secret"), options.get("token"))
            if not client_kwargs.get("region_name") and not session.get_config_variable("region"):
                # Any region will do: S3 answers with the right one and botocore follows.
                client_kwargs["region_name"] = "us-east-1"
            return session.create_client("s3", config=Config(**settings), **client_kwargs)
        except (botocore.exceptions.BotoCoreError, ValueError, TypeError) as exn:
            raise ConfigError(
                f"the S3 client cannot be set up: {redact(str(exn))}. "
                "Check endpoint_url, the profile and storage_options.",
            ) from exn


class _EmptyObjectError(Exception):
    """416 for a range that starts at 0."""


def _body(response: dict[str, Any], url: ShardURL, start: int, stop: int | None) -> RangeBody:
    stream = response["Body"]
    length = int(response["ContentLength"])
    status = response["ResponseMetadata"]["HTTPStatusCode"]
    text = response.get("ContentRange")
    if status != 206 or text is None:
        # The range was ignored: all bytes will come, from the first.
        return RangeBody(_info(response, length), 0, length, stream._raw_stream)
    try:
        total, end = content_range(text, length, start, stop)
    except TransientError:
        stream.close()
        raise
    return RangeBody(_info(response, total), start, end, stream._raw_stream)


def _info(response: dict[str, Any], size: int) -> ObjectInfo:
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


def _translate(exn: Exception, url: ShardURL, place: str) -> NoReturn:
    """Raise what the engine understands instead of what botocore says."""
    from botocore import exceptions

    if isinstance(exn, exceptions.ClientError):
        _translate_response(exn, url, place)
    if isinstance(exn, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
        raise AccessDeniedError(
            f"{url} cannot be read: no AWS credentials were found. Set AWS_PROFILE or "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass "
            "storage_options={'anon': True} for a public bucket.",
            url=str(url),
        ) from exn
    if isinstance(exn, (exceptions.ParamValidationError, exceptions.InvalidRegionError)):
        raise ConfigError(f"{url} is not a valid S3 object: {redact(str(exn))}") from exn
    if isinstance(exn, (exceptions.CredentialRetrievalError, exceptions.SSOError)):
        raise AccessDeniedError(
            f"{url} cannot be read: credentials could not be had: {redact(str(exn))}. "
            "Log in again (aws sso login), or check the role and the profile.",
            url=str(url),
        ) from exn
    if isinstance(exn, exceptions.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(exn):
        raise ConfigError(
            f"{url}: the certificate of {place} is not trusted here. Set AWS_CA_BUNDLE, or pass "
            "storage_options={'client_kwargs': {'verify': '/path/to/ca.pem'}}.",
            url=str(url),
        ) from exn
    if isinstance(exn, (exceptions.ConnectionError, exceptions.HTTPClientError, OSError)):
        timed_out = isinstance(
            exn, (exceptions.ConnectTimeoutError, exceptions.ReadTimeoutError, TimeoutError)
        )
        reason = redact(str(exn)).partition("\n")[0]
        raise TransientError(f"{place} does not answer: {reason}", timed_out=timed_out) from exn
    if isinstance(exn, exceptions.BotoCoreError):
        raise ConfigError(
            f"{url} cannot be read from {place}: {redact(str(exn))}", url=str(url)
        ) from exn
    raise exn


def _translate_response(exn: Any, url: ShardURL, place: str) -> NoReturn:
    code = _code(exn)
    meta = exn.response.get("ResponseMetadata", {})
    status = int(meta.get("HTTPStatusCode", 0))
    headers = meta.get("HTTPHeaders", {})
    said = redact(str(exn.response.get("Error", {}).get("Message", "")))
    if status == 412 or code == "PreconditionFailed":
        raise VersionChangedError(str(url)) from exn
    if status == 416 or code == "InvalidRange":
        if headers.get("content-range", "bytes */0").endswith("/0"):
            raise _EmptyObjectError from exn
        raise VersionChangedError(f"{url} became shorter") from exn
    if code in _TRANSIENT_CODES or status in TRANSIENT_STATUS:
        raise TransientError(
            f"{place} answered {status} {code}", retry_after=retry_after(headers)
        ) from exn
    if status == 404:
        bucket, _ = url.bucket_and_key()
        what = f"the bucket {bucket} does not exist" if code == "NoSuchBucket" else "not found"
        raise ShardNotFoundError(
            f"{url}: {what} at {place} (404). Check the pattern and the endpoint.",
            url=str(url),
        ) from exn
    if status in (401, 403) or code in _EXPIRED:
        hint = _HINTS.get(code, "log in again" if code in _EXPIRED else _HINTS["AccessDenied"])
        raise AccessDeniedError(
            f"{url}: access denied by {place} ({status} {code}): {hint}.", url=str(url)
        ) from exn
    raise ConfigError(
        f"{url}: {place} refused the request ({status} {code}: {said}). "
        "Check the region, the endpoint and the bucket's name.",
        url=str(url),
    ) from exn
