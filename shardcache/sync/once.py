"""Work that exactly one rank does: `once`.

The first rank that claims the work runs it and posts the outcome, a result or a failure; the
others wait for that. An outcome stays: a later call of the same job gets it and runs nothing.

Claims are numbered, and beside each is its runner's heartbeat. When a runner has given up or been
silent for `lease` seconds, the next number may be claimed: nothing is taken from anybody, and
nothing has to be removed after a death. A runner that was only stopped goes on: of two outcomes the
first counts, for both. Whoever makes both names has the claim, so removing one of them, as people
do with lock files, lets nobody in.
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

from shardcache.errors import ConfigError, OnceError, ShardCacheError
from shardcache.ranks import safe_name
from shardcache.sync.board import Board, Scope, board_for, describe_process
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
            waits for ever.
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
