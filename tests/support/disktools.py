"""Filesystems in memory."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcache.locks.mounts import read_mounts

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts filesystems, or changes users")


@contextlib.contextmanager
def disk(path: Path, options: str) -> Iterator[Path]:
    """Mount a filesystem in memory; it is unmounted at the end even while in use.

    Skips the test without root.
    """
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    path.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"mode=0700,{options}", "shardcache-test", str(path)],
        check=True,
    )
    try:
        yield path
    finally:
        unmount(path)


def unmount(path: Path) -> None:
    # `os.path.ismount` does not recognise bind mounts.
    while any(mount.point == str(path) for mount in read_mounts()):
        subprocess.run(["umount", "-l", str(path)], check=True)


def remount(path: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(path)], check=True)
