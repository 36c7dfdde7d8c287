"""The console's formats and manners, and the display of a long run."""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from shardcache.cli.output import Console, short_date
from shardcache.cli.progress import Position, display


@dataclass(frozen=True, slots=True)
class Row:
    url: str
    size: int


TITLES = ["SHARD", "SIZE", "STATE"]
ROWS = [("s3://b/a.tar", "1.5 MB", "ok"), ("s3://b/longer.tar", "12 B", "damaged")]


def test_machines_get_raw_values(capsys):
    when = datetime(2024, 2, 29, 12, 0, 0, 5000, UTC)
    console = Console(json=True)
    console.data("for people")
    console.table(TITLES, ROWS)
    row = Row("s3://b/a.tar", 12)
    console.object("x", row, when=when, path=Path("/x"), no=None, rows=[row], why=OSError(5, "bad"))
    fields = {"url": "s3://b/a.tar", "size": 12}
    found = {**fields, "path": "/x", "no": None, "rows": [fields]}
    found |= {"schema": 1, "command": "x", "when": "2024-02-29T12:00:00.005+00:00"}
    found["why"] = {"type": "OSError", "message": "bad"}
    assert json.loads(capsys.readouterr().out) == found


def test_what_was_not_asked_for_is_not_printed(capsys):
    Console().object("x", {})
    Console(json=True).info("for people")
    Console(quiet=True).info("for people")
    Console(quiet=True).hint("hint")
    Console(quiet=True).warning("look")
    assert capsys.readouterr() == ("", "warning: look\n")


def test_no_value_can_steer_a_terminal_or_break_a_row(capsys):
    Console().table(TITLES, [("s3://b/\ta\nb\x1b[31m\udc80[red]:boom:", "", "")])
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith("s3://b/\\ta\\nb\\x1b[31m\\udc80[red]:boom:")
    Console().error("no\x1b[2J")
    assert capsys.readouterr().err == "error: no\\x1b[2J\n"


@pytest.mark.parametrize(
    ("color", "environment", "terminal", "colored"),
    [
        ("auto", {}, True, True),
        ("auto", {}, False, False),
        ("auto", {"NO_COLOR": "1"}, True, False),
        ("auto", {"NO_COLOR": ""}, True, True),
        ("auto", {"TERM": "dumb"}, True, False),
        ("always", {"NO_COLOR": "1"}, False, True),
        ("never", {}, True, False),
    ],
)
def test_when_there_is_colour(monkeypatch, capsys, color, environment, terminal, colored):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    console = Console(color=color)
    console.data(console.styled("x", "red", sys.stdout))
    console.table(TITLES, ROWS)
    assert all(("\x1b[" in part) is colored for part in capsys.readouterr().out.split("SHARD"))


def test_dates_are_short():
    now = datetime.now(UTC)
    assert re.fullmatch(r"\w{3} \d\d \d\d:\d\d", short_date(now - timedelta(hours=1)))
    assert re.fullmatch(r"\w{3} \d\d  \d{4}", short_date(now - timedelta(days=365)))


# -- progress ------------------------------------------------------------------


def test_without_a_terminal_a_line_comes_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr("shardcache.cli.progress.LINE_EVERY", 0.01)
    positions = itertools.count(0, 10)
    with display(Console(), lambda: {"": Position("1/4 shards", next(positions), 10**9)}):
        while not (printed := capsys.readouterr()).err:
            pass
    line = r"0%, 1/4 shards, [\d.]+ K?B/s, ETA \d+:\d\d:\d\d"
    assert re.fullmatch(line, printed.err.splitlines()[0]) and not printed.out
    for console in (Console(quiet=True), Console(no_progress=True)):
        with display(console, lambda: pytest.fail("nothing is shown")):
            pass
