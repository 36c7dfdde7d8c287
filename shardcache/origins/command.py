"""Shards that a shell command writes: WebDataset's ``pipe:`` URLs.

They need ``allow_schemes=["pipe"]``, because a command out of a shard list runs with this process's
rights. Its output has no version and no stated size: it is cached under the command's text, read in
one go, and started over when it breaks. A command that only reads a URL, such as
``aws s3 cp s3://bucket/key -``, is not run: `urls.read_command` finds the URL in it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess

from shardcache.errors import ConfigError
from shardcache.origins.base import ObjectInfo, TransientError
from shardcache.urls import ShardURL


class PipeOrigin:
    """Runs ``pipe:`` commands, which may be silent for ``timeout`` seconds; see `base.Origin`."""

    conditional = True  # there is nothing to describe again
    states_checksums = False

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout

    def open(
        self, shard: ShardURL, start: int, stop: int | None, expected: ObjectInfo | None = None
    ) -> PipeBody:
        """See `base.Origin.open`."""
        if not shard.raw:
            raise ConfigError(
                f"{shard}: the command was left out when this was pickled, for it may hold "
                "secrets. Pass the URL as text instead.",
                url=str(shard),
            )
        try:
            return PipeBody(shard.raw.partition(":")[2], self._timeout)
        except OSError as exn:  # not the disk's fault: streaming could not start it either
            raise TransientError(f"the command cannot be started: {exn.strerror}") from None

    def stat(self, shard: ShardURL) -> ObjectInfo:
        """See `base.Origin.stat`: nothing is known of what a command will write."""
        return ObjectInfo(size=None)


class PipeBody:
    """One run of a command; see `base.Body`."""

    info = ObjectInfo(size=None)
    start = 0
    stop: int | None = None
    waited = 0.0
    proven = True  # by the exit status

    def __init__(self, command: str, timeout: float) -> None:
        self._timeout = timeout
        self._process = subprocess.Popen(  # noqa: S602 - what `pipe:` is, where it is allowed
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that a whole pipeline can be ended
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout

    def readinto(self, buffer: memoryview) -> int:
        """See `base.Body.readinto`; a command that fails fails at its end."""
        try:
            poller = select.poll()
            poller.register(self._output, select.POLLIN)
            if not poller.poll(self._timeout * 1000):
                raise TransientError(f"nothing came for {self._timeout:g} s", timed_out=True)
            count = os.readv(self._output.fileno(), [buffer])
        except (OSError, ValueError) as exn:  # ValueError: closed by `close`
            raise TransientError(f"reading the command's output failed: {exn}") from exn
        if count == 0:
            status = None
            with contextlib.suppress(subprocess.TimeoutExpired):  # which quotes the command
                status = self._process.wait(self._timeout)
            if status != 0:
                raise TransientError(f"the command ended with status {status}")
        return count

    def abort(self) -> None:
        """See `base.Body.abort`."""
        if self._process.returncode is not None:
            return  # reaped: the number may be somebody else's by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """See `base.Body.close`; a command that still runs is ended."""
        if self._process.poll() is None:
            self.abort()
        self._output.close()
        self._process.wait()
