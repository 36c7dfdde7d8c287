"""Spawned workers that are killed: as in `tests/test_killed_workers.py`, which forks them."""

from __future__ import annotations

from pathlib import Path

from shardcache.cli.demoserver import S3Server
from shardcache.cli.meter import Meter
from tests.fetch import test_killed_workers


def test_the_peers_of_a_killed_spawned_worker_go_on_at_once(
    s3: S3Server, bucket: str, meter: Meter, s3_environment: dict[str, str], tmp_path: Path
) -> None:
    test_killed_workers.test_the_peers_of_a_killed_worker_go_on_at_once(
        "spawn", s3, bucket, meter, s3_environment, tmp_path
    )
