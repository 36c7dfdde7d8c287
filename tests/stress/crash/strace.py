"""A function in a forked process under strace: watched, killed at a call, or given an error.

The child has everything imported and waits until strace is attached, so a run costs a fork and
some milliseconds. strace counts calls per thread: ``when=3`` strikes in whichever thread comes to
its third call first. A killed call has no effect.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.storetools import PATIENCE, Child, Parent, forked

#: Tells the child to begin. Waiting for a signal is no call that is counted.
_GO = signal.SIGUSR1
_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h; -1 lets any process of our user trace us
_CALL = re.compile(r"(\d+)\s+(\w+)\(")
KILL = "kill"


@dataclass(frozen=True, slots=True)
class Call:
    """The ``number``-th system call of a name in a thread, as strace shows it.

    Attributes:
        inside: whether it concerns the watched directory.
    """

    thread: int
    name: str
    number: int
    text: str
    inside: bool


@dataclass(frozen=True, slots=True)
class Strike:
    """What happens at the ``number``-th call of a name.

    Attributes:
        kind: `KILL`, or the name of an errno that the call answers without doing anything.
        on: whether also all later calls of the name fail.
    """

    name: str
    number: int
    kind: str = KILL
    on: bool = False

    @property
    def expression(self) -> str:
        """For strace's ``-e inject``."""
        action = "signal=KILL" if self.kind == KILL else f"error={self.kind}"
        return f"{self.name}:{action}:when={self.number}{'+' if self.on else ''}"

    def hits(self, call: Call) -> bool:
        first = call.number == self.number
        return call.name == self.name and (first or (self.on and call.number > self.number))


@dataclass(slots=True)
class Run:
    """What happened.

    Attributes:
        calls: those that concern the watched directory, in order of their beginning.
        struck: the call that the strike hit, rather one that concerns the watched directory.
        astray: whether it hit one of this process that does not.
        killed: whether the process ended by SIGKILL.
        answer: what the function returned.
        error: the function's traceback, if it raised.
        hung: whether it had to be ended.
    """

    calls: list[Call] = field(default_factory=list)
    struck: Call | None = None
    astray: bool = False
    killed: bool = False
    answer: Any = None
    error: str | None = None
    hung: bool = False


def unavailable() -> str | None:
    """Why nothing can be traced here, or None if it can."""
    if shutil.which("strace") is None:
        return "needs strace, which is not installed"
    try:
        return "ptrace does not work here" if trace(Path("/"), lambda: None).killed else None
    except RuntimeError as exn:
        return f"ptrace is not allowed here: {exn}"


def trace(watched: Path, function: Callable[[], Any], strike: Strike | None = None) -> Run:
    """Run a function in a child under strace.

    Raises:
        RuntimeError: strace cannot attach.
    """

    def work(parent: Parent) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1))
        parent.say("it may be traced now")
        if signal.sigtimedwait({_GO}, PATIENCE) is not None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {_GO})
            parent.say(function())

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {_GO})
    with forked(work) as child:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        child.hear()
        return _trace(child, str(watched), strike)


def _trace(child: Child, watched: str, strike: Strike | None) -> Run:
    run, counts, programs = Run(), Counter[tuple[int, str]](), set[int]()
    said, attached = [], False
    output, theirs = os.pipe()
    command = ["timeout", str(PATIENCE), "strace", "-f", "-y", "-s", "0", "-o", f"/dev/fd/{theirs}"]
    if strike is None:
        command += ["-e", "trace=%file,%desc"]
    else:  # only what tells whether it struck: strace is half of a run's cost
        command += ["-e", f"trace={strike.name},execve", "-e", f"inject={strike.expression}"]
    command += ["-e", "signal=none", "-p", str(child.pid)]
    with (
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=theirs, pass_fds=[theirs]
        ) as strace,
        open(output, errors="replace") as lines,
    ):
        os.close(theirs)
        for line in lines:
            if line.startswith("strace: Process ") and line.endswith("attached\n"):
                if not attached:
                    os.kill(child.pid, _GO)
                attached = True
            elif line.startswith("strace:"):
                said.append(line)
            elif begun := _CALL.match(line):
                thread, name = int(begun[1]), begun[2]
                if name == "execve":
                    programs.add(thread)
                counts[thread, name] += 1
                text = line.split(maxsplit=1)[1].rstrip()
                call = Call(thread, name, counts[thread, name], text, watched in text)
                if call.inside:
                    run.calls.append(call)
                if strike is not None and strike.hits(call):
                    run.astray |= not call.inside and thread not in programs
                    if run.struck is None or (call.inside and not run.struck.inside):
                        run.struck = call
    if not attached:
        raise RuntimeError(" ".join(said) or "strace did not attach")
    run.hung = strace.returncode == 124  # timeout's
    if run.hung:
        child.kill()
        return run
    run.killed = child.wait() == -signal.SIGKILL
    try:
        run.answer = child.hear()
    except EOFError:
        pass  # it was killed
    except AssertionError as exn:
        run.error = str(exn)
    return run
