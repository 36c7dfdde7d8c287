"""What a storm is made of: its sizes and times, and shards that say what they are.

Every 64 bytes of a shard state its name, its version and the offset of their 4 KiB block, so a byte
of another shard, another version or another place, a hole and a lost tail are all seen.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.support.tars import tar_of

KIB, MIB = 1 << 10, 1 << 20
_LINE, _BLOCK, _HEAD, _END = 64, 4096, 512, 1024
_STATED = re.compile(rb"(\S+) version (\d{6}) offset (\d{10}) \.*\n")


def _line(name: str, version: int, at: int) -> bytes:
    return f"{name} version {version:06d} offset {at:010d} ".encode().ljust(_LINE - 1, b".") + b"\n"


@dataclass(frozen=True)
class Storm:
    """One storm.

    Attributes:
        directory: holds the cache, and what everybody writes down.
        endpoint: URL of the origin.
        seconds: how long it blows.
        seed: of everything random but the kernel's schedule.
        workers: processes that use the cache at any time.
        lying: flock succeeds for everybody.
    """

    directory: Path
    endpoint: str
    seconds: float
    seed: int
    workers: int = 8
    lying: bool = False
    shards: int = 48
    stale_after: float = 1.5
    lock_timeout: float = 20.0

    @property
    def root(self) -> Path:
        return self.directory / "disk" / "cache"

    @property
    def stop_file(self) -> Path:
        """Asks the workers to end after the call that they are in."""
        return self.directory / "stop"

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of version 0 of each shard: mostly one block, some of two to five."""
        draw = random.Random(self.seed)
        spans = ((64 * KIB, 256 * KIB), (256 * KIB, MIB), (MIB, 5 * MIB))
        return {
            f"shard-{number:04d}.tar": draw.randrange(*draw.choices(spans, (50, 25, 25))[0]) & ~511
            for number in range(self.shards)
        }

    @cached_property
    def names(self) -> list[str]:
        return list(self.sizes)

    @property
    def max_size(self) -> int:
        """Less than half of all, so that there is something to evict."""
        return max(int(sum(self.sizes.values()) * 0.45), 12 * MIB)

    def size(self, name: str, version: int) -> int:
        """Bytes of a version: half of all have the length of the one before."""
        return self.sizes[name] + 512 * (version // 2 % 16)

    def url(self, name: str) -> str:
        return f"{self.endpoint}/{name}"

    def options(self) -> dict[str, Any]:
        """Of every cache in the storm."""
        return {
            "dir": self.root,
            "max_size": self.max_size,
            "min_free": 0,
            "part_size": MIB,  # several requests for a shard, between which it may be replaced
            "attempts": 6,
            "timeout": 5.0,
            "lock_timeout": self.lock_timeout,
            "stale_after": self.stale_after,
        }

    def data(self, name: str, version: int) -> bytes:
        """One version of a shard: a tar archive with one member."""
        size = self.size(name, version)
        blocks = b"".join(
            _line(name, version, at) * (_BLOCK // _LINE) for at in range(0, size, _BLOCK)
        )
        member = f"{name}.v{version}.txt", blocks[_HEAD : size - _END]
        return tar_of([member], whole_records=False)

    def examine(self, name: str, data: bytes) -> tuple[int | None, str | None]:
        """The version that the first line states, and what is wrong with the bytes, or None."""
        stated = _STATED.match(data, _HEAD)
        if stated is None:
            return None, f"{len(data)} bytes that begin with {data[:64]!r}"
        version = int(stated[2])
        expected = self.data(name, version)
        if data == expected:
            return version, None
        steps = range(0, max(len(data), len(expected)), _LINE)
        at = next(at for at in steps if data[at : at + _LINE] != expected[at : at + _LINE])
        what = f"{len(data)} of {len(expected)} bytes of version {version}"
        return version, f"{what}; at {at} stands {data[at : at + _LINE]!r}"
