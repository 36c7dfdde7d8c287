"""The console's formats and manners, and the display of a long run."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shardcache.cli.output import Console, short_date
from shardcache.cli.progress import Display, Position


@dataclass(frozen=True, slots=True)
class Row:
    url: str
    size: int


TITLES = ["SHARD", "SIZE", "STATE"]
ROWS = [("s3://b/a.tar", "1.5 MB", "ok"), ("s3://b/longer.tar", "12 B", "damaged")]


def test_human_columns_are_aligned(capsys):
    Console().table(TITLES, ROWS, right=["SIZE"])
    assert capsys.readouterr().out.splitlines() == [
        "SHARD                 SIZE   STATE",
        "s3://b/a.tar        1.5 MB   ok",
        "s3://b/longer.tar     12 B   damaged",
    ]


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
    Console(json=True).said("for people")
    Console(quiet=True).said("for people")
    Console(quiet=True).hint("hint")
    assert capsys.readouterr() == ("", "")
    Console(quiet=True).warning("look")
    Console(quiet=True).error("bad")
    assert capsys.readouterr() == ("", "warning: look\nerror: bad\n")


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
    now = datetime(2024, 11, 21, 9, 0).timestamp()
    assert short_date(now - 3600, now) == "Nov 21 08:00"
    assert short_date(now - 365 * 86400, now) == "Nov 22  2023"


# -- progress ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "line"),
    [
        (Position("2/9 shards", 28, 100), "28%, 2/9 shards, ETA -:--:--"),
        (Position("0/0 shards", 0, 0), "0%, 0/0 shards, ETA -:--:--"),
        (Position("looking"), "looking"),
    ],
)
def test_a_position_is_a_line(at, line):
    assert Display(Console(), lambda: at).lines() == [line]


def test_a_rate_is_of_the_last_seconds():
    clock = [0]
    done = lambda: Position("x", min(clock[0], 3) * 1000, 10_000, in_bytes=True)  # noqa: E731
    display, lines = Display(Console(), done, lambda: clock[0]), []
    for clock[0] in range(20):
        lines += display.lines()
    assert lines[2] == "20%, x, 1.0 KB/s, ETA 0:00:08"
    assert lines[-1] == "30%, x, 0 B/s, ETA -:--:--"


def test_without_a_terminal_a_line_comes_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr("shardcache.cli.progress.LINE_EVERY", 0.01)
    with Display(Console(), lambda: Position("1/4 shards", 1, 4)):
        while not (printed := capsys.readouterr()).err:
            pass
    assert printed.err.splitlines()[0] == "25%, 1/4 shards, ETA -:--:--" and not printed.out
    for console in (Console(quiet=True), Console(no_progress=True)):
        with Display(console, lambda: pytest.fail("somebody looked")):
            pass
