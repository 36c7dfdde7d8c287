"""Workloads, and the objects that they consist of.

An object is a tar archive with one member of pseudo-random bytes, because some caches look into a
shard before they store it. Its bytes depend on its name, so a client that mixes objects up is
noticed.
"""

from __future__ import annotations

import hashlib
import random
import tarfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.tars import tar_of

BUCKET = "bench"
#: Prefix of directories on a RAM disk. It differs from the package's, whose leftovers tests remove.
PREFIX = "bench-"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Workload:
    """Objects of one size."""

    name: str  # name in tables and for ``--only``
    count: int  # number of objects
    size: int  # bytes of each object, a multiple of 512

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the objects."""
        return tuple(f"{self.name}/{number:05d}.tar" for number in range(self.count))

    @property
    def total(self) -> int:
        """Bytes of all objects."""
        return self.count * self.size

    @property
    def title(self) -> str:
        """Title in tables, such as ``16 x 64 MiB``."""
        unit, name = next(
            u for u in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if self.size >= u[0]
        )
        return f"{self.count:,} x {self.size / unit:g} {name}"


#: name -> (workload, its replacement with ``--quick``).
WORKLOADS = {
    "large": (Workload("large", 1, GIB), Workload("large", 1, 24 * MIB)),
    "shards": (Workload("shards", 48, 64 * MIB), Workload("shards", 3, 4 * MIB)),
    "medium": (Workload("medium", 256, 4 * MIB), Workload("medium", 4, MIB)),
    "small": (Workload("small", 2000, 100 * KIB), Workload("small", 20, 100 * KIB)),
}


def write_bucket(home: Path, workloads: list[Workload]) -> None:
    """Write the objects as files below ``home/BUCKET``."""
    for workload in workloads:
        for key in workload.keys:
            path = home / BUCKET / key
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_archive(path, key, workload.size)


def _write_archive(path: Path, key: str, size: int) -> None:
    end = bytes(1024)
    member = tarfile.TarInfo("000000.bin")
    member.size = size - 512 - len(end)
    # One MiB, repeated with a number in each copy: random bytes for a whole GiB would take longer
    # to make than to download ten times.
    noise = hashlib.shake_128(key.encode()).digest(min(MIB, member.size))
    with path.open("wb") as file:
        file.write(member.tobuf(tarfile.USTAR_FORMAT))
        for start in range(0, member.size, MIB):
            block = start.to_bytes(8, "big") + noise[8:]
            file.write(block[: member.size - start])
        file.write(end)


def sample_archive(
    first: int, samples: int, size: int, *, files: int = 2, pax: bool = False
) -> bytes:
    """Return a shard whose ``.cls`` files hold numbers from ``first`` on, after a ``.bin`` of
    ``size`` bytes. With ``pax``, it has the extended headers that ShardWriter writes.
    """
    noise, members = random.Random(first).randbytes(size + samples), []
    for number in range(first, first + samples):
        data = noise[number - first :][:size]
        both = [(f"{number:08d}.bin", data), (f"{number:08d}.cls", b"%d" % number)]
        members += both[:files]
    return tar_of(members, tarfile.PAX_FORMAT, modified=1_700_000_000.5 if pax else 0)
