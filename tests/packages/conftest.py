"""A bucket with shards and tables, as docs/integrations.md has it; programs run apart.

Each test starts a program of its own: these packages start threads and processes of theirs,
which are gone with it.
"""

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas
import pytest

from shardcache.cli.demo import S3Server
from tests.support.proxy import Proxy
from tests.support.trainingtools import DataSet, run


def tables() -> dict[str, bytes]:
    """``table.csv``, and a directory of two Parquet files."""
    frame = pandas.DataFrame({"a": range(1000), "b": [f"row {n}" for n in range(1000)]})
    found = {"table.csv": frame.to_csv(index=False).encode()}
    for number in range(2):
        buffer = io.BytesIO()
        frame.to_parquet(buffer)
        found[f"table/part-{number}.parquet"] = buffer.getvalue()
    return found


class Bench:
    """The bucket, a directory, and programs that read the one through a cache in the other."""

    def __init__(self, data: DataSet, directory: Path) -> None:
        self.data = data
        self.directory = directory
        self.cache = directory / "shards"

    def run(self, code: str, *arguments: str) -> str:
        """Run a program of these lines; what it prints.

        From a file, since spawned workers import it.
        """
        program = self.directory / "program.py"
        program.write_text(code)
        command = [sys.executable, str(program), *arguments]
        return run(command, 170, self.directory).stdout

    def fetched(self) -> set[str]:
        """What crossed the network: each of it once."""
        fetches = self.data.fetches
        assert set(fetches.values()) <= {1}, fetches
        return {path.removeprefix("bucket/") for path in fetches}


@pytest.fixture
def bench(
    s3: S3Server,
    s3_environment: dict[str, str],
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Bench]:
    s3.create_bucket("bucket")
    for name, content in tables().items():
        s3.put("bucket", name, content)
    made = Bench(DataSet(s3, "bucket", proxy), tmp_path)
    for name, value in {
        "SHARDCACHE_DIR": str(made.cache),
        "SHARDCACHE_MIN_FREE": "0",
        "HF_HOME": str(tmp_path / "huggingface"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }.items():
        monkeypatch.setenv(name, value)
    assert os.environ["AWS_ENDPOINT_URL_S3"] == proxy.endpoint_url
    yield made
