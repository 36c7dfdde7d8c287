"""Filesystems in memory, and cgroups with a memory limit."""

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
    """Mount a filesystem in memory; it is unmounted at the end even while in use."""
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


@contextlib.contextmanager
def limited_group() -> Iterator[Path]:
    """Make a cgroup with 256 MiB of memory; skip the test if that is not possible."""
    for mount in read_mounts():
        if mount.type == "cgroup" and "memory" in mount.options:
            parent, name = Path(mount.point), "memory.limit_in_bytes"
            break
    else:
        parent, name = Path("/sys/fs/cgroup"), "memory.max"
    directory = parent / f"shardcache-test-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        try:
            directory.mkdir()
            stack.callback(directory.rmdir)
            (directory / name).write_text(str(256 << 20))
        except OSError as exn:
            pytest.skip(f"cannot make a cgroup with a memory limit: {exn}")
        yield directory
