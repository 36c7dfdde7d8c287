"""Work that exactly one rank does: `once`.

The first rank that claims the work runs it and posts the outcome, a result or a failure; the
others wait for that. An outcome stays: a later call of the same job gets it and runs nothing.

Claims are numbered. A claim says which process runs, and the runner posts a heartbeat. When a
runner has ended, given up, or been silent for `lease` seconds, the next number may be claimed, and
of several that claim it one gets it. So nothing is taken from anybody, and nothing has to be
removed after a death. A runner that was only stopped goes on: of two outcomes the first
counts, for both. A claim has two names: whoever removes one, as people do with lock files, lets
nobody in.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, overload

from shardcache.clock import SYSTEM_CLOCK, Clock
from shardcache.errors import ConfigError, OnceError, ShardCacheError, WaitTimeoutError
from shardcache.ranks import safe_name
from shardcache.sync.board import LIMIT, Board, Process, Scope, board_for
from shardcache.sync.paths import DEFAULT_TIMEOUT, Wait
from shardcache.units import format_duration, parse_duration
from shardcache.urls import redact

__all__ = ["Once", "once"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

#: Seconds without a heartbeat after which a runner counts as dead, and heartbeats in that time:
#: one may be lost, and one late.
_LEASE = 90.0
_BEATS = 5
#: In place of a heartbeat, of a runner that was interrupted.
_GAVE_UP = b"gave up"
#: Seconds for which a process of this machine must have been gone: where it saw another mount of
#: a network filesystem than this one, its outcome may need a moment to become visible.
_GONE = 1.0
#: Seconds that count between two looks, at most. After a pause of the whole machine the runner
#: has had no more time to post a heartbeat than this process had to look.
_LONGEST_LOOK = 2.0
#: Characters of a message and of a traceback, whose end says most.
_TEXT = 20_000

_guard = threading.Lock()
#: How many runs `again` has asked for that have an outcome, by place and key: ranks that run the
#: same program count alike.
_agains: dict[tuple[str, str], int] = {}


class _Options(TypedDict, total=False):
    per: Scope
    again: bool
    generation: int | str | None
    timeout: float | str | None
    lease: float | str
    dir: str | os.PathLike[str] | None
    job: str | None


class Once:
    """Work for one rank: a context manager and a decorator; see `once` for the arguments."""

    def __init__(
        self,
        key: str,
        *,
        per: Scope = "job",
        again: bool = False,
        generation: int | str | None = None,
        timeout: float | str | None = DEFAULT_TIMEOUT,
        lease: float | str = _LEASE,
        dir: str | os.PathLike[str] | None = None,
        job: str | None = None,
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
        self._run: _Run | None = None

    def __enter__(self) -> bool:
        self._run = run = _Run(self)
        run.claim_or_wait()
        if run.is_claimed:
            return True
        run.result()
        return False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exn: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        run, self._run = self._run, None
        if run is not None and run.is_claimed:
            run.finish(None, exn)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate: of all ranks that call the function, one runs it."""

        @functools.wraps(function)
        def wrapper(*args: P.args, **kw: P.kwargs) -> R:
            result: R = self.call(functools.partial(function, *args, **kw))
            return result

        return wrapper

    def call(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` here, or return its result elsewhere."""
        run = _Run(self)
        run.claim_or_wait()
        if not run.is_claimed:
            return run.result()
        try:
            value = function()
        except BaseException as exn:
            run.finish(None, exn)
            raise
        run.finish(value, None)
        return run.result()


class _Run:
    """One rank's part in one run of the work; for one thread.

    Args:
        once: the work.
        clock: time.

    Raises:
        ConfigError: the ranks have no place to meet.
    """

    def __init__(self, once: Once, clock: Clock = SYSTEM_CLOCK) -> None:
        self.is_claimed = False
        self._key = once._key
        self._lease = once._lease
        self._wait = Wait(once._timeout)
        self._clock = clock
        self._board: Board = board_for(*once._where)
        name = safe_name(once._key)
        self._counted: tuple[str, str] | None = None
        if once._generation is not None:
            generation = "g" + safe_name(str(once._generation))
        else:
            self._counted = str(self._board), name
            with _guard:
                self._number = _agains.get(self._counted, 0) + once._again
            generation = str(self._number)
        self._room = f"once/{name}/{generation}"
        self._claim = 0
        self._ended = threading.Event()
        self._outcome: bytes | None = None
        # Of the runner that is waited for.
        self._runner: Process | None = None
        self._seen: tuple[bytes | None, bytes | None] | None = None
        self._looked = clock.monotonic()
        self._silent = self._gone = 0.0

    def claim_or_wait(self) -> None:
        """Wait until this process has claimed the work or an outcome is posted.

        Raises:
            WaitTimeoutError: neither came.
        """
        free = True
        while not self._has_outcome():
            if free and self._try_claim():
                return
            free = self._next_is_free()
            if free:
                continue
            if self._wait.is_over:
                raise WaitTimeoutError(
                    f"Waited {self._wait} for once({self._key!r}): {self._running()} (in "
                    f"{self._board}). Look at that process (py-spy dump), or give it more time "
                    "with timeout.",
                    key=self._key,
                    waited=self._wait.waited,
                )
            self._wait.pause(lambda: f"waiting for once({self._key!r}): {self._running()}")

    def _has_outcome(self) -> bool:
        self._outcome = self._board.get(f"{self._room}/outcome")
        return self._outcome is not None

    def _try_claim(self) -> bool:
        name, process = f"{self._room}/claim.{self._claim}", Process.this().encode()
        if not self._board.create(name, process):
            return False
        if not self._board.create(f"{name}.copy", process):
            # The first name was free because somebody removed it, not because nobody works.
            self._board.remove(name)
            return False
        if self._has_outcome():  # of the former runner, who had all the time to post it
            return False
        self.is_claimed = True
        threading.Thread(target=self._beat, name="shardcache-beat", daemon=True).start()
        return True

    def _beat(self) -> None:
        count = 0
        while not self._ended.wait(self._lease / _BEATS):
            count += 1
            self._post_beat(b"%d" % count)

    def _post_beat(self, data: bytes) -> None:
        try:
            self._board.put(f"{self._room}/claim.{self._claim}.beat", data)
        except (OSError, ShardCacheError) as exn:  # the next one may come through
            logger.warning("once(%r): cannot post a heartbeat: %s", self._key, exn)

    def _next_is_free(self) -> bool:
        """Whether the runner is dead; then the next number may be claimed."""
        name = f"{self._room}/claim.{self._claim}"
        now = self._clock.monotonic()
        passed, self._looked = min(now - self._looked, _LONGEST_LOOK), now
        runner = self._board.get(name) or self._board.get(f"{name}.copy")
        seen = runner, self._board.get(f"{name}.beat")
        if seen != self._seen:
            self._seen, self._silent, passed = seen, 0.0, 0.0
            self._runner = Process.parse(runner)
        self._silent += passed
        ended = self._runner is not None and self._runner.has_ended()
        self._gone = self._gone + passed if ended else 0.0
        if seen[1] != _GAVE_UP and self._silent < self._lease and self._gone < _GONE:
            return False
        logger.warning("%s ended during once(%r); taking over", self._runner, self._key)
        self._claim += 1
        self._runner = self._seen = None
        self._silent = self._gone = 0.0
        return True

    def _running(self) -> str:
        if self._runner is None:
            return "a process that did not say who it is runs it"
        age = format_duration(round(max(0.0, self._clock.time() - self._runner.began), 1))
        return f"{self._runner} has been running it for {age}"

    def finish(self, value: Any, exn: BaseException | None) -> None:
        """Post the outcome; of two the first counts. An interrupt lets another rank take over.

        Raises:
            OnceError: the others cannot be given the result.
        """
        if exn is not None and not isinstance(exn, Exception):
            self._ended.set()
            self._post_beat(_GAVE_UP)
            return
        error = None
        record: dict[str, Any] = {"outcome": "done", "by": str(Process.this()), "value": value}
        try:
            if exn is not None:
                raise exn
            data = json.dumps(record).encode()
            if len(data) > LIMIT:
                raise ValueError(f"it is longer than {LIMIT} bytes")
        except Exception as failure:  # noqa: BLE001 - posted, and raised by the caller or below
            if exn is None:
                error = failure = OnceError(
                    f"once({self._key!r}) has run, and its result is no JSON ({failure}). Return "
                    "None, or what JSON can hold; write the rest to a file.",
                    key=self._key,
                )
            text = redact("".join(traceback.format_exception(failure))[-_TEXT:])
            kind, message = type(failure).__qualname__, redact(str(failure))[:_TEXT]
            record |= {"outcome": "failed", "type": kind, "message": message, "traceback": text}
            data = json.dumps(record | {"value": None}).encode()
        try:
            name = f"{self._room}/outcome"
            self._outcome = data
            if not self._board.create(name, data):
                self._outcome = self._board.get(name) or data
        finally:
            self._ended.set()
        self._count()
        if error is not None:
            raise error

    def _count(self) -> None:
        if self._counted is not None:
            with _guard:
                _agains[self._counted] = max(_agains.get(self._counted, 0), self._number)

    def result(self) -> Any:
        """Return the result that was posted.

        Raises:
            OnceError: it failed, or what was posted is damaged.
        """
        assert self._outcome is not None
        try:
            record = json.loads(self._outcome)
            by, outcome = record["by"], record["outcome"]
            damaged = outcome not in ("done", "failed") or not isinstance(by, str)
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged = True
        if damaged:
            raise OnceError(
                f"The outcome of once({self._key!r}) cannot be read in {self._board}/{self._room}. "
                "Remove that and run again.",
                key=self._key,
            )
        self._count()
        if outcome == "done":
            return record.get("value")
        kind, message, text = (str(record.get(x)) for x in ("type", "message", "traceback"))
        raise OnceError(
            f"once({self._key!r}) failed on {by}: {kind}: {message}\n"
            f"It does not run again in this job unless again=True is given. There:\n{text}",
            key=self._key,
            type=kind,
            cause=message,
            traceback=text,
            by=by,
        )


@overload
def once(key: str, /, **options: Unpack[_Options]) -> Once: ...
@overload
def once(key: str, function: Callable[..., R], /, *args: Any, **options: Unpack[_Options]) -> R: ...


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

    All ranks get the function's result, as JSON has it (a tuple becomes a list); with the block
    they get none. If it raises, the runner sees the exception and the others an `OnceError`
    that quotes it. It runs once per job: a later call gets the same outcome.

    Args:
        key: the name of the work; the same on all ranks.
        function: does it; without one, a context manager that is also a decorator is returned.
        args: its arguments.
        per: ``job`` (default), or ``node`` for one rank on each node.
        again: run it once more. All ranks ask alike: their n-th ``again`` is one run. A call
            that ends without an outcome, such as one that timed out, does not count.
        generation: run it once for each generation, such as an epoch.
        timeout: most seconds to wait for another rank (30 min), or text such as ``10m``; None
            waits for ever.
        lease: seconds (90) without a heartbeat after which a runner on another machine, or in
            another container, counts as dead.
        dir: a directory in which the ranks meet; the default is torch's store, then
            ``SHARDCACHE_SYNC_DIR``, then a directory of the node.
        job: a name in place of the launcher's job id; all who state the same one share results,
            also with earlier runs.

    Raises:
        OnceError: it failed on another rank, or its result is no JSON.
        WaitTimeoutError: no outcome came in time.
        ConfigError: an argument that cannot work, or no place where the ranks could meet.
        Whatever the function raises, on the rank that runs it.
    """
    work = Once(key, **options)
    return work if function is None else work.call(functools.partial(function, *args))
