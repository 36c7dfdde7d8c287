"""Records which rows of docs/failures.toml a run proved; a pytest plugin.

    pytest --reliability report.json

A test names its rows with ``@pytest.mark.failure("row-id", ...)``. An unknown
id is an error of the collection, so a table can never miss a renamed row.
"""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROWS = Path(__file__).resolve().parents[2] / "docs" / "failures.toml"

_PROPERTY = "failure rows"

#: row -> test without its parameters -> outcome -> how many
_found: dict[str, dict[str, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))


def row_ids() -> list[str]:
    return [row["id"] for row in tomllib.loads(ROWS.read_text("utf-8"))["row"]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reliability", metavar="FILE", help="write which failures were proven")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "failure(*ids): proves these rows of docs/failures.toml")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    known = set(row_ids())
    for item in items:
        for name in _rows_of(item):
            if name not in known:
                raise pytest.UsageError(f"{item.nodeid}: no row {name!r} in {ROWS}")


def _rows_of(item: pytest.Item) -> set[str]:
    return {name for mark in item.iter_markers("failure") for name in mark.args}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    # A test that fails in its set-up or its clean-up has failed.
    if report.when == "call" or report.outcome != "passed":
        # Along with the report, since the test may run in another process than this plugin's.
        report.user_properties.append((_PROPERTY, sorted(_rows_of(item))))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, rows in report.user_properties:
        if name == _PROPERTY:
            for row in rows:
                outcomes = _found[row][report.nodeid.split("[")[0]]
                outcomes[report.outcome] = outcomes.get(report.outcome, 0) + 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--reliability")
    if path and not hasattr(session.config, "workerinput"):
        Path(path).write_text(json.dumps(_found, indent=1, sort_keys=True), "utf-8")
