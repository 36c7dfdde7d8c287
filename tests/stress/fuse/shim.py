"""A filesystem that fails on demand: the cache on what a network mount may do.

    with mounted(tmp_path) as shim:
        shim.set(flock="lying")
        shim.fail("rename", "v1/objects/*", error=errno.EIO, done=True)
        Cache(shim.root)

A passthrough FUSE filesystem, one process per mount (`daemon`). Faults are
switched while it runs:

* flock works, is refused, lies, or is never answered;
* any operation on chosen paths fails, is carried out while its answer is lost,
  once, several times, or always;
* names made elsewhere (directly below ``backing``, or on another mount of it)
  come into sight late; what is removed elsewhere turns stale; absent names are
  remembered by the kernel.

The kernel itself asks once more when ``open`` or ``stat`` say ESTALE: two of them
in a row reach the caller as one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stress.fuse import proto

REPOSITORY = Path(__file__).resolve().parents[3]
#: Seconds: ends what hangs; nothing passes or fails by being faster.
_PATIENCE = 60.0
#: In a process that no plugin, no site and no broken flock of the tests reaches.
_DAEMON = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
from tests.stress.fuse.daemon import main
main(*sys.argv[1:])
"""


class Shim:
    """A mount, and the hand on its faults.

    Attributes:
        root: the mountpoint.
        backing: the directory behind it, where "another node" works.
    """

    def __init__(self, root: Path, backing: Path) -> None:
        self.root = root
        self.backing = backing
        command = [sys.executable, "-I", "-S", "-c", _DAEMON, str(backing), str(root)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            answer = self._hear()
            if "error" in answer:
                raise OSError(answer["error"])
        except BaseException:
            self.close()
            raise

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _PATIENCE)
        assert ready, "the shim says nothing"
        line = self._process.stdout.readline()
        assert line, "the shim has ended"
        return json.loads(line)

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        """One command; see `daemon.Daemon.command`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **given}).encode() + b"\n")
        self._process.stdin.flush()
        return self._hear()

    def set(self, **settings: Any) -> None:
        """Change `daemon.Settings`, or ``killable``: whether a signal ends what hangs."""
        self.ask("set", **settings)

    def fail(self, op: str, pattern: str = "*", **fault: Any) -> int:
        """Add a `daemon.Rule` for one or several operations; returns its number."""
        return self.ask("fail", ops=op.split(), pattern=pattern, **fault)["rule"]

    def heal(self) -> None:
        """No fault any more; what hung is carried out."""
        self.ask("heal")

    def struck(self, rule: int) -> int:
        """How often a rule struck."""
        return self.ask("status")["struck"][rule]

    def hanging(self) -> int:
        """How many requests hang now."""
        return self.ask("status")["hanging"]

    def crash(self) -> None:
        """The process dies, and the mount stays: every call says ENOTCONN."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Unmount and end the process, whoever still uses it."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended already
            stdin.write(b"\n")
            stdin.flush()
        for pipe in (stdin, stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        proto.unmount(self.root)


@contextlib.contextmanager
def mounted(directory: Path, *, name: str = "net") -> Iterator[Shim]:
    """A fresh mount ``directory``/``name`` of ``directory``/backing, which may exist.

    Args:
        directory: where.
        name: of the mountpoint; several of one directory are several nodes.
    """
    root, backing = directory / name, directory / "backing"
    for path in (root, backing):
        path.mkdir(exist_ok=True)
    shim = Shim(root, backing)
    try:
        yield shim
    finally:
        shim.close()


@functools.cache
def why_not() -> str | None:
    """Why nothing can be mounted here, or None."""
    if not os.path.exists(proto.DEVICE):
        return f"needs {proto.DEVICE}"
    with tempfile.TemporaryDirectory() as directory:
        try:
            with mounted(Path(directory)):
                return None
        except OSError as exn:
            return f"needs to mount a FUSE filesystem: {exn}"


def needs_fuse() -> None:
    """Skip the calling test where nothing can be mounted."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
