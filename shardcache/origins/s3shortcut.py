"""GetObject at half the cost: what botocore decided for one request holds for the next.

Botocore works each request out anew: parameters, endpoint rules, events, a model of the
answer. That takes a millisecond of processor time, which is most of what a small shard costs.
So the first request for a bucket is botocore's own, and is looked at as it leaves; the next
ones differ from it in their key, range and condition alone, are signed by botocore's signer and
sent by its HTTP session, with all that concerns TLS, proxies, time-outs and credentials.

What looks unusual in the first request (another kind of signature, an access point), or is
answered as if the bucket had moved, is left to botocore.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

__all__ = ["Shortcut"]

logger = logging.getLogger(__name__)

#: Of what `S3Origin` says in words, how it is said in headers.
_HEADERS = {"Range": "Range", "IfMatch": "If-Match", "ChecksumMode": "x-amz-checksum-mode"}
#: What is said of all requests of a client, and is in its first one.
_CONSTANT = frozenset({"RequestPayer"})
#: Headers that belong to one request.
_OWN = frozenset(
    {"authorization", "x-amz-date", "x-amz-security-token", "x-amz-content-sha256"}
    | {"range", "if-match", "x-amz-checksum-mode", "amz-sdk-invocation-id", "amz-sdk-request"}
)
_SIGNED = re.compile(r"AWS4-HMAC-SHA256 Credential=.*/([^/,]+)/s3/aws4_request,")
_REFUSED = 300
#: Answers that botocore may know what to do about: look for the bucket in another region.
_ELSEWHERE = frozenset({301, 302, 303, 307, 308})
_OTHER_REGION = "AuthorizationHeaderMalformed"
#: Of an error's text, which is XML of some hundred bytes.
_MOST = 64 * 1024
_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,100})</Code>")
_MESSAGE = re.compile(rb"<Message>([^<]{1,1000})</Message>")
_FIELDS = {
    "ETag": "etag",
    "ContentEncoding": "content-encoding",
    "ContentRange": "content-range",
    "ContentType": "content-type",
    "VersionId": "x-amz-version-id",
    "ChecksumType": "x-amz-checksum-type",
    "ChecksumCRC32": "x-amz-checksum-crc32",
    "ChecksumCRC32C": "x-amz-checksum-crc32c",
    "ChecksumCRC64NVME": "x-amz-checksum-crc64nvme",
    "ChecksumSHA256": "x-amz-checksum-sha256",
    "ChecksumSHA1": "x-amz-checksum-sha1",
}


@dataclass(frozen=True, slots=True)
class _Template:
    """What the requests for one bucket have in common; no region: not signed."""

    prefix: str
    headers: Mapping[str, str]
    region: str | None


class _Stream:
    """As much of botocore's ``StreamingBody`` as is used."""

    def __init__(self, raw: Any) -> None:
        self._raw_stream = raw

    def close(self) -> None:
        self._raw_stream.close()


class Shortcut:
    """The requests of one botocore client; safe between threads.

    Args:
        client: of S3.
    """

    def __init__(self, client: Any) -> None:
        self._templates: dict[str, _Template] = {}
        self._last = threading.local()
        self._config = client.meta.config
        try:  # not botocore's promise; without them every request goes the long way
            self._credentials = client._request_signer._credentials
            self._session = client._endpoint.http_session
        except AttributeError as exn:
            logger.debug("no shortcut with this botocore: %s", exn)
            return
        client.meta.events.register_last("before-send.s3.GetObject", self._look)

    def _look(self, request: Any, **_: Any) -> None:
        self._last.request = request

    def learn(self, bucket: str, key: str) -> None:
        """Remember what the calling thread's last request, which was answered, was like."""
        request = self._last.__dict__.pop("request", None)
        name = quote(key, safe="/~")
        if request is None or not request.url.endswith(f"/{name}"):
            return  # another version, or not the usual way to address it
        said = {name.lower(): _text(value) for name, value in request.headers.items()}
        signature = said.get("authorization")
        signed = _SIGNED.match(signature or "")
        if signature is not None and signed is None:
            return
        headers = {name: value for name, value in said.items() if name not in _OWN}
        region = signed[1] if signed else None
        self._templates[bucket] = _Template(request.url.removesuffix(name), headers, region)

    def get(self, bucket: str, key: str, arguments: Mapping[str, str]) -> dict[str, Any] | None:
        """Ask for an object.

        Args:
            bucket: its bucket.
            key: its name.
            arguments: of ``get_object``.

        Returns:
            The answer as ``get_object`` returns it; None where that is to be asked.

        Raises:
            botocore's errors, as ``get_object``.
        """
        template = self._templates.get(bucket)
        if template is None or arguments.keys() - _HEADERS.keys() - _CONSTANT:
            return None
        answer = self._session.send(self._request(template, key, arguments))
        if answer.status_code < _REFUSED:
            return _response(answer)
        error = _error(answer)
        code = error.response["Error"]["Code"]
        if answer.status_code not in _ELSEWHERE and code != _OTHER_REGION:
            raise error
        self._templates.pop(bucket, None)
        return None

    def _request(self, template: _Template, key: str, arguments: Mapping[str, str]) -> Any:
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest

        headers = dict(template.headers)
        for name, value in arguments.items():
            if name in _HEADERS:
                headers[_HEADERS[name]] = value
        request = AWSRequest("GET", template.prefix + quote(key, safe="/~"), headers=headers)
        if template.region is not None:
            request.context.update(client_config=self._config, signing={})
            credentials = self._credentials.get_frozen_credentials()
            S3SigV4Auth(credentials, "s3", template.region).add_auth(request)
        prepared = request.prepare()
        prepared.stream_output = True
        return prepared


def _text(value: Any) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)


def _response(answer: Any) -> dict[str, Any]:
    headers = answer.raw.headers
    found: dict[str, Any] = {
        "Body": _Stream(answer.raw),
        "ResponseMetadata": {"HTTPStatusCode": answer.status_code},
    }
    for name, header in _FIELDS.items():
        if (value := headers.get(header)) is not None:
            found[name] = value
    if (length := headers.get("content-length")) is not None:
        found["ContentLength"] = int(length)
    if (modified := headers.get("last-modified")) is not None:
        found["LastModified"] = parsedate_to_datetime(modified)
    return found


def _error(answer: Any) -> Any:
    """What botocore would have raised."""
    from botocore.exceptions import ClientError

    text = answer.raw.read(_MOST)
    answer.raw.close()
    code, message = _CODE.search(text), _MESSAGE.search(text)
    said = {
        "Code": code[1].decode() if code else str(answer.status_code),
        "Message": message[1].decode("utf-8", "replace") if message else "",
    }
    headers = {name.lower(): value for name, value in answer.raw.headers.items()}
    meta = {"HTTPStatusCode": answer.status_code, "HTTPHeaders": headers}
    return ClientError({"Error": said, "ResponseMetadata": meta}, "GetObject")
