"""Making a directory a cache, and refusing one that somebody else could tamper with.

A root bears a manifest: without it nothing in a directory is ours to remove.
Making it is idempotent and may happen in any number of processes at once.
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
#: What may be in a directory that is the cache's alone; lost+found is mkfs's.
_ROOT_NAMES = frozenset({"v1", MANIFEST, _TAG_NAME, _README_NAME, "lost+found"})

# https://bford.info/cachedir/: the first 43 bytes are the signature that backup
# programs look for.
_CACHEDIR_TAG = """Signature: 8a477f597d28d172789f06886806bc55
# This directory is a shardcache root: copies of training shards that can be
# fetched again. Backups may leave it out.
"""
_README = """Copies of training shards, kept by shardcache.

v1/objects   one directory per shard: the complete shard and meta.json
v1/partial   fetches in flight; what a killed process leaves is resumed or swept
v1/locks     lock files; harmless to keep, harmless to delete when nothing runs

Look with     shardcache --dir THIS ls
Make room     shardcache --dir THIS clean --max-size 500GB
Remove all    shardcache --dir THIS clean --all -y
Deleting any entry by hand is safe too: the next reader fetches it again.
"""


def make_root(root: Path, library: str, modes: Modes = PRIVATE) -> Layout:
    """Make ``root`` a cache of this version of the library, or check that it may be used as one.

    Raises:
        ConfigError: as `check_root` and `check_manifest`.
        OSError: it cannot be made or written (EACCES, EROFS, ENOSPC, ...).
    """
    if modes.group is None:  # the umask decides about directories that are not the cache's
        with contextlib.suppress(OSError):  # it comes again below, unless another process made it
            root.parent.mkdir(parents=True, exist_ok=True)
    try:
        modes.make_directory(root, levels=99)
    except (FileExistsError, NotADirectoryError) as exn:
        raise ConfigError(
            f"{exn.filename} is not a directory; point dir at a directory for the cache", dir=root
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
        # Last: its presence says that the rest is there. Its id never changes: by it the
        # processes of a node find each other's locks (`mounts`).
        texts[root / MANIFEST] = json.dumps(manifest) + "\n"
        for path, text in texts.items():
            replace_file(path, text.encode(), modes.file, via=layout.partial, once=True)
    return layout


def check_foreign(root: Path) -> None:
    """Refuse (ConfigError) a directory that is no cache and holds something, or leads elsewhere."""
    check_links(Layout.of_root(root))
    if root.exists() and not root.is_dir():
        raise ConfigError(
            f"{root} is not a shardcache directory: it is a file; point dir at a directory",
            dir=root,
        )
    names = [] if is_cache(root) else sorted(list_names(root.resolve()))
    if strange := [n for n in names if n not in _ROOT_NAMES and not is_temporary_name(n)]:
        shown = ", ".join(strange[:3]) + (", ..." if strange[3:] else "")
        raise ConfigError(
            f"{root} is not a shardcache directory, and it has other things in it ({shown}). "
            f"Give the cache a directory of its own, such as {root / 'shards'}.",
            dir=root,
        )


def is_cache(root: Path) -> bool:
    """Whether ``root`` bears our manifest and leads nowhere else; else nothing may be removed."""
    try:
        manifest = (root / MANIFEST).lstat()
    except OSError:
        return False
    return stat.S_ISREG(manifest.st_mode) and Layout.of_root(root).linked() is None


def require_cache(root: Path) -> None:
    """Refuse (ConfigError) a directory that is no cache: nothing in it is ours to remove."""
    check_foreign(root)
    if not is_cache(root):
        why = "it has no manifest.json" if root.exists() else "it does not exist"
        raise ConfigError(
            f"{root} is not a shardcache directory ({why}), so nothing in it is touched. "
            "Check dir (--dir, SHARDCACHE_DIR).",
            dir=root,
        )


def check_root(root: Path, modes: Modes = PRIVATE) -> None:
    """Refuse (ConfigError) a root that somebody else could tamper with, or that leads elsewhere."""
    reason = modes.objection(root, root.stat())
    if reason is not None:
        raise ConfigError(reason, dir=root)
    check_links(Layout.of_root(root))


def check_links(layout: Layout) -> None:
    """Refuse (ConfigError) a namespace that leads elsewhere: nothing is removed behind links."""
    linked = layout.linked()
    if linked is not None:
        raise ConfigError(
            f"{linked} is a symbolic link, and the cache removes nothing behind links; "
            "point dir at the place itself",
            dir=layout.base,
        )


def check_manifest(root: Path, modes: Modes) -> None:
    """Refuse (ConfigError) a cache that others share than ``modes`` say.

    What one process makes for itself alone, the others could not read, and could not tell from
    a failing disk.
    """
    manifest = read_manifest(root)
    stated = manifest.get(_GROUP)
    if stated == modes.group or not manifest:
        return
    if isinstance(stated, int):
        name = group_name(stated)
        reason = (
            f"{root} is shared by the group {name}; set shared_group={name!r}, or use a directory "
            "of your own."
        )
    else:
        reason = (
            f"{root} is the cache of one user, and shared_group is set. Use another directory "
            "for the group, or remove this one first."
        )
    raise ConfigError(reason, dir=root)


def identity(root: Path, namespace: Layout) -> Identity | None:
    """What tells a root from another under the same path; None where there is no cache.

    The device tells a mount that came or went, the inode a directory that was replaced, and
    a missing manifest or ``namespace`` one that was emptied.
    """
    try:
        found = root.stat()
        (root / MANIFEST).lstat()
        namespace.base.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    # Where other machines have the filesystem, inode numbers may come and go (FUSE).
    return found.st_dev, 0 if namespace.grace is not None else found.st_ino
