"""The console's formats and manners, progress, filters, and what a prewarm says."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import struct
import sys
import termios
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shardcache.cli.filters import matches_glob, parse_filter, parse_sort
from shardcache.cli.output import Column, Console, counted, printable, short_date
from shardcache.cli.prewarm import plan_text, summary_text, tell_failures
from shardcache.cli.progress import Progress, Tally, progress_line
from shardcache.cli.statusline import Rate
from shardcache.errors import AccessDeniedError, ConfigError, ShardNotFoundError
from shardcache.fetch.transfer import FetchStatus
from shardcache.prewarm.plan import PrewarmPlan
from shardcache.prewarm.report import (
    Finished,
    Outcome,
    Planned,
    PrewarmReport,
    ShardResult,
    Started,
    Stopped,
    Stopping,
)
from shardcache.units import format_bytes
from shardcache.urls import parse_url

COLUMNS = [
    Column("url", "SHARD"),
    Column("size", "SIZE", format_bytes, right=True),
    Column("state", "STATE", style=lambda state: "red" if state == "damaged" else None),
    Column("key"),
]
ROWS = [
    {"url": "s3://b/a.tar", "size": 1_500_000, "state": "ok", "key": "k1"},
    {"url": "s3://b/longer.tar", "size": 12, "state": "damaged", "key": "k2"},
]


def show(console: Console) -> None:
    console.table("ls", "shard", COLUMNS, ROWS, summary={"shards": 2}, footer="2 shards")


def test_human_columns_are_aligned_and_end_in_a_summary(capsys):
    show(Console())
    assert capsys.readouterr().out.splitlines() == [
        "SHARD                 SIZE   STATE",
        "s3://b/a.tar        1.5 MB   ok",
        "s3://b/longer.tar     12 B   damaged",
        "2 shards",
    ]


def test_json_is_one_object_with_raw_values(capsys):
    show(Console(format="json"))
    assert json.loads(capsys.readouterr().out) == {
        "schema": 1,
        "command": "ls",
        "shards": ROWS,
        "summary": {"shards": 2},
    }


def test_json_lines_are_rows_and_a_summary(capsys):
    show(Console(format="jsonl"))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["type"] for line in lines] == ["shard", "shard", "summary"]
    assert all(line["schema"] == 1 for line in lines)
    assert lines[0]["size"] == 1_500_000


def test_tsv_has_a_header_and_raw_values(capsys):
    show(Console(format="tsv"))
    assert capsys.readouterr().out.splitlines() == [
        "url\tsize\tstate\tkey",
        "s3://b/a.tar\t1500000\tok\tk1",
        "s3://b/longer.tar\t12\tdamaged\tk2",
    ]


def test_no_value_can_break_a_row_or_a_terminal(capsys):
    rows = [{"url": "s3://b/\ta\nb\x1b[31m\udc80", "size": 1, "state": None, "key": None}]
    Console(format="tsv").table("ls", "shard", COLUMNS, rows, summary={})
    out = capsys.readouterr().out
    assert out.splitlines()[1] == "s3://b/\\ta\\nb\\x1b[31m\\udc80\t1\t\t"
    Console().table("ls", "shard", COLUMNS[:2], rows, summary={})
    assert "\x1b" not in capsys.readouterr().out


def test_times_are_rfc_3339_and_paths_are_text(capsys):
    row = {"when": datetime(2024, 2, 29, 12, 0, 0, 5000, UTC), "path": Path("/x"), "no": None}
    for form in ("json", "tsv"):
        Console(format=form).record("x", row, "-")
        out = capsys.readouterr().out
        assert "2024-02-29T12:00:00.005+00:00" in out
        assert "/x" in out


def test_only_the_asked_for_format_is_printed(capsys):
    console = Console(format="json")
    console.said("for people")
    console.line("shard", {"x": 1})
    assert capsys.readouterr().out == ""
    Console(quiet=True).said("for people")
    assert capsys.readouterr().out == ""


def test_quiet_keeps_warnings_and_errors(capsys):
    console = Console(quiet=True)
    console.hint("hint")
    console.warning("look")
    console.error("bad")
    captured = capsys.readouterr()
    assert captured.err == "warning: look\nerror: bad\n"
    assert captured.out == ""


def test_traceback_only_when_debugging(capsys):
    exn = ValueError("x")
    Console(verbosity=1).error("bad", exn)
    assert capsys.readouterr().err == "error: bad\n"
    Console(verbosity=2).error("bad", exn)
    assert "ValueError: x" in capsys.readouterr().err


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
def test_when_there_is_colour(monkeypatch, color, environment, terminal, colored):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    console = Console(color=color)
    assert console.colored(sys.stdout) is colored
    assert ("\x1b" in console.styled("x", "red", sys.stdout)) is colored


def test_states_are_coloured(capsys):
    show(Console(color="always"))
    out = capsys.readouterr().out
    assert "\x1b[31mdamaged\x1b[0m" in out
    assert "\x1b[1mSHARD" in out


@contextlib.contextmanager
def stdout(stream):
    """Everything goes there, past pytest's own capture."""
    before, sys.stdout = sys.stdout, stream
    try:
        yield
        stream.flush()
    finally:
        sys.stdout = before


def test_long_names_are_cut_in_the_middle_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    row = {"url": "s3://a-bucket/with/a/long/prefix/train-0001.tar", "size": 1, "state": "ok"}
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 42, 0, 0))
    with open(leader, "rb", buffering=0) as screen, open(follower, "w") as terminal:
        with stdout(terminal):
            Console().table("ls", "shard", COLUMNS, [row], summary={})
        shown = b""
        while shown.count(b"\n") < 2:
            shown += screen.read(10_000)
    line = shown.decode().splitlines()[1]
    assert len(line) <= 42
    assert line.startswith("s3://a-")
    assert "…" in line
    assert "train-0001.tar" in line


def test_wide_characters_keep_the_columns(capsys):
    rows = [
        {"url": "s3://b/数据.tar", "size": 1, "state": "ok"},
        {"url": "s3://b/1234.tar", "size": 1, "state": "ok"},
    ]
    Console().table("ls", "shard", COLUMNS, rows, summary={})
    _, wide, plain = capsys.readouterr().out.splitlines()
    assert len(plain) - len(wide) == 2  # two characters of two cells each


def test_a_reader_that_hangs_up_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    console = Console()
    with open(writer, "w") as pipe, stdout(pipe):
        for _ in range(3):
            console.data("x" * 100_000)


def test_words():
    assert counted(1, "shard") == "1 shard"
    assert counted(1848, "shard") == "1,848 shards"
    assert printable("ok é") == "ok é"
    now = datetime(2024, 11, 21, 9, 0).timestamp()
    assert short_date(now - 3600, now) == "Nov 21 08:00"
    assert short_date(now - 365 * 86400, now) == "Nov 22  2023"


# -- filters -------------------------------------------------------------------

ENTRIES = [
    {"url": "s3://b/a.tar", "size": 10**9, "used_age": 60.0, "state": "ok"},
    {"url": "s3://b/b.tar", "size": 2 * 10**9, "used_age": 86400.0 * 3, "state": "pinned"},
    {"url": "s3://b/c.tar", "size": 5, "used_age": None, "state": "damaged"},
]


@pytest.mark.parametrize(
    ("text", "passing"),
    [
        ("size>1GB", "b"),
        ("size >= 1GB", "ab"),
        ("size<10", "c"),
        ("size!=5", "ab"),
        ("used<2d", "a"),
        ("used>2d", "b"),
        ("state=pinned", "b"),
        ("state!=ok", "bc"),
        ("url==s3://b/a.tar", "a"),
    ],
)
def test_filters(text, passing):
    test = parse_filter(text)
    assert "".join(row["url"][7] for row in ENTRIES if test(row)) == passing


@pytest.mark.parametrize("text", ["", "size", "size>", "size>x", "sizes>1", "state>ok", "used<2q"])
def test_what_is_no_filter_is_refused(text):
    with pytest.raises(ConfigError, match="--filter"):
        parse_filter(text)


def test_order_keeps_unknown_values_last():
    for text, order in (
        ("size", "cab"),
        ("size:desc", "bac"),
        ("used", "abc"),
        ("used:desc", "bac"),
    ):
        assert "".join(row["url"][7] for row in parse_sort(text)(ENTRIES)) == order
    for text in ("", "sizes", "size:up"):
        with pytest.raises(ConfigError, match="--sort"):
            parse_sort(text)


def test_globs_match_whole_urls_or_their_last_part():
    url = "s3://lab/train/x-0001.tar"
    assert matches_glob("x-*.tar", url)
    assert matches_glob("s3://lab/*", url)
    assert not matches_glob("lab*", url)
    assert not matches_glob("X-*.tar", url)


# -- progress ------------------------------------------------------------------


def shards(count):
    return tuple(parse_url(f"s3://b/x-{n}.tar") for n in range(count))


def make_plan(count, *, sizes=None, cached=0, **more):
    wanted = shards(count)
    have = {s.key: type("E", (), {"size": 100})() for s in wanted[:cached]}
    known = {s.key: 1000 for s in wanted[cached:]} if sizes is None else sizes
    fields = {"free": 10**9, "evict": 0, "missing": 0, **more}
    return PrewarmPlan(wanted, have, known, **fields)


def test_rate_is_of_the_last_seconds():
    rate = Rate()
    assert rate.update(0.0, 0) == 0.0
    assert rate.update(1.0, 1000) == 1000.0
    for second in range(2, 20):
        rate.update(float(second), 1000)
    assert rate.update(20.0, 1000) == 0.0


def test_sums_follow_events_and_running_fetches():
    plan = make_plan(4, cached=1)
    tally = Tally(plan)
    tally.snapshot(0.0)
    for shard in plan.shards[:3]:
        status = FetchStatus()
        tally.note(Started(shard, status))
    tally.note(Finished(plan.shards[0], ShardResult("u", Outcome.CACHED, 100)))
    tally.note(Finished(plan.shards[1], ShardResult("u", Outcome.FETCHED, 1000, received=1000)))
    status.written = status.received = 500
    snapshot = tally.snapshot(1.0)
    assert (snapshot.done, snapshot.total) == (1, 3)
    assert (snapshot.bytes_done, snapshot.bytes_total) == (1500, 3000)
    assert snapshot.rate == 1500.0
    assert snapshot.eta == 1.0
    assert (snapshot.checked, snapshot.cached) == (1, 1)
    assert progress_line(snapshot) == "1/3 shards, 1.5 of 3.0 KB, 1.5 KB/s, ETA 0:00:01"


def test_unknown_sizes_are_supposed_to_be_like_the_known_ones():
    wanted = shards(4)
    tally = Tally(make_plan(4, sizes={s.key: 1000 for s in wanted[:2]}))
    assert tally.snapshot(0.0).bytes_total == 4000
    assert "about 4.0 KB" in progress_line(tally.snapshot(0.0))
    tally.note(Finished(wanted[3], ShardResult("u", Outcome.FETCHED, 4000)))
    snapshot = tally.snapshot(1.0)
    assert (snapshot.bytes_total, snapshot.estimated) == (8000, True)
    tally.note(Finished(wanted[2], ShardResult("u", Outcome.FAILED)))
    snapshot = tally.snapshot(2.0)
    assert (snapshot.bytes_total, snapshot.estimated, snapshot.failed) == (6000, False, 1)


def test_without_any_size_the_estimate_is_open():
    tally = Tally(make_plan(3, sizes={}))
    snapshot = tally.snapshot(0.0)
    assert snapshot.bytes_total is None
    assert snapshot.fraction == 0.0
    assert "ETA -:--:--" in progress_line(snapshot)


def test_a_run_of_hits_is_complete_from_the_start():
    snapshot = Tally(make_plan(2, cached=2)).snapshot(0.0)
    assert (snapshot.fraction, snapshot.eta) == (1.0, 0.0)
    assert "0 of 2 cached ones checked" in progress_line(snapshot)


def test_lines_come_now_and_then_where_nothing_is_redrawn(capsys, monkeypatch):
    monkeypatch.setattr("shardcache.cli.statusline.LINE_EVERY", 0.02)
    with Progress(Console()) as progress:
        progress(Planned(make_plan(2)))
        while not (said := capsys.readouterr().err):
            pass
    assert said.startswith("0/2 shards, ")


def test_no_progress_is_no_progress(capsys, monkeypatch):
    monkeypatch.setattr("shardcache.cli.statusline.LINE_EVERY", 0.001)
    for console in (Console(quiet=True), Console(progress=False)):
        with Progress(console) as progress:
            progress(Planned(make_plan(2)))
            assert progress._lines is None
    assert capsys.readouterr().err == ""


def test_live_display_shows_bar_and_running_shards(monkeypatch):
    from rich.console import Console as Terminal

    plan = make_plan(14, cached=1)
    progress = Progress(Console(progress=False))
    progress(Planned(plan))
    for number, shard in enumerate(plan.shards[:12]):
        status = FetchStatus(size=1000 if number else None, written=500, received=500)
        status.retries = 2 if number == 3 else 0
        progress(Started(shard, status))
    progress(Stopping(Stopped.DEADLINE))
    terminal = Terminal(width=90, color_system=None)
    with terminal.capture() as capture:
        terminal.print(progress._render())
    lines = capture.get().splitlines()
    assert "0/13" in lines[0]
    assert "stopping" in lines[0]
    assert "checked 0/1 cached" in lines[0]
    assert "x-0.tar" in lines[1]
    assert "checking" in lines[1]
    assert " 50%" in lines[1]
    assert "retry 2" in lines[2]
    assert lines[-1].strip() == "and 4 more"
    assert all(len(line) <= 90 for line in lines)


# -- what is said of a prewarm -------------------------------------------------


def test_plans_in_words():
    assert plan_text(make_plan(3)) == (
        "Need 3 shards, 3.0 KB: 0 cached, 3 to fetch (3.0 KB); free 1.0 GB  ok"
    )
    assert plan_text(make_plan(1, cached=1)) == ("Need 1 shard, 100 B: 1 cached, nothing to fetch")
    assert "free 1.0 GB, 5 B of older shards make room  ok" in plan_text(make_plan(2, evict=5))
    assert plan_text(make_plan(2, missing=7)).endswith("does not fit: 7 B too many")
    assert "sizes unknown" in plan_text(make_plan(2, sizes={}))
    partly = plan_text(make_plan(3, sizes={shards(1)[0].key: 9}))
    assert "at least 9 B" in partly
    assert "(9 B and 2 of unknown size)" in partly
    left = make_plan(3, missing=1, left_out=frozenset({shards(1)[0].key}))
    assert plan_text(left).endswith("1 do not fit and are left out")


def result(number, outcome, **more):
    return ShardResult(f"s3://b/x-{number}.tar", outcome, 1000, **more)


def test_summaries_in_words():
    results = (
        result(0, Outcome.CACHED),
        result(1, Outcome.FETCHED, received=1000, retries=1),
        result(2, Outcome.COALESCED),
        result(3, Outcome.LINKED),
        result(4, Outcome.FAILED, error=ValueError()),
        result(5, Outcome.NOT_STARTED),
        result(6, Outcome.CANCELLED),
        result(7, Outcome.LEFT_OUT),
    )
    report = PrewarmReport(make_plan(8), results, 2.0, Stopped.DEADLINE)
    assert summary_text(report) == (
        "Warmed 3 of 7 shards (3.0 KB) in 2.0 s, 500 B/s; 1 failed, 1 retried, "
        "1 fetched by other processes, 1 linked, 1 left out for want of room, "
        "2 not done because the deadline is over."
    )
    all_there = PrewarmReport(make_plan(1, cached=1), (result(0, Outcome.CACHED),), 0.1)
    assert summary_text(all_there) == "All 1 shard cached (100 B)."


def failures(count, stopped=None):
    denied = [
        result(n, Outcome.FAILED, error=AccessDeniedError(f"s3://b/x-{n}.tar: denied (403)"))
        for n in range(count)
    ]
    lost = result(90, Outcome.FAILED, error=ShardNotFoundError("s3://b/x-90.tar: not found (404)"))
    odd = result(91, Outcome.FAILED, error=OSError(28, "No space left on device"))
    return PrewarmReport(make_plan(1), (*denied, lost, odd), 1.0, stopped)


def test_one_reason_is_told_once(capsys):
    tell_failures(Console(), failures(9), None)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "  failed  s3://b/x-0.tar: denied (403)",
        "  failed  8 more for the same reason: x-1.tar, x-2.tar, x-3.tar, x-4.tar, x-5.tar, ...",
        "  failed  s3://b/x-90.tar: not found (404)",
        "  failed  s3://b/x-91.tar: the local disk failed: No space left on device",
        "  To accept that many failures, pass --max-failures 11.",
    ]
    tell_failures(Console(verbosity=1), failures(9), 3)
    assert len(capsys.readouterr().err.splitlines()) == 11


def test_a_quiet_run_that_ends_early_says_so(capsys):
    early = replace(
        failures(0), results=(result(1, Outcome.NOT_STARTED),), stopped=Stopped.DEADLINE
    )
    tell_failures(Console(quiet=True), early, None)
    assert capsys.readouterr().err == "warning: 1 shard not done because the deadline is over\n"
    tell_failures(Console(), replace(early, stopped=Stopped.REQUESTED), None)
    assert "run the same command" in capsys.readouterr().err
