"""Runs any part of the suite with locks that fail; a pytest plugin.

    python -m pytest -p tests.stress.brokenflock --flock refused tests/test_cache.py

Locks only save bandwidth: all other claims must hold without them. ``--flock refused`` or ``lying``
replaces `fcntl.flock` here and in every Python child. A test that claims that a lock does its
work says so, and is left out where that cannot be true: ``@pytest.mark.locks_work("flock")``, of

    flock     nobody else has a lock that is held
    answers   flock says whether a lock is held, so that no time has to pass before
              what a dead process left, or nobody uses, may be taken

Without arguments both: one fetch of a key at a time, one budget.
"""

import os
from pathlib import Path

import pytest

_SITE = Path(__file__).resolve().parent / "brokensite"
#: What each fault leaves untrue.
_UNTRUE = {"refused": {"flock", "answers"}, "lying": {"flock"}}


def broken_environment(how: str) -> dict[str, str]:
    """Of Python children whose flock is "refused" or "lying"."""
    path = os.pathsep.join([str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "BROKEN_FLOCK": how, "PYTHONPATH": path}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--flock", choices=sorted(_UNTRUE), help="run with locks that fail")


def pytest_configure(config: pytest.Config) -> None:
    if how := config.getoption("--flock"):
        os.environ.update(broken_environment(how))
        from tests.stress.brokensite import sitecustomize  # noqa: F401  here, too


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (how := config.getoption("--flock")):
        return
    for item in items:
        marks = item.iter_markers("locks_work")
        if any(not mark.args or set(mark.args) & _UNTRUE[how] for mark in marks):
            item.add_marker(pytest.mark.skip(reason=f"claims that locks work; they are {how}"))
