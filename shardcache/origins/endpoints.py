"""Determine the S3 endpoint, the AWS region, and which client can read a bucket.

The endpoint and the AWS partition are part of a shard's key, because the same bucket name at two
endpoints or in two partitions means two buckets. Both the keys and the clients take them from this
module.

Importing botocore would add a tenth of a second to a hit. So it is imported only if a configuration
file of AWS sets an endpoint, or names a region outside AWS's standard partition.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardcache.commands import read_command
from shardcache.config import Config
from shardcache.errors import ConfigError
from shardcache.units import format_duration
from shardcache.urls import PARTITIONS, ShardURL, name_command, parse_url, redact

if TYPE_CHECKING:
    from botocore.session import Session

logger = logging.getLogger(__name__)

#: Suffixes in the names of S3 Express buckets and of their access points.
EXPRESS = ("--x-s3", "--xa-s3")
#: Options that only s3fs understands. Options in `s3_additional_kwargs` that only affect uploads
#: are not listed, because shards are only read.
_ONLY_S3FS = (
    *("session", "username"),
    *("ExpectedBucketOwner", "RequestPayer", "SSECustomerKey"),  # of s3_additional_kwargs
    *("client_cert", "proxies_config", "signature_version"),  # of config_kwargs
)


def scheme_options(config: Config, scheme: str) -> Mapping[str, Any]:
    """Return the storage options of one scheme.

    They are the table with the scheme's name. Without a table ``s3``, all options belong to S3.
    """
    own = config.storage_options.get(scheme)
    if isinstance(own, Mapping):
        return own
    return config.storage_options if scheme == "s3" else {}


def endpoint_of(config: Config) -> str | None:
    """Return the S3 endpoint of a configuration, or None for AWS."""
    return s3_endpoint(scheme_options(config, "s3"), config.endpoint_url)


def authority_of(config: Config) -> str | None:
    """Return the endpoint for keys, at AWS the region's host; None means the standard partition."""
    if endpoint := endpoint_of(config):
        return endpoint
    region = s3_region(scheme_options(config, "s3"))
    return f"s3.{region}.amazonaws.com" if region else None


def for_command(config: Config, options: Collection[tuple[str, str]]) -> Config:
    """Return a configuration with the client options of a ``pipe:`` command, such as a profile."""
    given = dict(options)
    merged = {**scheme_options(config, "s3")}
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
    return config.replace(endpoint_url=endpoint, storage_options=merged)


def parser(config: Config) -> Callable[[str], ShardURL]:
    """Return a function that parses URLs with the endpoint and the schemes of a configuration.

    The function turns a ``pipe:`` command that only reads an object (`commands.read_command`) into
    the URL of the object.
    """
    endpoint, schemes = authority_of(config), config.allow_schemes

    def parse(url: str) -> ShardURL:
        if not (isinstance(url, str) and url.startswith("pipe:")):
            return parse_url(url, endpoint=endpoint, allow_schemes=schemes)
        command = url.removeprefix("pipe:").strip()
        try:
            target, options = read_command(command)
        except ConfigError as exn:
            shard = parse_url(url, allow_schemes=["pipe"])  # refuses a credential in an address
            if "pipe" in schemes:
                return shard
            raise ConfigError(
                f"{name_command(command)}: the command is left to a shell, because {exn.message}. "
                "Pass allow_schemes=['pipe'] to cache its output, if you trust the authors of all "
                "shard lists."
            ) from None
        own = authority_of(for_command(config, options)) if options else endpoint
        shard = parse_url(target, endpoint=own, allow_schemes=schemes)
        return dataclasses.replace(shard, options=options)

    return parse


def s3_endpoint(options: Mapping[str, Any], endpoint_url: str | None = None) -> str | None:
    """Return the endpoint of a client with these options, or None for AWS.

    The precedence is botocore's: the arguments (``endpoint_url`` first), AWS_ENDPOINT_URL_S3,
    AWS_ENDPOINT_URL, the profile's ``services`` section, the profile's ``endpoint_url``.
    """
    passed = endpoint_url or options.get("endpoint_url")
    passed = passed or (options.get("client_kwargs") or {}).get("endpoint_url")
    if passed:
        return str(passed)
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
    ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS")
    # A file with `ignore_configured_endpoint_urls` also contains this word, and is parsed as well.
    if not ignored and b"endpoint_url" not in aws_files().lower():
        return named

    def configured(session: Session) -> str | None:
        if session.get_config_variable("ignore_configured_endpoint_urls"):
            return None
        own = session.get_scoped_config()
        services = session.full_config.get("services", {}).get(own.get("services"), {})
        found = services.get("s3", {}).get("endpoint_url") or own.get("endpoint_url")
        return named or found or None

    return _from_files(options, configured)


def needs_s3fs(bucket: str, options: Mapping[str, Any]) -> str:
    """Return the reason why only s3fs can read a bucket, or "" if shardcache's own client can."""
    if bucket.endswith(EXPRESS):
        return "S3 Express buckets"
    if bucket.startswith("arn:") and bucket.endswith(".mrap"):
        return "multi-region access points"
    given = dict(options)
    for holder in ("s3_additional_kwargs", "config_kwargs"):
        given |= options.get(holder) or {}
    found = (name for name in _ONLY_S3FS if given.get(name) not in (None, "", "s3v4"))
    return f"the option {name}" if (name := next(found, "")) else ""


def s3fs_options(options: Mapping[str, Any], endpoint_url: str | None = None) -> dict[str, Any]:
    """Return options with which s3fs uses the endpoint and region of shardcache's own client.

    The options for the profile, the credentials and anonymous access have the same names in both.
    """
    endpoint = s3_endpoint(options, endpoint_url)
    client = {**(options.get("client_kwargs") or {})}
    client.pop("endpoint_url", None)  # s3fs refuses two endpoints
    if not client.get("region_name"):
        region = _from_files(options, lambda session: session.get_config_variable("region"))
        region = region or (None if endpoint else os.environ.get("AWS_REGION"))
        client["region_name"] = region or "us-east-1"
    return {**options, "endpoint_url": endpoint, "client_kwargs": client}


def s3_region(options: Mapping[str, Any]) -> str | None:
    """Return the region that a client with these options tries first at AWS, or None.

    The precedence is botocore's, which ends with the profile's ``region``, and then AWS_REGION.
    Without an argument or AWS_DEFAULT_REGION, the files are parsed only if they or AWS_REGION name
    a region outside AWS's standard partition; otherwise, the result is None.
    """
    passed = (options.get("client_kwargs") or {}).get("region_name")
    if first := passed or os.environ.get("AWS_DEFAULT_REGION"):
        return str(first)
    last = os.environ.get("AWS_REGION")
    if not re.search(rf"\b({PARTITIONS})-".encode(), aws_files() + (last or "").encode()):
        return None
    return _from_files(options, lambda session: session.get_config_variable("region")) or last


def _from_files(options: Mapping[str, Any], read: Callable[[Session], str | None]) -> str | None:
    """Return the result of ``read``, or None if AWS's configuration files cannot be read."""
    import botocore.session
    from botocore.exceptions import BotoCoreError

    try:
        return read(botocore.session.Session(profile=options.get("profile")))
    except (BotoCoreError, OSError, ValueError, AttributeError) as exn:
        # The client cannot be set up for the same reason, and that error reaches the user.
        logger.debug("the configuration of AWS cannot be read: %s", type(exn).__name__)
        return None


def aws_paths() -> tuple[str, str]:
    """Return the paths of AWS's configuration file and credentials file."""
    config = os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")
    credentials = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    # `Path.expanduser` raises if no home directory is known, as for any uid in a container.
    config, credentials = (
        os.path.expanduser(os.path.expandvars(path))  # noqa: PTH111
        for path in (config, credentials)
    )
    return config, credentials


def aws_files() -> bytes:
    """Return the contents of AWS's two configuration files, joined; empty if there are none."""
    found = b""
    for path in aws_paths():
        with contextlib.suppress(OSError):
            found += Path(path).read_bytes()
    return found


class S3Access(NamedTuple):
    """The endpoint in use, and where the credentials come from, without any secret."""

    endpoint: str
    credentials: str | None  # their source, such as ``env``, and their expiry; None if not found
    problem: str = ""  # the error that botocore raised during the search

    def __str__(self) -> str:
        source = f"credentials from {self.credentials}" if self.credentials else "no credentials"
        return f"endpoint {self.endpoint}, {source}{self.problem and f': {self.problem}'}"


def s3_access(config: Config, *, timed: bool = False) -> S3Access:
    """Return the access to S3 shards; with ``timed``, also say when the credentials expire."""
    options, endpoint = scheme_options(config, "s3"), redact(endpoint_of(config) or "AWS")
    if options.get("anon"):
        return S3Access(endpoint, "nowhere: requests are anonymous (anon)")
    if options.get("key"):
        return S3Access(endpoint, "storage_options")
    import botocore.session
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        found = botocore.session.Session(profile=options.get("profile")).get_credentials()
        lifetime = _lifetime(found) if timed and found is not None else ""
    except (BotoCoreError, ClientError, ValueError) as exn:  # ValueError: of a credential_process
        return S3Access(endpoint, None, redact(str(exn)))
    return S3Access(endpoint, None if found is None else f"{found.method}{lifetime}")


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
