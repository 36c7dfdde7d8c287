"""Shards for tests."""

import io
import tarfile
from functools import lru_cache

_LINE, _BLOCK = 64, 4096


def tar_of(members, style=tarfile.DEFAULT_FORMAT, *, modified=0, whole_records=True) -> bytes:
    """Return a tar archive of the members, given as name and content.

    With ``whole_records``, it is padded to a multiple of 10,240 bytes, as the tar command does.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=style) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), modified
            archive.addfile(info, io.BytesIO(data))
        end = archive.offset + 2 * tarfile.BLOCKSIZE
    return buffer.getvalue() if whole_records else buffer.getvalue()[:end]


def make_tar(seed: int, members: int = 4, size: int = 1000) -> bytes:
    """Return a shard whose content depends on the arguments alone."""
    files = []
    for number in range(members):
        pattern = f"{seed}/{number}/".encode()
        content = (pattern * (size // len(pattern) + 1))[:size]
        files += [(f"{seed:04d}-{number:05d}.{suffix}", content) for suffix in ("txt", "cls")]
    return tar_of(files)


def sample_tar(seed: int, samples: int = 6) -> bytes:
    """Return a shard of ``.txt`` and ``.cls`` pairs, which every WebDataset reader decodes."""
    found = []
    for number in range(samples):
        text = f"sample {number} of shard {seed}, " * 30
        label = str((seed + number) % 10)
        name = f"{seed:04d}-{number:05d}"
        found += [(f"{name}.txt", text.encode()), (f"{name}.cls", label.encode())]
    return tar_of(found)


@lru_cache(maxsize=64)
def labelled_tar(name: str, version: int, size: int) -> bytes:
    """Return a shard whose every 64 bytes state name, version, and offset of their 4 KiB block."""
    lines = (
        f"{name} version {version:06d} offset {at:010d} ".encode().ljust(_LINE - 1, b".")
        for at in range(0, size, _BLOCK)
    )
    blocks = b"".join((line + b"\n") * (_BLOCK // _LINE) for line in lines)
    member = f"{name}.v{version}.txt", blocks[512 : size - 1024]
    return tar_of([member], whole_records=False)


def difference(found: bytes, expected: bytes) -> str:
    """Describe the first wrong line of a shard; empty if there is none."""
    if found == expected:
        return ""
    lines = range(0, max(len(found), len(expected)), _LINE)
    at = next(at for at in lines if found[at : at + _LINE] != expected[at : at + _LINE])
    return f"{len(found)} of {len(expected)} bytes; at {at}: {found[at : at + _LINE]!r}"
