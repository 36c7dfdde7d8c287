"""The shards that tests read."""

from __future__ import annotations

import io
import tarfile


def make_tar(seed: int, members: int = 4, size: int = 1000) -> bytes:
    """A shard whose every byte depends on ``seed``; the same for the same arguments."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for number in range(members):
            pattern = f"{seed}/{number}/".encode()
            data = (pattern * (size // len(pattern) + 1))[:size]
            for suffix in ("txt", "cls"):
                info = tarfile.TarInfo(f"{seed:04d}-{number:05d}.{suffix}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
