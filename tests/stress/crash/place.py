"""The shards of the crash-point sweep, and a cache directory that they are read through."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardcache.cache import Cache
from shardcache.clock import SYSTEM_CLOCK, Clock
from shardcache.config import Config
from shardcache.urls import ShardURL, parse_url

__all__ = ["BIG", "MIB", "SHARDS", "Place", "WrongBytesError"]

MIB = 1 << 20


def _shard(seed: int, size: int) -> bytes:
    """A tar archive whose bytes depend on ``seed`` everywhere."""
    data = hashlib.shake_128(b"%d" % seed).digest(size)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("000000.bin")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


#: Of several blocks and parts; the others of one block.
BIG = "big.tar"
SHARDS = {BIG: _shard(0, 3 * MIB + 4321)} | {
    f"{name}.tar": _shard(seed, 5000 * seed) for seed, name in enumerate("abcd", 1)
}


class WrongBytesError(Exception):
    """A shard was read, and is not what the origin has."""


@dataclass(frozen=True, slots=True)
class Place:
    """A cache directory and where its shards come from.

    Attributes:
        root: of the cache.
        origin: URL of the directory or bucket with `SHARDS`, without a slash at its end.
        options: of the cache, beside the usual ones.
    """

    root: Path
    origin: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def url(self, name: str) -> str:
        """The URL of a shard."""
        return f"{self.origin}/{name}"

    def key(self, name: str) -> str:
        """The key of a shard."""
        return self.parse(name).key

    def parse(self, name: str) -> ShardURL:
        """The shard's names."""
        return parse_url(self.url(name), endpoint=self.options.get("endpoint_url"))

    def cache(self, *, clock: Clock = SYSTEM_CLOCK, **options: Any) -> Cache:
        """A cache on this directory, whatever the environment says."""
        chosen = {"min_free": 0, "cache_local": True, "connections": 1, "part_size": 2 * MIB}
        # In the calling thread alone, unless a scenario is about more.
        chosen["fill"] = "complete"
        # One attempt: a fault of the disk is no reason to ask the origin again.
        config = Config(self.root, **{**chosen, "attempts": 1, **self.options, **options})
        return Cache.from_config(config, clock=clock)

    def read(self, cache: Cache, name: str) -> bool:
        """Read a shard; whether it came from a file of the cache.

        Raises:
            WrongBytesError: it is not what the origin has.
        """
        with cache.open(self.url(name)) as stream:
            data = stream.read()
            local = Path(str(stream.name)).is_absolute()
        if data != SHARDS[name]:
            raise WrongBytesError(f"{name}: {len(data)} bytes that are not the origin's")
        return local
