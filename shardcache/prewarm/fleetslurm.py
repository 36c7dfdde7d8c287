"""The engine that prewarms the nodes of a Slurm allocation: one srun, one task on each node.

srun labels lines with the number of the task, which with one task on each node in blocks is the
number of the node, too. Options are those of srun(1) of Slurm 20.11 and later; each has its reason
below. Tasks inherit the environment of the batch script, as always under srun, so that is where
their credentials come from.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from shardcache.errors import ConfigError
from shardcache.prewarm.fleet import Order
from shardcache.prewarm.fleetlines import Complained, Ended, Heard, Joiner, Members
from shardcache.prewarm.fleetrun import Engine
from shardcache.urls import redact

__all__ = ["SlurmEngine"]

#: srun also reads these; they would send what the nodes write, or read, somewhere else.
_REDIRECTING = ("SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE")
#: With --label: the task's number, aligned to the right.
_LABELLED = re.compile(r"\s*(\d+): ?(.*)", re.DOTALL)
#: ``srun: error: node[1-2]: tasks 1-2: Exited with exit code 3``
_TASKS_ENDED = re.compile(r"srun: error: \S+: tasks? ([\d,\-]+): (.*)")
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
#: Linux takes no longer single argument, and all together have a limit, too.
_LONGEST_ARGUMENTS = 32 * 1024
_SCONTROL_SECONDS = 60.0
#: SLURM_MAX_NORMAL_STEP_ID; above it are batch scripts and interactive shells.
_MAX_NORMAL_STEP = 0xFFFFFFF0
_PR_SET_PDEATHSIG = 1


class SlurmEngine(Engine):
    """See the module.

    Args:
        order: what to do.
        environ: instead of ``os.environ``.

    Raises:
        ConfigError: not inside an allocation, or Slurm's programs are not there.
    """

    name = "Slurm"

    def __init__(self, order: Order, environ: Mapping[str, str] | None = None) -> None:
        env = os.environ if environ is None else environ
        _refuse_elsewhere(env)
        self._order = order
        self._environ = {name: text for name, text in env.items() if name not in _REDIRECTING}
        self._srun = _program("srun", env)
        # Looked up here: a new process must not load anything before it is srun.
        self._prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
        self._job = env["SLURM_JOB_ID"]
        self.names = _node_names(env)
        self._joiners = [Joiner(number) for number in range(len(self.names))]
        specs = list(order.specs)
        # Command lines are there for everybody to see, and Slurm's accounting keeps them.
        secret = any(redact(spec) != spec or spec.startswith("-") for spec in specs)
        long = sum(len(spec.encode()) + 1 for spec in specs) > _LONGEST_ARGUMENTS
        self._fed = "".join(f"{spec}\n" for spec in specs) if secret or long else ""

    def command(self) -> Sequence[str]:
        """Of srun, ready to run."""
        count = len(self.names)
        options = [
            f"--nodes={count}",
            f"--ntasks={count}",
            "--ntasks-per-node=1",
            "--distribution=block",  # task n is node n
            "--label",
            "--wait=0",  # the first node to be ready does not end the others
            "--kill-on-bad-exit=0",  # nor does one that fails
            "--no-kill",  # nor one that dies
            "--overlap",  # beside other steps of the job
            "--cpu-bind=none",  # a task has all processors of its node
            "--disable-status",  # an interrupt is for the tasks, at once
            f"--input={'all' if self._fed else 'none'}",
            "--job-name=shardcache-prewarm",
        ]
        order = self._order
        prewarm = [sys.executable, "-m", "shardcache", *order.options]
        prewarm += ["prewarm", "--member", *order.arguments]
        return [self._srun, *options, *prewarm, *(["-f", "-"] if self._fed else order.specs)]

    def text(self) -> str:
        """The command for a shell."""
        return shlex.join(self.command())

    def environment(self) -> Mapping[str, str]:
        """The batch script's, less what would redirect."""
        return self._environ

    def prepare(self) -> None:
        """In the process that becomes srun: it is told when we are gone, however that happens."""
        if self._prctl is not None:
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    def before(self) -> Iterator[Heard]:
        """The allocation tells which nodes there are."""
        yield Members(tuple(self.names), f"job {self._job}")

    def heard(self, line: str) -> Iterator[Heard]:
        """A labelled line of a task, or a part of one."""
        member, text = self._unlabelled(line)
        if member is None:
            yield Complained(None, line)
        elif (said := self._joiners[member].take(text)) is not None:
            yield said

    def complained(self, line: str) -> Iterator[Heard]:
        """A labelled line of a task, or a word of srun's own."""
        member, text = self._unlabelled(line)
        if member is not None:
            yield Complained(member, text)
            return
        ended = _TASKS_ENDED.match(line)
        if ended is None:
            if line.strip():
                yield Complained(None, line)
            return
        code = _EXIT_CODE.search(ended[2])
        for number in _numbers(ended[1]):
            if number < len(self.names):
                yield Ended(number, int(code[1]) if code else None, f"Slurm says: {ended[2]}")

    def feed(self) -> tuple[str, bool]:
        """The shards, where they are not arguments."""
        return self._fed, False

    def stop(self, process: subprocess.Popen[str]) -> None:
        """srun passes it on to all tasks, which then end in order."""
        process.send_signal(signal.SIGINT)

    def _unlabelled(self, line: str) -> tuple[int | None, str]:
        found = _LABELLED.fullmatch(line)
        if found is None or int(found[1]) >= len(self.names):
            return None, line
        return int(found[1]), found[2]


def _refuse_elsewhere(env: Mapping[str, str]) -> None:
    if not env.get("SLURM_JOB_ID"):
        raise ConfigError(
            "--nodes slurm works inside an allocation, and there is none here (SLURM_JOB_ID is "
            "not set). Use it in a batch script (sbatch), or after salloc."
        )
    step, tasks = env.get("SLURM_STEP_ID", ""), env.get("SLURM_STEP_NUM_TASKS", "")
    if step.isdigit() and int(step) <= _MAX_NORMAL_STEP and tasks not in ("", "1"):
        raise ConfigError(
            f"this is one of {tasks} tasks of a Slurm step, and each of them would prewarm all "
            "nodes. Run it once, in the batch script and without srun."
        )


def _program(name: str, env: Mapping[str, str]) -> str:
    found = shutil.which(name, path=env.get("PATH"))
    if found is None:
        raise ConfigError(f"{name} is not in PATH. Load Slurm's module, or add its directory.")
    return found


def _node_names(env: Mapping[str, str]) -> list[str]:
    """Names of the allocation's nodes, in Slurm's order."""
    listed = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if not listed:
        raise ConfigError(
            "SLURM_JOB_NODELIST is not set, though SLURM_JOB_ID is: this is not the environment "
            "of a batch script or of salloc."
        )
    done = subprocess.run(
        [_program("scontrol", env), "show", "hostnames", listed],
        capture_output=True,
        text=True,
        timeout=_SCONTROL_SECONDS,
        env=dict(env),
        check=False,
    )
    names = done.stdout.split()
    if done.returncode or not names:
        why = (done.stderr.strip().splitlines() or ["it named none"])[-1]
        raise ConfigError(f"scontrol cannot tell which nodes {listed} is: {why}")
    return names


def _numbers(text: str) -> Iterator[int]:
    """Those of ``0,2-5``."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last.isdigit() or not last):
            yield from range(int(first), int(last or first) + 1)
