"""Barriers: no rank goes on before all have come.

Every rank posts that it has come and waits until all have. Each rank numbers the barriers of
one name for itself: its n-th call meets the n-th call of the others. A rank that has
passed one takes down what it posted for the one before, which all have left. A call that fails
does not count: the next call of that rank is the same barrier.
"""

from __future__ import annotations

import os

from shardcache.errors import BarrierTimeoutError, ConfigError
from shardcache.ranks import safe_name
from shardcache.sync import job as own
from shardcache.sync.board import Process, board_for
from shardcache.sync.job import identity
from shardcache.sync.paths import DEFAULT_TIMEOUT, Wait

#: Ranks that an error names; of a node that is away, the first few say which it is.
_NAMED = 16

#: How many barriers this process has passed, by place and name.
_passed: dict[tuple[str, str], int] = {}


def barrier(
    name: str = "barrier",
    *,
    timeout: float | str | None = DEFAULT_TIMEOUT,
    world_size: int | None = None,
    rank: int | None = None,
    dir: str | os.PathLike[str] | None = None,
    job: str | None = None,
) -> None:
    """Wait until all ranks of the job have called this as often as this one has.

    Args:
        name: of the barrier; the same on all ranks.
        timeout: seconds, or text such as ``10m``; None waits for ever.
        world_size, rank: how many ranks there are and which is this, where no launcher says.
        dir: a directory in which the ranks meet; see `once`.
        job: a name of this run, in place of the launcher's job id. No other run may have had it
            in that directory: its ranks would count.

    Raises:
        BarrierTimeoutError: not all came; ``missing`` has their ranks.
        ConfigError: an argument that cannot work, no place where the ranks could meet, or
            another process came as this rank.
    """
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"A barrier needs a name, not {name!r:.80}. Give a text.")
    size = own.world_size() if world_size is None else world_size
    number = own.rank() if rank is None else rank
    if size < 1 or not 0 <= number < size:
        raise ConfigError(f"Rank {number} is none of {size} ranks. They run from 0 to {size - 1}.")
    wait = Wait(timeout, lambda: f"at barrier({name!r}) for {_named(missing())}")
    if size == 1:
        return
    board = board_for("job", dir, job, size)
    place = str(board), name
    count = _passed.get(place, 0)
    room = f"barrier/{safe_name(name)}-{size}"
    names = [f"{room}/{count}/rank-{other}" for other in range(size)]

    def missing() -> list[int]:
        return [other for other in range(size) if board.get(names[other]) is None]

    if not board.create(names[number], Process.this().encode()):
        found = Process.parse(board.get(names[number]))
        if found is not None and found.identity != identity(os.getpid()):
            raise ConfigError(
                f"Rank {number} has come to barrier({name!r}) already, as {found.name} (in "
                f"{board}). If that is a process of this run, two of them have one rank; if it is "
                "of an earlier one, state another job, or remove that directory.",
                by=found.name,
            )
    if not any(board.has_all(names) for _ in wait) and (late := missing()):
        raise BarrierTimeoutError(
            f"Waited {wait} at barrier({name!r}) as rank {number} of {size}: {_named(late)} did "
            f"not come (in {board}). Look at the output of those, or give them more time with "
            "timeout.",
            missing=late,
            waited=wait.waited,
        )
    _passed[place] = count + 1
    if count:
        board.remove(f"{room}/{count - 1}/rank-{number}")


def _named(ranks: list[int]) -> str:
    if len(ranks) < 2:
        return f"rank {ranks[0]}" if ranks else "nobody"
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:_NAMED]))}{more})"
