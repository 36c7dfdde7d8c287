"""`once` and `barrier`: functions that all ranks of a job call together.

Ranks communicate by notes on a board, which is a directory or torch's store.

**once.** The first rank that claims the work, the runner, runs it and posts the outcome, which
stays on the board. A claim has a number and consists of two notes: the claim itself and its
heartbeat. Only the rank that creates both notes has the claim. So if a user removes one of the
notes, as people do with lock files, no second rank gets the claim. If a runner gives up, or sends
no heartbeat for `lease` seconds, another rank may make the claim with the next number. If two
runners post an outcome, the first outcome counts for both.

**barrier.** Every rank posts a note and waits until the notes of all ranks exist. Each rank counts
its own calls for each barrier name. A rank that has passed a barrier removes its note for the
previous barrier of that name, because all ranks have passed the previous one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import secrets
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from shardcache import threads
from shardcache.errors import (
    BarrierTimeoutError,
    ConfigError,
    OnceError,
    ShardCacheError,
    WaitTimeoutError,
)
from shardcache.ranks import safe_name
from shardcache.sync.board import Board, Scope, board_for, describe_process, rank, world_size
from shardcache.sync.paths import DEFAULT_TIMEOUT, waiting
from shardcache.units import parse_duration
from shardcache.urls import redact

logger = logging.getLogger(__name__)

R = TypeVar("R")

#: Seconds without a heartbeat after which a runner counts as dead, and the number of heartbeats in
#: that time: with five, one heartbeat may be lost and another one late.
_LEASE = 90.0
_BEATS = 5
#: An interrupted runner posts this instead of a heartbeat.
_GAVE_UP = b"gave up"

#: Number of runs with ``again`` that have an outcome, by board and key.
_reruns: Counter[tuple[str, str]] = Counter()
#: Number of barriers that this process has passed, by board and name.
_passed: Counter[tuple[str, str]] = Counter()
#: Distinguishes this process from a process of an earlier run with the same pid.
_RUN = secrets.token_hex(8)


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
    board, name = board_for(per, dir, job), safe_name(key)
    number = _reruns[str(board), name] + again
    prefix = f"once/{name}/{number}"
    error: Exception | None = None
    if (claim := _claim(key, board, prefix, timeout, lease_seconds)) is not None:
        with _heartbeat(board, f"{claim}.beat", lease_seconds / _BEATS):
            try:
                outcome = json.dumps({"by": describe_process(), "result": function(*args)})
            except Exception as exn:  # noqa: BLE001 - raised below
                error, outcome = exn, _failure(exn)
            board.create(f"{prefix}/outcome", outcome.encode())
    _reruns[str(board), name] = max(_reruns[str(board), name], number)
    if error is not None:
        raise error
    posted = json.loads(board.get(f"{prefix}/outcome") or b"")
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
    key: str, board: Board, prefix: str, timeout: float | str | None, lease: float
) -> str | None:
    """Wait for a claim on the work and return its name, or None once the work has an outcome."""
    number, waited, since = 0, 0.0, 0.0
    runner, last_beat = "an unknown rank", None

    def what() -> str:
        return f"for once({key!r}) on {runner} (notes in {board})"

    polls = waiting(timeout, what)
    while True:
        claim, outcome = f"{prefix}/claim.{number}", f"{prefix}/outcome"
        if board.get(outcome) is not None:
            return None
        if last_beat is None:  # try each number once: if a user removes a claim, it stays taken
            note = f"{describe_process()}\n{secrets.token_hex(8)}".encode()
            # If only the second name is taken, a user has removed the first, and another rank has
            # the claim. With both names, look for an outcome again: the former runner may have
            # posted one since the check above.
            if all(board.create(name, note) for name in (claim, f"{claim}.beat")):
                return claim if board.get(outcome) is None else None
        beat = board.get(f"{claim}.beat") or b""
        if beat != last_beat:
            last_beat, since = beat, waited
        if beat == _GAVE_UP or waited - since >= lease:
            logger.warning("waited %s, which has ended; this rank may take over", what())
            number, last_beat = number + 1, None
        elif beat:
            runner = beat.decode().partition("\n")[0]
        waited = next(polls)


@contextlib.contextmanager
def _heartbeat(board: Board, name: str, pause: float) -> Iterator[None]:
    """Post heartbeats while the body runs. If the body is interrupted, another rank takes over."""
    ended = threading.Event()

    def post(data: bytes) -> None:
        try:
            board.put(name, data)
        except (OSError, ShardCacheError) as exn:  # the next heartbeat may succeed
            logger.warning("%s: the heartbeat could not be posted: %s", name, exn)

    def beat() -> None:
        for count in itertools.count():
            if ended.wait(pause):
                return
            post(f"{describe_process()}\n{count}".encode())

    try:
        threads.start(beat, "shardcache-once")
    except RuntimeError as exn:  # no more threads are possible; another rank may run the work, too
        logger.warning("%s: there will be no heartbeats: %s", name, exn)
    try:
        yield
    except BaseException:
        ended.set()
        post(_GAVE_UP)
        raise
    finally:
        ended.set()


def _failure(exn: Exception) -> str:
    """Return the outcome that quotes an exception, as JSON without secrets."""
    quoted = {
        "by": describe_process(),
        "type": type(exn).__qualname__,
        "cause": str(exn),
        "traceback": "".join(traceback.format_exception(exn)),
    }
    return json.dumps({name: redact(text) for name, text in quoted.items()})


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
        return [other for other in range(size) if not board.has_all([notes[other]])]

    def what() -> str:
        late = missing()
        some = ", ".join(map(str, late[:16])) + (", ..." if len(late) > 16 else "")
        ranks = f"{len(late)} of {size} ranks: {some}"
        return f"at barrier({name!r}) as rank {number} for {ranks} (notes in {board})"

    polls = waiting(timeout, what)
    if size == 1:
        return
    board = board_for("job", dir, job)
    place = str(board), name
    count = _passed[place]
    prefix = f"barrier/{safe_name(name)}-{size}"
    notes = [f"{prefix}/{count}/rank-{other}" for other in range(size)]
    note = f"{describe_process()} {_RUN}"
    if not board.create(notes[number], note.encode()):
        other = (board.get(notes[number]) or b"").decode()
        if other != note:  # an equal note is from a call of this process that timed out
            raise ConfigError(
                f"Rank {number} has already reached barrier({name!r}), as {other} (notes in "
                f"{board}). If that process belongs to this run, two processes have one rank. If "
                "it belongs to an earlier run, pass another job=, or remove that directory."
            )
    try:
        while not board.has_all(notes):
            next(polls)
    except WaitTimeoutError as exn:
        raise BarrierTimeoutError(exn.message, missing=missing()) from None
    _passed[place] = count + 1
    if count:
        board.remove(f"{prefix}/{count - 1}/rank-{number}")
