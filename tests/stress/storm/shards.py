"""Shards that say what they are.

A tar archive with one member. Every 4 KiB block repeats one line of 64 bytes that
states name, version and offset of the block; header and end of the archive excepted.
A byte of another shard, another version or another place, a hole and a lost tail are
therefore all seen, and all but the hole say where they come from.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator

import xxhash

__all__ = ["BLOCK", "digest", "examine", "make", "name"]

BLOCK = 4096
_LINE = 64
_HEAD = 512
_END = 1024
_STATED = re.compile(rb"(\S+) version (\d{6}) offset (\d{10}) \.*\n")


def name(index: int) -> str:
    """The name of a shard."""
    return f"shard-{index:04d}.tar"


def digest(data: bytes) -> str:
    """What the history keeps of the bytes of a read."""
    return xxhash.xxh3_128_hexdigest(data)


def _line(shard: str, version: int, offset: int) -> bytes:
    stated = f"{shard} version {version:06d} offset {offset:010d} "
    return stated.encode().ljust(_LINE - 1, b".") + b"\n"


def make(shard: str, version: int, size: int) -> bytes:
    """One version of a shard.

    Args:
        shard: its name.
        version: its number.
        size: bytes, a multiple of 512, at least a block.
    """
    info = tarfile.TarInfo(f"{shard.removesuffix('.tar')}.v{version:06d}.txt")
    info.size = size - _HEAD - _END
    blocks = b"".join(
        _line(shard, version, offset) * (BLOCK // _LINE) for offset in range(0, size, BLOCK)
    )
    return info.tobuf(tarfile.USTAR_FORMAT) + blocks[_HEAD : size - _END] + bytes(_END)


def examine(
    shard: str, data: bytes, size_of: Callable[[str, int], int]
) -> tuple[int | None, str | None]:
    """(version, None) if ``data`` is exactly one version; else what is wrong with it.

    Args:
        shard: which shard was asked for.
        data: what was read.
        size_of: bytes of a version of a shard.
    """
    stated = _STATED.match(data, _HEAD)
    if stated is None:
        return None, f"{len(data)} bytes; the first block holds {_shown(data[:BLOCK])}"
    version = int(stated.group(2))
    expected = make(shard, version, size_of(shard, version))
    if data == expected:
        return version, None
    wrong = list(_differences(data, expected))
    text = f"{len(data)} of {len(expected)} bytes of version {version}; {len(wrong)} blocks differ"
    return version, "; ".join([text, *wrong[:3]])


def _differences(data: bytes, expected: bytes) -> Iterator[str]:
    for offset in range(0, max(len(data), len(expected)), BLOCK):
        found = data[offset : offset + BLOCK]
        if found != expected[offset : offset + BLOCK]:
            yield f"at {offset}: {_shown(found)}"


def _shown(block: bytes) -> str:
    """What a block says it is."""
    stated = _STATED.search(block)
    if stated is not None:
        whole = len({block[i : i + _LINE] for i in range(0, len(block), _LINE)}) == 1
        what = f"{stated.group(1).decode()} version {int(stated.group(2))}"
        return f"{'' if whole else 'among others '}{what} offset {int(stated.group(3))}"
    if not block:
        return "nothing"
    return "zeros" if not any(block) else repr(block[:32])
