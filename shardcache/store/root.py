"""The root of a cache: making one, and refusing one that other users could tamper with.

A root has a manifest; in a directory without one, shardcache removes nothing. Any number of
processes may make the same root at once.
"""

from __future__ import annotations

import contextlib
import json
import stat
from pathlib import Path

from shardcache.config import group_name
from shardcache.errors import ConfigError
from shardcache.files import PRIVATE, Modes, random_token
from shardcache.layout import (
    MANIFEST,
    Layout,
    is_temporary_name,
    list_names,
    read_manifest,
    replace_file,
)

#: Device and inode.
Identity = tuple[int, int]

#: In the manifest: the number of the group that shares the cache.
_GROUP = "shared_group"
_TAG_NAME = "CACHEDIR.TAG"
_README_NAME = "README.txt"
#: Names that an unmade root may hold: those of `make_root`, which may have been killed, and mkfs's.
_ROOT_NAMES = frozenset({"v1", MANIFEST, _TAG_NAME, _README_NAME, "lost+found"})

# https://bford.info/cachedir/: the first 43 bytes are the signature that backup
# programs look for.
_CACHEDIR_TAG = """Signature: 8a477f597d28d172789f06886806bc55
# This directory is a shardcache root: copies of training shards that can be
# downloaded again. Backups may leave it out.
"""
_README = """Copies of training shards, kept by shardcache.

v1/objects   one directory per shard: the complete shard and meta.json
v1/partial   downloads in flight; those of killed processes are resumed or removed
v1/locks     lock files; harmless to keep, harmless to delete when nothing runs

List          shardcache --dir THIS ls
Make room     shardcache --dir THIS clean --max-size 500GB
Remove all    shardcache --dir THIS clean --all -y
You may delete any entry by hand: the next reader downloads it again.
"""


def make_root(root: Path, library: str, modes: Modes = PRIVATE) -> Layout:
    """Make a directory a cache, or check that it may be used as one; return the node's namespace.

    The directory need not exist. ``library`` is the version of shardcache, for the manifest.

    Raises:
        ConfigError: the directory must not be used.
        OSError: it cannot be made or written (EACCES, EROFS, ENOSPC, ...).
    """
    if modes.group is None:  # directories above the cache get the permissions of the umask
        with contextlib.suppress(OSError):  # raised again below, unless another process made it
            root.parent.mkdir(parents=True, exist_ok=True)
    try:
        modes.make_directory(root, levels=99)
    except (FileExistsError, NotADirectoryError) as exn:
        raise ConfigError(
            f"{exn.filename} is not a directory. Set dir to a directory.", dir=root
        ) from exn
    check_manifest(root, modes)
    check_root(root, modes)
    check_foreign(root)
    layout = Layout.of_root(root, modes)
    layout.make()
    if not (root / MANIFEST).exists():
        manifest = {"schema": 1, "layouts": ["v1"], "id": random_token(), "library": library}
        if modes.group is not None:
            manifest[_GROUP] = modes.group
        texts = {root / _TAG_NAME: _CACHEDIR_TAG, root / _README_NAME: _README}
        # The manifest comes last: it says that the rest is complete. Its id never changes, because
        # it names the directory of the node's locks (`locks.mounts`).
        texts[root / MANIFEST] = json.dumps(manifest) + "\n"
        for path, text in texts.items():
            replace_file(path, text.encode(), modes.file, via=layout.partial, once=True)
    return layout


def check_foreign(root: Path) -> None:
    """Raise ConfigError for a file, a link, or a directory that is not a cache and not empty."""
    check_links(Layout.of_root(root))
    if root.exists() and not root.is_dir():
        raise ConfigError(
            f"{root} is not a shardcache directory: it is a file. Set dir to a directory.",
            dir=root,
        )
    names = [] if is_cache(root) else sorted(list_names(root.resolve()))
    if strange := [n for n in names if n not in _ROOT_NAMES and not is_temporary_name(n)]:
        shown = ", ".join(strange[:3]) + (", ..." if strange[3:] else "")
        raise ConfigError(
            f"{root} is not a shardcache directory, and it has other files in it ({shown}). "
            f"Give the cache a directory of its own, such as {root / 'shards'}.",
            dir=root,
        )


def is_cache(root: Path) -> bool:
    """Return whether ``root`` has a manifest and no links; else nothing in it may be removed."""
    try:
        manifest = (root / MANIFEST).lstat()
    except OSError:
        return False
    return stat.S_ISREG(manifest.st_mode) and Layout.of_root(root).linked() is None


def require_cache(root: Path) -> None:
    """Raise ConfigError if ``root`` is not a cache, before something in it is removed."""
    check_foreign(root)
    if not is_cache(root):
        why = "it has no manifest.json" if root.exists() else "it does not exist"
        raise ConfigError(
            f"{root} is not a shardcache directory ({why}), so nothing in it is touched. "
            "Check dir (--dir, SHARDCACHE_DIR).",
            dir=root,
        )


def check_root(root: Path, modes: Modes = PRIVATE) -> None:
    """Raise ConfigError for a root that other users could tamper with, or that has links."""
    reason = modes.objection(root, root.stat())
    if reason is not None:
        raise ConfigError(reason, dir=root)
    check_links(Layout.of_root(root))


def check_links(layout: Layout) -> None:
    """Raise ConfigError if a directory of the namespace is a symbolic link."""
    linked = layout.linked()
    if linked is not None:
        raise ConfigError(
            f"{linked} is a symbolic link, and shardcache does not follow links in a cache. "
            "Set dir to the directory that it points to.",
            dir=layout.base,
        )


def check_manifest(root: Path, modes: Modes) -> None:
    """Raise ConfigError if ``shared_group`` of the configuration is not that of the manifest.

    Processes with other settings could not read each other's files.
    """
    manifest = read_manifest(root)
    stated = manifest.get(_GROUP)
    if stated == modes.group or not manifest:
        return
    if isinstance(stated, int):
        name = group_name(stated)
        reason = (
            f"{root} is shared by the group {name}. Set shared_group={name!r}, or use a directory "
            "of your own."
        )
    else:
        reason = (
            f"{root} is the cache of one user, but shared_group is set. Use another directory for "
            "the group, or remove this one first."
        )
    raise ConfigError(reason, dir=root)


def identity(root: Path, namespace: Layout) -> Identity | None:
    """Return device and inode of a root; None if it or ``namespace`` is gone, or it is no cache.

    The device changes when a filesystem is mounted or unmounted there, the inode when the
    directory is replaced.
    """
    try:
        status = root.stat()
        (root / MANIFEST).lstat()
        namespace.base.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    # With leases, the filesystem may be FUSE, whose inode numbers may change.
    return status.st_dev, 0 if namespace.grace is not None else status.st_ino
