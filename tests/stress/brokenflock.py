"""Runs any part of the suite with locks that fail; a pytest plugin.

    python -m pytest -p tests.stress.brokenflock --flock refused tests/test_cache.py
    (or "lying", or "deleted")

Locks only save bandwidth: all other claims must hold without them. "refused" and "lying"
replace `fcntl.flock` here and in every Python child; "deleted" lets a process remove the
lock files and directories below the test's directory for as long as it runs.

A test that claims that a lock does its work says so, and is left out where that cannot
be true: ``@pytest.mark.locks_work("flock", ...)``, of

    flock     nobody else has a lock that is held
    answers   flock says whether a lock is held, so that no time has to pass before
              what a dead process left, or nobody uses, may be taken
    files     a lock file is there for as long as it is held

Without arguments all three: one fetch of a key at a time, one budget.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stress.brokensite import sitecustomize

_SITE = Path(__file__).resolve().parent / "brokensite"
#: What each fault leaves untrue.
_UNTRUE = {"refused": {"flock", "answers"}, "lying": {"flock"}, "deleted": {"files"}}
_CLAIMS = ("flock", "answers", "files")


def broken_environment(how: str) -> dict[str, str]:
    """Of Python children whose flock is "refused" or "lying"."""
    path = os.pathsep.join([str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "BROKEN_FLOCK": how, "PYTHONPATH": path}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--flock", choices=sorted(_UNTRUE), help="run with locks that fail")


def pytest_configure(config: pytest.Config) -> None:
    how = config.getoption("--flock")
    if how is not None:
        os.environ["BROKEN_FLOCK"] = how
    if how in ("refused", "lying"):
        sitecustomize.break_flock(how)
        os.environ.update(broken_environment(how))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    how = config.getoption("--flock")
    if how is None:
        return
    skip = pytest.mark.skip(reason=f"claims that locks work; they are {how}")
    for item in items:
        marks = list(item.iter_markers("locks_work"))
        claimed = {claim for mark in marks for claim in mark.args or _CLAIMS}
        if claimed & _UNTRUE[how]:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _sabotage(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--flock deleted``: no lock file of this test lives long."""
    if request.config.getoption("--flock") != "deleted":
        yield
        return
    directory = str(request.getfixturevalue("tmp_path"))
    command = [sys.executable, "-I", "-S", str(_SITE / "saboteur.py"), directory]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield
        process.kill()
