"""Barriers: no rank goes on before all have come.

Every rank posts that it has come, then waits until all have. Barriers of one name are
numbered, by each rank for itself: the n-th call of a rank meets the n-th of the others. A
rank that has passed one takes down what it posted for the one before, which all have left.
A call that fails counts for nothing: the next one of that rank is the same barrier.
"""

from __future__ import annotations

import os
import threading

from shardcache.errors import BarrierTimeoutError, ConfigError
from shardcache.ranks import JOB_VARIABLE, safe_name
from shardcache.sync import standing
from shardcache.sync.noticeboards import Board, board_for
from shardcache.sync.patience import DEFAULT_TIMEOUT, Patience
from shardcache.sync.runners import Identity

__all__ = ["barrier"]

#: Ranks that an error names; of a node that is away, the first few say which it is.
_NAMED = 16
#: Looks at a board that answers one question at a time between two that ask for every rank.
_SELDOM = 20

_guard = threading.Lock()
#: Barriers that this process has passed, by place and name.
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
        world_size: how many ranks there are, where the launcher does not say.
        rank: which of them this is, likewise.
        dir: a directory in which the ranks meet; see `once`.
        job: a name of this run, in place of the launcher's id of the job. No other run may have
            had it in that directory: its ranks would count.

    Raises:
        BarrierTimeoutError: not all came; ``missing`` has their ranks.
        ConfigError: an argument that cannot work, no place where the ranks could meet, or
            another process came as this rank.
    """
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"A barrier needs a name, not {name!r:.80}. Give a text.")
    size = standing.world_size() if world_size is None else world_size
    number = standing.rank() if rank is None else rank
    if size < 1 or not 0 <= number < size:
        raise ConfigError(f"Rank {number} is none of {size} ranks. They run from 0 to {size - 1}.")
    patience = Patience(timeout)
    if size == 1:
        return
    if job is None and size > standing.world_size() and standing.is_alone():
        raise ConfigError(
            f"Nobody launched this process as one of {size} ranks, so they have no name in common. "
            f"State job=, a name of this run, or set {JOB_VARIABLE}.",
            variable=JOB_VARIABLE,
        )
    board = board_for("job", dir, job)
    place = str(board), name
    with _guard:
        generation = _passed.get(place, 0)
    rooms = f"barrier/{safe_name(name)}-{size}"
    meeting = _Meeting(board, f"{rooms}/{generation}", name, number, size)
    meeting.arrive()
    meeting.wait(patience)
    with _guard:
        _passed[place] = generation + 1
    if generation:
        _Meeting(board, f"{rooms}/{generation - 1}", name, number, size).leave()


class _Meeting:
    """One barrier, as one rank sees it."""

    def __init__(self, board: Board, room: str, name: str, rank: int, size: int) -> None:
        self._board = board
        self._room = room
        self._name = name
        self._rank = rank
        self._size = size
        self._all = f"{room}/all"
        self._looks = 0

    def _of(self, rank: int) -> str:
        return f"{self._room}/rank-{rank}"

    def _everybody(self) -> list[str]:
        return [self._of(rank) for rank in range(self._size)]

    def arrive(self) -> None:
        """Say that this rank has come; twice is once.

        Raises:
            ConfigError: another process came as this rank.
        """
        if self._board.first(self._of(self._rank), Identity.this().encode()):
            return
        found = Identity.parse(self._board.get(self._of(self._rank)))
        if found is not None and not found.is_this_process():
            raise ConfigError(
                f"Rank {self._rank} has come to barrier({self._name!r}) already, as {found} (told "
                f"in {self._board}). If that is a process of this run, two of them have one rank; "
                "if it is of an earlier one, state another job, or remove that directory.",
                by=str(found),
            )

    def wait(self, patience: Patience) -> None:
        """Wait for all others.

        Raises:
            BarrierTimeoutError: they did not come.
        """
        while not self._is_complete():
            if patience.over:
                missing = self._missing()
                if not missing:
                    return
                raise BarrierTimeoutError(
                    f"Waited {patience} at barrier({self._name!r}) as rank {self._rank} of "
                    f"{self._size}: {_told(missing)} did not come (told in {self._board}). Look "
                    "at the output of those, or give them more time with timeout.",
                    missing=missing,
                    waited=patience.waited,
                )
            patience.pause(
                lambda: f"waiting at barrier({self._name!r}) for {_told(self._missing())}"
            )

    def _is_complete(self) -> bool:
        if not self._board.listed and self._board.get(self._all) is not None:
            return True
        self._looks += 1
        if not self._board.listed and self._looks % _SELDOM != 1:
            return False
        if not self._board.covers(self._everybody()):
            return False
        if not self._board.listed:
            self._board.put(self._all, b"here")  # the last to come tells the others
        return True

    def _missing(self) -> list[int]:
        found = self._board.posted(self._everybody())
        return [rank for rank in range(self._size) if self._of(rank) not in found]

    def leave(self) -> None:
        """Take down what this rank posted, for all have passed."""
        self._board.remove(self._of(self._rank))
        if self._rank == 0 and not self._board.listed:
            self._board.remove(self._all)


def _told(missing: list[int]) -> str:
    if len(missing) == 1:
        return f"rank {missing[0]}"
    names = ", ".join(map(str, missing[:_NAMED]))
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    return f"{len(missing)} ranks ({names}{more})" if missing else "nobody"
