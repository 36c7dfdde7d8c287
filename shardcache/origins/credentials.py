"""Read AWS credentials that are written down, and tell unavailable credentials from missing ones.

Importing `botocore.session` takes 0.14 s. So `written_settings` reads the keys and the region of
the most common configurations without it.

The services that provide credentials (the metadata services of EC2 instances and of containers, and
STS) throttle their clients. Botocore's chain of credential providers then ends as if there were no
credentials. This module tells the two cases apart. A temporary error becomes a `TransientError`
with ``patient``, which is waited out, and the next request runs the chain again. After a failure,
the processes of a user run the chain one at a time (`one_at_a_time`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from shardcache import clock, threads
from shardcache.errors import AccessDeniedError, ConfigError
from shardcache.origins.addresses import Dialer
from shardcache.origins.base import TransientError, read_all
from shardcache.origins.connection import Transport
from shardcache.origins.endpoints import aws_paths
from shardcache.urls import ShardURL, quoted

T = TypeVar("T")

#: botocore errors that a new login resolves: an SSO token is missing or has expired.
_LOGIN = frozenset({"LoginError", "SSOError", "TokenRetrievalError"})
#: botocore errors for files without credentials, or without valid ones. A program that renews them
#: may be writing the file.
_WRITTEN = frozenset(
    {"ConfigParseError", "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}
)
#: botocore errors for a service that does not respond, or temporarily refuses.
_SERVICE = frozenset(
    {"ConnectionError", "CredentialRetrievalError", "HTTPClientError", "MetadataRetrievalError"}
)
#: Error code of STS, with status 400, if the provider of a web identity does not respond.
_NO_PROVIDER = "IDPCommunicationError"
_METADATA = "http://169.254.169.254"
#: Timeout for the metadata service in seconds. Short, because the service is on the same machine.
_TIMEOUT = 2.0
#: Seconds that a process waits for its turn: more than a chain of several services needs.
_TURN = 30.0
#: Seconds that a process keeps its turn after a failure, so that the service gets a pause.
_REST = 1.0
#: Seconds after which the chain is no longer waited for. Botocore limits its requests, but waits
#: forever for a program that a profile names (`credential_process`).
CHAIN_TIMEOUT = 60.0
#: Names of the credentials in a profile, and in `client_kwargs`.
KEY_NAMES = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
#: Environment variables and options of a profile whose effects `written_settings` knows.
_VARIABLES = {name.upper() for name in KEY_NAMES} | {
    *("AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CA_BUNDLE"),
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
    *("AWS_EC2_METADATA_DISABLED", "AWS_DEFAULT_OUTPUT", "AWS_PAGER"),
}
_OPTIONS = {*KEY_NAMES, "region", "output"}


class Keys(NamedTuple):
    """Credentials that botocore would not renew; methods and attributes are those of botocore."""

    access_key: str
    secret_key: str
    token: str | None = None

    def get_frozen_credentials(self) -> Keys:
        """Return the same."""
        return self


class Settings(NamedTuple):
    """Settings that need no botocore; the methods are those of a botocore session."""

    variables: Mapping[str, str | None]
    keys: Keys

    def get_config_variable(self, name: str) -> str | None:
        """Return the ``region`` or the ``ca_bundle``. All others have their defaults."""
        return self.variables.get(name)

    def get_scoped_config(self) -> Mapping[str, Any]:
        """Return the profile's options for S3. There are none."""
        return {}

    def get_credentials(self) -> Keys:
        """Return the keys."""
        return self.keys


def written_settings(profile: str | None, keys: Keys | None) -> Settings | None:
    """Return what botocore would find if the environment or AWS's files state keys, else None.

    Each variable of AWS and each option of the profile must be known here. So botocore handles
    roles, SSO, programs that print credentials, and any provider that it may add to its chain.

    Args:
        profile: the profile that the caller passed. It takes precedence over the keys in the
            environment.
        keys: credentials that the caller passed, which replace those found.
    """
    from botocore.configloader import load_config, raw_config_parse
    from botocore.exceptions import ConfigNotFound, ConfigParseError

    env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    name = env.get("AWS_PROFILE") if profile is None else profile
    own, options = "default" if name is None else name, dict[str, str]()
    config, shared = aws_paths()
    try:
        with contextlib.suppress(ConfigNotFound):
            options |= load_config(config)["profiles"].get(own, {})
        written = {}
        with contextlib.suppress(ConfigNotFound):
            written = raw_config_parse(shared).get(own, {})
    except ConfigParseError:
        return None
    options |= written
    if env.keys() - _VARIABLES or options.keys() - _OPTIONS or (name is not None and not options):
        return None
    if keys is None:
        source = {name.lower(): value for name, value in env.items()}
        if profile is not None or not source.get(KEY_NAMES[0]):
            source = written
        keys = Keys(*(source.get(name, "") for name in KEY_NAMES))
        if not (keys.access_key and keys.secret_key):
            return None
    region = env.get("AWS_DEFAULT_REGION", options.get("region"))
    return Settings({"region": region, "ca_bundle": env.get("AWS_CA_BUNDLE")}, keys)


@functools.cache
def throttling_codes() -> tuple[frozenset[str], frozenset[str]]:
    """Return AWS's error codes for throttling and for transient faults, from botocore's tables."""
    from botocore.retries.standard import ThrottledRetryableChecker, TransientRetryableChecker

    throttled = frozenset(ThrottledRetryableChecker._THROTTLED_ERROR_CODES)
    return throttled, frozenset(TransientRetryableChecker._TRANSIENT_ERROR_CODES)


def login_ended(profile: str | None) -> TransientError:
    """Return the error for credentials that expired while a process was using them."""
    return TransientError(f"the login has ended. Log in: {_command(profile)}", patient=True)


def _command(profile: str | None) -> str:
    return f"aws sso login --profile {profile}" if profile else "aws sso login"


def chain_error(exn: Exception, shard: ShardURL, profile: str | None, *, worked: bool) -> Exception:
    """Return the exception that an origin raises for an exception of botocore's credential chain.

    Args:
        exn: the exception of botocore or, for a program that prints no valid credentials, of
            Python: FileNotFoundError, ValueError, or RuntimeError if they have expired.
        profile: the AWS profile in use, for the advice in the message.
        worked: whether the store has accepted credentials of this process before. Only then is an
            ended login waited for.
    """
    reason = quoted(str(exn)).rstrip(".")
    kinds = {kind.__name__ for kind in type(exn).__mro__}
    response = getattr(exn, "response", {})
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = response.get("Error", {}).get("Code")
    is_throttled = code == _NO_PROVIDER or code in throttling_codes()[0]
    is_program = getattr(exn, "kwargs", {}).get("provider") == "custom-process"
    if isinstance(exn, OSError) and not isinstance(exn, (FileNotFoundError, PermissionError)):
        return TransientError(f"the credentials cannot be read: {reason}")
    if kinds & {"ParamValidationError", "InvalidRegionError"}:
        text = f"{shard} cannot be read: {reason}. Check the URL and the region."
        return ConfigError(text, url=str(shard))
    busy = is_throttled or status == 429 or status >= 500
    if busy or (kinds & _SERVICE and not is_program):
        return TransientError(f"the source of credentials does not answer: {reason}", patient=True)
    if "NoCredentialsError" in kinds and _metadata_service_is_busy():
        text = "the metadata service of this machine gives no credentials now"
        return TransientError(text, patient=True)
    if worked and (is_program or kinds & {*_LOGIN, *_WRITTEN, "RuntimeError"}):
        return login_ended(profile)
    clock_too = "Check this machine's clock. " if "RuntimeError" in kinds else ""
    return AccessDeniedError(
        f"{shard} cannot be read: {reason}. {clock_too}Log in ({_command(profile)}), set "
        "AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass "
        "storage_options={'anon': True} for a public bucket.",
        url=str(shard),
    )


def _metadata_service_is_busy() -> bool:
    """Return whether this EC2 instance has a role, but cannot get its credentials at the moment.

    Botocore raises the same NoCredentialsError on a machine without a metadata service, so this
    function sends requests of its own.
    """
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    service = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or _METADATA
    parts = urlsplit(service)
    try:
        Dialer().connect(parts.hostname or "", parts.port or 80, _TIMEOUT).close()
    except (OSError, ValueError):
        return False
    server, latest = f"{parts.scheme}://{parts.netloc}", f"{parts.path.rstrip('/')}/latest"
    transport = Transport(timeout=_TIMEOUT, proxies={})
    try:
        limit = {"X-aws-ec2-metadata-token-ttl-seconds": "60", "Content-Length": "0"}
        response = transport.request("PUT", server, f"{latest}/api/token", limit)
        token = read_all(response, 4096).decode("latin-1")
        if response.status == 200:
            path = f"{latest}/meta-data/iam/security-credentials/"
            response = transport.request("GET", server, path, {"X-aws-ec2-metadata-token": token})
            response.close()
            return response.status != 404  # 404: the instance has no role
    except (OSError, TransientError):  # it accepted a connection above, so it is too busy
        return True
    return response.status == 429 or response.status >= 500


def within_timeout(chain: Callable[[], T]) -> T:
    """Call ``chain`` in a thread, and return its result or raise its exception.

    Raises:
        TransientError: it has not ended after `CHAIN_TIMEOUT`. It goes on in its thread.
    """
    try:
        return threads.call(chain, CHAIN_TIMEOUT, "shardcache-credentials")
    except Empty:
        text = f"the source of credentials has not answered for {CHAIN_TIMEOUT:g} s"
        raise TransientError(text, patient=True) from None


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let one process of this user at a time run the chain; after half a minute, run it anyway.

    Otherwise the workers of a node, which start together, would all send their requests at once to
    a service that allows a few per second, and would repeat them together after each refusal.
    """
    from filelock import FileLock

    lock = None
    # A timeout, a lock file of another user, or no directory for temporary files.
    with contextlib.suppress(OSError):
        path = Path(tempfile.gettempdir(), f"shardcache-credentials-{os.getuid()}.lock")
        lock = FileLock(path, timeout=_TURN, mode=0o600)
        lock.acquire()
    try:
        yield
    except Exception:
        clock.sleep(_REST)
        raise
    finally:
        if lock is not None:
            lock.release()
