"""Making a directory a cache, and refusing one that somebody else could tamper with.

A root bears a manifest: without it nothing in a directory is ours to remove.
Making it is idempotent and may happen in any number of processes at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from shardcache.config import group_name
from shardcache.errors import ConfigError
from shardcache.files import PRIVATE, Modes, random_token
from shardcache.layout import (
    MANIFEST,
    Layout,
    is_temporary_name,
    list_names,
    read_file,
    replace_file,
    temporary_name,
    write_new,
)

#: Device and inode.
Identity = tuple[int, int]

#: Of the manifest: what it says about all layouts below it.
_SCHEMA = 1
#: In the manifest: the number of the group that shares the cache.
_GROUP = "shared_group"
#: What a filesystem says that has no hard links.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK})
#: A sweeper may remove a manifest before it has its name, not this often in a row.
_ATTEMPTS = 100
#: A manifest has about 150 bytes.
_MAX_MANIFEST = 64 * 1024

_TAG_NAME = "CACHEDIR.TAG"
_README_NAME = "README.txt"
#: What may be in a directory that is the cache's alone; lost+found is mkfs's.
_ROOT_NAMES = frozenset({"v1", MANIFEST, _TAG_NAME, "lost+found"})

# https://bford.info/cachedir/: the first 43 bytes are the signature that backup
# programs look for.
_CACHEDIR_TAG = """Signature: 8a477f597d28d172789f06886806bc55
# This directory is a shardcache root: copies of training shards that can be
# fetched again. Backups may leave it out.
"""
_README = """Copies of training shards, kept by shardcache.

v1/objects   one directory per shard: the shard and meta.json, complete and read-only
v1/partial   fetches in flight; what a killed process leaves is resumed or swept
v1/locks     empty lock files; harmless to keep, harmless to delete when nothing runs

Look with     shardcache --dir THIS ls
Make room     shardcache --dir THIS clean --max-size 500GB
Remove all    shardcache --dir THIS clean --all -y
Deleting any entry by hand is safe too: the next reader fetches it again.
"""


def make_root(root: Path, library: str, modes: Modes = PRIVATE) -> Layout:
    """Make ``root`` a cache, or check that it is one that may be used.

    Args:
        root: the directory.
        library: version of shardcache, for the manifest.
        modes: who shares it.

    Raises:
        ConfigError: ``root`` is not a directory, belongs to somebody else, anybody may
            write to it, it leads elsewhere, or others share it than ``modes`` say.
        OSError: it cannot be made or written (EACCES, EROFS, ENOSPC, ...).
    """
    try:
        modes.make_root(root)
    except (FileExistsError, NotADirectoryError) as exn:
        raise ConfigError(
            f"{exn.filename} is not a directory; point dir at a directory for the cache", dir=root
        ) from exn
    check_group(root, modes)
    check_root(root, modes)
    layout = Layout.of_root(root, modes)
    check_layout(layout)
    layout.make()
    if not (root / MANIFEST).exists():
        # Backups skip what the tag is in: it must not be in a directory that holds
        # other things as well, and their README is not ours to replace.
        alone = all(_is_ours(root, name) for name in list_names(root.resolve()))
        manifest = {"schema": _SCHEMA, "layouts": ["v1"], "id": random_token(), "library": library}
        if modes.group is not None:
            manifest[_GROUP] = modes.group
        home, via = root if alone else layout.base, layout.partial
        replace_file(home / _TAG_NAME, _CACHEDIR_TAG.encode(), modes.notice, via=via)
        replace_file(home / _README_NAME, _README.encode(), modes.notice, via=via)
        # Last: its presence says that the rest is there. Its id never changes: by it the
        # processes of a node find each other's locks (`mounts`).
        data = (json.dumps(manifest) + "\n").encode()
        for _ in range(_ATTEMPTS):
            if _make_once(root / MANIFEST, data, modes.notice, via):
                break
            layout.make()
    return layout


def _make_once(path: Path, data: bytes, mode: int, via: Path) -> bool:
    """Make ``path`` hold ``data`` unless somebody has made it: of several makers one wins.

    Returns:
        False if a sweeper took the file for that of a dead process.
    """
    temporary = temporary_name(via, path)
    write_new(temporary, data, mode)
    try:
        os.link(temporary, path)
    except OSError as exn:
        if exn.errno in _NO_LINKS:
            temporary.replace(path)  # the last of several makers wins
        elif not path.exists():  # else theirs; or ours, and the answer was lost (NFS)
            if exn.errno == errno.ENOENT and path.parent.exists():
                return False
            raise
    finally:
        with contextlib.suppress(OSError):  # it was renamed, or swept
            temporary.unlink()
    return True


def _is_ours(root: Path, name: str) -> bool:
    """Whether something directly in a root without manifest is what `make_root` makes."""
    if name == _README_NAME:
        try:
            return read_file(root / name, len(_README) + 1) == _README.encode()
        except OSError:
            return False
    return name in _ROOT_NAMES or is_temporary_name(name)


def is_foreign(root: Path) -> bool:
    """Whether a directory holds something, and is neither a cache nor just being made one.

    Raises:
        OSError: it cannot be listed.
    """
    # The manifest is made last: what was listed before there was one may be ours.
    names = list_names(root.resolve())
    return not is_cache(root) and not all(_is_ours(root, name) for name in names)


def check_root(root: Path, modes: Modes = PRIVATE) -> None:
    """Refuse a root that somebody else could tamper with.

    Raises:
        ConfigError: with the command that mends it.
        OSError: ``root`` cannot be looked at.
    """
    own = (0, os.geteuid())
    link = root.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in own:
        raise ConfigError(
            f"{root} is a symbolic link that user {link.st_uid} made; use a directory of your own",
            dir=root,
        )
    planted = _planted_link(root)
    if planted is not None:
        raise ConfigError(
            f"{planted} is a symbolic link that another user made where every user may; "
            "point dir at the place itself",
            dir=root,
        )
    found = root.stat()
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"{root} can be written by every user, who could plant shards in it; "
            f"use a directory of your own below it, such as {root / 'shards'}",
            dir=root,
        )
    reason = modes.objection(root, found)
    if reason is not None:
        raise ConfigError(reason, dir=root)


def _planted_link(root: Path) -> Path | None:
    """A link on the way to ``root`` that the kernel would not follow with protected_symlinks.

    That is set almost everywhere, but not in every container; see proc_sys_fs(5).
    """
    for path in root.parents:
        found = path.lstat()
        if not stat.S_ISLNK(found.st_mode) or found.st_uid in (0, os.geteuid()):
            continue
        above = path.parent.stat()
        if above.st_mode & stat.S_IWOTH and above.st_uid != found.st_uid:
            return path
    return None


def check_layout(layout: Layout) -> None:
    """Refuse a namespace that leads elsewhere, or that somebody else could tamper with.

    Raises:
        ConfigError: with what to do.
        OSError: it cannot be looked at.
    """
    check_links(layout)
    reason = layout.objection()
    if reason is not None:
        raise ConfigError(reason, dir=layout.base)


def check_links(layout: Layout) -> None:
    """Refuse a namespace that leads elsewhere: nothing is removed behind links.

    Raises:
        ConfigError: with what to do.
    """
    linked = layout.linked()
    if linked is not None:
        raise ConfigError(
            f"{linked} is a symbolic link, and the cache removes nothing behind links; "
            "point dir at the place itself",
            dir=layout.base,
        )


def check_group(root: Path, modes: Modes) -> None:
    """Refuse a cache that others share than ``modes`` say.

    What one process makes for itself alone, the others could not read, and could not
    tell from a failing disk.

    Raises:
        ConfigError: with the option to set; or something else is in the manifest's place.
    """
    manifest = _manifest(root)
    if manifest is None:
        path = root / MANIFEST
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise ConfigError(
                f"{path} is a symbolic link or another thing that no manifest is. Look at who made "
                "it, and remove it.",
                dir=root,
            )
        return
    _check_schema(root, manifest)
    stated = manifest.get(_GROUP)
    if stated == modes.group:
        return
    if not isinstance(stated, int):
        raise ConfigError(
            f"{root} is the cache of one user, and shared_group is set. Use another directory "
            "for the group, or remove this one first.",
            dir=root,
        )
    raise ConfigError(
        f"{root} is shared by the group {group_name(stated)}; set "
        f"shared_group={group_name(stated)!r}, or use a directory of your own.",
        dir=root,
    )


def _check_schema(root: Path, manifest: dict[str, Any]) -> None:
    """Refuse what a newer library keeps by rules of its own.

    It need not come to that: a new layout gets a directory of its own beside ``v1``, and each
    library touches only those that it knows.
    """
    schema = manifest.get("schema")
    if isinstance(schema, int) and schema > _SCHEMA:
        library = str(manifest.get("library", "of another version"))[:20]
        raise ConfigError(
            f"{root} was made by shardcache {library}, which keeps it in a way that this one does "
            f"not know (schema {schema}). Upgrade shardcache, or use another directory.",
            dir=root,
        )


def _manifest(root: Path) -> dict[str, Any] | None:
    """What the manifest says; None if there is none that makes sense."""
    try:
        found = json.loads(read_file(root / MANIFEST, _MAX_MANIFEST))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def identity(root: Path, namespace: Layout) -> Identity | None:
    """What tells a root from another under the same path; None where there is no cache.

    The device tells a mount that came or went, the inode a directory that was replaced, and
    what is missing one that was emptied.

    Args:
        root: the directory.
        namespace: one that must be in it.

    Raises:
        OSError: it cannot be looked at.
    """
    try:
        found = root.stat()
        (root / MANIFEST).lstat()
        namespace.base.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    # Where other machines have the filesystem, inode numbers may come and go (FUSE).
    return found.st_dev, 0 if namespace.grace is not None else found.st_ino


def is_cache(root: Path) -> bool:
    """Whether ``root`` bears our manifest and leads nowhere else.

    Nothing may be removed where it does not.
    """
    try:
        manifest = (root / MANIFEST).lstat()
    except OSError:
        return False
    return stat.S_ISREG(manifest.st_mode) and Layout.of_root(root).linked() is None
