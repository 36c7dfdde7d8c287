"""``pipe:`` URLs, for those who allow them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from shardcache import ConfigError, TransferError, TransferTimeoutError
from shardcache.origins.command import PipeOrigin
from shardcache.urls import parse_url
from tests.support.tars import make_tar


def test_a_command_runs_once_and_its_output_is_cached(make_cache, tmp_path):
    (tmp_path / "a.tar").write_bytes(make_tar(8))
    cache = make_cache(allow_schemes=["pipe"])
    for _ in range(3):
        with cache.open(f"pipe: echo ran >> {tmp_path}/log; cat {tmp_path}/a.tar") as stream:
            assert stream.read() == make_tar(8)
    assert (tmp_path / "log").read_text() == "ran\n"


@pytest.mark.parametrize(
    ("options", "command", "error"),
    [
        ({"max_size": 1, "deadline": 1}, "while :; do echo x; sleep 0.1; done", TransferError),
        ({"timeout": 1}, "exec sleep 3600", TransferTimeoutError),
    ],
)
def test_a_command_ends_with_its_reader(make_cache, tmp_path, options, command, error):
    with make_cache(allow_schemes=["pipe"], attempts=1, **options) as cache, pytest.raises(error):
        cache.fetch(f"pipe:echo $$ > {tmp_path}/pid; {command}")
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_a_command_that_was_pickled_is_not_run():
    shard = parse_url("pipe:cat /etc/passwd", allow_schemes=["pipe"])
    with pytest.raises(ConfigError, match="left out"):
        PipeOrigin(1.0).open(pickle.loads(pickle.dumps(shard)), 0, None)
