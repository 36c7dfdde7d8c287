"""Which S3 endpoint is in force, told without botocore.

A hit must not pay for importing botocore, and yet the endpoint is part of a
shard's identity: the same bucket name on two endpoints is two objects.

Reads the environment and the AWS configuration file; changes nothing.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["configured_endpoint", "default_s3_endpoint"]


def configured_endpoint(storage_options: Mapping[str, Any]) -> str | None:
    """The S3 endpoint that storage options name, else the default one."""
    client = storage_options.get("client_kwargs")
    for table in (storage_options, client if isinstance(client, Mapping) else {}):
        if table.get("endpoint_url"):
            return str(table["endpoint_url"])
    profile = storage_options.get("profile")
    return default_s3_endpoint(profile=str(profile) if profile else None)


def default_s3_endpoint(
    environ: Mapping[str, str] | None = None, profile: str | None = None
) -> str | None:
    """The S3 endpoint that botocore will use when none is passed, or None for AWS.

    Follows the order of the AWS SDKs reference guide, "Service-specific
    endpoints": AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the profile's
    ``services`` section, the profile's ``endpoint_url``. Read here without
    botocore because a hit must not pay for importing it.
    """
    env = os.environ if environ is None else environ
    if env.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return None
    for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if env.get(variable):
            return env[variable]
    # os.path: where there is no home (any uid in a container), pathlib raises.
    path = os.path.expanduser(env.get("AWS_CONFIG_FILE") or "~/.aws/config")  # noqa: PTH111
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None  # botocore will say what is wrong with it, if it needs it
    if "endpoint_url" not in text:
        return None
    return _profile_endpoint(text, profile or env.get("AWS_PROFILE") or "default")


def _profile_endpoint(text: str, profile: str) -> str | None:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(text)
    except configparser.Error:
        return None
    section = f"profile {profile}"
    if profile == "default" and parser.has_section("default"):
        section = "default"
    if not parser.has_section(section):
        return None
    services = parser.get(section, "services", fallback=None)
    if services and parser.has_section(f"services {services}"):
        nested = parser.get(f"services {services}", "s3", fallback="")
        for line in nested.splitlines():
            name, _, value = line.partition("=")
            if name.strip() == "endpoint_url" and value.strip():
                return value.strip()
    return parser.get(section, "endpoint_url", fallback=None) or None
