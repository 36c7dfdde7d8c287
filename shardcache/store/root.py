"""The root of a cache: create it, and refuse a directory that other users could tamper with.

shardcache removes nothing from a directory without a manifest. Several processes may create a root.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import stat
from pathlib import Path

from shardcache.config import Config, __version__, group_name
from shardcache.errors import ConfigError
from shardcache.faults import FULL, ignoring, system_error
from shardcache.files import Modes, existing, is_directory, list_names, locked_if_free, random_token
from shardcache.layout import MANIFEST, Layout, is_record_name, is_temporary_name, read_manifest
from shardcache.locks.mounts import lock_kind

#: Manifest field with the number of the group that shares the cache.
_GROUP = "shared_group"
#: Manifest field with the kind of lock that the creator of the cache uses.
_LOCKS = "locks"
_TAG_NAME = "CACHEDIR.TAG"
_README_NAME = "README.txt"
#: Names that a root without a manifest may contain: those that `make_root` creates before the
#: manifest, in case it was killed, and the one that mkfs creates.
_ROOT_NAMES = frozenset({"v1", MANIFEST, _TAG_NAME, _README_NAME, "lost+found"})

# The first 43 bytes are the signature that backup programs look for (https://bford.info/cachedir/).
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
Remove all    shardcache --dir THIS clean --all --remove-dir -y
You may delete any entry by hand: the next reader downloads it again.
"""


def make_root(config: Config) -> Layout:
    """Turn an empty or missing directory into a root, or check one; return the node's namespace.

    Raises ConfigError or OSError if it must not or cannot be used as a cache.
    """
    root, modes = config.dir, Modes.of(config.shared_group)
    if modes.group is None:  # directories above the cache get the permissions of the umask
        with ignoring(OSError):  # raised again below, unless another process made it
            root.parent.mkdir(parents=True, exist_ok=True)
    try:
        modes.make_directory(root, levels=99)
    except (FileExistsError, NotADirectoryError) as exn:
        raise ConfigError(f"{exn.filename} is not a directory. Set dir to a directory.") from exn
    except FileNotFoundError as exn:  # the filesystem is one of the kernel, such as /proc
        raise FileNotFoundError(exn.errno, exn.strerror, str(root)) from exn
    check_root(config)
    layout = Layout.of_root(root, modes)
    layout.make()
    if not (root / MANIFEST).exists():
        manifest = {"schema": 1, "layouts": ["v1"], "id": random_token(), "library": __version__}
        manifest[_LOCKS] = lock_kind(config, {})
        if modes.group is not None:
            manifest[_GROUP] = modes.group
        texts = {root / _TAG_NAME: _CACHEDIR_TAG, root / _README_NAME: _README}
        # The manifest is written last, so it proves that the rest is complete. Its id never
        # changes, because the id names the directory of the node's locks (`locks.mounts`).
        texts[root / MANIFEST] = json.dumps(manifest) + "\n"
        for path, text in texts.items():
            layout.write(path, text.encode(), once=True)
    return layout


def check_usable(config: Config) -> None:
    """Raise ConfigError if a directory cannot be made a cache, or not be used as one.

    A cache on a read-only filesystem can be used: its shards can be read.
    """
    root = config.dir
    try:
        path = existing(root)
        if not path.is_dir():
            advice = "Point dir at a directory, or at a name in one."
            raise ConfigError(f"{path} is not a directory. {advice}")
        if path == root:
            check_root(config)
    except system_error() as exn:
        raise unusable(root, exn) from exn
    if not (is_cache(root) or os.access(path, os.W_OK | os.X_OK)):
        raise unusable(root, not_writable(path))


def not_writable(path: Path) -> OSError:
    """Return the error of a directory that this process cannot write to."""
    number = errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES
    return OSError(number, os.strerror(number), str(path))


class UnusableError(ConfigError):
    """The directory must not be used. Shards are streamed."""


def unusable(root: Path, exn: OSError) -> ConfigError:
    """Return the error for a directory that cannot be made or written."""
    path = exn.filename or root
    if Path(path).name == MANIFEST:
        fix = "Let this user read it, or point dir (--dir, SHARDCACHE_DIR) at another directory."
        return ConfigError(f"{path} cannot be read ({exn.strerror or exn}). {fix}")
    how = f" (mount -o remount,rw {shlex.quote(str(path))})" if exn.errno == errno.EROFS else ""
    is_above = not Path(path).is_relative_to(root)
    text = f"{root} cannot be made, because " if is_above else ""
    fix = f", or make {path} writable{how}" if how or not is_above else ""
    fix = f"at a directory that this user may write{fix}"
    if exn.errno in FULL:
        fix = "at another disk, or free this one"
    return ConfigError(
        f"{text}{path} cannot be written ({exn.strerror or exn}). Point dir (--dir, "
        f"SHARDCACHE_DIR) {fix}."
    )


def _check_foreign(root: Path) -> None:
    """Raise ConfigError if ``root`` has links, or is neither a cache nor empty."""
    check_symlinks(Layout.of_root(root))
    names = [] if is_cache(root) else sorted(list_names(root.resolve()))
    if foreign := [n for n in names if not (n in _ROOT_NAMES or is_temporary_name(n))]:
        examples = ", ".join(foreign[:3]) + (", ..." if foreign[3:] else "")
        raise ConfigError(
            f"{root} is not a shardcache directory, and it has other files in it ({examples}). "
            f"Give the cache a directory of its own, such as {root / 'shards'}."
        )


def is_cache(root: Path) -> bool:
    """Return whether ``root`` has a manifest and no links, so that files in it may be removed."""
    try:
        manifest = (root / MANIFEST).lstat()
    except system_error():
        return False
    return stat.S_ISREG(manifest.st_mode) and Layout.of_root(root).first_symlink() is None


def is_read_only(root: Path) -> bool:
    """Return whether ``root`` is a cache to which this process cannot add shards."""
    partials = Layout.of_root(root).partials
    return is_cache(root) and is_directory(partials) and not os.access(partials, os.W_OK | os.X_OK)


def require_cache(root: Path) -> None:
    """Raise ConfigError if ``root`` is not a cache. Call this before removing anything in it."""
    _check_foreign(root)
    if not is_cache(root):
        why = "it has no manifest.json" if root.exists() else "it does not exist"
        raise ConfigError(
            f"{root} is not a shardcache directory ({why}), so nothing in it is touched. "
            "Check dir (--dir, SHARDCACHE_DIR)."
        )


def remove_root(layout: Layout) -> None:
    """Remove the records of a cache, and its directories unless shards or other files are left."""
    root = layout.base.parent
    for base in filter(None, (layout.base, layout.local)):
        for directory, _, names in os.walk(base, topdown=False):
            for name in names:
                path = Path(directory, name)
                if is_record_name(name) or is_temporary_name(name):
                    with ignoring(OSError), locked_if_free(path) as free:
                        if free:  # otherwise, a job began after the last check
                            path.unlink(missing_ok=True)
            with ignoring(OSError):  # not empty
                Path(directory).rmdir()
    if set(list_names(root)) <= _ROOT_NAMES - {layout.base.name}:
        for name in (_TAG_NAME, _README_NAME, MANIFEST):  # last the manifest, which marks a cache
            (root / name).unlink(missing_ok=True)
        with ignoring(OSError):  # a mount point
            root.rmdir()
    else:
        layout.make()  # cleaning needs all directories


def check_root(config: Config) -> None:
    """Raise ConfigError if a directory must not be used: `check_manifest`, owner, links, files."""
    root = config.dir
    reason = Modes.of(config.shared_group).objection(root, root.stat())
    try:
        check_manifest(config)
    except PermissionError:  # for the same reason
        if not reason:
            raise
    if reason:
        raise ConfigError(reason)
    _check_foreign(root)


def check_user(config: Config) -> None:
    """Raise the errors of `check_root`; but the superuser may use the caches of all users."""
    if config.dir.is_dir() and (os.geteuid() != 0 or config.dir.stat().st_uid == 0):
        check_root(config)


def check_symlinks(layout: Layout) -> None:
    """Raise ConfigError if a directory of the namespace is a symbolic link."""
    if link := layout.first_symlink():
        raise ConfigError(
            f"{link} is a symbolic link, and shardcache does not follow links in a cache. "
            "Set dir to the directory that it points to."
        )


def check_manifest(config: Config) -> None:
    """Raise ConfigError if ``shared_group`` or the kind of lock differs from the manifest's."""
    root, group = config.dir, config.shared_group
    manifest = read_manifest(root)
    shared, kind = manifest.get(_GROUP), lock_kind(config, manifest)
    other = "lease" if kind == "flock" else "flock"
    if isinstance(shared, int) and shared != group:
        name = group_name(shared)
        raise ConfigError(
            f"{root} is shared by the group {name}. Set shared_group={name!r}, or use a directory "
            "of your own."
        )
    if manifest and shared != group:
        raise ConfigError(
            f"{root} is the cache of one user, but shared_group is set. Use another directory for "
            "the group, or remove this one first."
        )
    if manifest.get(_LOCKS) == other:
        fix = "Set locks to lease here, too"
        if other == "flock":
            fix = f"End all processes that use it, delete {root / MANIFEST}, and set locks to "
            fix += "lease (SHARDCACHE_LOCKS=lease) for all of them"
        raise ConfigError(
            f"{root} is locked by {other}, and this process would lock it by {kind}, so each would "
            f"evict shards that the others read. {fix}, or use another directory."
        )
