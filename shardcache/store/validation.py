"""Whether what was fetched can be a shard at all.

Checksums prove that the bytes are the origin's; they do not prove that the
origin sent a shard: error pages arrive with status 200 and a correct length.
"""

from __future__ import annotations

import os

from shardcache.errors import IntegrityError

__all__ = ["check_archive"]

_HEADER = 512
#: First bytes of what tarfile's "r|*" opens.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"(\xb5/\xfd")
_SUFFIXES = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")


def check_archive(fd: int, basename: str, url: str) -> None:
    """Refuse a file named like a tar archive that does not begin like one.

    Args:
        fd: the open file.
        basename: its name; other names than tar's are not looked at.
        url: for the error.

    Raises:
        IntegrityError: it is something else, an error page for instance.
        OSError: it cannot be read.
    """
    if not basename.lower().endswith(_SUFFIXES):
        return
    head = os.pread(fd, _HEADER, 0)
    if not head or head.startswith(_COMPRESSED) or _is_tar_header(head):
        return
    raise IntegrityError(
        f"{url} is no tar archive: it begins with {head[:24]!r}. "
        "Look at the object; an error page may have been uploaded or served in its place.",
        url=url,
    )


def _is_tar_header(head: bytes) -> bool:
    """POSIX pax: the header's own checksum, bytes 148-155 counted as blanks."""
    if len(head) < _HEADER:
        return False
    if head == bytes(_HEADER):
        return True  # an archive without members
    try:
        stated = int(head[148:156].rstrip(b"\0 ").lstrip(b" ") or b"0", 8)
    except ValueError:
        return False
    # Old writers summed signed bytes; tarfile accepts both.
    fields = head[:148] + b" " * 8 + head[156:]
    if stated == sum(fields):
        return True
    return stated == sum(byte - 256 if byte > 127 else byte for byte in fields)
