"""Botocore's S3 clients: how one is made, and what is read once for all of them.

The first client of a process takes a fifth of a second, most of it for the description of
S3's interface, a megabyte of JSON. That is kept: later clients take a tenth of it, those of
forked workers as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from shardcache.errors import ConfigError
from shardcache.origins.endpoints import s3_endpoint
from shardcache.urls import redact
from shardcache.version import __version__

__all__ = ["make_client"]

#: Botocore's loaders with all they have read, by where they look for descriptions.
_loaders: dict[str | None, Any] = {}


def make_client(
    options: Mapping[str, Any], *, endpoint_url: str | None, connections: int, timeout: float
) -> Any:
    """A client for many threads; its retries are off: `retry` is the only layer that repeats.

    Args:
        options: as s3fs takes them; see `s3.S3Origin`.
        endpoint_url: overrides the endpoint of ``options``.
        connections: size of the connection pool.
        timeout: seconds without a byte before a connection counts as dead.

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
