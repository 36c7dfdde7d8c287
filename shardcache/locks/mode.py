"""Where lock files live, and whether a lock on a file in the cache means anything.

On a local disk flock(2) tells the truth: lock files are in the cache, a reader's
lock is its pin, a writer's lock says that it lives. On a network filesystem (NFS,
Lustre, GPFS, FUSE, anything unknown) flock may be refused, may be granted to
everybody, may hang; there

* lock files and sessions are on a disk of this node: one fetch per node, still;
* no flock is taken on files in the cache. Whether an entry is in use, or a partial
  alive, is told by how long ago it was touched (`Locking.grace`).

Decided once per process, from the type of the mount and, for a local type, by a child
process that tries: a hanging flock hangs the child, which is killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path

from shardcache.clock import boot_id
from shardcache.files import PRIVATE, Modes
from shardcache.layout import IDLE_GRACE, MANIFEST, Layout, read_file, replace_file
from shardcache.locks.mounts import Mount, mount_of

__all__ = ["Answer", "Locking", "decide", "distrust", "node_directory", "probe"]

logger = logging.getLogger(__name__)

#: Seconds that the probe may take. Starting Python takes 10-20 ms on an idle node and
#: some seconds on one that is starting a thousand ranks.
_PROBE_SECONDS = 10.0
#: A manifest and what is noted about flock have some hundred bytes.
_MAX_NOTE = 64 * 1024
#: Where lock files may be on this node, in the order in which every process tries them. Not
#: TMPDIR or XDG_RUNTIME_DIR: they differ between the jobs of one node.
# What is found there is used only if nobody else could have made it (`_node_directory`).
_NODE_DIRECTORIES = ("/dev/shm", "/run/lock", "/tmp", "/var/tmp")  # noqa: S108

# Two open files of one file: when both get the lock, locks are granted to everybody.
# Somebody else's lock in the way proves as much as our own.
_PROBE = """
import errno, fcntl, os, sys
def ask(fd):
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exn:
        return "busy" if exn.errno in (errno.EWOULDBLOCK, errno.EACCES) else "refused"
    return "granted"
def open_it():
    try:
        return os.open(sys.argv[1], os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return os.open(sys.argv[1], os.O_RDONLY | os.O_NOFOLLOW)
first, second = open_it(), open_it()
answer = ask(first)
if answer == "granted":
    answer = ask(second)
print({"granted": "lies", "busy": "works", "refused": "refused"}[answer])
"""


class Answer(StrEnum):
    """What flock does on a filesystem."""

    WORKS = "works"
    LIES = "lies"
    REFUSED = "refused"
    HANGS = "hangs"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Locking:
    """How this process locks in one root.

    Attributes:
        filesystem: type of the mount, or "unknown".
        local: directory on this node for lock files; None where they are in the cache.
        grace: seconds without a use that free an entry; None where flock tells.
        reason: why, as the end of a sentence; empty where all is as it should be.
        modes: the permissions of what is made.
    """

    filesystem: str
    local: Path | None = None
    grace: float | None = None
    reason: str = ""
    modes: Modes = PRIVATE

    def layout(self, root: Path) -> Layout:
        """The node's namespace under this root."""
        return Layout(root / "v1", local=self.local, grace=self.grace, modes=self.modes)


def decide(root: Path, mode: str, touch_interval: float, modes: Modes = PRIVATE) -> Locking:
    """How to lock in ``root``, which may not exist yet.

    Args:
        root: of the cache.
        mode: the option ``locks``: ``auto``, ``flock``, ``node`` or ``lease``.
        touch_interval: seconds; what is in use is touched this often, so the grace is
            at least twice as long.
        modes: the permissions of what is made.
    """
    mount = mount_of(root)
    filesystem = mount.type if mount else "unknown"
    if mode == "flock":
        return Locking(filesystem, modes=modes)
    if mode == "auto":
        reason = _reason(root, mount, modes)
        if not reason:
            return Locking(filesystem, modes=modes)
    else:
        reason = f"locks = {mode!r}"
    grace = max(IDLE_GRACE, 2 * touch_interval)
    return Locking(filesystem, _node_directory(root, modes), grace, reason, modes)


def _reason(root: Path, mount: Mount | None, modes: Modes) -> str:
    """Why flock in ``root`` cannot be believed; empty if it can."""
    reason = distrust(mount, Answer.UNKNOWN)
    if reason or not os.path.lexists(root / MANIFEST):
        return reason  # nothing to ask; asked again when it is made
    return distrust(mount, _remembered(root, mount, modes))


def distrust(mount: Mount | None, answer: Answer) -> str:
    """Why flock cannot be believed on a mount where it answers so; empty if it can."""
    if mount is not None and not mount.is_local:
        return f"it is on {mount.type}, which other nodes may write"
    return "" if answer in (Answer.WORKS, Answer.UNKNOWN) else f"flock {answer} there"


def _remembered(root: Path, mount: Mount | None, modes: Modes) -> Answer:
    """The probe's answer, asked once per boot and mount where it can be noted."""
    note = root / "v1" / "flock.json"
    question = [boot_id(), mount.source if mount else "", mount.type if mount else ""]
    try:
        if json.loads(read_file(note, _MAX_NOTE)) == {"asked": question, "answer": Answer.WORKS}:
            return Answer.WORKS
    except (OSError, ValueError, RecursionError):
        logger.debug("%s: asking whether flock works", root)
    answer = probe(root / MANIFEST)
    if answer is Answer.WORKS:  # a fault is asked about again: it may have been mended
        data = json.dumps({"asked": question, "answer": answer}).encode()
        with contextlib.suppress(OSError):  # read-only or full: asked again next time
            if modes.objection(note.parent, note.parent.lstat()) is None:  # nor into another's
                replace_file(note, data, modes.notice, via=Layout.of_root(root).partial)
    return answer


def probe(path: Path, seconds: float = _PROBE_SECONDS) -> Answer:
    """Try flock on an existing file, in a child process that can be killed."""
    import subprocess  # a third of this module's import, and rarely needed

    command = [sys.executable, "-I", "-S", "-c", _PROBE, str(path)]
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except (OSError, ValueError) as exn:  # no process to be had, no interpreter (embedded)
        logger.debug("flock in %s was not tried: %s", path.parent, exn)
        return Answer.UNKNOWN
    try:
        answer, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        # A process in an uninterruptible call never ends; then it is left to init.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1.0)
        return Answer.HANGS
    finally:
        if child.stdout is not None:
            child.stdout.close()
    text = answer.decode("ascii", "replace").strip()
    return Answer(text) if text in set(Answer) else Answer.UNKNOWN


def _node_directory(root: Path, modes: Modes) -> Path | None:
    """A directory of ours on this node, the same for all who use ``root``; None without one."""
    if not os.path.lexists(root / MANIFEST):
        return None  # what it is called is not settled, and there is nothing to lock
    return node_directory(_identity(root), modes)


def node_directory(identity: str, modes: Modes = PRIVATE) -> Path | None:
    """A directory of ours on this node, the same for all who say ``identity``; None without one.

    Args:
        identity: sixteen hexadecimal digits.
        modes: whose it is.
    """
    owner = os.geteuid() if modes.group is None else f"g{modes.group}"
    name = f"shardcache-{owner}-{identity}"
    for parent in _NODE_DIRECTORIES:
        mount = mount_of(parent)
        if mount is not None and not mount.is_local:
            continue
        directory = Path(parent, name)
        try:
            modes.make_directory(directory)
            found = directory.lstat()
        except OSError:
            continue
        # Whoever made the name before us in a directory that all may write must be us.
        closed = not found.st_mode & 0o777 & ~modes.directory
        if closed and modes.objection(directory, found) is None:
            return directory
        logger.warning("%s is not ours alone; lock files go elsewhere", directory)
    return None


def _identity(root: Path) -> str:
    """What all who use this root call it: the id in its manifest, else its path."""
    try:
        manifest = json.loads(read_file(root / MANIFEST, _MAX_NOTE))
        text = str(manifest["id"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        text = os.path.realpath(root)
    return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
