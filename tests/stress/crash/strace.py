"""A function in a forked process under strace: watched, killed at a call, or given an error.

The child has everything imported and waits until strace is attached, so a run costs a fork and
some milliseconds. strace counts calls per thread: ``when=3`` strikes in whichever thread comes to
its third call first. What was struck is read from strace's own output.

* "before": SIGKILL when the call is entered; it has no effect.
* "after": ``delay_exit`` holds the thread behind the call, and the process is killed from here.
* an errno: the call does nothing and answers it; with ``on`` also all later ones of its name.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Seconds after which a run has hung. The longest take half a second on an idle machine.
PATIENCE = 60.0
#: Tells the child to begin. Waiting for a signal is no call that is counted.
_GO = signal.SIGUSR1
_DELAY = 600_000_000  # microseconds: for ever, as runs go
_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h; -1 lets any process of our user trace us
_ATTACHED = re.compile(r"strace: Process \d+ attached")
_BEGUN = re.compile(r"(\d+)\s+(\w+)\(")
_RESUMED = re.compile(r"(\d+)\s+<\.\.\. (\w+) resumed>")
_KILLED = re.compile(r"(\d+)\s+\+\+\+ killed by SIGKILL \+\+\+")


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
    """What happens at the ``number``-th call of a name: "before", "after", or an errno's name."""

    name: str
    number: int
    kind: str
    on: bool = False

    @property
    def expression(self) -> str:
        """For strace's ``-e inject``."""
        does = {"before": "signal=KILL", "after": f"delay_exit={_DELAY}"}
        action = does.get(self.kind, f"error={self.kind}")
        return f"{self.name}:{action}:when={self.number}{'+' if self.on else ''}"

    @property
    def fails(self) -> bool:
        """Whether the call fails, and nobody is killed."""
        return self.kind not in ("before", "after")

    def __str__(self) -> str:
        return f"{self.kind} at {self.name} {self.number}{' and on' if self.on else ''}"


@dataclass(slots=True)
class Run:
    """What happened.

    Attributes:
        calls: those that concern the watched directory, in order of their beginning.
        struck: the call that the strike hit, rather one that concerns the watched directory.
        astray: whether it hit one of this process that does not.
        killed: whether the process ended by SIGKILL.
        answer: what the function returned; only JSON.
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
    if sys.platform != "linux" or shutil.which("strace") is None:
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
    answers, answer = os.pipe()
    sys.stdout.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {_GO})
    pid = os.fork()
    if pid == 0:
        _child(function, answer)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(answer)
    try:
        os.read(answers, 1)  # it may be traced now
        return _trace(pid, answers, str(watched), strike)
    finally:
        os.close(answers)


def _trace(pid: int, answers: int, watched: str, strike: Strike | None) -> Run:
    output, theirs = os.pipe()
    command = ["strace", "-f", "-y", "-s", "0", "-o", f"/dev/fd/{theirs}", "-e", "signal=none"]
    if strike is None:
        command += ["-e", "trace=%file,%desc"]
    else:  # only what tells whether it struck: strace is half of a run's cost
        command += ["-e", f"trace={strike.name},execve", "-e", f"inject={strike.expression}"]
    with subprocess.Popen(
        [*command, "-p", str(pid)], stdin=subprocess.DEVNULL, stderr=theirs, pass_fds=[theirs]
    ) as strace:
        os.close(theirs)
        watch = _Watch(watched, strike)
        try:
            watch.follow(output, pid)
        finally:
            os.close(output)
            if not watch.attached or watch.delayed or watch.run.hung:
                os.kill(pid, signal.SIGKILL)
                strace.kill()  # it would wait for the end of the delay
            strace.wait(PATIENCE)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not watch.attached:
        raise RuntimeError(" ".join(watch.said) or "strace did not attach")
    run = watch.run
    run.killed = status == -signal.SIGKILL and not run.hung
    said = b""
    while data := os.read(answers, 1 << 16):
        said += data
    if said:
        run.answer, run.error = json.loads(said)
    return run


class _Watch:
    """Makes calls of strace's lines."""

    def __init__(self, watched: str, strike: Strike | None) -> None:
        self.run = Run()
        self.attached = self.delayed = False
        self.said: list[str] = []
        self._watched = watched
        self._strike = strike
        self._counts: Counter[tuple[int, str]] = Counter()
        self._open: dict[int, Call] = {}
        self._programs: set[int] = set()

    def follow(self, output: int, pid: int) -> None:
        """Read strace's output to its end, or to where the process is to be killed."""
        end, rest, started = time.monotonic() + PATIENCE, b"", False
        while not self.delayed:
            if not select.select([output], [], [], max(0.0, end - time.monotonic()))[0]:
                self.run.hung = True
                return
            if not (data := os.read(output, 1 << 16)):
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._line(line.decode("utf-8", "replace"))
            if self.attached and not started:
                started = True
                os.kill(pid, _GO)

    def _line(self, text: str) -> None:
        if _ATTACHED.match(text):
            self.attached = True
        elif text.startswith("strace:"):
            self.said.append(text)
        elif begun := _BEGUN.match(text):
            thread, name = int(begun[1]), begun[2]
            if name == "execve":
                self._programs.add(thread)
            self._counts[thread, name] += 1
            number, inside = self._counts[thread, name], self._watched in text
            call = Call(thread, name, number, text.split(maxsplit=1)[1], inside)
            if inside:
                self.run.calls.append(call)
            if text.endswith("<unfinished ...>"):
                self._open[thread] = call
            else:
                self._ended(call, text)
        elif (resumed := _RESUMED.match(text)) and int(resumed[1]) in self._open:
            self._ended(self._open.pop(int(resumed[1])), text)
        elif (killed := _KILLED.match(text)) and int(killed[1]) in self._open:
            self._struck(self._open.pop(int(killed[1])))

    def _ended(self, call: Call, text: str) -> None:
        if "(DELAYED)" in text:
            self.delayed = True
        if "(INJECTED)" in text or "(DELAYED)" in text or text.endswith("= ?"):
            self._struck(call)

    def _struck(self, call: Call) -> None:
        strike = self._strike
        if strike is None or call.name != strike.name or call.number < strike.number:
            return
        if not call.inside and call.thread not in self._programs:
            self.run.astray = True
        if self.run.struck is None or (call.inside and not self.run.struck.inside):
            self.run.struck = call


def _child(function: Callable[[], Any], answer: int) -> None:
    """Wait to be traced, run, answer, and end without any of the parent's clean-up."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1))
        os.write(answer, b"!")
        if signal.sigtimedwait({_GO}, PATIENCE) is not None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {_GO})
            told: tuple[Any, str | None] = (None, None)
            try:
                told = (function(), None)
            except BaseException:
                told = (None, traceback.format_exc())
            os.write(answer, json.dumps(told).encode())
    finally:
        os._exit(0)
