"""Avoid the usual race conditions of training scripts: ``from shardcache import sync``.

docs/sync.md states what each function promises. All of them wait with `poll`, and look up names
with `find`. `once` and `barrier` exchange notes through a store: the one of torch.distributed, or a
`FileStore`. A note is a text under a name. If several ranks create the same name, one succeeds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import socket
import stat
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty
from typing import IO, Any, Literal, TypeVar, overload

from shardcache import clock, threads
from shardcache.clock import boot_id
from shardcache.errors import (
    BarrierTimeoutError,
    ConfigError,
    InTheWayError,
    OnceError,
    TorchStoreError,
    WaitTimeoutError,
)
from shardcache.faults import ignoring, system_error
from shardcache.files import GONE, replacing, sync_directory
from shardcache.locks.mounts import node_directory
from shardcache.ranks import detect, job_name, rank, safe_name, torch_store, world_size
from shardcache.units import format_duration, parse_choice, parse_duration
from shardcache.urls import redact

__all__ = ["BarrierTimeoutError", "InTheWayError", "OnceError", "WaitTimeoutError"]
__all__ += ["atomic_write", "barrier", "makedirs", "once", "rank", "wait_for", "world_size"]

logger = logging.getLogger(__name__)

R = TypeVar("R")
PathLike = str | os.PathLike[str]
Timeout = float | str | None

#: Default timeout in seconds, the same as for the collectives of torch.distributed.
DEFAULT_TIMEOUT = 1800.0
#: Seconds for which a filesystem may contradict itself: twice the default of acdirmax.
_MKDIR_TIMEOUT = 120.0
_DIRECTORY_VARIABLE = "SHARDCACHE_SYNC_DIR"
#: Seconds without a heartbeat after which a runner counts as dead, and the number of heartbeats in
#: that time: with five, one heartbeat may be lost and another one late.
_LEASE, _BEATS = 90.0, 5
#: An interrupted runner posts this instead of a heartbeat.
_GAVE_UP = "gave up"

#: Number of runs with ``again`` that have an outcome, and of barriers passed, by store and name.
_ended: Counter[str] = Counter()
#: Distinguishes this process from one of an earlier run with the same pid.
_PROCESS_TOKEN = secrets.token_hex(8)


def poll(timeout: Timeout, what: Callable[[], str]) -> Iterator[float]:
    """Yield the seconds since the start, with a pause after each, until the timeout.

    A warning every ten seconds, and the WaitTimeoutError, contain the text that ``what`` returns.
    """
    limit = math.inf if timeout is None else parse_duration(timeout)
    start, pause, warned = clock.monotonic(), 0.01, 0.0
    while True:
        yield clock.monotonic() - start
        if (waited := clock.monotonic() - start) >= limit:
            text = f"Waited {format_duration(waited)} {what()}. "
            raise WaitTimeoutError(f"{text}Check the other ranks, or raise timeout.", waited=waited)
        if waited - warned >= 10.0:
            warned = waited
            logger.warning("after %s: waiting %s", format_duration(waited), what())
        # A thousand ranks that poll every 10 ms, or all at the same time, would overload a file
        # server. So the pauses grow to a second, and have jitter.
        clock.sleep(min(pause * clock.randomness.uniform(0.5, 1.0), limit - waited))
        pause = min(pause * 1.5, 1.0)


class _ignoring_absence(contextlib.AbstractContextManager[Any]):  # noqa: N801 - used like a function
    def __exit__(self, *raised: Any) -> bool:
        return getattr(raised[1], "errno", None) in GONE


def find(path: PathLike) -> os.stat_result | None:
    """Return the current status of a path at its server, following links; None if it is absent.

    A client of a network filesystem remembers for a while that a name was absent (3 to 60 s on NFS:
    acdirmin and acdirmax of nfs(5)). `os.path.exists` then returns False although another
    node has created the path, and ``mkdir`` fails with EEXIST.
    """
    with _ignoring_absence():
        return os.stat(path)  # noqa: PTH116 - no Path needed
    parent = os.path.dirname(path) or "."  # noqa: PTH120
    if parent == path or find(parent) is None:
        return None
    # When a directory is opened, an NFS client checks the absent names that it remembers there.
    # When a name is about to be created, no kernel trusts a remembered absence (FUSE:
    # `fuse_dentry_revalidate`). So try to link `path` to /proc, a directory, which always fails.
    try:
        os.close(os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        os.link("/proc/.", path)
    except system_error() as exn:  # usually EEXIST, EXDEV or EPERM
        logger.debug("%s: looked up again: %s", path, exn)
    with _ignoring_absence():
        return os.stat(path)  # noqa: PTH116
    return None


def makedirs(path: PathLike, mode: int = 0o777, *, timeout: Timeout = _MKDIR_TIMEOUT) -> Path:
    """Create a directory and its parents, and return its absolute path once it is visible.

    Args:
        path: the directory. It may exist.
        mode: mode of the last directory if this call creates it, as for `os.makedirs`.
        timeout: seconds (120), or text such as ``10m``, to wait until it is visible, or None.

    Raises:
        InTheWayError: a file or a dangling link has the name. It is not removed.
        WaitTimeoutError: the directory was created but is not visible.
        OSError: no permission, no space, or a read-only filesystem.
    """
    target = Path(path).absolute()
    mount = "see the caching options of its mount: lookupcache and acdirmax in nfs(5)"
    for _ in poll(timeout, lambda: f"to see {target}, which was created ({mount})"):
        if find(target) is None:
            with _ignoring_absence(), contextlib.suppress(FileExistsError):  # of another node
                target.mkdir(mode, parents=True, exist_ok=True)
        found = ((name, find(name)) for name in (target, *target.parents))
        nearest, status = next((name, s) for name, s in found if s or name.is_symlink())
        if status is None or not stat.S_ISDIR(status.st_mode):
            obstacle = "a file" if status else "a symbolic link to a missing target"
            raise InTheWayError(
                f"No directory can be created at {nearest}: it is {obstacle}. "
                "Remove or rename it, or choose another path."
            )
        if nearest == target:
            break
    return target


@overload
def wait_for(what: PathLike, *, timeout: Timeout = ..., by: str | None = ...) -> Path: ...
@overload
def wait_for(
    what: Sequence[Path] | list[str], *, timeout: Timeout = ..., by: str | None = ...
) -> list[Path]: ...


def wait_for(
    what: PathLike | Sequence[PathLike],
    *,
    timeout: Timeout = DEFAULT_TIMEOUT,
    by: str | None = None,
) -> Path | list[Path]:
    """Wait until a path, or each of several paths, exists; return the absolute path or paths.

    A file that exists may be incomplete, unless `atomic_write` wrote it.

    Args:
        what: a path, or a sequence of paths.
        timeout: seconds to wait (30 min), or text such as ``10m``; None waits forever.
        by: the rank that should create the path, such as ``rank 0``, for the error message.

    Raises:
        WaitTimeoutError: a path did not appear in time.
        OSError: a path cannot be checked: no permission, or a failing disk.
    """
    wanted = [what] if isinstance(what, str | os.PathLike) else what
    missing = paths = [Path(path).absolute() for path in wanted]

    def describe() -> str:
        names = ", ".join(map(str, missing[:3])) + (", ..." if len(missing) > 3 else "")
        nearest = next(parent for parent in missing[0].parents if find(parent) is not None)
        maker = f" (which {by} should make)" if by else ""
        return f"for {names}{maker}: {len(missing)} of {len(paths)} missing, {nearest} exists"

    for _ in poll(timeout, describe):
        if not (missing := [path for path in missing if find(path) is None]):
            break
    return paths if wanted is what else paths[0]


@contextlib.contextmanager
def atomic_write(
    path: PathLike, mode: Literal["w", "wb"] = "wb", *, sync: bool = True
) -> Iterator[IO[Any]]:
    """Open a file that appears, or replaces another one, when the block ends without an error.

    The bytes go into a temporary file ``.<name>.<random>`` in the same directory, which remains if
    the process is killed. The new file gets the permissions of the file that it replaces. If
    ``path`` is a symbolic link, its target is replaced.

    Args:
        path: the file; its directory must exist.
        mode: ``wb``, or ``w`` for text in UTF-8.
        sync: flush the bytes to the disk before the rename, and the new name afterwards. Without
            ``sync``, a power failure may leave an empty file.

    Raises:
        ConfigError: ``mode`` has another value.
        OSError: the file cannot be written. The temporary file is removed.
    """
    encoding = "utf-8" if parse_choice(mode, ("wb", "w")) == "w" else None
    target = Path(os.path.realpath(path))
    with replacing(target) as new, open(new, "x" if encoding else "xb", encoding=encoding) as file:
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode) & 0o777)
        yield file
        if sync:
            file.flush()
            os.fsync(file.fileno())
    if sync:
        with ignoring(OSError):  # some filesystems cannot sync a directory
            sync_directory(target.parent)


class FileStore:
    """A directory of notes for the ranks of several nodes, with the methods of torch's stores."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def check(self, names: Sequence[str]) -> bool:
        """Return whether all notes with these names exist. They must be in one directory."""
        with _ignoring_absence():
            posted = os.listdir((self._directory / names[0]).parent)  # noqa: PTH208 - names alone
            return {name.rpartition("/")[2] for name in names}.issubset(posted)
        return False

    def get(self, name: str) -> bytes:
        """Return a note, or nothing if it is gone."""
        path = self._directory / name
        with _ignoring_absence():  # another node may replace the file between the two calls
            if find(path):
                return path.read_bytes()
        return b""

    def set(self, name: str, text: str) -> None:
        """Post a note, in place of an existing one."""
        with atomic_write(self._directory / name, "w", sync=False) as file:
            file.write(text)

    def compare_set(self, name: str, expected: str, text: str) -> bytes:
        """Post a note unless the name is taken; return the note with the name.

        link(2) fails if the name exists, even on NFS, Lustre or GPFS. If NFS repeats a request
        whose reply was lost, the existing note is equal to ours.
        """
        path = self._directory / name
        temporary = makedirs(path.parent) / f".{secrets.token_hex(12)}"
        try:
            with atomic_write(temporary, "w") as file:  # a power failure leaves no empty note
                file.write(text)
            path.hardlink_to(temporary)
            return text.encode()
        except FileExistsError:
            return self.get(name)
        finally:
            temporary.unlink(missing_ok=True)

    def delete_key(self, name: str) -> None:
        """Remove a note, and its directory if it is empty."""
        path = self._directory / name
        with ignoring(OSError):  # a note that remains does no harm
            path.unlink()
            path.parent.rmdir()


@contextlib.contextmanager
def _shared_store(per: str, dir: PathLike | None, job: str | None) -> Iterator[tuple[Any, str]]:
    """Enter as the store of a job's ranks, or of those on this node, and a text that names it.

    Raises TorchStoreError if torch's store does not answer in the body.
    """
    parse_choice(per, ("node", "job"))
    location, directory = None, dir or os.environ.get(_DIRECTORY_VARIABLE, "").strip()
    try:
        name = job_name(job)
        if dir is None and per == "job" and (store := torch_store()) is not None:
            from torch.distributed import PrefixStore  # type: ignore[attr-defined]

            yield PrefixStore(f"shardcache/{name}", store), "the store of torch.distributed"
            return
        if directory:
            location = Path(directory).absolute() / ".shardcache-sync"
        elif per == "node" or world_size() in (1, detect().local_size):
            location = node_directory("sync")
        if location is None:
            raise ConfigError(
                f"The {world_size()} ranks of this job share no directory or store. Pass dir=, or "
                f"set {_DIRECTORY_VARIABLE}, to a directory that all of them share, or call "
                "torch.distributed.init_process_group() first."
            )
        node = f"node-{boot_id()[:13] or os.uname().nodename}" if per == "node" else ""
        location = location / name / node
        yield FileStore(location), str(location)
    except RuntimeError as exn:
        torch = sys.modules.get("torch.distributed")
        if torch is None or not isinstance(exn, getattr(torch, "DistError", RuntimeError)):
            raise  # of a signal handler
        reason = str(exn).partition("\n")[0]
        raise TorchStoreError(
            f"The store of torch.distributed does not answer ({reason:.200}). "
            "Rank 0, which serves it, has probably ended. Check its output."
        ) from exn


def _this_process() -> str:
    return f"rank {rank()} (process {os.getpid()} on {socket.gethostname()})"


def _get(store: Any, name: str) -> str:
    """Return a note, or "" if it is absent: torch's ``get`` would then block all threads."""
    return str(store.get(name).decode()) if store.check([name]) else ""


def _create(store: Any, name: str, text: str) -> bool:
    """Post a note, and return whether its name was free. No two notes of processes are equal."""
    return bool(store.compare_set(name, "", text) == text.encode())


def once(
    key: str,
    function: Callable[..., R],
    /,
    *args: Any,
    per: Literal["node", "job"] = "job",
    again: bool = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
    lease: float | str = _LEASE,
    dir: PathLike | None = None,
    job: str | None = None,
) -> R:
    """Call a function on exactly one rank, and return its result, as JSON has it, on all ranks.

        path = once("unpack", unpack, archive, per="node")

    A later call in the job returns the same result, or raises an `OnceError`.

    Args:
        key: the name of the work, the same on all ranks.
        function: called with ``args``.
        per: ``job`` (default), or ``node`` to call the function on one rank of each node.
        again: run the work once more. The n-th calls with ``again`` on all ranks are one run. A
            call that timed out does not count.
        timeout: as for `wait_for`.
        lease: seconds (90) without a heartbeat after which the running rank counts as dead.
        dir: a directory that all ranks share, for their notes. By default, they use torch's store,
            ``SHARDCACHE_SYNC_DIR``, or a directory of the node.
        job: a name in place of the launcher's job id. Jobs with this name share results forever.

    Raises:
        OnceError: the function failed on another rank, whose exception it quotes.
        WaitTimeoutError: the other rank did not finish in time.
        ConfigError: an argument is not valid, or the ranks have no shared place for notes.
        Exception: the exception of the function, on the rank that ran it.
    """
    lease = parse_duration(lease)
    if not key.strip() or lease < 1:
        raise ConfigError("once needs a name for the work, and a lease of 1 s or more.")
    error: Exception | None = None
    with _shared_store(per, dir, job) as (store, location):
        work = f"{location}/once/{safe_name(key)}"
        number = _ended[work] + again
        prefix = f"once/{safe_name(key)}/{number}"
        if claim := _claim(store, prefix, lease, timeout, f"once({key!r})", location):
            with _heartbeat(store, f"{claim}.beat", lease / _BEATS):
                outcome = {"by": _this_process()}
                try:
                    text = json.dumps(outcome | {"result": function(*args)})
                except Exception as exn:  # noqa: BLE001 - raised below
                    outcome |= {"type": type(exn).__qualname__, "cause": redact(str(exn))}
                    text = json.dumps(outcome | {"traceback": redact(traceback.format_exc())})
                    error = exn
                if not _create(store, f"{prefix}/outcome", text):
                    error = None  # another rank has taken over, and its outcome counts
        _ended[work] = max(_ended[work], number)
        first = json.loads(_get(store, f"{prefix}/outcome")) if error is None else {}
    if error is not None:
        raise error
    if "type" not in first:
        return first["result"]  # type: ignore[no-any-return]
    raise OnceError(
        f"once({key!r}) failed on {first['by']}: {first['type']}: {first['cause']}\nIt does not "
        f"run again in this job without again=True. Its traceback:\n{first['traceback']}",
        key=key,
        **first,
    )


def _claim(
    store: Any, prefix: str, lease: float, timeout: Timeout, name: str, location: str
) -> str | None:
    """Wait for a claim on the work and return its name, or None once the work has an outcome.

    A claim consists of two notes, the claim and its heartbeat, and belongs to the rank that creates
    both. So if a user deletes one of them like a lock file, no second rank gets the claim. If the
    runner gives up, or sends no heartbeat for ``lease`` seconds, another rank may create the claim
    with the next number. If two runners post an outcome, both return the first one.
    """
    number, since, runner, last_beat = 0, 0.0, "an unknown rank", ""
    polls = poll(timeout, lambda: f"for {name} on {runner} (notes in {location})")
    for waited in polls:
        if store.check([f"{prefix}/outcome"]):
            break
        claim = f"{prefix}/claim.{number}"
        if not last_beat:  # try each number once: if a user removes a claim, it stays taken
            note = f"{_this_process()}\n{secrets.token_hex(8)}"
            # If only the second name is taken, a user has removed the first, and another rank has
            # the claim. With both names, check again whether the former runner posted an outcome.
            if all(_create(store, title, note) for title in (claim, f"{claim}.beat")):
                return None if store.check([f"{prefix}/outcome"]) else claim
        beat = _get(store, f"{claim}.beat") or "removed"
        if beat != last_beat:
            last_beat, since = beat, waited
        if beat == _GAVE_UP or waited - since >= lease:
            logger.warning("%s: %s has ended; this rank may take over", claim, runner)
            number, last_beat = number + 1, ""
        elif beat != "removed":
            runner = beat.partition("\n")[0]
    return None


@contextlib.contextmanager
def _heartbeat(store: Any, name: str, pause: float) -> Iterator[None]:
    """Post heartbeats while the body runs. If the body is interrupted, another rank takes over."""
    ended = threads.Queue[None]()

    def post(text: str) -> None:
        try:
            store.set(name, text)
        except (OSError, RuntimeError) as exn:  # the next heartbeat may succeed
            logger.warning("%s: the heartbeat could not be posted: %s", name, exn)

    def beat() -> None:
        while True:
            try:
                return ended.get(pause)
            except Empty:
                post(f"{_this_process()}\n{clock.monotonic()}")

    beats = threading.Thread()
    try:
        with contextlib.suppress(threads.NoThreadError):  # another rank may run the work, too
            beats = threads.start(beat, "shardcache-once")
        yield
        ended.put(None)
    except BaseException:
        ended.put(None)
        if beats.is_alive():  # a heartbeat on its way would replace the note
            beats.join(pause)
        post(_GAVE_UP)
        raise


def barrier(
    name: str = "barrier",
    *,
    timeout: Timeout = DEFAULT_TIMEOUT,
    dir: PathLike | None = None,
    job: str | None = None,
) -> None:
    """Wait until all ranks of the job have called this function as often as this rank.

    Args:
        name: the name of the barrier, the same on all ranks. Each name is counted separately.
        timeout: as for `wait_for`.
        dir: a directory that all ranks share, for their notes; the default is that of `once`.
        job: a name of this run, in place of the launcher's job id. No earlier run may have used
            the name in that directory, because the notes of that run would count.

    Raises:
        BarrierTimeoutError: some ranks did not arrive in time; ``missing`` lists them.
        ConfigError: an argument is not valid, the ranks have no shared place for notes, or another
            process has arrived with the number of this rank.
    """
    number, size = rank(), world_size()

    def missing() -> list[int]:
        return [other for other in range(size) if not store.check([notes[other]])]

    def describe() -> str:
        late = missing()
        ranks = ", ".join(map(str, late[:16])) + (", ..." if len(late) > 16 else "")
        count = f"{len(late)} of {size} ranks"
        return f"at barrier({name!r}) as rank {number} for {count}: {ranks} (notes in {location})"

    polls = poll(timeout, describe)
    next(polls)  # which checks the timeout
    if size == 1:
        return
    with _shared_store("job", dir, job) as (store, location):
        prefix = f"barrier/{safe_name(name)}-{size}"
        series = f"{location}/{prefix}"
        notes = [f"{prefix}/{_ended[series]}/rank-{other}" for other in range(size)]
        # An equal note is from a call of this process that timed out.
        if not _create(store, notes[number], f"{_this_process()} {_PROCESS_TOKEN}"):
            raise ConfigError(
                f"Rank {number} has already reached barrier({name!r}), as "
                f"{_get(store, notes[number])} (notes in {location}). If that process belongs to "
                "this run, two processes have one rank. If it belongs to an earlier run, pass "
                "another job=, or remove that directory."
            )
        try:
            while not store.check(notes):
                next(polls)
        except WaitTimeoutError as exn:
            raise BarrierTimeoutError(exn.message, missing=missing()) from None
        _ended[series] += 1
        if _ended[series] > 1:
            with contextlib.suppress(RuntimeError):  # torch's store cannot delete, or has ended
                store.delete_key(f"{prefix}/{_ended[series] - 2}/rank-{number}")
