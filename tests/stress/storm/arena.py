"""Where a storm takes place: a working directory, a small disk, a server and a meter."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcache.cli.demo import S3Server
from shardcache.cli.meter import Meter
from tests.stress.storm import shards
from tests.stress.storm.history import Log
from tests.stress.storm.rules import rules_of
from tests.stress.storm.settings import BUCKET, Settings

__all__ = ["Arena", "Disk", "arena", "working_directory"]


class Disk:
    """The filesystem of the cache; one of its own where we may mount.

    Args:
        path: where.
        size: bytes, if it is mounted.

    Attributes:
        mounted: whether it is a filesystem of its own, and so can be filled.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "storm", str(path)]
        self.mounted = os.geteuid() == 0 and _succeeds(command)
        self._filler = path / "filler"

    def fill(self, leave: int) -> None:
        """Use up all but ``leave`` bytes."""
        free = os.statvfs(self.path)
        size = free.f_bavail * free.f_frsize - leave
        with open(self._filler, "wb") as file, suppress(OSError):  # workers fill it meanwhile
            if size > 0:
                os.posix_fallocate(file.fileno(), 0, size)

    def free(self) -> None:
        """Undo `fill`."""
        self._filler.unlink(missing_ok=True)

    def close(self, keep: Path | None = None) -> None:
        """Unmount; first copy what is there to ``keep``, if given."""
        if not self.mounted:
            return
        if keep is not None:
            shutil.copytree(self.path, keep, symlinks=True)
        # Lazily: a process that would not die must not keep the rest from going.
        if not _succeeds(["umount", str(self.path)]):
            _succeeds(["umount", "-l", str(self.path)])
        self.mounted = False


def _succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@contextmanager
def working_directory(parent: Path | None, keep: bool) -> Iterator[Path]:
    """A new directory, removed in the end unless it is to be kept."""
    path = Path(tempfile.mkdtemp(prefix="shardcache-storm-", dir=parent)).resolve()
    try:
        yield path
    finally:
        if not keep:
            shutil.rmtree(path, ignore_errors=True)


@dataclass
class Arena:
    """What the boss works with.

    Attributes:
        settings: the storm.
        disk: the cache's.
        server: the origin.
        meter: counts what is asked of it.
        log: the boss's history.
        versions: shard -> the number of its newest version.
        keys: the key of a shard's URL -> its name.
        clients: one that sends checksums with what it stores, and one that does not.
    """

    settings: Settings
    disk: Disk
    server: S3Server
    meter: Meter
    log: Log
    versions: dict[str, int]
    keys: dict[str, str]
    clients: tuple[Any, Any]

    def environment(self) -> dict[str, str]:
        """Of the workers, and of whoever uses the cache: they reach the server by the meter."""
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SHARDCACHE_", "WDS_", "AWS_", "SLURM_", "OMPI_", "PMI_"))
        }
        return {
            **clean,
            **self.server.environment(self.meter.endpoint_url),
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def put(self, name: str) -> None:
        """Store the next version of a shard; in the history before and after."""
        version = self.versions.get(name, -1) + 1
        data = shards.make(name, version, self.settings.size(name, version))
        facts = {"name": name, "version": version, "size": len(data)}
        self.log.write("put", phase="begin", digest=shards.digest(data), **facts)
        # Every other shard has no checksum but its ETag, as most objects in the world.
        client = self.clients[self.settings.names.index(name) % 2]
        client.put_object(Bucket=BUCKET, Key=name, Body=data)
        self.log.write("put", phase="end", **facts)
        self.versions[name] = version


def _clients(server: S3Server) -> tuple[Any, Any]:
    variable = "AWS_REQUEST_CHECKSUM_CALCULATION"
    before = os.environ.get(variable)
    made = []
    for value in ("when_supported", "when_required"):
        os.environ[variable] = value
        made.append(server.client())
    del os.environ[variable]
    if before is not None:
        os.environ[variable] = before
    return made[0], made[1]


@contextmanager
def arena(settings: Settings, keep: bool) -> Iterator[Arena]:
    """Set everything up, with version 0 of every shard stored."""
    settings.history.mkdir()
    settings.counters.write_bytes(bytes(64 * settings.workers))
    disk = Disk(settings.cache.parent, settings.disk_size)
    try:
        log = Log(settings.history / "boss.jsonl", "boss")
        with S3Server(settings.directory) as server, Meter(server.endpoint_url) as meter:
            server.create_bucket(BUCKET)
            keys = rules_of(settings, meter.endpoint_url).keys
            found = Arena(settings, disk, server, meter, log, {}, keys, _clients(server))
            for name in settings.names:
                found.put(name)
            yield found
    finally:
        disk.free()
        disk.close(settings.directory / "cache-as-it-was" if keep else None)
