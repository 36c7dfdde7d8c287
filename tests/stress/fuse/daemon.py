"""The process behind a mount of the shim; see `shim` for the test's side.

Commands come on stdin, one JSON object a line, and are answered on stdout. The
process unmounts and ends when stdin does: no mount outlives its test.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.stress.fuse import proto
from tests.stress.fuse.faults import Faults, Hanging, Rule
from tests.stress.fuse.files import Files, HangError
from tests.stress.fuse.nodes import Settings
from tests.stress.fuse.proto import Op, Request

#: Seconds after which what hangs is answered EIO: longer than any test waits.
_LIMIT = 150.0
_THREADS = 4
#: Where the name begins in the arguments of operations on (directory, name).
_NAME_AT = {
    Op.LOOKUP: 0,
    Op.SYMLINK: 0,
    Op.MKNOD: 16,
    Op.MKDIR: 8,
    Op.UNLINK: 0,
    Op.RMDIR: 0,
    Op.CREATE: 16,
    Op.LINK: 8,
    Op.RENAME: 8,
    Op.RENAME2: 16,
}
_ENTERING = (Op.LOOKUP, Op.CREATE, Op.MKDIR, Op.MKNOD, Op.SYMLINK, Op.LINK)


class Daemon:
    """One mount: answers the kernel, and the test."""

    def __init__(self, backing: Path, mountpoint: Path, grave: Path | None) -> None:
        self.files = Files(backing, grave)
        self.mountpoint = mountpoint
        self.faults = Faults()
        self.calls: Counter[str] = Counter()
        self._operations: dict[int, Callable[[Request], bytes]] = {
            op: getattr(self.files, op.name.lower())
            for op in Op
            if hasattr(self.files, op.name.lower()) and op != Op.FORGET
        }
        self.channel = proto.mount(mountpoint)
        self.hanging = Hanging(lambda r: self.channel.reply(r.unique, error=errno.EIO), _LIMIT)

    def serve(self) -> None:
        """Answer requests until the filesystem is unmounted."""
        while (request := self.channel.receive()) is not None:
            if request.op == Op.INIT:
                self.channel.greet(request)
            elif request.op in (Op.FORGET, Op.BATCH_FORGET):
                self.files.forget(request)
            elif request.op == Op.INTERRUPT:
                (unique,) = request.unpack("<Q")
                if self.hanging.interrupt(unique):
                    self.channel.reply(unique, error=errno.EINTR)
            elif request.op == Op.SETLKW:
                threading.Thread(target=self.handle, args=(request,), daemon=True).start()
            else:
                self.handle(request)

    def handle(self, request: Request) -> None:
        """Carry out one request and answer it."""
        operation = self._operations.get(request.op)
        if operation is None:
            self.channel.reply(request.unique, error=errno.ENOSYS)
            return
        name = Op(request.op).name.lower().removesuffix("2")
        self.calls[name] += 1
        try:
            data = self._carry_out(name, operation, request)
        except HangError:
            if not self.hanging.add(request):
                self.channel.reply(request.unique, error=errno.EINTR)
        except OSError as exn:
            self.channel.reply(request.unique, error=exn.errno or errno.EIO)
        except Exception as exn:  # a bug of the shim: say so, and fail the request
            print(f"shim: {name}: {type(exn).__name__}: {exn}", file=sys.stderr, flush=True)
            self.channel.reply(request.unique, error=errno.EREMOTEIO)
        else:
            self.channel.reply(request.unique, data)

    def _carry_out(
        self, name: str, operation: Callable[[Request], bytes], request: Request
    ) -> bytes:
        rule = self.faults.strike(name, lambda: self._paths(request))
        if rule is None:
            return operation(request)
        if rule.hang:
            raise HangError
        if rule.done:
            data = operation(request)
            # The kernel never hears of the inode and the handle in this answer.
            if request.op in _ENTERING:
                self.files.drop(int.from_bytes(data[:8], "little"), 1)
            if request.op == Op.CREATE:
                self.files.close(int.from_bytes(data[128:136], "little"))
        raise OSError(rule.error, "")

    def _paths(self, request: Request) -> Iterator[str]:
        at = _NAME_AT.get(Op(request.op))
        if at is None:
            yield self.files.relative(request.node)
            return
        names = request.names(at)
        yield self.files.relative(request.node, names[0])
        if request.op in (Op.RENAME, Op.RENAME2):
            yield self.files.relative(request.unpack("<Q")[0], names[1])

    # -- the test's side -----------------------------------------------------------

    def command(self, do: str, **given: Any) -> dict[str, Any]:
        """Carry out one command of the test; the answer is the state afterwards."""
        answer: dict[str, Any] = {}
        if do == "set":
            self.hanging.killable = given.pop("killable", self.hanging.killable)
            for name, value in given.items():
                getattr(self.files.settings, name)
                setattr(self.files.settings, name, value)
        elif do == "fail":
            answer["rule"] = self.faults.add(Rule(frozenset(given.pop("ops")), **given))
        elif do == "heal":
            self.faults.clear()
            self.files.settings = Settings()
        elif do == "lose":
            answer["lost"] = self._lose_power(**given)
        if do == "heal" or (do == "set" and self.files.settings.flock != "hanging"):
            for request in self.hanging.take():
                self.handle(request)
        return answer | {
            "hanging": len(self.hanging),
            "struck": self.faults.struck(),
            "calls": dict(self.calls),
            "nodes": len(self.files.nodes),
            "handles": len(self.files.handles),
        }

    def _lose_power(self, **given: Any) -> dict[str, int]:
        assert self.files.journal is not None
        proto.unmount(self.mountpoint)
        with self.files.journal.changing():
            self.files.dead = True
            return self.files.journal.lose(**given)


def main(backing: str, mountpoint: str, grave: str = "") -> None:
    """Serve one mount until stdin ends."""
    os.umask(0)  # the kernel has applied the asker's
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    try:
        daemon = Daemon(Path(backing), Path(mountpoint), Path(grave) if grave else None)
    except OSError as exn:
        print(json.dumps({"error": str(exn)}), flush=True)
        return
    for _ in range(_THREADS):
        threading.Thread(target=daemon.serve, daemon=True).start()
    print(json.dumps({}), flush=True)
    try:
        for line in sys.stdin:
            if not line.strip():
                break  # said by a test whose forked children still hold our stdin open
            print(json.dumps(daemon.command(**json.loads(line))), flush=True)
    finally:
        proto.unmount(daemon.mountpoint)
        os._exit(0)  # closes the device, which lets go whatever hangs
