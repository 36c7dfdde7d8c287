"""The names of ``import shardcache``, and the modules that it loads."""

import ast
import os
import subprocess
import sys

import shardcache

HEAVY = {
    *("webdataset", "wids", "torch", "numpy", "lightning", "pytorch_lightning", "opentelemetry"),
    *("botocore", "s3fs", "fsspec", "aiohttp", "urllib3", "asyncio", "http", "ssl", "subprocess"),
    *("rich", "click", "filelock"),
}


def fresh(code: str) -> object:
    """Run code in a new interpreter, and evaluate its output."""
    command = [sys.executable, "-c", f"import sys, shardcache\n{code}"]
    env = {name: value for name, value in os.environ.items() if "COVERAGE" not in name}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return ast.literal_eval(done.stdout)


def test_importing_loads_nothing_heavy_and_lists_public_names():
    names, modules = fresh("shardcache.Cache\nprint((dir(shardcache), list(sys.modules)))")
    assert names == sorted(shardcache.__all__)
    assert not HEAVY & {module.partition(".")[0] for module in modules}
    for name in names:
        assert getattr(shardcache, name) is not None
    assert not hasattr(shardcache, "filesystem")


def test_submodules_load_on_first_use():
    code = """
found = [shardcache.wids.LocalNames, shardcache.lightning.ShardCacheHooks,
         shardcache.telemetry.observe, shardcache.sync.wait_for, shardcache.wds.attach]
from shardcache import wids, sync
print((all(map(callable, found)), wids is shardcache.wids, list(sys.modules)))"""
    usable, same, light = fresh(code)
    assert usable and same
    packages = {"lightning", "pytorch_lightning", "torch", "wids", "webdataset", "fsspec"}
    assert not packages & {module.partition(".")[0] for module in light}
