"""The bucket of docs/integrations.md, with shards and tables.

Each test runs a program, because these packages start threads and processes, which end with it.
"""

import sys

import pandas
import pytest

from tests.support.trainingtools import DataSet, run


class Bench:
    """Runs programs that read the bucket through a cache in a directory."""

    def __init__(self, data, directory):
        self.data, self.directory, self.cache = data, directory, directory / "shards"

    def run(self, code, *arguments, ranks=0):
        """Run a program from a file, which spawned workers import; returns its output.

        With ``ranks``, torchrun starts that many.
        """
        program = self.directory / "program.py"
        program.write_text(code)
        launcher = "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"
        command = [sys.executable, *(launcher if ranks else ()), str(program), *arguments]
        return run(command, 500, self.directory).stdout

    def fetched(self):
        """Return the names of downloaded objects; each was downloaded once."""
        fetches = self.data.fetches
        assert set(fetches.values()) <= {1}, fetches
        return {path.removeprefix("bucket/") for path in fetches}


@pytest.fixture
def bench(s3, s3_environment, proxy, tmp_path, set_variables):
    s3.create_bucket("bucket")
    frame = pandas.DataFrame({"a": range(1000), "b": [f"row {n}" for n in range(1000)]})
    s3.put("bucket", "table.csv", frame.to_csv(index=False).encode())
    for number in range(2):
        s3.put("bucket", f"table/part-{number}.parquet", frame.to_parquet())
    bench = Bench(DataSet(s3, "bucket", proxy), tmp_path)
    set_variables(SHARDCACHE_DIR=bench.cache, HF_HOME=tmp_path / "huggingface")
    set_variables(HF_HUB_DISABLE_TELEMETRY=1, RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED=0)
    return bench
