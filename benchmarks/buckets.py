"""What is transferred: workloads, and the objects they are made of.

An object is a tar archive of one member of pseudo-random bytes, of exactly the size asked
for, so that caches which look into a shard before they keep it find what they expect. Its
bytes depend on its name: mixed up objects are told apart.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BUCKET", "PREFIX", "WORKLOADS", "Workload", "archive", "write_bucket"]

BUCKET = "bench"
#: Of directories on a RAM disk. Not the library's own: a test run removes what is called so.
PREFIX = "bench-"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
#: Bytes that are made once per object and then repeated with its number in them; making a
#: GiB of hash output would take longer than fetching it ten times.
_NOISE = 1 << 20


@dataclass(frozen=True, slots=True)
class Workload:
    """So many objects of one size.

    Attributes:
        name: in tables and ``--only``.
        count: of objects.
        size: bytes of each.
    """

    name: str
    count: int
    size: int

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the objects."""
        return tuple(f"{self.name}/{number:05d}.tar" for number in range(self.count))

    @property
    def total(self) -> int:
        """Bytes of all."""
        return self.count * self.size

    @property
    def title(self) -> str:
        """As ``16 x 64 MiB``."""
        for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
            if self.size >= unit:
                return f"{self.count:,} x {self.size / unit:g} {name}"
        return f"{self.count:,} x {self.size} bytes"


#: name -> (workload, what ``--quick`` takes in its place).
WORKLOADS = {
    "large": (Workload("large", 1, GIB), Workload("large", 1, 24 * MIB)),
    "shards": (Workload("shards", 16, 64 * MIB), Workload("shards", 3, 4 * MIB)),
    "medium": (Workload("medium", 256, 4 * MIB), Workload("medium", 4, MIB)),
    "small": (Workload("small", 2000, 100 * KIB), Workload("small", 20, 100 * KIB)),
}


def archive(name: str, size: int) -> Iterator[bytes]:
    """The blocks of an object: a tar archive of ``size`` bytes, a multiple of 512."""
    if size < 2048 or size % 512:
        raise ValueError(f"a tar archive of {size} bytes: not possible")
    member = tarfile.TarInfo("000000.bin")
    end = bytes(1024)
    left = member.size = size - 512 - len(end)
    yield member.tobuf(tarfile.USTAR_FORMAT)
    noise = hashlib.shake_128(name.encode()).digest(min(_NOISE, left))
    number = 0
    while left:
        block = number.to_bytes(8, "big") + noise[8:]
        yield block[:left]
        left -= min(left, len(block))
        number += 1
    yield end


def write_bucket(home: Path, workloads: list[Workload]) -> None:
    """Make the objects as files below ``home/BUCKET``; what is there already stays."""
    for workload in workloads:
        for key in workload.keys:
            path = home / BUCKET / key
            if path.exists() and path.stat().st_size == workload.size:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.writelines(archive(key, workload.size))
