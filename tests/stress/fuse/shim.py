"""A filesystem that fails on demand: the cache on what a network mount may do.

    with mounted(tmp_path) as shim:
        shim.set(stale=True)
        shim.fail("rename", "v1/objects/*", error=errno.EIO, done=True)
        Cache(shim.root)

A passthrough FUSE filesystem, one process per mount. Faults are switched while it runs: see
`daemon.Settings` and `daemon.Rule`. "Elsewhere" is directly below ``backing``, or on another mount
of it. The kernel itself asks once more when ``open`` or ``stat`` say ESTALE: two of them in a row
reach the caller as one.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stress.fuse import daemon
from tests.support.storetools import PATIENCE


class Shim:
    """A mount ``root`` of the directory ``backing``, where "another node" works; and its faults."""

    def __init__(self, root: Path, backing: Path) -> None:
        self.root, self.backing = root, backing
        # A process that no plugin, no site and no broken flock of the tests reaches.
        command = [sys.executable, "-I", "-S", daemon.__file__, str(backing), str(root)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if "error" in (answer := self._hear()):
            self.close()
            raise OSError(answer["error"])

    def _hear(self) -> dict[str, Any]:
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        line = self._process.stdout.readline() if ready else ""
        assert line, "the shim says nothing"
        return json.loads(line)

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        """One order; returns the state after it."""
        self._process.stdin.write(json.dumps({"do": do, **given}) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def set(self, **settings: Any) -> None:
        """Change `daemon.Settings`."""
        self.ask("set", **settings)

    def fail(self, op: str, pattern: str = "*", **fault: Any) -> int:
        """Add a `daemon.Rule` for one or several operations; returns its number."""
        return len(self.ask("fail", ops=op.split(), pattern=pattern, **fault)["struck"]) - 1

    def heal(self) -> None:
        """No fault any more."""
        self.ask("heal")

    def struck(self, rule: int) -> int:
        """How often a rule struck."""
        return self.ask("status")["struck"][rule]

    def crash(self) -> None:
        """The process dies, and the mount stays: every call says ENOTCONN."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Unmount and end the process, whoever still uses it."""
        try:
            self._process.communicate("\n", timeout=10)
        except subprocess.TimeoutExpired:
            self.crash()
        daemon.unmount(str(self.root))


@contextlib.contextmanager
def mounted(directory: Path, *, name: str = "net") -> Iterator[Shim]:
    """A mount ``directory``/``name`` of ``directory``/backing; several names are several nodes."""
    root, backing = directory / name, directory / "backing"
    for path in (root, backing):
        path.mkdir(exist_ok=True)
    try:
        shim = Shim(root, backing)
    except OSError as exn:
        pytest.skip(f"needs to mount a FUSE filesystem: {exn}")
    try:
        yield shim
    finally:
        shim.close()
