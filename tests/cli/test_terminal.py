"""The command line as a process: streams, signals, terminals."""
# ruff: noqa: F401, F811  (fixtures are imported, and shadowed by arguments)

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.support.clitools import (
    Command,
    Screen,
    data,
    run,
    run_process,
    slow,
    spec,
    wait_until,
    warm,
    written,
)

# -- as a process --------------------------------------------------------------


def test_help_and_dir_import_nothing_heavy(tmp_path):
    code = (
        "import sys; from shardcache.cli.main import main\n"
        "for args in (['--help'], ['--dir', '/x', 'dir'], ['--dir', '/x', 'config']): main(args)\n"
        "heavy = {'botocore', 's3fs', 'webdataset', 'torch', 'rich', 'fsspec', 'tenacity'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stderr.strip() == "[]"


def test_without_a_terminal_there_is_no_escape_and_no_prompt(spec, bucket, tmp_path):
    directory = tmp_path / "cache"
    code, out, err = run_process("prewarm", spec, directory=directory)
    assert code == 0
    assert "\x1b" not in out + err
    code, out, err = run_process("rm", f"s3://{bucket}/train-0000.tar", directory=directory)
    assert code == 2
    assert "-y" in err
    code, out, err = run_process("ls", "--color", "always", directory=directory)
    assert "\x1b[1mSHARD" in out


def test_no_traceback_from_a_process(tmp_path):
    for arguments, expected in (
        (["--dir", "/dev/null/x", "prewarm", "s3://b/x.tar"], 2),
        (["prewarm", "ftp://x/y.tar"], 2),
        (["prewarm", "s3://b/{0..3.tar"], 2),
        (["path", "s3://b/x.tar"], 1),
        (["clean", "--min-free", "200%"], 2),
    ):
        code, _, err = run_process(*arguments, directory=tmp_path / "cache")
        assert code == expected, arguments
        assert "Traceback" not in err
        assert err.startswith("error: ")
        assert len(err.splitlines()) == 1


def test_a_reader_that_hangs_up_hears_no_complaint(warm, tmp_path):
    with Command("ls", directory=tmp_path / "cache") as command:
        command.process.stdout.close()
        assert command.process.wait(60) == 0
        assert command.process.stderr.read() == ""


def test_closed_streams_are_survived(warm, tmp_path):
    shell = f"exec {sys.executable} -m shardcache --dir {tmp_path / 'cache'} ls >&- 2>&-"
    assert subprocess.run(["sh", "-c", shell], stdin=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
def test_first_signal_leaves_partials_that_are_resumed(slow, proxy, tmp_path, number, code):
    directory = tmp_path / "cache"
    with Command("prewarm", slow, "-j", "2", directory=directory) as command:
        wait_until(lambda: list(directory.glob("v1/partial/*/progress")), command)
        wait_until(lambda: written(directory) >= 2 << 20, command)
        command.process.send_signal(number)
        ended, out, err = command.end()
    assert ended == code
    assert "3 not done because the run was interrupted" in out
    assert "run the same command" in err
    assert "Traceback" not in err
    kept = json.loads(run_process("ls", "--partial", "--json", directory=directory)[1])
    assert {partial["state"] for partial in kept["partials"]} == {"orphan"}
    proxy.resume()
    proxy.reset()
    code, out, _ = run_process("prewarm", slow, "--json", directory=directory)
    assert code == 0
    found = json.loads(out)
    total = sum(shard["size"] for shard in found["shards"])
    assert found["summary"]["received_bytes"] <= total - kept["summary"]["written_bytes"]


STUBBORN = """
import sys
from shardcache.cache import Cache
from shardcache.cli.main import main

Cache.cancel = lambda self: print("calling off", file=sys.stderr, flush=True)
sys.exit(main())
"""


def test_second_signal_ends_at_once(slow, tmp_path):
    directory = tmp_path / "cache"
    python = [sys.executable, "-c", STUBBORN]
    with Command("prewarm", slow, "--no-progress", directory=directory, python=python) as command:
        wait_until(lambda: list(directory.glob("v1/partial/*/progress")), command)
        command.process.send_signal(signal.SIGINT)
        assert "calling off" in command.process.stderr.readline()
        command.process.send_signal(signal.SIGTERM)
        code, out, err = command.end()
    assert code == 143
    assert "Warmed" not in out
    assert "run the same command" not in err


def test_terminal_shows_live_progress_and_colour(slow, proxy, tmp_path):
    with Screen("prewarm", slow, directory=tmp_path / "cache") as screen:
        screen.read(until=r"big-0\.tar +\d+%")
        assert "\x1b[?25l" in screen.text  # the cursor is hidden
        assert re.search(r"0/3.*MB.*ETA", screen.text)
        proxy.resume()
        screen.read(until="Warmed 3 of 3 shards")
        assert "\x1b[?25h" in screen.read()
        assert screen.command.process.wait(60) == 0


@pytest.mark.parametrize(
    ("environment", "options"),
    [({"TERM": "dumb"}, []), ({}, ["--no-progress"]), ({}, ["-q"])],
    ids=["dumb", "no-progress", "quiet"],
)
def test_terminal_without_progress(spec, tmp_path, environment, options):
    screen = Screen(
        "prewarm", spec, *options, directory=tmp_path / "cache", environment=environment
    )
    with screen:
        text = screen.read()
        assert screen.command.process.wait(60) == 0
    assert "\x1b" not in text


def test_no_color_leaves_the_progress_plain(slow, proxy, tmp_path):
    screen = Screen("prewarm", slow, directory=tmp_path / "cache", environment={"NO_COLOR": "1"})
    with screen:
        screen.read(until=r"big-0\.tar +\d+%")
        proxy.resume()
        text = screen.read()
    assert not re.search(r"\x1b\[[\d;]*(3[0-9]|9[0-7])[\d;]*m", text)


def test_terminal_is_asked_before_removing(warm, tmp_path):
    directory = tmp_path / "cache"
    with Screen("rm", warm[0], directory=directory) as screen:
        screen.read(until=r"Remove 1 shard, .*\[y/N\]")
        screen.type("n\n")
        screen.read()
        assert screen.command.process.wait(60) == 1
    with Screen("clean", "--all", directory=directory) as screen:
        screen.read(until=r"Remove every shard in .*\[y/N\]")
        screen.type("y\n")
        assert "removed 4 shards" in screen.read()
        assert screen.command.process.wait(60) == 0


def test_interrupt_on_a_terminal_gives_the_cursor_back(slow, tmp_path):
    with Screen("prewarm", slow, directory=tmp_path / "cache") as screen:
        screen.read(until=r"big-0\.tar +\d+%")
        os.killpg(screen.command.process.pid, signal.SIGINT)
        text = screen.read()
        assert screen.command.process.wait(60) == 130
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "run the same command to go on" in text
