"""Spawned workers that are killed: as in `tests/test_killed_workers.py`, which forks them."""

from __future__ import annotations

from pathlib import Path

from shardcache.cli.demo import S3Server
from tests.fetch import test_killed_workers
from tests.support.proxy import Proxy


def test_the_peers_of_a_killed_spawned_worker_go_on_at_once(
    s3: S3Server, bucket: str, proxy: Proxy, s3_environment: dict[str, str], tmp_path: Path
) -> None:
    test_killed_workers.test_the_peers_of_a_killed_worker_go_on_at_once(
        "spawn", s3, bucket, proxy, s3_environment, tmp_path
    )
