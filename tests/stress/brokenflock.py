"""A pytest plugin that runs tests with locks that fail.

    python -m pytest -p tests.stress.brokenflock --flock refused tests/test_cache.py

Locks only save bandwidth, so all other claims must hold without them. ``--flock refused`` or
``lying`` replaces `fcntl.flock` here and in every Python child. A test that depends on locks has
the marker ``@pytest.mark.locks_work(...)`` with one of these claims, or none to claim both:

    flock     no other process can take a lock that is held
    answers   flock reports whether a lock is held, so that locks and leftovers of dead processes
              can be taken at once
"""

import os
from pathlib import Path

import pytest

_SITE = Path(__file__).resolve().parent / "brokensite"
#: The claims that each fault breaks.
_UNTRUE = {"refused": {"flock", "answers"}, "lying": {"flock"}}


def broken_environment(how: str) -> dict[str, str]:
    """Return an environment in which the flock of Python children is "refused" or "lying"."""
    path = os.pathsep.join([str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "BROKEN_FLOCK": how, "PYTHONPATH": path}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--flock", choices=sorted(_UNTRUE), help="run with locks that fail")


def pytest_configure(config: pytest.Config) -> None:
    if how := config.getoption("--flock"):
        os.environ.update(broken_environment(how))
        from tests.stress.brokensite import sitecustomize  # noqa: F401


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    how = config.getoption("--flock")
    for item in items if how else ():
        marks = item.iter_markers("locks_work")
        if any(not mark.args or set(mark.args) & _UNTRUE[how] for mark in marks):
            item.add_marker(pytest.mark.skip(reason=f"claims that locks work; they are {how}"))
