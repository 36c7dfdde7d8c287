"""The line that says how far a long command is: on a terminal, in a log, from cron."""
# ruff: noqa: F401, F811  (fixtures are imported, and shadowed by arguments)

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.cli import statusline
from shardcache.cli.output import Console
from shardcache.cli.statusline import StatusLine, share_done
from shardcache.space.clean import CleanStatus
from shardcache.space.eviction import Reason, Removal
from shardcache.store.store import Entry, Store
from tests.support.clitools import run
from tests.support.storetools import PATIENCE, publish

SHARDS = 6


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of some shards, of which each takes its time to go."""
    with Cache(tmp_path / "cache", min_free=0) as cache:
        cache._here().coordinator()
        (store,) = cache.stores()
        for number in range(SHARDS):
            publish(store, f"s3://lab/{number}.tar", b"x" * 1000, used=1.0)
    real = Store.evict

    def slowly(self: Store, entry: Entry) -> bool:
        time.sleep(0.1)
        return real(self, entry)

    monkeypatch.setattr(Store, "evict", slowly)
    return tmp_path / "cache"


Run = Callable[..., tuple[int, str, str]]


def test_cleaning_many_says_now_and_then_how_far_it_is(
    run: Run, full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statusline, "LINE_EVERY", 0.02)
    code, out, err = run("--dir", full, "clean", "--all", "-y")
    assert (code, out.count("\n")) == (0, 2) and out.startswith("removed 6 shards, 6.0 KB")
    lines = err.splitlines()
    assert "\x1b" not in err
    shape = r"\d+%, (\d)/6 shards, [\d.]+ K?B of 6.0 KB, ETA .*"
    found = [m for line in lines if (m := re.fullmatch(shape, line))]
    others = {line for line in lines if not re.fullmatch(shape, line)}
    assert others <= {"looking for what is to go"}
    done = [int(m.group(1)) for m in found]
    assert done == sorted(done) and 0 < done[-1] <= SHARDS


@pytest.mark.parametrize("given", [["-q"], ["--no-progress"]])
def test_who_wants_no_progress_gets_none(
    run: Run, full: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    """Cron mails whatever is written."""
    monkeypatch.setattr(statusline, "LINE_EVERY", 0.02)
    code, out, err = run("--dir", full, *given, "clean", "--all", "-y")
    assert (code, err) == (0, "") and (out == "") == (given == ["-q"])


def test_on_a_terminal_one_line_is_drawn_again_and_gone_at_the_end(
    run: Run, full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statusline, "REDRAW_EVERY", 0.02)
    monkeypatch.setattr(Console, "live", True)
    code, _, err = run("--dir", full, "clean", "--all", "-y")
    drawn = err.split("\r")
    assert code == 0 and "\n" not in err
    assert any(re.match(r"\d+%, \d/6 shards.*ETA .*\x1b\[K", text) for text in drawn)
    assert drawn[-1] == "\x1b[K"


def test_lines_of_json_come_as_things_go(
    run: Run, full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[int] = []
    real = Console.line

    def line(self: Console, kind: str, record: dict[str, object]) -> None:
        if kind == "removal":
            said.append(len(list(full.glob("v1/objects/*/*/*"))))
        real(self, kind, record)

    monkeypatch.setattr(Console, "line", line)
    code, out, _ = run("--dir", full, "--format", "jsonl", "clean", "--all", "-y")
    found = [json.loads(text) for text in out.splitlines()]
    assert code == 0 and said == [5, 4, 3, 2, 1, 0]
    assert [one["type"] for one in found] == ["removal"] * SHARDS + ["summary"]
    assert {(one["size"], one["reason"]) for one in found[:-1]} == {(1000, "all")}
    assert found[-1]["removed"] == SHARDS


def test_a_json_document_has_everything_once(run: Run, full: Path) -> None:
    code, out, _ = run("--dir", full, "--json", "clean", "-n", "--all")
    found = json.loads(out)
    assert code == 0 and len(found["removals"]) == found["summary"]["removed"] == SHARDS


def test_several_tiers_are_one_clean() -> None:
    told: list[Removal] = []
    status = CleanStatus(listener=told.append)
    assert status.victims is None
    status.planned(3, 30)
    status.passed(10)
    status.planned(2, 20)
    assert (status.victims, status.victim_bytes, status.done, status.done_bytes) == (5, 50, 1, 10)
    status.went(removal := Removal("x", 10, Reason.ALL))
    assert told == [removal]


def test_nothing_is_written_once_it_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statusline, "LINE_EVERY", 0.001)
    asked = threading.Event()

    def text(now: float) -> str:
        asked.set()
        return "so far"

    with StatusLine(Console(), text):
        assert asked.wait(PATIENCE)
    assert "so far\n" in capsys.readouterr().err
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_how_far_it_is() -> None:
    assert share_done(1, 4, 0.5, ["1/4 shards"]) == "25%, 1/4 shards, ETA 0:00:06"
    assert share_done(0, 4, 0.0, []) == "0%, ETA -:--:--"
    assert share_done(0, 0, 0.0, ["x"]) == "0%, x, ETA -:--:--"
