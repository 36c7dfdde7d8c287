"""Console output: escaping, colour and progress."""

import sys
import threading

import pytest

from shardcache.cli.output import Console, Position, display
from tests.support.storetools import PATIENCE


def test_values_are_escaped(capsys):
    name = "s3://b/\ta\nb\x1b[31m\udc80[red]:boom:"
    Console().table(["SHARD", "SIZE"], [(name, "1 B")])
    escaped = "s3://b/\\ta\\nb\\x1b[31m\\udc80[red]:boom:"
    assert capsys.readouterr().out == f"SHARD\tSIZE\n{escaped}\t1 B\n"
    Console().error("no\x1b[2J")
    assert capsys.readouterr().err == "error: no\\x1b[2J\n"


def test_a_terminal_gets_many_rows_as_lines(capsys):
    Console(color="always").table(["SHARD", "SIZE"], [("s3://b/a.tar", "1 B")] * 2000)
    assert capsys.readouterr().out.splitlines()[1] == "s3://b/a.tar\t1 B"


@pytest.mark.parametrize(
    ("color", "no_color", "term", "terminal", "colored"),
    [
        ("auto", "", "xterm", True, True),
        ("auto", "", "dumb", True, False),
        ("always", "1", "xterm", False, True),
        ("never", "", "xterm", True, False),
    ],
)
def test_when_there_are_colour_and_bars(
    monkeypatch, set_variables, capsys, color, no_color, term, terminal, colored
):
    set_variables(NO_COLOR=no_color, TERM=term)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    console = Console(color=color)
    assert console.live == (terminal and term != "dumb")
    console.data(console.styled("x", "red", sys.stdout))
    console.table(["SHARD"], [["s3://b/a.tar"]])
    assert all(("\x1b[" in part) is colored for part in capsys.readouterr().out.split("SHARD"))


@pytest.mark.parametrize("options", [{}, {"quiet": True}, {"no_progress": True}])
def test_without_a_terminal_progress_is_a_line_now_and_then(capsys, monkeypatch, options):
    monkeypatch.setattr("shardcache.cli.output.LINE_EVERY", 0.01)
    called = threading.Event()

    def positions():
        called.set()
        return {"": Position("1/4 shards", 0, 10**9)}

    with display(Console(**options), positions):
        assert called.wait(0.3 if options else PATIENCE) is not bool(options)
    assert capsys.readouterr().err[:13] == ("" if options else "1/4 shards 0%")
