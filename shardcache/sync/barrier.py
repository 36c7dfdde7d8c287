"""Barriers: no rank goes on before all have come.

Every rank posts that it has come and waits until all have. Each rank numbers the barriers of
one name for itself: its n-th call meets the n-th call of the others. A rank that has
passed one takes down what it posted for the one before, which all have left. A call that fails
does not count: the next call of that rank is the same barrier.
"""

from __future__ import annotations

import os
import secrets

from shardcache.errors import BarrierTimeoutError, ConfigError, WaitTimeoutError
from shardcache.ranks import safe_name
from shardcache.sync.board import board_for, describe_process, rank, world_size
from shardcache.sync.paths import DEFAULT_TIMEOUT, waiting

#: How many barriers this process has passed, by board and name.
_passed: dict[tuple[str, str], int] = {}
#: With its number it tells a process from those of earlier runs.
_RUN = secrets.token_hex(8)


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
        timeout: seconds, or text such as ``10m``; None waits for ever.
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
    count = _passed.get(place, 0)
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
