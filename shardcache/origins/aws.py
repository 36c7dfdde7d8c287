"""Read endpoints, regions and credentials from the variables, files and services of AWS.

The endpoint and the AWS partition are part of a shard's key, so `url_parser` takes them from here,
as the clients do. Importing `botocore.session` takes a tenth of a fresh process with torch. So the
endpoint, the region and the keys are read without it in the usual configurations.

Services that give credentials (of EC2 instances, of containers, STS) throttle their clients, and
botocore's chain of providers then ends as if there were none. `chain_error` tells the two apart: a
temporary error is patient, and the next request runs the chain again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from shardcache import threads
from shardcache.config import Config
from shardcache.errors import AccessDeniedError, ConfigError
from shardcache.faults import ignoring
from shardcache.origins.base import TransientError
from shardcache.pipe_commands import read_command
from shardcache.units import format_duration
from shardcache.urls import PARTITIONS, ShardURL, name_command, parse_url, quoted, redact

T = TypeVar("T")

#: Suffixes in the names of S3 Express buckets and of their access points.
EXPRESS = ("--x-s3", "--xa-s3")
#: Options that only s3fs understands, without those that only affect uploads.
_ONLY_S3FS = (
    *("session", "username"),
    *("ExpectedBucketOwner", "RequestPayer", "SSECustomerKey"),  # of s3_additional_kwargs
    *("client_cert", "proxies_config", "signature_version"),  # of config_kwargs
)
#: Errors of botocore that a new login resolves: an SSO token is missing or has expired, the
#: credentials of a program have expired, or a program may be writing a file of credentials.
_LOGIN_ERRORS = frozenset(
    {"LoginError", "SSOError", "TokenRetrievalError", "RuntimeError"}
    | {"ConfigParseError", "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}
)
#: Matches the error codes for throttling, which are those that botocore repeats requests for.
_THROTTLING = "Throttl|SlowDown|TooManyRequests|(Throughput|Limit)Exceeded"
#: botocore errors for a service that does not respond, or temporarily refuses.
_SERVICE = frozenset(
    {"ConnectionError", "CredentialRetrievalError", "HTTPClientError", "MetadataRetrievalError"}
)
#: Error code of STS, with status 400, if the provider of a web identity does not respond.
_NO_PROVIDER = "IDPCommunicationError"
_METADATA = "http://169.254.169.254"
_TIMEOUT = 2.0  #: seconds; the metadata service is on the same machine
#: Seconds that a process waits for its turn: more than a chain of several services needs.
_TURN = 30.0
#: Seconds after which the chain is no longer waited for. Botocore limits its requests, but waits
#: forever for a program that a profile names (`credential_process`).
CHAIN_TIMEOUT = 60.0
#: Names of the credentials in a profile, and in `client_kwargs`.
KEY_NAMES = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
#: Environment variables and options of a profile whose effects `written_keys` knows.
_VARIABLES = {name.upper() for name in KEY_NAMES} | {
    *("AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CA_BUNDLE"),
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
    *("AWS_EC2_METADATA_DISABLED", "AWS_DEFAULT_OUTPUT", "AWS_PAGER"),
}
_OPTIONS = {*KEY_NAMES, "region", "output"}


def endpoint_of(config: Config) -> str | None:
    """Return the S3 endpoint of a configuration, or None for AWS."""
    return s3_endpoint(config.scheme_options("s3"))


def _authority(config: Config) -> str | None:
    """Return the endpoint for keys, at AWS the region's host; None means the standard partition."""
    if endpoint := endpoint_of(config):
        return endpoint
    options = config.scheme_options("s3")
    variables = os.environ.get("AWS_DEFAULT_REGION"), os.environ.get("AWS_REGION")
    # Parsing the files takes longer, and few name a region outside the standard partition.
    text = ascii((options.get("client_kwargs"), variables)).encode() + aws_files()
    is_elsewhere = re.search(rf"\b({PARTITIONS})-".encode(), text)
    return f"s3.{s3_region(options)}.amazonaws.com" if is_elsewhere else None


def with_options(config: Config, options: Collection[tuple[str, str]]) -> Config:
    """Return a configuration with client options of a command line or a ``pipe:`` command."""
    given, table = dict(options), config.storage_options
    merged = {**config.scheme_options("s3")}
    profile, anon = given.get("profile"), "anon" in given
    if profile or anon:
        credentials = ("key", "secret", "token", "anon", "profile")
        merged = {name: value for name, value in merged.items() if name not in credentials}
        merged |= {"anon": True} if anon else {"profile": profile}
    if "requester_pays" in given:
        merged["requester_pays"] = True
    if region := given.get("region_name"):
        merged["client_kwargs"] = {**(merged.get("client_kwargs") or {}), "region_name": region}
    endpoint = given.get("endpoint_url") or config.endpoint_url
    has_own = isinstance(table.get("s3"), Mapping)  # otherwise, `merged` has all tables
    merged = {**table, "s3": merged} if has_own else merged
    return config.replace(endpoint_url=endpoint, storage_options=merged)


def url_parser(config: Config) -> Callable[[str], ShardURL]:
    """Return a function that parses URLs, and commands that only read one, for a configuration."""
    endpoint, schemes = _authority(config), config.allow_schemes
    parse = functools.partial(parse_url, servers=config.servers(), allow_schemes=schemes)

    def parse_any(url: str) -> ShardURL:
        if not (isinstance(url, str) and url.startswith("pipe:")):
            return parse(url, endpoint=endpoint)
        command = url.removeprefix("pipe:").strip()
        try:
            target, options = read_command(command)
        except ConfigError as exn:
            shard = parse_url(url, allow_schemes=["pipe"])  # refuses a credential in an address
            if "pipe" in schemes:
                return shard
            raise ConfigError(
                f"{name_command(command)}: the command is left to a shell, because {exn.message}. "
                "To cache its output, set allow_schemes=['pipe'] in code, or "
                "SHARDCACHE_ALLOW_SCHEMES=pipe, if you trust the authors of all shard lists."
            ) from None
        command_endpoint = _authority(with_options(config, options)) if options else endpoint
        return dataclasses.replace(parse(target, endpoint=command_endpoint), options=options)

    return parse_any


def s3_endpoint(options: Mapping[str, Any]) -> str | None:
    """Return the endpoint of a client with these options, or None for AWS.

    The precedence is botocore's: the options, AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the profile's
    ``services`` section, the profile's ``endpoint_url``.
    """
    client = options.get("client_kwargs") or {}
    if passed := options.get("endpoint_url") or client.get("endpoint_url"):
        return str(passed)
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "")
    # A file with `ignore_configured_endpoint_urls` also contains this word.
    if b"endpoint_url" in aws_files().lower():
        profile, _, services = _read_profile(options.get("profile")) or ({}, {}, {})
        ignored = str(ignored or profile.get("ignore_configured_endpoint_urls"))
        with contextlib.suppress(AttributeError):  # the section of S3 is broken
            near = services.get(profile.get("services", ""), {}).get("s3", {}).get("endpoint_url")
            named = named or near or profile.get("endpoint_url")
    return None if ignored.lower() == "true" else named or None


def needs_s3fs(bucket: str, options: Mapping[str, Any]) -> str:
    """Return the reason why only s3fs can read a bucket, or "" if shardcache's own client can."""
    if bucket.endswith(EXPRESS):
        return "S3 Express buckets"
    if bucket.startswith("arn:") and bucket.endswith(".mrap"):
        return "multi-region access points"
    given = {**options}
    for holder in ("s3_additional_kwargs", "config_kwargs"):
        given |= options.get(holder) or {}
    names = [name for name in _ONLY_S3FS if given.get(name) not in (None, "", "s3v4")]
    return f"the option {names[0]}" if names else ""


def s3fs_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with which s3fs uses the endpoint and region of shardcache's own client."""
    endpoint = s3_endpoint(options)
    client = {**(options.get("client_kwargs") or {}), "region_name": s3_region(options, endpoint)}
    client.pop("endpoint_url", None)  # s3fs refuses two endpoints
    return {**options, "endpoint_url": endpoint, "client_kwargs": client}


def s3_region(options: Mapping[str, Any], endpoint: str | None = None) -> str:
    """Return the region that a client tries first: botocore's, at AWS then that of AWS_REGION."""
    if passed := (options.get("client_kwargs") or {}).get("region_name"):
        return str(passed)
    region = os.environ.get("AWS_DEFAULT_REGION")
    if region is None and (found := _read_profile(options.get("profile"))):
        region = found[0].get("region")
    return region or (not endpoint and os.environ.get("AWS_REGION")) or "us-east-1"


def _read_profile(profile: str | None) -> tuple[dict[str, Any], ...] | None:
    """Return a profile's options in both of AWS's files, those in the second one, and all services.

    None as the ``profile`` is that of the environment. The result is None if a file is broken.
    """
    if not aws_files():
        return {}, {}, {}
    from botocore.configloader import load_config, raw_config_parse
    from botocore.exceptions import ConfigNotFound, ConfigParseError

    if profile is None:
        profile = os.environ.get("AWS_DEFAULT_PROFILE", os.environ.get("AWS_PROFILE", "default"))
    full, written = dict[str, Any](), dict[str, Any]()
    config, credentials = aws_paths()
    try:
        with contextlib.suppress(ConfigNotFound):
            full = load_config(config)
        with contextlib.suppress(ConfigNotFound):
            written = raw_config_parse(credentials).get(profile, {})
    except ConfigParseError:
        return None
    return full.get("profiles", {}).get(profile, {}) | written, written, full.get("services", {})


def aws_paths() -> tuple[str, str]:
    """Return the paths of AWS's configuration file and credentials file."""
    config = os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")
    credentials = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    # `Path.expanduser` raises if no home directory is known, as for any uid in a container.
    expand = os.path.expanduser
    return expand(os.path.expandvars(config)), expand(os.path.expandvars(credentials))


def aws_files() -> bytes:
    """Return the contents of AWS's two configuration files, joined; empty if there are none."""
    contents = b""
    for path in aws_paths():
        with ignoring(OSError):
            contents += Path(path).read_bytes()
    return contents


class Keys(NamedTuple):
    """Credentials that are not renewed, with the attributes and the method of botocore's."""

    access_key: str
    secret_key: str
    token: str | None = None

    def get_frozen_credentials(self) -> Keys:
        return self


def session(options: Mapping[str, Any]) -> Any:
    """Return a session of botocore. Credentials in the options precede all others."""
    import botocore.session

    made = botocore.session.Session(profile=options.get("profile"))
    if keys := _passed_keys(options):
        made.set_credentials(*keys)
    return made


def _passed_keys(options: Mapping[str, Any]) -> Keys | None:
    client = options.get("client_kwargs") or {}
    for given, names in ((client, KEY_NAMES), (options, ("key", "secret", "token"))):
        if given.get(names[0]):
            return Keys(*map(given.get, names))
    return None


def written_keys(options: Mapping[str, Any]) -> Keys | None:
    """Return botocore's credentials if the options, the environment or AWS's files state them.

    Otherwise, or if a variable of AWS or an option of the profile is not known here, return None.
    So botocore handles all settings of S3, roles, SSO, programs that print credentials, and any
    provider that it may add to its chain. A passed profile precedes the keys in the environment.
    """
    profile = options.get("profile")
    env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    if (profiles := _read_profile(profile)) is None:
        return None
    settings, written, _ = profiles
    is_missing = not settings and (profile is not None or "AWS_PROFILE" in env)
    if env.keys() - _VARIABLES or settings.keys() - _OPTIONS or is_missing:
        return None
    if options.get("anon"):
        return Keys("", "")
    if passed := _passed_keys(options):
        return passed
    source = {name.lower(): value for name, value in env.items()}
    if profile is not None or not source.get(KEY_NAMES[0]):
        source = written
    keys = Keys(*(source.get(name, "") for name in KEY_NAMES))
    return keys if keys.access_key and keys.secret_key else None


def is_throttling(code: str) -> bool:
    """Return whether this error code of S3, or of another service of AWS, means throttling."""
    return re.search(_THROTTLING, code) is not None


def login_ended(profile: str | None) -> TransientError:
    """Return the error for credentials that expired while a process was using them."""
    return TransientError(f"the login has ended. Log in: {_login(profile)}", patient=True)


def _login(profile: str | None) -> str:
    return f"aws sso login --profile {profile}" if profile else "aws sso login"


def chain_error(exn: Exception, shard: ShardURL, profile: str | None, *, worked: bool) -> Exception:
    """Return the exception that an origin raises for one of botocore's credential chain.

    A program that prints no valid credentials raises FileNotFoundError, ValueError, or RuntimeError
    if they have expired. An ended login is waited for only if the store ``worked`` before.
    """
    reason = shown_error(exn)
    kinds = {kind.__name__ for kind in type(exn).__mro__}
    response = getattr(exn, "response", None)
    response = response if isinstance(response, dict) else {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = response.get("Error", {}).get("Code", "")
    is_busy = code == _NO_PROVIDER or is_throttling(code) or status == 429 or status >= 500
    is_program = getattr(exn, "kwargs", {}).get("provider") == "custom-process"
    if isinstance(exn, OSError) and not isinstance(exn, (FileNotFoundError, PermissionError)):
        return TransientError(f"the credentials cannot be read: {reason}")
    if kinds & {"ParamValidationError", "InvalidRegionError"}:
        text = f"{shard} cannot be read: {reason}. Check the URL and the region."
        return ConfigError(text, url=str(shard))
    if is_busy or (kinds & _SERVICE and not is_program):
        return TransientError(f"the source of credentials does not answer: {reason}", patient=True)
    if "NoCredentialsError" in kinds and _metadata_service_is_busy():
        text = "the metadata service of this machine gives no credentials now"
        return TransientError(text, patient=True)
    if worked and (is_program or kinds & _LOGIN_ERRORS):
        return login_ended(profile)
    clock_too = "Check this machine's clock. " if "RuntimeError" in kinds else ""
    return AccessDeniedError(
        f"{shard} cannot be read: {reason}. {clock_too}Log in ({_login(profile)}), set "
        "AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. For a public bucket, pass "
        "--no-sign-request, or storage_options={'anon': True} in code "
        """(SHARDCACHE_STORAGE_OPTIONS='{"anon": true}').""",
        url=str(shard),
    )


def shown_error(exn: Exception) -> str:
    """Return botocore's text, without what a service or a program sent: it may be a secret."""
    sent = str(getattr(exn, "kwargs", {}).get("error_msg") or "")
    status = re.search(r"response (\d{3})\b", sent)
    hidden = f"status {status[1]}" if status else "its text is not shown, as it may hold secrets"
    text = str(exn).replace(sent, hidden) if sent else str(exn)
    return quoted(text).rstrip(".")


def _metadata_service_is_busy() -> bool:
    """Return whether this is an EC2 instance whose role gives no credentials at the moment."""
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    import http.client  # here: few processes need it

    service = urlsplit(os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or _METADATA)
    latest, is_there = f"{service.path.rstrip('/')}/latest", False
    server = http.client.HTTPConnection(service.netloc, timeout=_TIMEOUT)
    with contextlib.closing(server), contextlib.suppress(OSError, http.client.HTTPException):
        server.connect()
        is_there = True
        limit = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        server.request("PUT", f"{latest}/api/token", headers=limit)
        response = server.getresponse()
        token = response.read().decode("latin-1")
        if response.status != 200:
            return response.status == 429 or response.status >= 500
        path = f"{latest}/meta-data/iam/security-credentials/"
        server.request("GET", path, headers={"X-aws-ec2-metadata-token": token})
        return server.getresponse().status != 404  # 404: the instance has no role
    return is_there  # it accepted a connection, so it is too busy


def within_timeout(chain: Callable[[], T]) -> T:
    """Call ``chain`` in a thread; raise TransientError after `CHAIN_TIMEOUT` without a result."""
    with contextlib.suppress(Empty):
        return threads.call(chain, CHAIN_TIMEOUT, "shardcache-credentials")
    text = f"the source of credentials has not answered for {CHAIN_TIMEOUT:g} s"
    raise TransientError(text, patient=True)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let one process of this user at a time run the chain; after half a minute, run it anyway.

    Otherwise all workers of a node would ask a service at once that allows a few requests a second.
    """
    import tempfile

    from filelock import FileLock

    with contextlib.ExitStack() as stack:
        # A timeout, a lock file of another user, or no directory for temporary files.
        with contextlib.suppress(OSError):
            path = Path(tempfile.gettempdir(), f"shardcache-credentials-{os.getuid()}.lock")
            stack.enter_context(FileLock(path, timeout=_TURN, mode=0o600))
        yield


class S3Access(NamedTuple):
    """The endpoint in use, and where the credentials come from, without any secret."""

    endpoint: str
    credentials: str | None  #: their source, such as ``env``, and their expiry; None if not found
    problem: str = ""  #: the error that botocore raised during the search

    def __str__(self) -> str:
        source = f"credentials from {self.credentials}" if self.credentials else "no credentials"
        return f"endpoint {self.endpoint}, {source}{self.problem and f': {self.problem}'}"


def s3_access(config: Config, *, timed: bool = False) -> S3Access:
    """Return the access to S3 shards; with ``timed``, also say when the credentials expire."""
    options, endpoint = config.scheme_options("s3"), redact(endpoint_of(config) or "AWS")
    if options.get("anon"):
        return S3Access(endpoint, "nowhere: requests are anonymous (anon)")
    if options.get("key"):
        return S3Access(endpoint, "storage_options")
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        credentials = session(options).get_credentials()
        lifetime = _lifetime(credentials) if timed and credentials is not None else ""
    except (BotoCoreError, ClientError, ValueError) as exn:  # ValueError: of a credential_process
        return S3Access(endpoint, None, shown_error(exn))
    return S3Access(endpoint, None if credentials is None else f"{credentials.method}{lifetime}")


def _lifetime(credentials: Any) -> str:
    """Return a phrase that says when botocore's credentials expire, and how they are renewed."""
    token = credentials.get_frozen_credentials().token  # also fetches the credentials of a role
    end = getattr(credentials, "_expiry_time", None)
    if end is None:
        return ", which expire with their session" if token else ""
    left = format_duration(max(0.0, (end - datetime.now(UTC)).total_seconds()))
    if credentials.method in ("env", "sso", "login"):
        moment = f"{end.astimezone():%Y-%m-%d %H:%M}"
        return f", which expire in {left}: log in again before {moment} if the login ends by then"
    return f", which expire in {left}, renewed automatically"
