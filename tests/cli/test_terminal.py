"""The command line on a terminal."""

import os
import re
import signal

import pytest

from tests.support.clitools import Screen
from tests.support.tars import make_tar


def test_a_terminal_shows_progress_and_gets_its_cursor_back(slow, bucket):
    words, short = ["prewarm", slow, f"s3://{bucket}/absent.tar"], {"SHARDCACHE_TIMEOUT": "1s"}
    with Screen(*words, environment=short) as screen:
        screen.read(until=r"big-0\.tar +\d+%")
        assert "\x1b[?25l" in screen.text  # the cursor is hidden
        screen.read(until=r"\x1b\[[39]\dm.*1/4 shards, 1 failed, [\d.]+ MB")
        screen.read(until=r"big-1\.tar  retry \d +\d+%")
        os.killpg(screen.command.process.pid, signal.SIGINT)
        text, code = screen.end()
    assert code == 130
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "Run the same command again" in text


def test_progress_has_the_units_of_all_commands(spec):
    # The rate is known when the second shard is complete, and they arrive one by one.
    command = ["prewarm", spec, "--limit-rate", "64KB", "--jobs", "1"]
    with Screen(*command) as screen:
        screen.read(until=r"[0-9] KB/s.*ETA")


def test_progress_distinguishes_shards_of_one_name(put, proxy):
    folders, data = ("imagenet-21k/training", "laion-aesthetics/training"), make_tar(0, 60, 70_000)
    urls = [put(f"datasets/{folder}/train-0000.tar", data) for folder in folders]
    proxy.pause(after=1_200_000)
    with Screen("prewarm", *urls, columns=60) as screen:
        for folder in folders:
            screen.read(until=rf"{folder[:15]}\S*/train-0000\.tar ")


@pytest.mark.parametrize("columns", [100, 60, 30])
def test_a_narrow_terminal_shortens_names_but_no_figures(run, warm, columns):
    with Screen("ls", environment={"NO_COLOR": "1"}, columns=columns) as screen:
        head, *rows, _ = screen.read().splitlines()
    assert head.split() == ["SHARD", "SIZE", "USED", "FETCHED", "STATE"] and len(rows) == len(warm)
    for url, row in zip(warm, rows, strict=True):
        figures = r"[\d.]+ KB\s+\w.+\w\s+[\d-]+ [\d:]+\s+ok"
        name = rf"s3:\S*…\S*{url[-6:]}" if columns == 60 else url
        assert re.fullmatch(rf"{name}\s+{figures}", row) and ("\t" in row) == (columns == 30)
    assert columns < 60 or max(map(len, [head, *rows])) <= columns


def test_a_terminal_confirms_removals(run, warm):
    for command, question, reply, result, expected in (
        (["rm", warm[0]], "Remove 1 shard, ", "n\n", "nothing was done", 1),
        (["clean", "--all"], "Remove every shard in ", "y\n", "removed 4 shards", 0),
    ):
        assert run("path", warm[0])[0] == 0
        with Screen(*command) as screen:
            screen.read(until=rf"{question}.*\[y/N\]")
            screen.type(reply)
            text, code = screen.end()
        assert result in text and code == expected
