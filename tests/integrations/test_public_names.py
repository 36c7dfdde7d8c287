"""The names of ``import shardcache``, and the modules that it loads."""

import ast
import os
import re
import subprocess
import sys

import pytest

import shardcache
from shardcache.errors import REMOVED

HEAVY = {
    *("webdataset", "torch", "numpy"),
    *("botocore", "s3fs", "fsspec", "aiohttp", "urllib3", "asyncio", "http", "ssl", "subprocess"),
    *("rich", "click", "filelock"),
}


PROGRAM = """
import sys, shardcache
shardcache.Cache
first = dir(shardcache), list(sys.modules)
found = [shardcache.sync.wait_for, shardcache.wds.attach]
from shardcache import sync
print((*first, all(map(callable, found)), sync is shardcache.sync, list(sys.modules)))
"""


def test_importing_loads_nothing_heavy_and_submodules_load_on_first_use():
    env = {name: value for name, value in os.environ.items() if "COVERAGE" not in name}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True, env=env)
    names, modules, usable, same, later = ast.literal_eval(done.stdout.decode())
    assert names == sorted(shardcache.__all__)
    assert not HEAVY & {module.partition(".")[0] for module in modules}
    for name in names:
        assert getattr(shardcache, name) is not None
    assert not hasattr(shardcache, "filesystem")
    assert usable and same
    assert not {"torch", "webdataset", "fsspec"} & {module.partition(".")[0] for module in later}


@pytest.mark.parametrize("name", ["lightning", "telemetry", "wids"])
def test_a_removed_name_says_what_to_use_instead(name):
    with pytest.raises(shardcache.ConfigError, match=re.escape(REMOVED[f"shardcache.{name}"])):
        getattr(shardcache, name)
