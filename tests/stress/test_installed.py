"""A fresh installation of the wheel in a new virtual environment."""

import json
import sys
from pathlib import Path

import pytest

from tests.support import trainingtools
from tests.support.trainingtools import EXAMPLES, ROOT

#: Seconds; pip may be slow.
_PATIENCE = 540


def run(*command, **environment):
    """Run a program outside this checkout; returns its output."""
    command = [*map(str, command)]
    return trainingtools.run(command, _PATIENCE, Path("/"), PYTHONPATH="", **environment).stdout


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """Install the wheel with the extra of the demo; returns the directory of programs."""
    home = tmp_path_factory.mktemp("fresh")
    pip = [sys.executable, "-m", "pip"]
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", home, ROOT)
    (wheel,) = home.glob("shardcache-*.whl")
    run(sys.executable, "-m", "venv", home / "venv")
    run(home / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet", f"{wheel}[demo]")
    return home / "venv" / "bin"


def test_the_demo_keeps_its_promise(fresh, tmp_path):
    found = json.loads(run(fresh / "python", EXAMPLES / "demo.py", "--json", TMPDIR=str(tmp_path)))
    size = found["summary"]["shards"] * found["summary"]["shard_bytes"]
    assert sum(step["origin_bytes"] for step in found["steps"]) == size
    assert list(tmp_path.iterdir()) == []


def test_the_installation_is_complete(fresh):
    run(fresh / "python", "-m", "pip", "check")
    run(fresh / "python", "-c", "import fsspec; fsspec.get_filesystem_class('shardcache')")
    (site,) = fresh.parent.glob("lib/python*/site-packages")
    files = {str(path.relative_to(site)) for path in site.rglob("*")}
    assert {"tests", "benchmarks"}.isdisjoint(files)
    templates = ("py.typed", "cli/report.html", "cli/report.mplstyle")
    assert {f"shardcache/{name}" for name in templates} <= files
