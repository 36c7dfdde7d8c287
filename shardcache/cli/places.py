"""What a directory for shards is and can do, asked by a process that can be left behind.

A dead mount hangs whoever looks at it, so `look` starts a child that looks, and kills it when it
has said nothing for a while; what it said before counts. The child really makes, renames, links
and locks a file, in a directory of its own that goes again, also when the child had to be killed.

Invariants: the cache's directory is not made; nothing that was there before is changed; nothing
is left. Several may look at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from shardcache.config import Config
from shardcache.errors import ConfigError
from shardcache.files import Modes
from shardcache.layout import Layout, is_temporary_name, list_names, temporary_name
from shardcache.locks.mounts import Mount, mount_of, node_namespace, read_mounts
from shardcache.locks.sessions import dead_sessions
from shardcache.store.entry import scan
from shardcache.store.root import check_group, check_layout, check_root, is_cache
from shardcache.store.store import rank_layouts
from shardcache.store.sweeping import in_flight, remove_quarantined

__all__ = ["SILENCE", "Place", "look"]

#: Seconds without a word after which a filesystem counts as dead. Each word costs it a few calls;
#: a server that takes longer for those would stop a training, too.
SILENCE = 5.0
#: Likewise before the first word: Python starts, on a node that may be busy.
_START = 30.0
#: Seconds in which a process ends that has said all, or was killed.
_ENDING = 1.0
#: What the last question is for.
_LOCK = "for a lock"
#: Entries between two words of a scan.
_BREATH = 256
#: ``-I -S``: neither the directory we are in nor anybody's site matters to where our code is.
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import shardcache.cli.places as p; "
)
_LOOK = f"{_CHILD} p.answer(json.loads(sys.argv[2]))"
_REMOVE = "import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)"
#: What mkfs makes is not somebody's data.
_NOBODYS = frozenset({"lost+found"})

Facts = dict[str, Any]


class Answer(StrEnum):
    """What flock does on a filesystem."""

    WORKS = "works"
    LIES = "lies"
    REFUSED = "refused"
    HANGS = "hangs"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Place:
    """A directory for shards, as it was found. Texts are empty where nothing is to be said.

    Attributes:
        directory: as configured.
        hung: what it was asked when it fell silent.
        broken: what it answered, if that was an error.
        kind: ``cache``, ``empty``, ``foreign`` (other things are in it), ``file``, ``missing``.
        real: where it is, symbolic links followed.
        near: itself, or of what is above it the innermost that exists.
        mount: the filesystem; None where the kernel does not tell.
        device: number of the filesystem.
        size, free: bytes of the filesystem, and of those that this user may still write.
        inodes, free_inodes: likewise; 0 inodes where it makes them as it needs them.
        objection: why the library refuses it, with what to do.
        unwritable, unrenamable, unlinkable: why no file can be made, renamed, hard-linked there.
        flock: what flock does there.
        shards, held: entries in it, and their bytes.
        orphans, orphaned: fetches of dead processes, and their bytes.
        damaged, quarantined: entries that were set aside, and their bytes.
        sessions: registrations of dead processes.
    """

    directory: str
    hung: str = ""
    broken: str = ""
    kind: str = ""
    real: str = ""
    near: str = ""
    mount: Mount | None = None
    device: int = -1
    size: int = 0
    free: int = 0
    inodes: int = 0
    free_inodes: int = 0
    objection: str = ""
    unwritable: str = ""
    unrenamable: str = ""
    unlinkable: str = ""
    flock: Answer = Answer.UNKNOWN
    shards: int = 0
    held: int = 0
    orphans: int = 0
    orphaned: int = 0
    damaged: int = 0
    quarantined: int = 0
    sessions: int = 0


def look(config: Config, silence: float = SILENCE) -> Place:
    """Look at ``config.dir``.

    Args:
        config: of one tier.
        silence: seconds without a word after which the filesystem counts as dead.

    Raises:
        OSError: no process can be started for it, or it says nothing at all.
    """
    trial = temporary_name(Path(), Path("doctor")).name
    question = {
        "directory": os.fspath(config.dir),
        "trial": trial,
        "group": config.shared_group,
        "locks": config.locks,
        "touch_interval": config.touch_interval,
    }
    command = [sys.executable, "-I", "-S", "-c", _LOOK, json.dumps(sys.path), json.dumps(question)]
    facts: Facts = {}
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None
    try:
        with child.stdout as said:
            for line in _lines(said.fileno(), silence):
                facts.update(json.loads(line))
    except TimeoutError:
        if not facts:
            raise
        facts["hung"] = facts["asked"]
    finally:
        ended = _end(child)
        if facts.get("trying") and not (ended and facts.get("done")):
            _remove(Path(facts["near"], trial), silence)
    if not facts:
        raise OSError(f"the process that looks at it ended with {child.returncode}")
    return _place(config, facts)


def _place(config: Config, facts: Facts) -> Place:
    known = {field.name for field in fields(Place)}
    facts = {name: value for name, value in facts.items() if name in known}
    if facts.get("mount") is not None:
        options = frozenset(facts["mount"]["options"])
        facts["mount"] = Mount(**{**facts["mount"], "options": options})
    elif facts.get("hung"):
        facts["mount"] = _named_mount(config.dir)
    facts["flock"] = Answer(facts.get("flock", Answer.UNKNOWN))
    if facts.get("hung") == _LOCK:  # all else was answered, and the library lives with that
        facts["hung"], facts["flock"] = "", Answer.HANGS
    return Place(os.fspath(config.dir), **facts)


def _named_mount(path: Path) -> Mount | None:
    """The mount that the text of a path leads to; asks nobody but the kernel."""
    inside = [mount for mount in read_mounts() if path.is_relative_to(mount.point)]
    return max(inside, key=lambda mount: len(mount.point), default=None)


def _lines(fd: int, silence: float) -> Iterator[bytes]:
    """Lines of the child, to its end.

    Raises:
        TimeoutError: it says nothing.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    rest, patience = b"", max(silence, _START)
    while True:
        if not poll.poll(patience * 1000):
            raise TimeoutError(f"the process that looks at it said nothing for {patience:g} s")
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
        patience = silence


def _end(child: subprocess.Popen[bytes]) -> bool:
    """Whether it ended by itself; if not it is killed, and left where that does not help."""
    try:
        return child.wait(_ENDING) == 0
    except subprocess.TimeoutExpired:
        child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_ENDING)
    return False


def _remove(trial: Path, silence: float) -> None:
    """Remove what a killed child made, by one that may hang as well."""
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _REMOVE, str(trial)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        child.wait(silence)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_ENDING)


# -- in the child --------------------------------------------------------------


def answer(question: Facts) -> None:
    """Look, and tell on standard output, a line of JSON each; the child's work."""

    def say(**facts: Any) -> None:
        sys.stdout.write(f"{json.dumps(facts)}\n")
        sys.stdout.flush()

    try:
        _answer(question, say)
    except (OSError, ValueError) as exn:
        say(broken=getattr(exn, "strerror", None) or str(exn))
    say(done=True)


def _answer(question: Facts, say: Callable[..., None]) -> None:
    directory = Path(question["directory"])
    say(asked="what is there")
    kind, near = _kind(directory)
    say(kind=kind, near=str(near), device=near.stat().st_dev)
    real = os.path.realpath(directory)
    mount = mount_of(real)
    options = [] if mount is None else sorted(mount.options)
    say(real=real, mount=None if mount is None else {**asdict(mount), "options": options})
    say(asked="how much is free")
    found = os.statvfs(near)
    say(
        size=found.f_frsize * found.f_blocks,
        free=found.f_frsize * found.f_bavail,
        inodes=found.f_files,
        free_inodes=found.f_favail,
    )
    if kind == "file":
        return
    if kind != "missing":
        say(asked="whose it is")
        say(objection=_objection(directory, question["group"]))
    if kind == "cache":
        _count(Layout.of_root(directory), say)
    _try(near / question["trial"], say)
    if kind == "cache":
        say(asked="what dead processes left")
        layout = node_namespace(directory, question["locks"], question["touch_interval"])
        say(**_leftovers(replace(layout, local=None)))


def _kind(directory: Path) -> tuple[str, Path]:
    """What a directory is, and itself or what exists above it."""
    for path in (directory, *directory.parents):
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not stat.S_ISDIR(found.st_mode):
            return "file", path
        if path != directory:
            return "missing", path
        if is_cache(path):
            return "cache", path
        theirs = [n for n in list_names(path) if n not in _NOBODYS and not is_temporary_name(n)]
        return "foreign" if theirs else "empty", path
    return "missing", Path("/")


def _objection(directory: Path, group: int | None) -> str:
    """What the library would say to using it, as `root.make_root` decides."""
    try:
        modes = Modes.of(group)
        check_group(directory, modes)
        check_root(directory, modes)
        check_layout(Layout.of_root(directory, modes))
    except ConfigError as exn:
        return exn.message
    return ""


def _count(node: Layout, say: Callable[..., None]) -> None:
    say(asked="what is in it")
    shards = held = 0
    for layout in (node, *rank_layouts(node)):
        for entry in scan(layout):
            shards, held = shards + 1, held + entry.size
            if shards % _BREATH == 0:
                say(shards=shards, held=held)
    say(shards=shards, held=held)


def _try(trial: Path, say: Callable[..., None]) -> None:
    """Make, rename, link and lock a file in a directory of ours."""
    say(asked="to make a directory", trying=True)
    try:
        trial.mkdir(mode=0o700)
    except OSError as exn:
        say(unwritable=exn.strerror or str(exn))
        return
    try:
        say(asked="to write a file")
        one, other, third = (trial / name for name in ("one", "other", "third"))
        try:
            one.write_bytes(b"shardcache doctor\n")
        except OSError as exn:
            say(unwritable=exn.strerror or str(exn))
            return
        say(asked="to rename a file")
        try:
            one.rename(other)
            other.read_bytes()
        except OSError as exn:
            say(unrenamable=exn.strerror or str(exn))
            return
        say(asked="to link a file")
        try:
            os.link(other, third)
        except OSError as exn:
            say(unlinkable=exn.strerror or str(exn))
        # Last: this one may never be answered.
        say(asked=_LOCK)
        say(flock=_flock(other))
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def _flock(path: Path) -> Answer:
    """Two open files of one file: where both get the lock, it means nothing."""
    with path.open("rb") as one, path.open("rb") as other:
        try:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return Answer.REFUSED
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return Answer.WORKS
    return Answer.LIES


def _leftovers(node: Layout) -> Facts:
    facts = dict.fromkeys(("orphans", "orphaned", "damaged", "quarantined", "sessions"), 0)
    for layout in (node, *rank_layouts(node)):
        for found in in_flight(layout):
            if not found.live:
                facts["orphans"] += 1
                facts["orphaned"] += found.occupied
        for _, size in remove_quarantined(layout, dry_run=True):
            facts["damaged"] += 1
            facts["quarantined"] += size
        facts["sessions"] += dead_sessions(layout)
    return facts
