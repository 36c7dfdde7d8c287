"""Work that exactly one rank does: `once`.

The first rank that claims the work runs it and posts what came of it, a result or a failure;
the others wait for that. What has been posted stays: a later call of the same job is told the
same, and runs nothing. If the runner dies, by SIGKILL too, another rank takes over
(`runners`); if it is interrupted (KeyboardInterrupt, SystemExit), likewise.

Of two results, which only a runner that was taken for dead can bring about, the first counts,
for both (`outcomes`).
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar, overload

from shardcache.errors import ConfigError, OnceError, WaitTimeoutError
from shardcache.ranks import safe_name
from shardcache.sync.fileboard import LIMIT
from shardcache.sync.noticeboards import Board, Scope, board_for
from shardcache.sync.outcomes import Outcome, done, failed
from shardcache.sync.patience import DEFAULT_TIMEOUT, Patience
from shardcache.sync.runners import LEASE_SECONDS, Claim, Watch
from shardcache.units import parse_duration

__all__ = ["Once", "once"]

P = ParamSpec("P")
R = TypeVar("R")

_guard = threading.Lock()
#: How often `again` was asked for here: ranks that run the same program count alike.
_agains: dict[tuple[str, str], int] = {}


class Once:
    """Work for one rank, not begun yet: a context manager and a decorator; made by `once`."""

    def __init__(
        self,
        key: str,
        *,
        per: Scope,
        again: bool,
        generation: int | str | None,
        timeout: float | str | None,
        lease: float | str,
        dir: str | os.PathLike[str] | None,
        job: str | None,
    ) -> None:
        if not isinstance(key, str) or not key.strip():
            raise ConfigError(f"once needs a name for the work, not {key!r:.80}. Give a text.")
        if again and generation is not None:
            raise ConfigError("again and generation exclude each other. Give one of them.")
        self._key = key
        self._again = again
        self._generation = generation
        self._timeout = None if timeout is None else parse_duration(timeout)
        self._lease = parse_duration(lease)
        if self._lease < 1:
            raise ConfigError(f"lease={lease!r} is too short for a heartbeat. Give 1 s or more.")
        self._where: tuple[Scope, str | os.PathLike[str] | None, str | None] = per, dir, job
        self._turn: _Turn | None = None

    def run(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` here, or be told what came of it elsewhere."""
        turn = self._begin()
        if turn.claim is None:
            return turn.outcome().value()
        try:
            value = function()
        except Exception as exn:
            turn.fail(exn)
            raise
        except BaseException:
            turn.give_up()
            raise
        return turn.succeed(value)

    def _begin(self) -> _Turn:
        board = board_for(*self._where)
        name = safe_name(self._key)
        if self._generation is not None:
            generation = "g" + safe_name(str(self._generation))
        else:
            with _guard:
                asked = str(board), name
                _agains[asked] = _agains.get(asked, 0) + self._again
                generation = str(_agains[asked])
        turn = _Turn(self._key, board, f"once/{name}/{generation}", self._lease)
        turn.take(Patience(self._timeout))
        return turn

    def __enter__(self) -> bool:
        self._turn = turn = self._begin()
        if turn.claim is None:
            turn.outcome().value()
            return False
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exn: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        turn, self._turn = self._turn, None
        if turn is None or turn.claim is None:
            return
        if exn is None:
            turn.succeed(None)
        elif isinstance(exn, Exception):
            turn.fail(exn)
        else:
            turn.give_up()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate: of all ranks that call the function, one runs it."""

        @functools.wraps(function)
        def wrapper(*args: P.args, **kw: P.kwargs) -> R:
            result: R = self.run(lambda: function(*args, **kw))
            return result

        return wrapper


class _Turn:
    """One rank's part in one piece of work."""

    def __init__(self, key: str, board: Board, room: str, lease: float) -> None:
        self.claim: Claim | None = None
        self._key = key
        self._board = board
        self._room = room
        self._lease = lease
        self._posted: bytes | None = None

    def take(self, patience: Patience) -> None:
        """Wait for the claim or for the outcome.

        Raises:
            WaitTimeoutError: neither came.
        """
        watch = Watch(self._board, self._room, self._lease)
        free = True
        while not self._is_posted():
            if free and self._claim(watch):
                return
            free = watch.next_is_free()
            if free:
                continue
            if patience.over:
                raise WaitTimeoutError(
                    f"Waited {patience} for once({self._key!r}): {watch} (told in {self._board}). "
                    "Look at that process (py-spy dump), or give it more time with timeout.",
                    key=self._key,
                    waited=patience.waited,
                )
            patience.pause(lambda: f"waiting for once({self._key!r}): {watch}")

    def _is_posted(self) -> bool:
        self._posted = self._board.get(f"{self._room}/outcome")
        return self._posted is not None

    def _claim(self, watch: Watch) -> bool:
        claim = Claim.make(self._board, self._room, watch.number, self._lease)
        if claim is None:
            return False
        try:
            posted = self._is_posted()  # by the former holder, who had all the time to do so
        except BaseException:
            claim.release()
            raise
        if posted:
            claim.release()
        else:
            self.claim = claim
        return True

    def outcome(self) -> Outcome:
        """What was posted."""
        assert self._posted is not None
        return Outcome.parse(self._key, self._posted, f"{self._board}/{self._room}")

    def succeed(self, value: Any) -> Any:
        """Post the result; what all ranks get, this one included.

        Raises:
            OnceError: it cannot be told to the others.
        """
        try:
            data = done(value)
        except (TypeError, ValueError, RecursionError) as exn:
            return self._refuse(f"its result is no JSON ({exn})")
        if len(data) > LIMIT:
            return self._refuse(f"its result is longer than {LIMIT} bytes")
        return self._post(data).value()

    def _refuse(self, why: str) -> Any:
        error = OnceError(
            f"once({self._key!r}) has run, and {why}. Return None, or what JSON can hold; write "
            "the rest to a file.",
            key=self._key,
        )
        self.fail(error)
        raise error

    def fail(self, exn: Exception) -> None:
        """Post the failure."""
        self._post(failed(exn))

    def _post(self, data: bytes) -> Outcome:
        name = f"{self._room}/outcome"
        try:
            if not self._board.first(name, data):
                data = self._board.get(name) or data
        finally:
            if self.claim is not None:
                self.claim.release()
        return Outcome.parse(self._key, data, f"{self._board}/{self._room}")

    def give_up(self) -> None:
        """Let another rank take over: this one was interrupted."""
        if self.claim is not None:
            self.claim.give_up()


@overload
def once(
    key: str,
    /,
    *,
    per: Scope = ...,
    again: bool = ...,
    generation: int | str | None = ...,
    timeout: float | str | None = ...,
    lease: float | str = ...,
    dir: str | os.PathLike[str] | None = ...,
    job: str | None = ...,
) -> Once: ...


@overload
def once(
    key: str,
    function: Callable[..., R],
    /,
    *args: Any,
    per: Scope = ...,
    again: bool = ...,
    generation: int | str | None = ...,
    timeout: float | str | None = ...,
    lease: float | str = ...,
    dir: str | os.PathLike[str] | None = ...,
    job: str | None = ...,
) -> R: ...


def once(
    key: str,
    function: Callable[..., Any] | None = None,
    /,
    *args: Any,
    per: Literal["node", "job"] = "job",
    again: bool = False,
    generation: int | str | None = None,
    timeout: float | str | None = DEFAULT_TIMEOUT,
    lease: float | str = LEASE_SECONDS,
    dir: str | os.PathLike[str] | None = None,
    job: str | None = None,
) -> Any:
    """Have exactly one rank do something; the others wait for its success and see its failure.

        path = once("unpack", unpack, archive, per="node")

        with once("unpack", per="node") as mine:
            if mine:
                unpack(archive)

        @once("unpack", per="node")
        def unpack(): ...

    All ranks get the function's result, as JSON has it (a tuple becomes a list); with the
    block they get none. If it raises, the runner sees the exception and the others an
    `OnceError` that quotes it. It is run once per job: a later call is told what came of it.

    Args:
        key: the name of the work; the same on all ranks.
        function: does it; without one, a context manager that is also a decorator is returned.
        args: its arguments.
        per: ``job``, or ``node`` for one rank on each node.
        again: run it once more. All ranks ask alike: their n-th ``again`` is one run.
        generation: run it once for each generation, such as an epoch.
        timeout: most seconds to wait for another rank, or text such as ``10m``; None: for ever.
        lease: seconds without a sign of life after which a runner counts as dead where only
            signs of life tell: on network filesystems and in torch's store.
        dir: a directory in which the ranks meet; the default is torch's store, then
            ``SHARDCACHE_SYNC_DIR``, then a directory of the node.
        job: a name in place of the launcher's id of the job; who states the same one sees the
            same results, also those of an earlier run.

    Raises:
        OnceError: it failed on another rank, or its result is no JSON.
        WaitTimeoutError: nothing came of it in time.
        ConfigError: an argument that cannot work, or no place where the ranks could meet.
        Whatever the function raises, on the rank that runs it.
    """
    found = Once(
        key,
        per=per,
        again=again,
        generation=generation,
        timeout=timeout,
        lease=lease,
        dir=dir,
        job=job,
    )
    return found if function is None else found.run(functools.partial(function, *args))
