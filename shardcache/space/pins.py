"""Pins: shards that a user keeps with ``shardcache pin``.

A pin is a small file, named after the shard's key. It may be created before the shard is
downloaded, and stays when the shard's version changes. No policy, no ``clean --all`` and no ``rm``
removes a pinned shard.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Container, Iterable

from shardcache.faults import os_error
from shardcache.layout import Layout, is_pin_name, list_names, read_file, replace_file
from shardcache.urls import ShardURL

logger = logging.getLogger(__name__)

_MAX_RECORD = 16_384  #: maximum bytes to read of a pin, which holds one URL


def pin(layout: Layout, shard: ShardURL, until: float | None) -> None:
    """Pin a shard until a time in seconds since the epoch; None pins it forever."""
    layout.modes.make_directory(layout.pins, levels=0)
    data = json.dumps({"schema": 1, "url": str(shard), "until": until}).encode()
    replace_file(layout.pin(shard.key), data, layout.modes.file, via=layout.partial)


def unpin(layout: Layout, key: str) -> bool:
    """Remove a pin; return False if the shard was not pinned."""
    try:
        layout.pin(key).unlink()
    except FileNotFoundError:
        return False
    return True


def pinned(
    layouts: Iterable[Layout], now: float, keys: Container[str] | None = None
) -> dict[str, str]:
    """Return the URL of each pinned shard by key, or only of those among ``keys``.

    If the pin is damaged, the URL is empty.
    """
    every = (pin for layout in layouts for pin in _pins(layout, keys).items())
    return {key: url for key, (until, url) in every if now < until}


def remove_expired(layout: Layout, now: float) -> int:
    """Remove expired pins, and return their number."""
    return sum(unpin(layout, key) for key, (until, _) in _pins(layout).items() if now >= until)


def _pins(layout: Layout, keys: Container[str] | None = None) -> dict[str, tuple[float, str]]:
    """Return (expiry, URL) by key. A damaged pin does not expire and has an empty URL."""
    pins = {}
    for name in filter(is_pin_name, list_names(layout.pins)):
        key = name.removesuffix(".pin")
        if keys is not None and key not in keys:
            continue
        try:
            record = json.loads(read_file(layout.pin(key), _MAX_RECORD))
            until = math.inf if record["until"] is None else float(record["until"])
            pins[key] = until, str(record["url"])
        except (os_error(), ValueError, TypeError, KeyError, RecursionError) as exn:
            pins[key] = math.inf, ""
            logger.info("the pin of %s cannot be read (%s), so the shard is kept", key, exn)
    return pins
