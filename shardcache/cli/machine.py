"""What this machine gives a training job, and whether that is enough for the cache.

`Machine.now` gathers, the checks judge and are pure. Nothing here touches a disk that may be dead:
all is told by the kernel or stands in the environment.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from shardcache.cli.checkup import Finding
from shardcache.config import Config
from shardcache.errors import ConfigError
from shardcache.ranks import detect, local_world_size
from shardcache.space.memory import Headroom, cpu_quota, memory_headroom
from shardcache.space.policy import tells_time
from shardcache.units import format_duration

__all__ = ["Machine", "check_clock", "check_cpus", "check_environment", "check_files", "check_skew"]

logger = logging.getLogger(__name__)

_MEMINFO = Path("/proc/meminfo")
#: Descriptors of Python, torch and a GPU's driver.
_PROGRAM = 64
#: Of a shard: its data, lock, progress and sidecar.
_SHARD = 4
#: DataLoader workers that a job is thought to have, and what its main process opens for each of
#: them: pipes, and a descriptor for each tensor on its way (torch.multiprocessing,
#: "file_descriptor").
_WORKERS = 8
_WORKER = 32
#: Seconds by which S3 lets a clock differ (RequestTimeTooSkewed), and that are worth a word.
_REFUSED = 900.0
_WORTH = 60.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts.

    Attributes:
        time: seconds since the epoch.
        files: most open files of a process; None without a limit.
        cpus: how many there are.
        allowed: on how many of them this process may run.
        quota: CPUs' time that cgroups allow; None without a limit.
        ranks: processes of the job on this node; None where nobody tells.
        bound: whether ``allowed`` are a rank's own, not shared by those of the node.
        pod: whether this is a pod of Kubernetes.
        memory: what a RAM disk may take; None where nobody tells.
        memory_of: what sets that limit.
    """

    time: float
    files: int | None
    cpus: int
    allowed: int
    quota: float | None
    ranks: int | None
    bound: bool
    pod: bool
    memory: Headroom | None
    memory_of: str

    @classmethod
    def now(cls, environ: Mapping[str, str]) -> Machine:
        """This machine as it is.

        Args:
            environ: the environment.
        """
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        cpus, allowed = os.cpu_count() or 1, len(os.sched_getaffinity(0))
        try:
            ranks = local_world_size(environ)
            slurm = detect(environ).source == "slurm"
        except ConfigError as exn:  # `check_environment` says so
            logger.debug("ranks: %s", exn)
            ranks, slurm = None, False
        memory, memory_of = memory_headroom(), "cgroup memory"
        if memory is None:
            memory, memory_of = _memory(), "the machine's memory"
        return cls(
            time=time.time(),
            files=None if soft == resource.RLIM_INFINITY else soft,
            cpus=cpus,
            allowed=allowed,
            quota=cpu_quota(),
            ranks=ranks,
            bound=slurm and allowed < cpus,  # srun binds each task to CPUs of its own
            pod="KUBERNETES_SERVICE_HOST" in environ,
            memory=memory,
            memory_of=memory_of,
        )


def _memory() -> Headroom | None:
    """What the machine has, and what programs may still get of it."""
    rows = {}
    for line in _MEMINFO.read_text("ascii").splitlines():
        name, _, value = line.partition(":")
        rows[name] = int(value.split()[0]) * 1024
    if "MemTotal" not in rows or "MemAvailable" not in rows:
        return None
    return Headroom(rows["MemTotal"], rows["MemAvailable"])


def check_files(machine: Machine, config: Config) -> Iterator[Finding]:
    """The limit of open files against what the cache opens."""
    subject, limit = "open files", machine.files
    alone = _PROGRAM + config.connections + _SHARD * (config.prefetch + 1)
    wanted = alone + _WORKERS * _WORKER
    if limit is None or limit >= wanted:
        text = "no limit" if limit is None else f"limit {limit:,}"
        yield Finding("ok", "files", subject, f"{text}, {wanted:,} are enough for 8 workers")
        return
    fix = (
        "Raise it where the job is started: ulimit -n 65536 (systemd: LimitNOFILE=65536, "
        "docker: --ulimit nofile=65536)."
    )
    if limit < alone:
        found = (
            f"limit {limit:,}, but {config.connections} connections and {config.prefetch} shards "
            f"ahead need {alone:,}"
        )
        yield Finding("fail", "files", subject, found, fix)
    else:
        found = f"limit {limit:,}, but a job with {_WORKERS} DataLoader workers needs {wanted:,}"
        yield Finding("warn", "files", subject, found, fix)


def check_cpus(machine: Machine) -> Iterator[Finding]:
    """The CPUs that may be used against the workers that are likely to be started."""
    usable = float(machine.allowed)
    why = "" if machine.allowed == machine.cpus else f" by affinity, of {machine.cpus}"
    if machine.quota is not None and machine.quota < usable:
        usable, why = machine.quota, f" by a cgroup's quota, of {machine.cpus}"
    ranks = machine.ranks or 1
    each = usable if machine.bound else usable / ranks
    # One is for the training itself.
    workers = max(0, int(each) - 1)
    text = f"{usable:g} usable{why}"
    if machine.ranks is not None:
        text += f", {machine.ranks} ranks on this node: {each:.3g} each"
    if machine.ranks is not None and each < 2:
        yield Finding(
            "warn", "cpus", "CPUs", f"{text}, too few for a DataLoader worker beside training",
            "Ask the scheduler for more CPUs (Slurm: --cpus-per-task, Kubernetes: limits.cpu), or "
            "start fewer ranks.",
        )  # fmt: skip
    elif usable < machine.cpus / 2:
        yield Finding(
            "warn", "cpus", "CPUs", f"{text}; os.cpu_count() says {machine.cpus}",
            f"Start at most {max(1, workers)} DataLoader workers per rank (num_workers), or ask "
            "for more CPUs.",
        )  # fmt: skip
    else:
        yield Finding("ok", "cpus", "CPUs", text)


def check_clock(machine: Machine) -> Iterator[Finding]:
    """Whether the machine knows the time."""
    date = f"{datetime.fromtimestamp(machine.time, UTC):%Y-%m-%d %H:%M:%S} UTC"
    if tells_time(machine.time):
        yield Finding("ok", "clock", "clock", date)
    else:
        yield Finding(
            "fail", "clock", "clock", f"it says {date}, which cannot be",
            "Set the clock and keep it set: timedatectl set-ntp true (or chronyd, ntpd).",
        )  # fmt: skip


def check_skew(ahead: float, place: str) -> Iterator[Finding]:
    """How far our clock is from that of an origin.

    Args:
        ahead: seconds by which ours is.
        place: whose clock it was compared with.
    """
    text = f"{format_duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} {place}"
    fix = "Synchronise this machine's clock: timedatectl set-ntp true (or chronyd, ntpd)."
    if abs(ahead) > _REFUSED:
        text += "; S3 refuses requests from 15 minutes on"
        yield Finding("fail", "clock", "clock", text, fix)
    elif abs(ahead) > _WORTH:
        yield Finding("warn", "clock", "clock", text, fix)
    else:
        yield Finding("ok", "clock", "clock", f"agrees with {place}")


def check_environment(environ: Mapping[str, str], config: Config | None) -> Iterator[Finding]:
    """Variables that contradict each other or the configuration, or say nothing."""
    findings = list(_oddities(environ, config))
    yield from findings
    if not findings:
        yield Finding("ok", "environment", "environment", "nothing odd")


def _oddities(environ: Mapping[str, str], config: Config | None) -> Iterator[Finding]:
    try:
        detect(environ)
        local_world_size(environ)
    except ConfigError as exn:
        variable = getattr(exn, "variable", "ranks")
        yield Finding("fail", "environment", variable, "no rank can be told", exn.message)
    for name, value in sorted(environ.items()):
        if name.startswith("SHARDCACHE_") and not value.strip():
            yield Finding(
                "warn", "environment", name, "it is empty, which counts as not set",
                "Unset it, or give it a value; 'none' clears an option.",
            )  # fmt: skip
    other = environ.get("WDS_CACHE", "").strip()
    if other and config is not None and Path(other).absolute() != config.dir:
        yield Finding(
            "warn", "environment", "WDS_CACHE",
            f"it names {other}, and dir is {config.dir}: WebDataset may keep copies of its own",
            "Unset WDS_CACHE where shardcache is used.",
        )  # fmt: skip
    keys = [bool(environ.get(n)) for n in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
    if any(keys) and not all(keys):
        given, missing = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")[:: 1 if keys[0] else -1]
        yield Finding(
            "warn", "environment", given, f"it is set, and {missing} is not",
            f"Set {missing} as well, or unset {given} and use a profile or a role.",
        )  # fmt: skip
