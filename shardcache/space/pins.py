"""What a user asked to keep: ``shardcache pin``.

A pin is a small file in ``pins``, named by the shard's key, that says until when. It is of the
shard and not of its entry: it may be there before the shard is, and stays when another version is
fetched. No policy, no ``clean --all`` and no ``rm`` removes a pinned shard.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

from shardcache.layout import Layout, is_pin_name, list_names, read_file, refuse_links, replace_file
from shardcache.urls import ShardURL

__all__ = ["Pin", "pin", "pinned_keys", "pins", "remove_expired", "unpin"]

logger = logging.getLogger(__name__)

_MAX_RECORD = 16_384


@dataclass(frozen=True, slots=True)
class Pin:
    """One pin: of which shard, and until when (seconds since the epoch; None without end)."""

    key: str
    url: str
    until: float | None

    def holds(self, now: float) -> bool:
        """Whether it still counts."""
        return self.until is None or now < self.until


def pin(layout: Layout, shard: ShardURL, until: float | None) -> None:
    """Keep a shard until then, in seconds since the epoch; None without end."""
    refuse_links(layout.pins)
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


def pins(layout: Layout) -> list[Pin]:
    """All pins, expired ones too; one that cannot be read, or makes no sense, has no end."""
    found = []
    for name in filter(is_pin_name, list_names(layout.pins)):
        key = name.removesuffix(".pin")
        try:
            record = json.loads(read_file(layout.pin(key), _MAX_RECORD))
            until = record["until"]
            found.append(Pin(key, str(record["url"]), None if until is None else float(until)))
        except FileNotFoundError:  # unpinned meanwhile
            continue
        except (OSError, ValueError, TypeError, KeyError) as exn:
            logger.info("the pin of %s cannot be read (%s); the shard is kept", key, exn)
            found.append(Pin(key, "", None))
    return found


def pinned_keys(layout: Layout, now: float) -> frozenset[str]:
    """The keys of all shards that are to be kept."""
    return frozenset(pin.key for pin in pins(layout) if pin.holds(now))


def remove_expired(layout: Layout, now: float) -> int:
    """Remove pins that no longer count; returns how many."""
    return sum(unpin(layout, pin.key) for pin in pins(layout) if not pin.holds(now))
