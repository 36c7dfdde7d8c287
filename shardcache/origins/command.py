"""Read shards from the output of shell commands: WebDataset's ``pipe:`` URLs.

These URLs need ``allow_schemes=["pipe"]``, because a command from a shard list runs with the rights
of this process. Its output has no version, so a failed download begins again with the first byte. A
command that only reads a URL is not run (`pipe_commands.read_command`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Mapping
from functools import partial
from queue import Empty
from typing import Any

from shardcache import threads
from shardcache.faults import system_error
from shardcache.origins.base import ObjectInfo, Origin, TransientError
from shardcache.urls import ShardURL

#: Seconds to wait for a command that was killed. The caller may hold the lock of the downloads.
_LAST = 0.1


class PipeOrigin(Origin):
    """Runs ``pipe:`` commands. A command fails if it writes nothing for ``timeout`` seconds."""

    proves_version = True  # as far as possible: a second `stat` could compare nothing

    def __init__(self, scheme: str, options: Mapping[str, Any], timeout: float) -> None:
        self._timeout = timeout

    def open(
        self, shard: ShardURL, start: int, stop: int | None, expected: ObjectInfo | None = None
    ) -> PipeBody:
        """Start the command, whose whole output is returned, without regard to the range."""
        try:
            return PipeBody(shard.raw.partition(":")[2], self._timeout)
        except system_error() as exn:  # not a disk fault: bypassing the cache would not help
            raise TransientError(f"the command cannot be started: {exn.strerror}") from None

    def stat(self, shard: ShardURL) -> ObjectInfo:
        """Return an `ObjectInfo` without content: nothing is known of a command's output."""
        return ObjectInfo(size=None)


class PipeBody:
    """The output of one run of a command; implements `base.Body`."""

    info = ObjectInfo(size=None)
    start = 0
    stop: int | None = None
    waited = 0.0
    proven = True  # the exit status proves that the output is complete

    def __init__(self, command: str, timeout: float) -> None:
        self._timeout = timeout
        self._process = subprocess.Popen(  # noqa: S602 - the user allowed `pipe:`
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that `abort` kills all commands of a pipeline
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout

    def readinto(self, buffer: memoryview) -> int:
        try:
            poller = select.poll()
            poller.register(self._output, select.POLLIN)
            if not poller.poll(min(self._timeout, 1e6) * 1000):  # an int of 32 bits
                raise TransientError(f"no data for {self._timeout:g} s", timed_out=True)
            count = os.readv(self._output.fileno(), [buffer])
        except (ValueError, system_error()) as exn:
            if isinstance(exn, ValueError) and not self._output.closed:  # of a signal handler
                raise
            raise TransientError(f"reading the command's output failed: {exn}") from exn
        if count == 0 and (status := self._status()) != 0:
            raise TransientError(f"the command failed or did not end (status {status})")
        return count

    def _status(self) -> int | None:
        wait = partial(os.waitid, os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        try:
            ended = threads.call(wait, self._timeout, "shardcache-command")
            return ended and ended.si_status
        except ChildProcessError:  # `Popen.wait` would return 0
            text = "the exit status of the command is lost, because the program ignores SIGCHLD or "
            raise TransientError(f"{text}waits for all children. Set SIGCHLD to SIG_DFL") from None
        except Empty:
            return None

    def abort(self) -> None:
        if self._process.returncode is not None:
            return  # the command has ended, and another process may have its process id
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Release the pipe, and kill the command if it is still running."""
        if self._process.poll() is None:
            self.abort()
        self._output.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a call to a dead mount never ends
            self._process.wait(_LAST)
