"""A function in a forked process under strace: watched, killed at a call, or given an error.

`Tracer.run` forks the calling process, which has imported everything, and lets the child
wait until strace is attached; so a run costs a fork and some milliseconds, not a start
of Python. strace counts calls per thread: ``when=3`` strikes in whichever thread comes
to its third call first. Nothing here depends on the two runs being alike: what was
struck is read from strace's own output.

How a call is struck (strace 6.1, ``signal.c`` and ``syscall.c`` of its source):

* `Strike.before`: ``signal=KILL`` is sent when the call is entered; the kernel sees it
  before it begins, so the call has no effect.
* `Strike.after`: ``delay_exit`` holds the thread behind the call, which is then killed
  from here; all of the call's effect is there, none of what follows.
* `Strike.error`: the call is replaced by none and answers the error; with ``on`` also
  all later calls of that name.

For one thread of the caller; the function runs in another process, so it may do anything.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Call", "Run", "Strike", "Tracer", "unavailable"]

#: Seconds after which a run has hung. The longest take half a second.
PATIENCE = 60.0
#: Tells the child to begin. Waiting for a signal is no call that is counted, as reading
#: from a pipe would be: once or twice, as strace happens to come.
_GO = signal.SIGUSR1
#: Microseconds: for ever, as runs go.
_DELAY = 600_000_000
#: prctl(2) of Linux, linux/prctl.h: who may trace us; -1 is anybody of our user.
_PR_SET_PTRACER = 0x59616D61
_LIBC = ctypes.CDLL(None)
_ATTACHED = re.compile(r"strace: Process \d+ attached")
_BEGUN = re.compile(r"(\d+)\s+(\w+)\(")
_RESUMED = re.compile(r"(\d+)\s+<\.\.\. (\w+) resumed>")
_KILLED = re.compile(r"(\d+)\s+\+\+\+ killed by SIGKILL \+\+\+")


def unavailable() -> str | None:
    """Why nothing can be traced here, or None if it can."""
    if sys.platform != "linux":
        return "needs strace, which is for Linux"
    if shutil.which("strace") is None:
        return "needs strace, which is not installed"
    try:
        run = Tracer(Path("/")).run(lambda: None)
    except RuntimeError as exn:
        return f"ptrace is not allowed here: {exn}"
    return None if run.ended else "ptrace does not work here"


@dataclass(frozen=True, slots=True)
class Call:
    """One system call.

    Attributes:
        thread: strace's number of the thread.
        name: such as ``openat``.
        number: how many of that name this thread had made, itself included.
        text: as strace shows it.
        inside: whether it concerns the watched directory.
    """

    thread: int
    name: str
    number: int
    text: str
    inside: bool


@dataclass(frozen=True, slots=True)
class Strike:
    """What happens at the ``number``-th call of a name in a thread."""

    name: str
    number: int
    kind: str
    on: bool = False

    @classmethod
    def before(cls, name: str, number: int) -> Strike:
        """Kill before the call has any effect."""
        return cls(name, number, "before")

    @classmethod
    def after(cls, name: str, number: int) -> Strike:
        """Kill when the call has taken effect."""
        return cls(name, number, "after")

    @classmethod
    def error(cls, name: str, number: int, error: str, *, on: bool = False) -> Strike:
        """Let the call fail, and with ``on`` all later ones of its name."""
        return cls(name, number, error, on)

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

    @property
    def next(self) -> Strike:
        """The same at the next call of the name."""
        return Strike(self.name, self.number + 1, self.kind, self.on)

    def __str__(self) -> str:
        verb = f"{self.kind} of" if self.fails else f"killed {self.kind}"
        return f"{verb} {self.name} {self.number}{' on' if self.on else ''}"


@dataclass(slots=True)
class Run:
    """What happened.

    Attributes:
        calls: those that concern the watched directory, in order of their beginning; with
            a strike, those of its name.
        struck: the call that the strike hit, if it hit one; rather one that concerns the
            watched directory.
        astray: whether it also hit a call that concerned something else, in this process;
            a program that it starts is no part of it.
        killed: whether the process ended by SIGKILL.
        answer: what the function returned; only JSON.
        error: the function's traceback, if it raised.
        hung: whether it had to be ended.
        counts: calls of every name by the thread that made most of them.
        elsewhere: names of calls that concerned something else.
    """

    calls: list[Call] = field(default_factory=list)
    struck: Call | None = None
    astray: bool = False
    killed: bool = False
    answer: Any = None
    error: str | None = None
    hung: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)

    @property
    def ended(self) -> bool:
        """Whether the function came to its end by itself."""
        return not self.killed and not self.hung


class Tracer:
    """Runs functions under strace.

    Args:
        watched: the directory whose calls are of interest.
    """

    def __init__(self, watched: Path) -> None:
        self._watched = str(watched)

    def run(self, function: Callable[[], Any], strike: Strike | None = None) -> Run:
        """Run it once.

        Raises:
            RuntimeError: strace cannot attach.
        """
        answers, answer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {_GO})
        pid = os.fork()
        if pid == 0:
            _child(function, answer)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(answer)
        try:
            os.read(answers, 1)  # it may be traced now
            return self._trace(pid, answers, strike)
        finally:
            os.close(answers)

    def _trace(self, pid: int, answers: int, strike: Strike | None) -> Run:
        output, theirs = os.pipe()
        command = ["strace", "-f", "-y", "-s", "0", "-o", f"/dev/fd/{theirs}"]
        if strike is None:
            command += ["-e", "trace=%file,%desc"]
        else:  # only what tells whether it struck: strace is half of a run's cost
            command += ["-e", f"trace={strike.name},execve", "-e", f"inject={strike.expression}"]
        command += ["-e", "signal=none", "-p", str(pid)]
        strace = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=theirs, pass_fds=[theirs]
        )
        os.close(theirs)
        watch = _Watch(self._watched, strike)
        status: int | None = None
        try:
            self._follow(output, watch, pid)
        finally:
            os.close(output)
            if strace.poll() is None and (watch.delayed or watch.run.hung):
                os.kill(pid, signal.SIGKILL)
                strace.kill()  # it would wait for the end of the delay
            elif not watch.attached:
                os.kill(pid, signal.SIGKILL)
            strace.wait(PATIENCE)
            _, status = os.waitpid(pid, 0)
        if not watch.attached:
            raise RuntimeError(" ".join(watch.said) or "strace did not attach")
        run = watch.run
        run.killed = os.waitstatus_to_exitcode(status) == -signal.SIGKILL and not run.hung
        run.counts = watch.most()
        run.astray = watch.astray
        said = _read_all(answers)
        if said:
            told = json.loads(said)
            run.answer, run.error = told["answer"], told["error"]
        return run

    @staticmethod
    def _follow(output: int, watch: _Watch, pid: int) -> None:
        """Read strace's output to its end, or to where the process is to be killed."""
        end = time.monotonic() + PATIENCE
        rest = b""
        started = False
        while True:
            left = end - time.monotonic()
            if not select.select([output], [], [], max(0.0, left))[0]:
                watch.run.hung = True
                return
            data = os.read(output, 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                watch.line(line.decode("utf-8", "replace"))
            if watch.delayed:
                return
            if watch.attached and not started:
                started = True
                os.kill(pid, _GO)


class _Watch:
    """Makes calls of strace's lines."""

    def __init__(self, watched: str, strike: Strike | None) -> None:
        self.run = Run()
        self.attached = False
        self.delayed = False
        self.said: list[str] = []
        self._watched = watched
        self._strike = strike
        self._counts: dict[tuple[int, str], int] = {}  # by thread and name
        self._open: dict[int, Call] = {}
        self._astray: set[int] = set()
        self._programs: set[int] = set()

    def line(self, text: str) -> None:
        """Take one line of strace's output."""
        if _ATTACHED.match(text):
            self.attached = True
        elif text.startswith("strace:"):
            self.said.append(text)
        elif begun := _BEGUN.match(text):
            self._begun(int(begun.group(1)), begun.group(2), text)
        elif resumed := _RESUMED.match(text):
            call = self._open.pop(int(resumed.group(1)), None)
            if call is not None:
                self._ended(call, text)
        elif killed := _KILLED.match(text):
            # A call of another thread may have been under way, too: the one struck
            # is that whose number is the strike's.
            call = self._open.pop(int(killed.group(1)), None)
            if call is not None:
                self._strike_at(call)

    def _begun(self, thread: int, name: str, text: str) -> None:
        if name == "execve":
            self._programs.add(thread)
        number = self._counts[thread, name] = self._counts.get((thread, name), 0) + 1
        call = Call(thread, name, number, text.split(maxsplit=1)[1], self._watched in text)
        if call.inside:
            self.run.calls.append(call)
        else:
            self.run.elsewhere.add(name)
        if text.endswith("<unfinished ...>"):
            self._open[thread] = call
        else:
            self._ended(call, text)

    def _ended(self, call: Call, text: str) -> None:
        if "(INJECTED)" in text:
            self._strike_at(call)
        elif "(DELAYED)" in text:
            self.delayed = True
            self._strike_at(call)
        elif text.endswith("= ?"):
            self._strike_at(call)

    def _strike_at(self, call: Call) -> None:
        strike = self._strike
        if strike is None or call.name != strike.name or call.number < strike.number:
            return
        if not call.inside:
            self._astray.add(call.thread)
        if self.run.struck is None or (call.inside and not self.run.struck.inside):
            self.run.struck = call

    @property
    def astray(self) -> bool:
        """See `Run`."""
        return bool(self._astray - self._programs)

    def most(self) -> dict[str, int]:
        """Calls of each name by the thread that made most of them."""
        found: dict[str, int] = {}
        for (_thread, name), count in self._counts.items():
            found[name] = max(count, found.get(name, 0))
        return found


def _child(function: Callable[[], Any], answer: int) -> None:
    """Wait to be traced, run, answer, and end without any of the parent's clean-up."""
    status = 1
    try:
        # Where only ancestors may trace (Yama), strace is none. Elsewhere it is refused.
        _LIBC.prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1))
        os.write(answer, b"!")
        if signal.sigtimedwait({_GO}, PATIENCE) is not None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {_GO})
            told: dict[str, Any] = {"answer": None, "error": None}
            try:
                told["answer"] = function()
            except BaseException:
                told["error"] = traceback.format_exc()
            os.write(answer, json.dumps(told).encode())
            status = 0
    finally:
        os._exit(status)


def _read_all(fd: int) -> bytes:
    found = b""
    while data := os.read(fd, 1 << 16):
        found += data
    return found
