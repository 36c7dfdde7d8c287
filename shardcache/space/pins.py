"""What a user asked to keep: ``shardcache pin``.

A pin is a small file in ``pins``, named by the shard's key, that says until when. It is of the
shard and not of its entry: it may be there before the shard is, and stays when another version is
fetched. No policy, no ``clean --all`` and no ``rm`` removes a pinned shard.
"""

from __future__ import annotations

import json
import logging
import math

from shardcache.layout import Layout, is_pin_name, list_names, read_file, replace_file
from shardcache.urls import ShardURL

__all__ = ["pin", "pinned", "remove_expired", "unpin"]

logger = logging.getLogger(__name__)

_MAX_RECORD = 16_384


def pin(layout: Layout, shard: ShardURL, until: float | None) -> None:
    """Keep a shard until then, in seconds since the epoch; None without end."""
    layout.modes.make_directory(layout.pins, levels=0)
    data = json.dumps({"schema": 1, "url": str(shard), "until": until}).encode()
    replace_file(layout.pin(shard.key), data, layout.modes.file, via=layout.partial)


def unpin(layout: Layout, key: str) -> bool:
    """Keep a shard no longer; False if it was not pinned."""
    try:
        layout.pin(key).unlink()
    except FileNotFoundError:
        return False
    return True


def pinned(layout: Layout, now: float) -> dict[str, str]:
    """All shards that are to be kept: URLs by key; empty where a pin does not tell its own."""
    return {key: url for key, (until, url) in _pins(layout).items() if now < until}


def remove_expired(layout: Layout, now: float) -> int:
    """Remove pins that no longer count; returns how many."""
    return sum(unpin(layout, key) for key, (until, _) in _pins(layout).items() if now >= until)


def _pins(layout: Layout) -> dict[str, tuple[float, str]]:
    """Until when each key is kept, and its URL; a pin that makes no sense has no end and no URL."""
    found = {}
    for name in filter(is_pin_name, list_names(layout.pins)):
        key = name.removesuffix(".pin")
        try:
            record = json.loads(read_file(layout.pin(key), _MAX_RECORD))
            until = math.inf if record["until"] is None else float(record["until"])
            found[key] = until, str(record["url"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as exn:
            found[key] = math.inf, ""
            logger.info("the pin of %s cannot be read (%s); the shard is kept", key, exn)
    return found
