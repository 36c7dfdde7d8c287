"""A function in a forked process under strace: watched, or killed at a call.

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
from typing import Any, NamedTuple

from tests.support.storetools import PATIENCE, Child, Parent, forked

#: Tells the child to begin. Waiting for a signal is no call that is counted.
_GO = signal.SIGUSR1
_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h; -1 lets any process of our user trace us
_CALL = re.compile(r"(\d+)\s+(\w+)\(")


class Call(NamedTuple):
    """The ``number``-th system call of a name in a thread, as strace shows it."""

    name: str
    number: int
    text: str


@dataclass(slots=True)
class Run:
    """What happened."""

    calls: list[Call] = field(default_factory=list)  # that concern the watched directory
    struck: Call | None = None  # the call at which it was killed, rather one of those
    killed: bool = False  # the process ended by SIGKILL
    answer: Any = None  # what the function returned
    error: str | None = None  # the function's traceback, if it raised


def unavailable() -> str | None:
    """Why nothing can be traced here, or None if it can."""
    if shutil.which("strace") is None:
        return "needs strace, which is not installed"
    try:
        return "ptrace does not work here" if trace(Path("/"), lambda: None).killed else None
    except RuntimeError as exn:
        return f"ptrace is not allowed here: {exn}"


def trace(watched: Path, function: Callable[[], Any], strike: Call | None = None) -> Run:
    """Run a function in a child under strace, and kill it before a call such as ``strike``.

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


def _trace(child: Child, watched: str, strike: Call | None) -> Run:
    run, counts = Run(), Counter[tuple[str, str]]()
    said, attached = [], False
    output, theirs = os.pipe()
    command = ["timeout", str(PATIENCE), "strace", "-f", "-y", "-s", "0", "-o", f"/dev/fd/{theirs}"]
    if strike is None:
        command += ["-e", "trace=%file,%desc"]
    else:  # only what tells whether it struck: strace is half of a run's cost
        command += ["-e", f"trace={strike.name}"]
        command += ["-e", f"inject={strike.name}:signal=KILL:when={strike.number}"]
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
                thread, name = begun[1], begun[2]
                counts[thread, name] += 1
                call = Call(name, counts[thread, name], line.split(maxsplit=1)[1].rstrip())
                if watched in call.text:
                    run.calls.append(call)
                if strike is not None and call[:2] == strike[:2]:
                    run.struck = call if watched in call.text else run.struck or call
    if not attached:
        raise RuntimeError(" ".join(said) or "strace did not attach")
    if strace.returncode == 124:  # timeout's
        child.kill()
        run.error = "it hung"
        return run
    run.killed = child.wait() == -signal.SIGKILL
    try:
        run.answer = child.hear()
    except EOFError:
        pass  # it was killed
    except AssertionError as exn:
        run.error = str(exn)
    return run
