"""`once` and `barrier`: functions that all ranks of a job call together.

Ranks leave notes for each other in a store: that of torch.distributed, or a `FileStore`. A note is
a text under a name, and of several ranks that create one name, one succeeds.

**once.** A claim is two notes, the claim and its heartbeat, and belongs to the rank that creates
both. So if a user removes one of them, as people do with lock files, no second rank gets the claim.
If the runner gives up, or sends no heartbeat for `lease` seconds, another rank may make the claim
with the next number. Of two outcomes, the first counts for both runners.

**barrier.** Every rank posts a note with the number of its call, and waits for the notes of all.
Then it removes its previous note, because all ranks have passed that barrier.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from shardcache import clock, ranks, threads
from shardcache.clock import boot_id
from shardcache.errors import (
    BarrierTimeoutError,
    ConfigError,
    OnceError,
    ShardCacheError,
    WaitTimeoutError,
)
from shardcache.locks.mounts import node_directory
from shardcache.ranks import safe_name
from shardcache.sync.job import answering, describe_process, job_name, rank, torch_store, world_size
from shardcache.sync.paths import ABSENT, DEFAULT_TIMEOUT, atomic_write, find, makedirs, waiting
from shardcache.units import parse_choice, parse_duration
from shardcache.urls import redact

logger = logging.getLogger(__name__)

R = TypeVar("R")
Scope = Literal["node", "job"]

DIRECTORY_VARIABLE = "SHARDCACHE_SYNC_DIR"
#: Notes are below this name in the user's directory, because the directory may hold other files.
_NAME = ".shardcache-sync"
#: Seconds without a heartbeat after which a runner counts as dead, and the number of heartbeats in
#: that time: with five, one heartbeat may be lost and another one late.
_LEASE = 90.0
_BEATS = 5
#: An interrupted runner posts this instead of a heartbeat.
_GAVE_UP = "gave up"

#: Number of runs with ``again`` that have an outcome, by place and key.
_reruns: Counter[tuple[str, str]] = Counter()
#: Number of barriers that this process has passed, by place and name.
_passed: Counter[tuple[str, str]] = Counter()
#: Distinguishes this process from a process of an earlier run with the same pid.
_RUN = secrets.token_hex(8)


class FileStore:
    """A directory of notes, with the methods of torch's stores that this module uses.

    Several threads and nodes may use it at once.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def check(self, names: Sequence[str]) -> bool:
        """Return whether notes with all these names, which are in one directory, exist."""
        try:
            posted = os.listdir((self._directory / names[0]).parent)  # noqa: PTH208 - names alone
        except FileNotFoundError:
            return False
        return {name.rpartition("/")[2] for name in names}.issubset(posted)

    def get(self, name: str) -> bytes:
        """Return a note, or nothing if it is gone."""
        path = self._directory / name
        try:
            return path.read_bytes() if find(path) else b""
        except OSError as exn:
            if exn.errno in ABSENT:  # another node replaced the file between the two calls
                return b""
            raise

    def set(self, name: str, text: str) -> None:
        """Post a note, replacing an existing note with the same name."""
        with atomic_write(self._directory / name, "w", sync=False) as file:
            file.write(text)

    def compare_set(self, name: str, expected: str, text: str) -> bytes:
        """Post a note unless one with that name exists; return the note with the name.

        A name is given by link(2), which fails if it exists, even on NFS, Lustre or GPFS. NFS may
        repeat a request whose reply was lost; then the existing note is equal to ours.
        """
        path = self._directory / name
        temporary = makedirs(path.parent) / f".{secrets.token_hex(12)}"
        try:
            with atomic_write(temporary, "w") as file:  # a power failure leaves no empty note
                file.write(text)
            path.hardlink_to(temporary)
        except FileExistsError:
            return self.get(name)
        finally:
            temporary.unlink(missing_ok=True)
        return text.encode()

    def delete_key(self, name: str) -> None:
        """Remove a note, and its directory if it is empty."""
        path = self._directory / name
        with contextlib.suppress(OSError):  # a note that remains does no harm
            path.unlink()
            path.parent.rmdir()


def _store_for(
    per: Scope, directory: str | os.PathLike[str] | None, job: str | None
) -> tuple[Any, str]:
    """Return the store for all ranks of a job, or of a job on this node, and its place in words.

    The store is the first of these that is available: ``directory``; torch's store (only for all
    ranks of a job); the directory in ``SHARDCACHE_SYNC_DIR``; a directory of the node (only if all
    these ranks are on one node).

    Raises:
        ConfigError: the ranks share none of these.
    """
    parse_choice(per, ("node", "job"))
    name = job_name(job)
    if directory is None and per == "job" and (store := torch_store()) is not None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return PrefixStore(f"shardcache/{name}", store), "the store of torch.distributed"
    if directory := directory or os.environ.get(DIRECTORY_VARIABLE, "").strip():
        place: Path | None = Path(directory).absolute() / _NAME
    else:
        is_local = per == "node" or world_size() in (1, ranks.detect().local_size)
        place = node_directory("sync") if is_local else None
    if place is None:
        raise ConfigError(
            f"The {world_size()} ranks of this job share no directory or store. Pass dir=, or set "
            f"{DIRECTORY_VARIABLE}, to a directory that all of them share, or call "
            "torch.distributed.init_process_group() first."
        )
    place /= name
    if per == "node":
        place /= f"node-{boot_id()[:13] or os.uname().nodename}"
    return FileStore(place), str(place)


def _get(store: Any, name: str) -> str:
    """Return a note, or "" if there is none. For an absent one, torch would block all threads."""
    return str(store.get(name).decode()) if store.check([name]) else ""


def _create(store: Any, name: str, text: str) -> bool:
    """Post a note, and return whether its name was free. No two notes of processes are equal."""
    return bool(store.compare_set(name, "", text) == text.encode())


def once(
    key: str,
    function: Callable[..., R],
    /,
    *args: Any,
    per: Scope = "job",
    again: bool = False,
    timeout: float | str | None = DEFAULT_TIMEOUT,
    lease: float | str = _LEASE,
    dir: str | os.PathLike[str] | None = None,
    job: str | None = None,
) -> R:
    """Call a function on exactly one rank, and return its result on all ranks.

        path = once("unpack", unpack, archive, per="node")

    The result is passed on as JSON (a tuple becomes a list). If the function raises an exception,
    the rank that ran it gets the exception, and the others get an `OnceError` that quotes it. The
    function runs once per job: a later call returns the same result, or raises an `OnceError`.

    Args:
        key: the name of the work, the same on all ranks.
        function: the function, which is called with ``args``.
        per: ``job`` (default), or ``node`` to call the function on one rank of each node.
        again: run the work once more. The n-th calls with ``again`` on all ranks are one run. A
            call that timed out does not count.
        timeout: seconds to wait for another rank (30 min), or text such as ``10m``; None waits
            forever.
        lease: seconds (90) without a heartbeat after which the running rank counts as dead.
        dir: a directory that all ranks share, for their notes. By default, they use torch's store,
            ``SHARDCACHE_SYNC_DIR``, or a directory of the node.
        job: a name in place of the launcher's job id. All jobs with this name share their results
            permanently.

    Raises:
        OnceError: the function failed on another rank.
        WaitTimeoutError: the other rank did not finish in time.
        ConfigError: an argument is not valid, or the ranks have no shared place for notes.
        Exception: the exception of the function, on the rank that ran it.
    """
    lease_seconds = parse_duration(lease)
    if not key.strip() or lease_seconds < 1:
        raise ConfigError("once needs a name for the work, and a lease of 1 s or more.")
    error: Exception | None = None
    with answering():
        store, place = _store_for(per, dir, job)
        this = place, safe_name(key)
        number = _reruns[this] + again
        prefix = f"once/{this[1]}/{number}"
        claim = _claim(key, store, place, prefix, timeout, lease_seconds)
    if claim is not None:
        with _heartbeat(store, f"{claim}.beat", lease_seconds / _BEATS):
            try:
                outcome = json.dumps({"by": describe_process(), "result": function(*args)})
            except Exception as exn:  # noqa: BLE001 - raised below
                quoted = {"by": describe_process(), "type": type(exn).__qualname__}
                quoted |= {"cause": str(exn), "traceback": traceback.format_exc()}
                error, outcome = exn, json.dumps({k: redact(text) for k, text in quoted.items()})
            with answering():
                _create(store, f"{prefix}/outcome", outcome)
    _reruns[this] = max(_reruns[this], number)
    if error is not None:
        raise error
    with answering():
        posted = json.loads(_get(store, f"{prefix}/outcome"))
    if "result" in posted:
        result: R = posted["result"]
        return result
    raise OnceError(
        f"once({key!r}) failed on {posted['by']}: {posted['type']}: {posted['cause']}\nIt does not "
        f"run again in this job without again=True. Its traceback:\n{posted['traceback']}",
        key=key,
        **posted,
    )


def _claim(
    key: str, store: Any, place: str, prefix: str, timeout: float | str | None, lease: float
) -> str | None:
    """Wait for a claim on the work and return its name, or None once the work has an outcome."""
    number, waited, since = 0, 0.0, 0.0
    runner, last_beat, outcome = "an unknown rank", "", f"{prefix}/outcome"
    polls = waiting(timeout, lambda: f"for once({key!r}) on {runner} (notes in {place})")
    while not store.check([outcome]):
        claim = f"{prefix}/claim.{number}"
        if not last_beat:  # try each number once: if a user removes a claim, it stays taken
            note = f"{describe_process()}\n{secrets.token_hex(8)}"
            # If only the second name is taken, a user has removed the first, and another rank has
            # the claim. With both names, look for an outcome again: the former runner may have
            # posted one since the check above.
            if all(_create(store, name, note) for name in (claim, f"{claim}.beat")):
                return None if store.check([outcome]) else claim
        beat = _get(store, f"{claim}.beat") or "removed"
        if beat != last_beat:
            last_beat, since = beat, waited
        if beat == _GAVE_UP or waited - since >= lease:
            logger.warning("%s: %s has ended; this rank may take over", claim, runner)
            number, last_beat = number + 1, ""
        elif beat != "removed":
            runner = beat.partition("\n")[0]
        waited = next(polls)
    return None


@contextlib.contextmanager
def _heartbeat(store: Any, name: str, pause: float) -> Iterator[None]:
    """Post heartbeats while the body runs. If the body is interrupted, another rank takes over."""
    ended = threading.Event()

    def post(text: str) -> None:
        try:
            with answering():
                store.set(name, text)
        except (OSError, ShardCacheError) as exn:  # the next heartbeat may succeed
            logger.warning("%s: the heartbeat could not be posted: %s", name, exn)

    def beat() -> None:
        while not ended.wait(pause):
            post(f"{describe_process()}\n{clock.monotonic()}")

    with contextlib.suppress(RuntimeError):  # no more threads; another rank may run the work, too
        threads.start(beat, "shardcache-once")
    try:
        yield
    except BaseException:
        ended.set()
        post(_GAVE_UP)
        raise
    finally:
        ended.set()


def barrier(
    name: str = "barrier",
    *,
    timeout: float | str | None = DEFAULT_TIMEOUT,
    dir: str | os.PathLike[str] | None = None,
    job: str | None = None,
) -> None:
    """Wait until all ranks of the job have called this function as often as this rank.

    Args:
        name: the name of the barrier, the same on all ranks. Each name is counted separately.
        timeout: seconds to wait (30 min), or text such as ``10m``; None waits forever.
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

    def what() -> str:
        late = missing()
        some = ", ".join(map(str, late[:16])) + (", ..." if len(late) > 16 else "")
        text = f"{len(late)} of {size} ranks: {some}"
        return f"at barrier({name!r}) as rank {number} for {text} (notes in {place})"

    polls = waiting(timeout, what)
    if size == 1:
        return
    with answering():
        store, place = _store_for("job", dir, job)
        count, prefix = _passed[place, name], f"barrier/{safe_name(name)}-{size}"
        notes = [f"{prefix}/{count}/rank-{other}" for other in range(size)]
        note = f"{describe_process()} {_RUN}"
        # An equal note is from a call of this process that timed out.
        if not _create(store, notes[number], note):
            raise ConfigError(
                f"Rank {number} has already reached barrier({name!r}), as "
                f"{_get(store, notes[number])} (notes in {place}). If that process belongs to this "
                "run, two processes have one rank. If it belongs to an earlier run, pass another "
                "job=, or remove that directory."
            )
        try:
            while not store.check(notes):
                next(polls)
        except WaitTimeoutError as exn:
            raise BarrierTimeoutError(exn.message, missing=missing()) from None
        _passed[place, name] = count + 1
        if count:
            with contextlib.suppress(RuntimeError):  # torch's store cannot delete, or has ended
                store.delete_key(f"{prefix}/{count - 1}/rank-{number}")
