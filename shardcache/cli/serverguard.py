"""The guard of an embedded S3 server: runs weed, and tidies up after it.

`shardcache.cli.demoserver` runs this file (the standard library is all it needs) because
nothing in the owner can act once the owner has been SIGKILLed. A parent-death
signal on weed alone would not do: the kernel sends it when the *thread* that
started a process ends, it needs a preexec_fn (unsafe in a threaded owner) or
setpriv (not everywhere), and a killed weed leaves its sockets and its data.
The guard has one thread, sees its parent change however the owner dies (also
while forked children of the owner live on and keep its pipes open), kills
weed, and removes what weed left. Weed has the death signal as well, against
the loss of the guard.

Protocol: argv is owner's pid, directory, ports, weed; the guard writes weed's
pid to stdout, whose other end then reads EOF when weed is dead; it stops on any
byte or EOF on stdin, on SIGTERM, or when its parent is no longer the owner.

Invariants:
    * Removed are only the directory the owner made, and sockets of weed's own
      ports, or named in its own log, that nobody listens on any more.
    * Guard and owner may tidy up at the same time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["COMPONENTS", "GRPC_OFFSET", "KEYS", "LOG_NAME", "ROOT_PREFIX", "remove_leftovers"]

COMPONENTS = ("s3", "master", "volume", "filer", "admin")
GRPC_OFFSET = 10_000  # weed listens on every port plus this one
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
LOG_NAME = "server.log"
ROOT_PREFIX = "shardcache-s3-"
# Hard-coded in weed, whatever TMPDIR says.
_SOCKETS = "/tmp/seaweedfs-{}.sock"  # noqa: S108 - not ours to choose
_LOGGED_SOCKET = re.compile(rb"Unix socket (/tmp/seaweedfs-\S+\.sock)")
_POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _command(weed: str, root: Path, ports: Sequence[int]) -> list[str]:
    listening = [f"-{name}.port={port}" for name, port in zip(COMPONENTS, ports, strict=True)]
    return [
        *(weed, "-logtostderr=true", "mini", f"-dir={root / 'data'}"),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", *listening),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false"),
        "-master.telemetry=false",
        # Every bucket takes a volume of its own; by default free space sets their number.
        "-volume.max=1000",
    ]


def remove_leftovers(root: Path, ports: Sequence[int]) -> None:
    """Remove what a killed weed leaves: its sockets and its directory."""
    names = [f"{name}-{port}" for name, port in zip(COMPONENTS, ports, strict=True)]
    names += [
        f"{name}-grpc-{port + GRPC_OFFSET}" for name, port in zip(COMPONENTS, ports, strict=True)
    ]
    paths = {Path(_SOCKETS.format(name)) for name in names}
    with contextlib.suppress(FileNotFoundError):
        log = (root / LOG_NAME).read_bytes()
        paths |= {Path(os.fsdecode(name)) for name in _LOGGED_SOCKET.findall(log)}
    for path in paths:
        # Gone already, or not ours: both are fine.
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(path.lstat().st_mode) and _is_deserted(path):
                path.unlink()
    if root.name.startswith(ROOT_PREFIX):
        # Guard and owner both tidy up, so either may find that files are gone.
        shutil.rmtree(root, ignore_errors=True)


def _is_deserted(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False


def _death_signal() -> Callable[[], None] | None:
    """What makes a child die with its parent, to run between fork and exec."""
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def arm() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return arm


def _guard(owner: int, root: Path, ports: Sequence[int], weed: str) -> None:
    """Run weed until told to stop, or until ``owner`` has died; then tidy up."""
    child: subprocess.Popen[bytes] | None = None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        for name in ("data", "tmp"):
            (root / name).mkdir()
        kept = {name: os.environ[name] for name in (*KEYS, "PATH") if name in os.environ}
        line_to_owner = os.dup(1)
        # One thread only here, so preexec_fn is safe.
        child = subprocess.Popen(
            _command(weed, root, ports),
            stdin=subprocess.DEVNULL,
            stdout=2,
            cwd=root,
            env={**kept, "HOME": str(root), "TMPDIR": str(root / "tmp")},
            pass_fds=(line_to_owner,),
            preexec_fn=_death_signal(),
        )
        os.write(1, b"%d\n" % child.pid)
        # From here on weed alone holds that end: the owner reads EOF when it dies.
        os.close(line_to_owner)
        os.close(1)
        while os.getppid() == owner:
            if select.select([0], [], [], _POLL_SECONDS)[0]:
                break
    finally:
        if child is not None:
            child.kill()
            child.wait()
        remove_leftovers(root, ports)


if __name__ == "__main__":
    _guard(
        int(sys.argv[1]), Path(sys.argv[2]), [int(p) for p in sys.argv[3].split(",")], sys.argv[4]
    )
