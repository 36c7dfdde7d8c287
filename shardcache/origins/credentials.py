"""AWS credentials that cannot be had: not yet, or not at all.

The services that hand them out throttle, too: the metadata service of an EC2 instance, those of
containers, STS. Then botocore's chain ends as if there were no credentials. This module tells the
two cases apart. Errors that end by themselves are patient (`TransientError.patient`), and none is
remembered. After a failure, the workers of a node take turns (`one_at_a_time`).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import tempfile
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from shardcache import clock
from shardcache.errors import AccessDeniedError, ConfigError
from shardcache.origins.addresses import Dialer
from shardcache.origins.base import TransientError, read_all
from shardcache.origins.connection import Transport
from shardcache.urls import ShardURL, quoted

#: Errors of botocore that end with a login: an SSO token is missing or has expired.
_LOGIN = frozenset({"LoginError", "SSOError", "TokenRetrievalError"})
#: Errors of a service that does not answer, or refuses for now.
_SERVICE = frozenset(
    {"ConnectionError", "CredentialRetrievalError", "HTTPClientError", "MetadataRetrievalError"}
)
#: STS says this, with 400, if the provider of a web identity does not answer it.
_NO_PROVIDER = "IDPCommunicationError"
_METADATA = "http://169.254.169.254"
#: Seconds that the metadata service has to answer; it is on the same machine.
_ANSWER = 2.0
#: Seconds that a process waits for its turn: longer than a chain takes that asks several services.
_TURN = 30.0
_LOOK = 0.02
#: Seconds that a turn lasts after a failure: a service that throttles gets no request meanwhile.
_REST = 1.0


@functools.cache
def throttling_codes() -> tuple[frozenset[str], frozenset[str]]:
    """AWS's codes for throttling, and for faults that pass, out of botocore's tables."""
    from botocore.retries.standard import ThrottledRetryableChecker, TransientRetryableChecker

    throttled = frozenset(ThrottledRetryableChecker._THROTTLED_ERROR_CODES)
    return throttled, frozenset(TransientRetryableChecker._TRANSIENT_ERROR_CODES)


def login_ended(profile: str | None) -> TransientError:
    """The error for credentials that ended while a process was at work."""
    return TransientError(f"the login has ended. Log in: {_command(profile)}", patient=True)


def _command(profile: str | None) -> str:
    return f"aws sso login --profile {profile}" if profile else "aws sso login"


def chain_error(exn: Exception, shard: ShardURL, profile: str | None, *, worked: bool) -> Exception:
    """The error of ours for an error of botocore's chain.

    Args:
        exn: botocore's.
        shard: the shard that was to be read.
        profile: the profile in force, for the advice.
        worked: whether this process has read with credentials before.
    """
    reason = quoted(str(exn))
    kinds = {kind.__name__ for kind in type(exn).__mro__}
    response = getattr(exn, "response", {})
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = response.get("Error", {}).get("Code")
    is_throttled = code == _NO_PROVIDER or code in throttling_codes()[0]
    is_program = getattr(exn, "kwargs", {}).get("provider") == "custom-process"
    if "ParamValidationError" in kinds:
        return ConfigError(f"{shard} cannot be read: {reason}. Check the URL.", url=str(shard))
    busy = is_throttled or status == 429 or status >= 500
    if busy or (kinds & _SERVICE and not is_program):
        return TransientError(f"the source of credentials does not answer: {reason}", patient=True)
    if "NoCredentialsError" in kinds and _metadata_service_is_busy():
        text = "the metadata service of this machine gives no credentials now"
        return TransientError(text, patient=True)
    if worked and kinds & {*_LOGIN, "NoCredentialsError"}:
        return login_ended(profile)
    return AccessDeniedError(
        f"{shard} cannot be read: {reason}. Log in ({_command(profile)}), set AWS_PROFILE or "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass "
        "storage_options={'anon': True} for a public bucket.",
        url=str(shard),
    )


def _metadata_service_is_busy() -> bool:
    """Whether this is an EC2 instance with a role, or may be one.

    Botocore tells neither from a machine without such a service, which does not answer at all.
    """
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    service = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or _METADATA
    latest = f"{service.rstrip('/')}/latest"
    parts = urlsplit(service)
    try:
        Dialer().connect(parts.hostname or "", parts.port or 80, _ANSWER).close()
    except (OSError, ValueError):
        return False
    transport = Transport(timeout=_ANSWER, proxies={})
    try:
        limit = {"X-aws-ec2-metadata-token-ttl-seconds": "60", "Content-Length": "0"}
        answer = transport.request("PUT", f"{latest}/api/token", limit)
        token = read_all(answer, 4096).decode("latin-1")
        if answer.status == 200:
            path = f"{latest}/meta-data/iam/security-credentials/"
            answer = transport.request("GET", path, {"X-aws-ec2-metadata-token": token})
            answer.close()
            return answer.status != 404  # no role
    except (OSError, TransientError):  # it is there, and too busy to answer
        return True
    return answer.status == 429 or answer.status >= 500


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let one process of this user run the chain at a time, or go on after half a minute.

    The workers of a node that start together would otherwise ask a service that answers a few
    requests a second all at once, and again after each refusal.
    """
    path = os.path.join(tempfile.gettempdir(), f"shardcache-credentials-{os.getuid()}.lock")  # noqa: PTH118
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:  # a file of another user: then they do not take turns
        yield
        return
    try:
        end = time.monotonic() + _TURN
        while time.monotonic() < end:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_LOOK)
        try:
            yield
        except Exception:
            clock.sleep(_REST)
            raise
    finally:
        os.close(fd)
