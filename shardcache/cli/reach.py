"""Whether a shard can be read from where it comes from, and how fast; nothing is stored.

It is read through the library's own origins, with its credentials, endpoint, time-outs and
errors. The origin's clock is asked without credentials, by the Date of any answer.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from shardcache.cli.checkup import Finding
from shardcache.cli.machine import check_skew
from shardcache.clock import SYSTEM_CLOCK
from shardcache.config import Config
from shardcache.errors import ShardCacheError
from shardcache.origins.base import ObjectInfo, VersionChangedError
from shardcache.origins.endpoints import endpoint_of
from shardcache.origins.resolve import Origins
from shardcache.origins.retry import RetryPolicy
from shardcache.origins.s3 import S3Origin
from shardcache.origins.upstream import Upstreams
from shardcache.units import format_bytes, format_duration, format_rate
from shardcache.urls import ShardURL, parse_url, redact

__all__ = ["Reading", "check_reading", "read_origin"]

logger = logging.getLogger(__name__)

#: Bytes: as many as a connection is asked for at a time.
_MOST = 8 << 20
#: One hiccup is none; an operator who waits wants no more patience than that.
_ATTEMPTS = 2
#: Seconds of reading that tell how fast it is.
_READING = 20.0
#: Seconds for the Date of an origin.
_DATE = 10.0


@dataclass(frozen=True, slots=True)
class Reading:
    """What a read showed.

    Attributes:
        size: bytes that came.
        first: seconds until the first of them.
        seconds: until the last.
        info: the version.
    """

    size: int
    first: float
    seconds: float
    info: ObjectInfo


def read_origin(config: Config, text: str) -> Iterator[Finding]:
    """Read the start of a shard; look at the clock of its origin, and into upstreams.

    Args:
        config: endpoint, credentials, upstreams.
        text: the shard's URL.
    """
    try:
        endpoint = endpoint_of(config)
        url = parse_url(text, endpoint=endpoint, allow_schemes=config.allow_schemes)
    except ShardCacheError as exn:
        # What is secret in a command cannot be told.
        shown = "pipe:" if text.startswith("pipe:") else redact(text)
        yield Finding("fail", "origin", shown, "it names no shard", exn.message)
        return
    origins = Origins(config)
    try:
        origins.prepare(url)
        policy = RetryPolicy(_ATTEMPTS, config.deadline, SYSTEM_CLOCK)
        reading = policy.started(str(url)).call(lambda: _read(origins, url), sleep=time.sleep)
    except (ShardCacheError, VersionChangedError) as exn:
        yield Finding("fail", "origin", str(url), "the read failed", str(exn))
    else:
        yield from check_reading(reading, str(url))
    place = _place(origins, url)
    date = None if place is None else _date(place)
    if place is not None and date is not None:
        yield from check_skew(time.time() - date, place)
    yield from _upstreams(config, url)


def check_reading(reading: Reading, subject: str) -> Iterator[Finding]:
    """What a read tells."""
    rate = reading.size / reading.seconds if reading.seconds > 0 else 0.0
    found = (
        f"{format_bytes(reading.size)} in {format_duration(reading.seconds)} "
        f"({format_rate(rate)}), first byte after {format_duration(reading.first)}, "
        f"ETag {reading.info.etag or 'none'}"
    )
    if not reading.info.identifiable:
        yield Finding(
            "warn", "origin", subject, found,
            "Have the server state ETag or Last-Modified: without them a fetch is one request and "
            "never resumed.",
        )  # fmt: skip
    else:
        yield Finding("ok", "origin", subject, found)


def _read(origins: Origins, url: ShardURL) -> Reading:
    begun = time.monotonic()
    body = origins.of(url).open(url, 0, _MOST)
    try:
        buffer, size, first = memoryview(bytearray(1 << 20)), 0, None
        while size < _MOST and time.monotonic() - begun < _READING:
            count = body.readinto(buffer[: _MOST - size])
            if first is None:
                first = time.monotonic() - begun
            if not count:
                break
            size += count
        seconds = time.monotonic() - begun
        return Reading(size, seconds if first is None else first, seconds, body.info)
    finally:
        body.close()


def _place(origins: Origins, url: ShardURL) -> str | None:
    """The server that a shard comes from; None for what is no server."""
    if url.scheme in ("http", "https"):
        parts = urlsplit(url.canonical)
        return f"{parts.scheme}://{parts.netloc}"
    try:
        origin = origins.of(url)
        return origin.endpoint if isinstance(origin, S3Origin) else None
    except ShardCacheError as exn:  # told already
        logger.debug("no endpoint: %s", exn)
        return None


class _Stay(urllib.request.HTTPRedirectHandler):
    """Another server's clock is not asked for."""

    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        return None


def _date(place: str) -> float | None:
    """What time a server says it is, in seconds since the epoch; None if it does not say."""
    if urlsplit(place).scheme not in ("http", "https"):
        return None
    try:
        context = ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or None)
        opener = urllib.request.build_opener(_Stay, urllib.request.HTTPSHandler(context=context))
        with opener.open(urllib.request.Request(place, method="HEAD"), timeout=_DATE) as answer:  # noqa: S310
            stated = answer.headers.get("Date")
    except urllib.error.HTTPError as exn:
        with exn:
            stated = exn.headers.get("Date")
    except (OSError, ValueError) as exn:
        logger.debug("%s does not tell the time: %s", place, redact(str(exn)))
        return None
    try:
        return parsedate_to_datetime(stated).timestamp() if stated else None
    except ValueError:
        return None


def _upstreams(config: Config, url: ShardURL) -> Iterator[Finding]:
    if not config.upstreams:
        return
    for name, answer in Upstreams(config, SYSTEM_CLOCK).answers(url):
        if isinstance(answer, Exception):
            yield Finding("warn", "upstream", name, "it does not tell what it has", str(answer))
        else:
            yield Finding("ok", "upstream", name, f"has {'it' if answer else 'not got it'}: {url}")
