"""The console's formats and manners, and the display of a long run."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shardcache.cli.output import Column, Console, counted, printable, short_date
from shardcache.cli.progress import Display, Position, Rate
from shardcache.units import format_bytes


@dataclass(frozen=True, slots=True)
class Row:
    url: str
    size: int
    state: str = "ok"


COLUMNS = [
    Column("url", "SHARD"),
    Column("size", "SIZE", format_bytes, right=True),
    Column("state", "STATE", style={"damaged": "red"}.get),
]
ROWS = [Row("s3://b/a.tar", 1_500_000), Row("s3://b/longer.tar", 12, "damaged")]


def show(console: Console, rows: list[Row] = ROWS) -> None:
    console.table("ls", "shard", COLUMNS, rows, summary={"shards": 2}, footer="2 shards")


def test_human_columns_are_aligned_and_end_in_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    show(Console())
    assert capsys.readouterr().out.splitlines() == [
        "SHARD                 SIZE   STATE",
        "s3://b/a.tar        1.5 MB   ok",
        "s3://b/longer.tar     12 B   damaged",
        "2 shards",
    ]
    show(Console(color="always"))
    out = capsys.readouterr().out
    assert "\x1b[31mdamaged" in out and "\x1b[1mSHARD" in out


def test_machines_get_raw_values(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"url": "s3://b/a.tar", "size": 1_500_000, "state": "ok"},
        {"url": "s3://b/longer.tar", "size": 12, "state": "damaged"},
    ]
    show(Console(format="json"))
    whole = {"schema": 1, "command": "ls", "shards": rows, "summary": {"shards": 2}}
    assert json.loads(capsys.readouterr().out) == whole
    show(Console(format="jsonl"))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [{"schema": 1, "type": "shard", **row} for row in rows]
    assert lines[2:] == [{"schema": 1, "type": "summary", "shards": 2}]
    when = datetime(2024, 2, 29, 12, 0, 0, 5000, UTC)
    Console(format="json").record("x", {"when": when, "path": Path("/x"), "no": None}, "-")
    found = json.loads(capsys.readouterr().out)
    assert (found["when"], found["path"]) == ("2024-02-29T12:00:00.005+00:00", "/x")


def test_what_was_not_asked_for_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(format="json")
    console.said("for people")
    console.line("shard", {"x": 1})
    Console(quiet=True).said("for people")
    Console(quiet=True).hint("hint")
    assert capsys.readouterr() == ("", "")
    Console(quiet=True).warning("look")
    Console(quiet=True).error("bad")
    assert capsys.readouterr() == ("", "warning: look\nerror: bad\n")


def test_no_value_can_steer_a_terminal_or_break_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    show(Console(), [Row("s3://b/\ta\nb\x1b[31m\udc80[red]:boom:", 1)])
    assert (
        capsys.readouterr()
        .out.splitlines()[1]
        .startswith("s3://b/\\ta\\nb\\x1b[31m\\udc80[red]:boom:   ")
    )
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
def test_when_there_is_colour(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    color: str,
    environment: dict[str, str],
    terminal: bool,
    colored: bool,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    console = Console(color=color)
    console.data(console.styled("x", "red", sys.stdout))
    show(console)
    assert all(("\x1b[" in part) is colored for part in capsys.readouterr().out.split("SHARD"))


def test_words() -> None:
    assert (counted(1, "shard"), counted(1848, "shard")) == ("1 shard", "1,848 shards")
    assert printable("ok é") == "ok é"
    now = datetime(2024, 11, 21, 9, 0).timestamp()
    assert short_date(now - 3600, now) == "Nov 21 08:00"
    assert short_date(now - 365 * 86400, now) == "Nov 22  2023"


# -- progress ------------------------------------------------------------------


def test_a_rate_is_of_the_last_seconds() -> None:
    rate = Rate()
    assert (rate.update(0.0, 0), rate.update(1.0, 1000)) == (0.0, 1000.0)
    for second in range(2, 20):
        rate.update(float(second), 1000)
    assert rate.update(20.0, 1000) == 0.0


def test_a_position_is_a_line() -> None:
    assert Position.of(28, 100, 0.5, ["2/9 shards"]).line() == "28%, 2/9 shards, ETA 0:02:24"
    assert Position.of(0, 0, 0.0, ["0/0 shards"]).line() == "0%, 0/0 shards, ETA -:--:--"
    assert Position(None, ["looking"]).line() == "looking"


def test_without_a_terminal_a_line_comes_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcache.cli.progress.LINE_EVERY", 0.01)
    with Display(Console(), lambda now: Position.of(1, 4, 0.0, ["1/4 shards"])):
        while not (printed := capsys.readouterr()).err:
            pass
    assert printed.err.splitlines()[0] == "25%, 1/4 shards, ETA -:--:--" and not printed.out
    for console in (Console(quiet=True), Console(progress=False)):
        with Display(console, lambda now: pytest.fail("somebody looked")):
            pass
