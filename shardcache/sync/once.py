"""Work that exactly one rank does: `once`.

The first rank that claims the work runs it and posts the outcome, a result or a failure; the
others wait for that. An outcome stays: a later call of the same job gets it and runs nothing.

Claims are numbered, and beside each is its runner's heartbeat. When a runner has ended, given up,
or been silent for `lease` seconds, the next number may be claimed: nothing is taken from anybody,
and nothing has to be removed after a death. A runner that was only stopped goes on: of two outcomes
the first counts, for both. Whoever makes both names has the claim, so removing one of them, as
people do with lock files, lets nobody in.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import secrets
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, overload

from shardcache import clock
from shardcache.errors import ConfigError, OnceError, ShardCacheError, WaitTimeoutError
from shardcache.ranks import safe_name
from shardcache.sync.board import Process, Scope, board_for
from shardcache.sync.job import has_ended
from shardcache.sync.paths import DEFAULT_TIMEOUT, Wait
from shardcache.units import format_duration, parse_duration
from shardcache.urls import redact

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

#: Seconds without a heartbeat after which a runner counts as dead, and heartbeats in that time:
#: one may be lost, and one late.
_LEASE = 90.0
_BEATS = 5
#: In place of a heartbeat, of a runner that was interrupted.
_GAVE_UP = b"gave up"
#: Seconds for which a process of this machine must have been gone: its outcome may need a moment
#: to become visible where it saw another mount of a network filesystem.
_GONE = 1.0
#: Characters of a message and of a traceback, whose end says most.
_TEXT = 20_000

_guard = threading.Lock()
#: How many runs `again` has asked for that have an outcome, by place and key.
_agains: Counter[tuple[str, str]] = Counter()


class Once:
    """Work for one rank: a context manager and a decorator; see `once` for the arguments."""

    def __init__(
        self,
        key: str,
        *,
        per: Scope = "job",
        again: bool = False,
        timeout: float | str | None = DEFAULT_TIMEOUT,
        lease: float | str = _LEASE,
        dir: str | os.PathLike[str] | None = None,
        job: str | None = None,
    ) -> None:
        if not isinstance(key, str) or not key.strip():
            raise ConfigError(f"once needs a name for the work, not {key!r:.80}. Give a text.")
        self._key, self._again = key, again
        self._timeout = None if timeout is None else parse_duration(timeout)
        self._lease = parse_duration(lease)
        if self._lease < 1:
            raise ConfigError(f"lease={lease!r} is too short for a heartbeat. Give 1 s or more.")
        self._where = functools.partial(board_for, per, dir, job)

    def __str__(self) -> str:
        return f"once({self._key!r})"

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate: of all ranks that call the function, one runs it."""

        @functools.wraps(function)
        def wrapper(*args: P.args, **kw: P.kwargs) -> R:
            result: R = self.call(functools.partial(function, *args, **kw))
            return result

        return wrapper

    def call(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` here, or return its result elsewhere."""
        run = copy.copy(self)  # any number of threads may call at once
        with run as is_mine:
            if is_mine:
                run._value = function()
        return run._result()

    def __enter__(self) -> bool:
        self._board = self._where()
        name = safe_name(self._key)
        self._counted = str(self._board), name
        self._number = _agains[self._counted] + self._again
        self._room = f"once/{name}/{self._number}"
        self._value: Any = None
        self._outcome: bytes | None = None
        self._ended = threading.Event()
        self._is_mine = self._claim_or_wait()
        if not self._is_mine:
            self._result()
        return self._is_mine

    def _claim_or_wait(self) -> bool:
        """Wait until this process has claimed the work (True) or an outcome is posted (False)."""
        number, since = 0, 0.0
        runner: Process | None = None
        seen: tuple[bytes | None, bool] | None = None

        def what() -> str:
            if runner is None:
                return f"for {self}: a process that did not say who it is runs it"
            age = format_duration(max(0, round(clock.time() - runner.began)))
            return f"for {self}: {runner.name} has been running it for {age}"

        for _ in (wait := Wait(self._timeout, what)):
            if self._has_outcome():
                return False
            self._claim = f"{self._room}/claim.{number}"
            # The claim of a runner that lives is taken, or was made anew by others.
            if seen is None and self._try_claim():
                return True
            beat = self._board.get(f"{self._claim}.beat")
            runner = Process.parse(beat) or runner
            looked = beat, runner is not None and has_ended(runner.identity)
            if looked != seen:
                seen, since = looked, wait.waited
            if beat == _GAVE_UP or wait.waited - since >= (_GONE if looked[1] else self._lease):
                logger.warning("%s ended during %s; taking over", runner and runner.name, self)
                number, runner, seen = number + 1, None, None
        raise WaitTimeoutError(
            f"Waited {wait} {what()} (in {self._board}). Look at that "
            "process (py-spy dump), or give it more time with timeout.",
            key=self._key,
            waited=wait.waited,
        )

    def _has_outcome(self) -> bool:
        self._outcome = self._board.get(f"{self._room}/outcome")
        return self._outcome is not None

    def _try_claim(self) -> bool:
        me, names = Process.this(), (self._claim, f"{self._claim}.beat")
        # Where the second name is taken, the first was free because somebody removed it. Where
        # there is an outcome, the former runner had all the time to post it.
        if not all(self._board.create(each, me.encode()) for each in names) or self._has_outcome():
            return False
        threading.Thread(target=self._keep_beating, args=[me], daemon=True).start()
        return True

    def _keep_beating(self, me: Process) -> None:
        while not self._ended.wait(self._lease / _BEATS):
            self._post_beat(replace(me, token=secrets.token_hex(8)).encode())

    def _post_beat(self, data: bytes) -> None:
        try:
            self._board.put(f"{self._claim}.beat", data)
        except (OSError, ShardCacheError) as exn:  # the next one may come through
            logger.warning("%s: cannot post a heartbeat: %s", self, exn)

    def __exit__(self, kind: object, exn: BaseException | None, trace: object) -> None:
        if not self._is_mine:
            return
        try:
            if exn is None or isinstance(exn, Exception):
                self._post_outcome(exn)
        finally:
            self._ended.set()
        if exn is not None and not isinstance(exn, Exception):
            self._post_beat(_GAVE_UP)  # an interrupt lets another rank take over

    def _post_outcome(self, exn: Exception | None) -> None:
        """Post what came of it; of two outcomes the first counts."""
        error = exn
        record: dict[str, Any] = {"by": Process.this().name, "value": None, "failure": None}
        try:
            data = json.dumps(record | {"value": self._value})
        except (TypeError, ValueError, RecursionError) as why:
            error = OnceError(
                f"{self} has run, and its result is no JSON ({why}). Return "
                "None, or what JSON can hold; write the rest to a file.",
                key=self._key,
            )
        if error is not None:
            record["failure"] = {
                "type": type(error).__qualname__,
                "cause": redact(str(error))[:_TEXT],
                "traceback": redact("".join(traceback.format_exception(error))[-_TEXT:]),
            }
            data = json.dumps(record)
        self._outcome = data.encode()
        if not self._board.create(f"{self._room}/outcome", self._outcome):
            self._has_outcome()
        self._count()
        if error is not exn and error is not None:
            raise error

    def _count(self) -> None:
        with _guard:
            _agains[self._counted] = max(_agains[self._counted], self._number)

    def _result(self) -> Any:
        """Return the result that was posted, or raise the failure."""
        try:
            record = json.loads(self._outcome or b"")
            by, value, failure = record["by"], record["value"], record["failure"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise OnceError(
                f"The outcome of {self} cannot be read in {self._board}/{self._room}. "
                "Remove that and run again.",
                key=self._key,
            ) from None
        self._count()
        if failure:
            raise OnceError(
                f"{self} failed on {by}: {failure['type']}: {failure['cause']}\nIt does not run "
                f"again in this job unless again=True is given. There:\n{failure['traceback']}",
                key=self._key,
                by=by,
                **failure,
            )
        return value


@overload
def once(key: str, /, **options: Any) -> Once: ...
@overload
def once(key: str, function: Callable[..., R], /, *args: Any, **options: Any) -> R: ...


def once(
    key: str, function: Callable[..., Any] | None = None, /, *args: Any, **options: Any
) -> Any:
    """Have exactly one rank do something; the others wait for it and get its result or failure.

        path = once("unpack", unpack, archive, per="node")

        with once("unpack", per="node") as mine:
            if mine:
                unpack(archive)

        @once("unpack", per="node")
        def unpack(): ...

    The result comes as JSON has it (a tuple becomes a list); with the block there is none. If the
    function raises, the runner sees the exception and the others an `OnceError` that quotes it. It
    runs once per job: a later call gets the same outcome.

    Args:
        key: the name of the work; the same on all ranks.
        function: does it, with ``args``; without one, a context manager that is also a decorator
            is returned.
        per: ``job`` (default), or ``node`` for one rank on each node.
        again: run it once more; the n-th ``again`` of all ranks is one run. A call that ends
            without an outcome, such as one that timed out, does not count.
        timeout: most seconds to wait for another rank (30 min), or text such as ``10m``; None
            waits for ever.
        lease: seconds (90) without a heartbeat after which a runner on another machine, or in
            another container, counts as dead.
        dir: a directory in which the ranks meet; else torch's store, ``SHARDCACHE_SYNC_DIR``, or
            a directory of the node.
        job: a name in place of the launcher's job id; all who state it share results, for good.

    Raises:
        OnceError: it failed on another rank, or its result is no JSON.
        WaitTimeoutError: no outcome came in time.
        ConfigError: an argument that cannot work, or no place where the ranks could meet.
        Whatever the function raises, on the rank that runs it.
    """
    work = Once(key, **options)
    return work if function is None else work.call(functools.partial(function, *args))
