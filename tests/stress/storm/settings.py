"""What a storm is made of: how long, how many, how big, and every bound the judge applies."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.stress.storm import shards

__all__ = ["MIB", "Settings"]

KIB = 1 << 10
MIB = 1 << 20
BUCKET = "storm"


@dataclass(frozen=True)
class Settings:
    """One storm; the same on every side, handed to the workers as JSON.

    Attributes:
        directory: the working directory; ``history`` and, unless it is a mount, the cache.
        cache: the cache's root.
        seconds: how long the storm blows, without its beginning and end.
        seed: of everything that is random in the harness (the schedule of the kernel is not).
        workers: processes that read at any time.
        lying: whether flock succeeds for everybody in the workers.
        shards: number of objects.
        stale_after: seconds, the cache's option. Small, so that many stops exceed it.
        lock_timeout: seconds, the cache's option.
        timeout: seconds, the cache's option.
        least_calls: the storm goes on until so many calls were made, up to four times as
            long: a machine that does much else needs longer for the same.
        pause: mean seconds between two calls of a worker: leaves the processor to the faults.
    """

    directory: Path
    cache: Path
    seconds: float
    seed: int
    workers: int = 8
    lying: bool = False
    shards: int = 64
    stale_after: float = 1.5
    lock_timeout: float = 20.0
    timeout: float = 5.0
    pause: float = 0.004
    least_calls: int = 0

    @property
    def history(self) -> Path:
        """Where everybody writes what happened."""
        return self.directory / "history"

    @property
    def stop_file(self) -> Path:
        """Its existence asks the workers to end after the call they are in."""
        return self.directory / "stop"

    @property
    def counters(self) -> Path:
        """A mapped file with one counter per worker, for the progress line only."""
        return self.directory / "counters"

    @cached_property
    def names(self) -> list[str]:
        """The shards' names."""
        return [shards.name(index) for index in range(self.shards)]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of version 0 of each shard: mostly one part, some of two to four."""
        rng = random.Random(f"{self.seed}/sizes")
        sizes = {}
        for name in self.names:
            low, high = rng.choices(
                ((64 * KIB, 256 * KIB), (256 * KIB, MIB), (MIB, 4 * MIB)), (55, 25, 20)
            )[0]
            sizes[name] = rng.randrange(low, high) // 512 * 512
        return sizes

    def size(self, name: str, version: int) -> int:
        """Bytes of one version: half of all versions have the length of the one before."""
        return self.sizes[name] + 512 * (version // 2 % 16)

    @property
    def dataset(self) -> int:
        """Bytes of all shards, about."""
        return sum(self.sizes.values())

    @property
    def max_size(self) -> int:
        """The cache's budget: less than half of the data, so that there is something to evict."""
        return max(int(self.dataset * 0.45), 8 * MIB)

    @property
    def largest(self) -> int:
        """Bytes of the largest version of any shard."""
        return max(self.sizes.values()) + 512 * 16

    @property
    def disk_size(self) -> int:
        """Bytes of the cache's own filesystem: room for the budget and what overlaps it."""
        return int(self.max_size * 1.5) + 16 * MIB

    def url(self, name: str) -> str:
        """A shard's URL."""
        return f"s3://{BUCKET}/{name}"

    def options(self) -> dict[str, Any]:
        """Options of every `Cache` in the storm."""
        return {
            "dir": self.cache,
            "max_size": self.max_size,
            "min_free": "1%",
            "connections": 4,
            "part_size": MIB,
            "attempts": 6,
            "timeout": self.timeout,
            "lock_timeout": self.lock_timeout,
            "stale_after": self.stale_after,
            "touch_interval": 1,
        }

    def to_json(self) -> str:
        """All of it as one line."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The inverse of `to_json`."""
        values = json.loads(text)
        return cls(**{**values, **{k: Path(values[k]) for k in ("directory", "cache")}})
