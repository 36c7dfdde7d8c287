"""Shards in S3 and in everything that speaks its protocol.

Built on the synchronous botocore client that s3fs brings along: it knows every way to find
credentials (environment, profile, SSO, role, web identity, container, instance) and every
addressing rule. Its retries are off; `retry` is the only layer that repeats a request.

Each range request carries ``If-Match`` (or the version id), and the answer is checked against
what was asked: status, Content-Range and length. A client may be used by many threads; make one
per process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from http.client import HTTPException
from typing import Any, NoReturn
from urllib.parse import urlsplit

from shardcache.config import __version__
from shardcache.errors import AccessDeniedError, ConfigError, ShardNotFoundError
from shardcache.origins.base import (
    Checksum,
    ObjectInfo,
    TransientError,
    VersionChangedError,
    unchained,
)
from shardcache.origins.endpoints import s3_endpoint
from shardcache.origins.http import (
    TRANSIENT_STATUS,
    RangeBody,
    content_length,
    object_info,
    range_body,
    retry_after,
)
from shardcache.threads import undivided
from shardcache.urls import ShardURL, redact

__all__ = ["S3Origin", "make_client"]

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
#: Checksums, the ones that cost least first.
_CHECKSUMS = ("crc32", "crc32c", "crc64nvme", "sha256", "sha1")

#: Botocore's loaders with all they have read, by where they look for descriptions. The first
#: client of a process takes a fifth of a second, most of it for a megabyte of JSON that describes
#: S3's interface; later ones take a tenth of that, those of forked workers as well.
_loaders: dict[str | None, Any] = {}


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
        self._extra: dict[str, Any] = {}
        if self._options.get("requester_pays"):
            self._extra["RequestPayer"] = "requester"

    def client(self) -> Any:
        """The client of botocore, made if need be.

        Raises:
            ConfigError: it cannot be set up.
        """
        with self._guard:
            if self._client is None:
                with undivided():  # a fork: it imports, and makes a context of OpenSSL
                    self._client = make_client(
                        self._options,
                        endpoint_url=self._endpoint,
                        connections=self._connections,
                        timeout=self._timeout,
                    )
            return self._client

    def open(
        self, url: ShardURL, start: int, stop: int | None, pin: ObjectInfo | None = None
    ) -> RangeBody:
        """See `base.Origin.open`."""
        arguments = self._arguments(url, pin)
        if pin is not None and pin.etag and not pin.etag.startswith("W/"):  # those never match
            arguments["IfMatch"] = pin.etag
        # Also where it is all of it: what a gateway compresses on its way is no such range.
        span = f"bytes={start}-" if stop is None else f"bytes={start}-{stop - 1}"
        try:
            answer = self._call("get_object", url, Range=span, **arguments)
        except _EmptyObjectError:
            # No range of an empty object is satisfiable; ask for all of it.
            answer = self._call("get_object", url, **arguments)
        return _body(answer, url, start, stop)

    def whole(self, url: ShardURL, most: int, listed: int | None) -> RangeBody | None:
        """See `base.WholeOrigin.whole`. A range is answered without a checksum."""
        arguments = self._arguments(url, None)
        answer = self._call("get_object", url, ChecksumMode="ENABLED", **arguments)
        body = _body(answer, url, 0, None)
        size = body.info.size
        # What a gateway compresses on its way has another size than it has; no range is.
        plain = size == listed or not answer.get("ContentEncoding")
        if size is None or body.stop != size or not plain:
            body.close()
            return None
        body.end_at(most)
        return body

    def stat(self, url: ShardURL) -> ObjectInfo:
        """See `base.Origin.stat`."""
        arguments = self._arguments(url, None)
        answer = self._call("head_object", url, ChecksumMode="ENABLED", **arguments)
        headers = answer["ResponseMetadata"]["HTTPHeaders"]
        size = content_length(headers)
        if size is None:  # then it cannot be compared with any version
            raise ConfigError(f"{url}: the origin states no size without sending it", url=str(url))
        return _info(headers, size)

    def list_page(self, url: ShardURL, **options: Any) -> dict[str, Any]:
        """One answer of ListObjectsV2: the keys that begin as ``url``, which may be a bucket, does.

        Raises:
            As `base.Origin.open`.
        """
        page: dict[str, Any] = self._call("list_objects_v2", url, **self._extra, **options)
        return page

    def _arguments(self, url: ShardURL, pin: ObjectInfo | None) -> dict[str, Any]:
        version = url.version_id or (pin.version_id if pin else None)
        if version and version != "null":
            return {**self._extra, "VersionId": version}
        return dict(self._extra)

    @unchained
    def _call(self, operation: str, url: ShardURL, **arguments: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError
        from urllib3.exceptions import HTTPError

        bucket, key = url.bucket_and_key()
        arguments["Bucket"] = bucket
        arguments["Prefix" if operation == "list_objects_v2" else "Key"] = key
        for renewed in (False, True):
            client = self.client()
            place = redact(str(client.meta.endpoint_url))
            try:
                return getattr(client, operation)(**arguments)
            except (BotoCoreError, ClientError, OSError) as exn:
                if not renewed and _code(exn) in _EXPIRED:
                    logger.info("credentials expired; asking the chain for new ones")
                    with self._guard:
                        if self._client is client:
                            self._client = None
                    continue
                _translate(exn, url, place)
            except (HTTPError, HTTPException) as exn:  # botocore reads errors unguarded
                raise TransientError(f"{place} broke off its answer: {redact(str(exn))}") from None
            except (ResponseParserError, ValueError, RuntimeError, OverflowError) as exn:
                raise ConfigError(
                    f"{url}: what {place} answers is not S3: {redact(str(exn))}. "
                    "Check endpoint_url.",
                    url=str(url),
                ) from None
        raise AssertionError("unreachable")  # pragma: no cover


def make_client(
    options: Mapping[str, Any], *, endpoint_url: str | None, connections: int, timeout: float
) -> Any:
    """A client of botocore for many threads; its retries are off.

    Args:
        options, endpoint_url, connections, timeout: as for `S3Origin`.

    Raises:
        ConfigError: it cannot be set up.
    """
    import botocore
    import botocore.exceptions
    from botocore import UNSIGNED
    from botocore.config import Config

    client_kwargs = dict(options.get("client_kwargs") or {})
    settings: dict[str, Any] = {
        "max_pool_connections": connections + 1,  # and one for the checksum
        "connect_timeout": min(timeout, 10.0),
        "read_timeout": timeout,
        "tcp_keepalive": True,
        # Whole-object checksums are compared by the engine, which sees all parts.
        "response_checksum_validation": "when_required",
        # Botocore's own is put together anew for each request, at a twentieth of its cost.
        "user_agent": f"shardcache/{__version__} botocore/{botocore.__version__}",
        **(options.get("config_kwargs") or {}),
        # Whatever config_kwargs say for s3fs: attempts must not multiply.
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "ignore_configured_endpoint_urls": True,  # `s3_endpoint` has looked at them
    }
    if options.get("anon"):
        settings["signature_version"] = UNSIGNED
    client_kwargs["endpoint_url"] = s3_endpoint(options, endpoint_url)
    client_kwargs.setdefault("use_ssl", options.get("use_ssl", True))
    try:
        session = _session(options.get("profile"))
        if options.get("key"):
            session.set_credentials(options["key"], options.get("secret"), options.get("token"))
        if not client_kwargs.get("region_name") and not session.get_config_variable("region"):
            # Any region will do: S3 answers with the right one and botocore follows.
            client_kwargs["region_name"] = "us-east-1"
        client = session.create_client("s3", config=Config(**settings), **client_kwargs)
    except (botocore.exceptions.BotoCoreError, ValueError, TypeError) as exn:
        raise ConfigError(
            f"the S3 client cannot be set up: {redact(str(exn))}. "
            "Check endpoint_url, the profile and storage_options.",
        ) from None
    if not (urlsplit(client.meta.endpoint_url).hostname or "").endswith(".amazonaws.com"):
        client.meta.events.register_last("before-parameter-build.s3", _stay)
    return client


def _session(profile: str | None) -> Any:
    import botocore.loaders
    import botocore.session

    session = botocore.session.Session(profile=profile)
    where = session.get_config_variable("data_path")
    loader = _loaders.get(where)
    if loader is None:
        loader = _loaders[where] = botocore.loaders.create_loader(where)
        # Botocore looks through the directories of all its 400 services for one name,
        # which is a third of the time that a client takes.
        loader.list_available_services = lambda type_name: ["s3"]
    session.register_component("data_loader", loader)
    return session


def _stay(context: dict[str, Any], **_: Any) -> None:
    """Keep botocore from looking for a bucket's region where there are none.

    A gateway that answers 301 (a web server in front that wants https) would be asked
    for the bucket, answer 301, be asked again: some hundred requests per attempt.
    """
    context.setdefault("s3_redirect", {})["redirected"] = True


class _EmptyObjectError(TransientError):
    """416 for a range that starts at 0; in answer to anything else it is mere trouble."""


def _body(answer: Mapping[str, Any], url: ShardURL, start: int, stop: int | None) -> RangeBody:
    meta, raw = answer["ResponseMetadata"], answer["Body"]._raw_stream
    status, headers = meta["HTTPStatusCode"], meta["HTTPHeaders"]
    try:
        if status not in (200, 206):
            raise ConfigError(f"{url}: {status} is no answer to a read. Check endpoint_url.")
        body = range_body(status, headers, raw, start, stop, _info)
        page = headers.get("content-type", "")
        if status == 200 and not body.info.identifiable and page.startswith(_PAGES):
            raise TransientError(f"a page of {page} came in place of the object")
    except Exception:
        raw.close()
        raise
    return body


def _info(headers: Mapping[str, str], size: int | None) -> ObjectInfo:
    checksum = None
    if headers.get("x-amz-checksum-type") != "COMPOSITE":
        for algorithm in _CHECKSUMS:
            if stated := headers.get(f"x-amz-checksum-{algorithm}"):
                checksum = Checksum(algorithm, stated)
                break
    version = headers.get("x-amz-version-id")
    return replace(object_info(headers, size), version_id=version, checksum=checksum)


def _code(exn: Exception) -> str:
    response = getattr(exn, "response", None)
    if not isinstance(response, dict):
        return ""
    return str(response.get("Error", {}).get("Code", ""))


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
    # What says that somebody has to log in again; the last is not in old versions of botocore.
    names = ("CredentialRetrievalError", "SSOError", "TokenRetrievalError", "LoginError")
    if isinstance(exn, tuple(getattr(exceptions, n) for n in names if hasattr(exceptions, n))):
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
