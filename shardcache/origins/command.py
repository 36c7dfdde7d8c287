"""Shards that a shell command writes: WebDataset's ``pipe:`` URLs.

They need ``allow_schemes=["pipe"]``, because a command from a shard list runs with the rights of
this process. Its output has no version and no known size. So a shard is cached under the text of
the command, read in one go, and started over after a failure. A command that only reads a URL, such
as ``aws s3 cp s3://bucket/key -``, is not run: see `commands.read_command`.
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
    """Runs ``pipe:`` commands; see `base.Origin`. A silence of ``timeout`` seconds is a failure."""

    conditional = True  # a second `stat` would prove nothing
    states_checksums = False

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout

    def open(
        self, shard: ShardURL, start: int, stop: int | None, expected: ObjectInfo | None = None
    ) -> PipeBody:
        """See `base.Origin.open`."""
        if not shard.raw:
            raise ConfigError(
                f"{shard}: pickling removed the command, which may hold secrets. Pass the URL as "
                "text instead.",
                url=str(shard),
            )
        try:
            return PipeBody(shard.raw.partition(":")[2], self._timeout)
        except OSError as exn:  # not a fault of the disk; streaming would fail, too
            raise TransientError(f"the command cannot be started: {exn.strerror}") from None

    def stat(self, shard: ShardURL) -> ObjectInfo:
        """See `base.Origin.stat`. Nothing is known of a command's output."""
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
            start_new_session=True,  # so that `abort` ends a whole pipeline
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout

    def readinto(self, buffer: memoryview) -> int:
        """See `base.Body.readinto`. A failed command raises at the end of its output."""
        try:
            poller = select.poll()
            poller.register(self._output, select.POLLIN)
            if not poller.poll(self._timeout * 1000):
                raise TransientError(f"nothing came for {self._timeout:g} s", timed_out=True)
            count = os.readv(self._output.fileno(), [buffer])
        except (OSError, ValueError) as exn:  # ValueError: after `close`
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
            return  # the system may have given its number to another process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """See `base.Body.close`. It ends a command that still runs."""
        if self._process.poll() is None:
            self.abort()
        self._output.close()
        self._process.wait()
