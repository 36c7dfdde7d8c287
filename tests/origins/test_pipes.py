"""``pipe:`` URLs, for those who allow them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from shardcache import Cache, ConfigError, TransferError, TransferTimeoutError
from shardcache.origins.command import PipeOrigin
from shardcache.urls import parse_url
from tests.support.tars import make_tar

SHARD = make_tar(8)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", min_free=0, attempts=2, allow_schemes=["pipe"])


def test_a_command_runs_once_and_its_output_is_cached(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(SHARD)
    url = f"pipe: echo ran >> {tmp_path}/log; cat {tmp_path}/a.tar"
    for _ in range(3):
        with cache.open(url) as stream:
            assert stream.read() == SHARD
    assert (tmp_path / "log").read_text() == "ran\n"


@pytest.mark.parametrize(
    ("options", "command", "error"),
    [
        ({"max_size": 1, "deadline": 1}, "while :; do echo x; sleep 0.1; done", TransferError),
        ({"timeout": 1}, "exec sleep 3600", TransferTimeoutError),
    ],
)
def test_a_command_ends_with_its_reader(tmp_path: Path, options, command, error) -> None:
    given = {"min_free": 0, "allow_schemes": ["pipe"], "attempts": 1, **options}
    with Cache(tmp_path / "cache", **given) as cache, pytest.raises(error):
        cache.fetch(f"pipe:echo $$ > {tmp_path}/pid; {command}")
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_pipes_are_refused_unless_allowed(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", min_free=0)
    with pytest.raises(ConfigError, match="run a shell command"):
        cache.open(f"pipe:touch {tmp_path}/ran")
    assert not (tmp_path / "ran").exists()


def test_a_command_that_was_pickled_is_not_run() -> None:
    shard = parse_url("pipe:cat /etc/passwd", allow_schemes=["pipe"])
    with pytest.raises(ConfigError, match="left out"):
        PipeOrigin(1.0).open(pickle.loads(pickle.dumps(shard)), 0, None)
