"""What the ranks of a job do together: `once` and `barrier`.

**once.** The first rank that claims the work runs it and posts the outcome, which stays; the others
wait for that. Claims are numbered, and beside each is its runner's heartbeat. When a runner has
given up or been silent for `lease` seconds, the next number may be claimed: nothing is taken from
anybody. A runner that was only stopped goes on: of two outcomes the first counts, for both. Whoever
makes both names has the claim, so removing one of them, as people do with lock files, lets nobody
in.

**barrier.** Every rank posts that it has come and waits until all have. Each rank numbers the
barriers of one name for itself: its n-th call meets the n-th call of the others. A rank that has
passed one takes down what it posted for the one before, which all have left. A call that fails
does not count: the next call of that rank is the same barrier.
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

#: Seconds without a heartbeat after which a runner counts as dead, and heartbeats in that time:
#: one may be lost, and one late.
_LEASE = 90.0
_BEATS = 5
#: In place of a heartbeat, of a runner that was interrupted.
_GAVE_UP = b"gave up"

#: How many runs `again` has asked for that have an outcome, by board and key.
_agains: Counter[tuple[str, str]] = Counter()
#: How many barriers this process has passed, by board and name.
_passed: Counter[tuple[str, str]] = Counter()
#: With its number it tells a process from those of earlier runs.
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
    """Have exactly one rank do something; the others wait for it and get its result or failure.

        path = once("unpack", unpack, archive, per="node")

    All get the result as JSON has it (a tuple becomes a list). If the function raises, the runner
    sees the exception and the others an `OnceError` that quotes it. It runs once per job: a later
    call gets the same outcome.

    Args:
        key: the name of the work; the same on all ranks.
        function: does it, with ``args``.
        per: ``job`` (default), or ``node`` for one rank on each node.
        again: run it once more; the n-th ``again`` of all ranks is one run. A call that timed
            out does not count.
        timeout: most seconds to wait for another rank (30 min), or text such as ``10m``; None
            waits without end.
        lease: seconds (90) without a heartbeat after which a runner counts as dead.
        dir: a directory in which the ranks meet; else torch's store, ``SHARDCACHE_SYNC_DIR``, or
            a directory of the node.
        job: a name in place of the launcher's job id; all who state it share results, for good.

    Raises:
        OnceError: it failed on another rank.
        WaitTimeoutError: no outcome came in time.
        ConfigError: an argument that cannot work, or no place where the ranks could meet.
        Whatever the function raises, on the rank that runs it.
    """
    silence = parse_duration(lease)
    if not key.strip() or silence < 1:
        raise ConfigError("once needs a name for the work, and a lease of 1 s or more.")
    board, name = board_for(per, dir, job), safe_name(key)
    number = _agains[str(board), name] + again
    room = f"once/{name}/{number}"
    error: Exception | None = None
    if (claim := _claim(key, board, room, timeout, silence)) is not None:
        with _heartbeat(board, f"{claim}.beat", silence / _BEATS):
            try:
                outcome = json.dumps({"by": describe_process(), "result": function(*args)})
            except Exception as exn:  # noqa: BLE001 - raised below
                error, outcome = exn, _failure(exn)
            board.create(f"{room}/outcome", outcome.encode())  # of two the first counts
    _agains[str(board), name] = max(_agains[str(board), name], number)
    if error is not None:
        raise error
    found = json.loads(board.get(f"{room}/outcome") or b"")
    if "result" in found:
        result: R = found["result"]
        return result
    raise OnceError(
        f"once({key!r}) failed on {found['by']}: {found['type']}: {found['cause']}\nIt does not "
        f"run again in this job unless again=True is given. There:\n{found['traceback']}",
        key=key,
        **found,
    )


def _claim(
    key: str, board: Board, room: str, timeout: float | str | None, lease: float
) -> str | None:
    """Claim the work for this process, or wait until it has an outcome (None)."""
    number, waited, since = 0, 0.0, 0.0
    runner, seen = "an unknown rank", None

    def what() -> str:
        return f"for once({key!r}), which {runner} runs (in {board})"

    polls = waiting(timeout, what)
    while True:
        claim, outcome = f"{room}/claim.{number}", f"{room}/outcome"
        if board.get(outcome) is not None:
            return None
        if seen is None:  # later the claim of a runner that lives may have been removed
            note = f"{describe_process()}\n{secrets.token_hex(8)}".encode()
            # Where the second name is taken, the first was free because somebody removed it. Where
            # there is an outcome, the former runner had all the time to post it.
            if all(board.create(name, note) for name in (claim, f"{claim}.beat")):
                return claim if board.get(outcome) is None else None
        beat = board.get(f"{claim}.beat") or b""
        if beat != seen:
            seen, since = beat, waited
        if beat == _GAVE_UP or waited - since >= lease:
            logger.warning("waited %s, and it has ended; taking over", what())
            number, seen = number + 1, None
        elif beat:
            runner = beat.decode().partition("\n")[0]
        waited = next(polls)


@contextlib.contextmanager
def _heartbeat(board: Board, name: str, pause: float) -> Iterator[None]:
    """Show that this process lives; after an interrupt, let another rank take over."""
    ended = threading.Event()

    def post(data: bytes) -> None:
        try:
            board.put(name, data)
        except (OSError, ShardCacheError) as exn:  # the next one may come through
            logger.warning("%s: cannot post a heartbeat: %s", name, exn)

    def beat() -> None:
        for count in itertools.count():
            if ended.wait(pause):
                return
            post(f"{describe_process()}\n{count}".encode())

    threading.Thread(target=beat, daemon=True).start()
    try:
        yield
    except BaseException:
        ended.set()
        post(_GAVE_UP)
        raise
    finally:
        ended.set()


def _failure(exn: Exception) -> str:
    """An outcome that quotes an exception, without secrets."""
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
    """Wait until all ranks of the job have called this as often as this one has.

    Args:
        name: of the barrier; the same on all ranks.
        timeout: seconds, or text such as ``10m``; None waits without end.
        dir: a directory in which the ranks meet; see `once`.
        job: a name of this run, in place of the launcher's job id. No other run may have had it
            in that directory: its ranks would count.

    Raises:
        BarrierTimeoutError: not all came; ``missing`` has their ranks.
        ConfigError: an argument that cannot work, no place where the ranks could meet, or
            another process came as this rank.
    """
    number, size = rank(), world_size()

    def missing() -> list[int]:
        return [other for other in range(size) if not board.has_all([notes[other]])]

    def what() -> str:
        late = missing()
        some = ", ".join(map(str, late[:16])) + (", ..." if len(late) > 16 else "")
        return (
            f"at barrier({name!r}) as rank {number} of {size} for {len(late)}: {some} (in {board})"
        )

    polls = waiting(timeout, what)
    if size == 1:
        return
    board = board_for("job", dir, job)
    place = str(board), name
    count = _passed[place]
    room = f"barrier/{safe_name(name)}-{size}"
    notes = [f"{room}/{count}/rank-{other}" for other in range(size)]
    note = f"{describe_process()} {_RUN}"
    if not board.create(notes[number], note.encode()):
        there = (board.get(notes[number]) or b"").decode()
        if there != note:  # else this is another try
            raise ConfigError(
                f"Rank {number} has come to barrier({name!r}) already, as {there} (in "
                f"{board}). If that is a process of this run, two of them have one rank; if it is "
                "of an earlier one, state another job, or remove that directory."
            )
    try:
        while not board.has_all(notes):
            next(polls)
    except WaitTimeoutError as exn:
        raise BarrierTimeoutError(exn.message, missing=missing()) from None
    _passed[place] = count + 1
    if count:
        board.remove(f"{room}/{count - 1}/rank-{number}")
