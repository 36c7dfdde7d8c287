"""Each command ends with each exit code that the README's table says, for the reason it says."""
# ruff: noqa: F401, F811  (fixtures are imported, and shadowed by arguments)

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardcache.cache import Cache
from shardcache.cli import demorun as demo
from shardcache.cli.invocation import Invocation
from shardcache.cli.main import _COMMANDS, ANY, EXIT_CODES, OTHER_CODES
from shardcache.errors import ConfigError
from tests.support.clitools import Command, data, run, slow, spec, wait_until, warm, written

CASES: dict[tuple[str, int], Callable] = {}


def case(command: str, code: int):
    """What makes a command end so: a function that gives its arguments."""

    def note(function):
        assert (command, code) not in CASES
        CASES[command, code] = function
        return function

    return note


@pytest.fixture
def world(run, warm, spec, bucket, s3, proxy, tmp_path, monkeypatch):
    """A cache with four shards, and what can be done to it."""
    monkeypatch.setenv("SHARDCACHE_ATTEMPTS", "1")
    with contextlib.ExitStack() as stack:
        yield SimpleNamespace(
            urls=warm,
            spec=spec,
            absent=f"s3://{bucket}/absent.tar",
            put=lambda name, content: s3.put(bucket, name, content) and f"s3://{bucket}/{name}",
            run=run,
            proxy=proxy,
            home=tmp_path,
            set=monkeypatch.setenv,
            patch=monkeypatch.setattr,
            stack=stack,
            cache=stack.enter_context(Cache(tmp_path / "cache", min_free=0)),
        )


REPORT = demo.DemoReport((demo.Step("x", 8, 1, 9, 9, 3, True, 1.5),), 16, 100, (1, 1), None)


def _demo(world, **changes):
    from dataclasses import replace

    world.patch(demo, "run", lambda **options: replace(REPORT, **changes))
    return []


# -- 0 and 1 -------------------------------------------------------------------------------

case("prewarm", 0)(lambda world: [world.spec])
case("ls", 0)(lambda world: [])
case("path", 0)(lambda world: [world.urls[0]])
case("rm", 0)(lambda world: ["-y", world.urls[0]])
case("pin", 0)(lambda world: [world.urls[0]])
case("unpin", 0)(lambda world: world.run("pin", world.urls[0]) and [world.urls[0]])
case("clean", 0)(lambda world: [])
case("verify", 0)(lambda world: [])
case("stats", 0)(lambda world: [])
case("top", 0)(lambda world: ["--count", "1", "--interval", "0.2"])
case("report", 0)(lambda world: ["-o", world.home / "report.html"])
case("recipe", 0)(lambda world: ["cron"])
case("config", 0)(lambda world: [])
case("dir", 0)(lambda world: [])
case("doctor", 0)(lambda world: [])
case("completion", 0)(lambda world: ["bash"])
case("demo", 0)(_demo)

case("prewarm", 1)(lambda world: [f"{world.urls[0]}*/nothing-*.tar"])
case("path", 1)(lambda world: [world.absent])
case("rm", 1)(lambda world: ["-y", world.absent])
case("unpin", 1)(lambda world: [world.urls[0]])
case("report", 1)(lambda world: ["-o", world.home / "none" / "report.html"])

# -- 3: some shards ------------------------------------------------------------------------

case("prewarm", 3)(lambda world: [world.spec, world.absent])


@case("verify", 3)
def _(world):
    world.proxy.close()
    return ["--remote"]


# -- 4: damage -----------------------------------------------------------------------------

case("prewarm", 4)(lambda world: ["--check", world.absent])
case("path", 4)(lambda world: ["--fetch", world.put("page.tar", b"<html>Sign in</html>" * 99)])
case("demo", 4)(lambda world: _demo(world, fetches_per_shard=(1, 2)))


@case("verify", 4)
def _(world):
    path = world.cache.entry(world.urls[1]).data
    path.chmod(0o600)
    path.write_bytes(b"x" * path.stat().st_size)
    return []


@case("doctor", 4)
def _(world):
    world.set("SHARDCACHE_MAX_SIZE", "much")
    return []


# -- 5: room -------------------------------------------------------------------------------


@case("prewarm", 5)
def _(world):
    world.set("SHARDCACHE_MAX_SIZE", "1kB")
    return [world.put("large.tar", world.cache.entry(world.urls[0]).data.read_bytes())]


@case("path", 5)
def _(world):
    return ["--fetch", *CASES["prewarm", 5](world)]


case("report", 5)(lambda world: ["-o", "/dev/full"])

# -- 6: busy -------------------------------------------------------------------------------


@case("rm", 6)
def _(world):
    world.stack.enter_context(world.cache.open(world.urls[0]))
    return ["-y", world.urls[0]]


@case("clean", 6)
def _(world):
    space = world.cache._here().home.space()
    world.stack.enter_context(space.sole_cleaner(wait=True))
    return ["--no-wait"]


@case("path", 6)
def _(world):
    """Another process fetches it, and comes to nothing."""
    url = world.put("hung.tar", world.cache.entry(world.urls[0]).data.read_bytes() * 99)
    world.proxy.pause(after=1 << 20)
    other = world.stack.enter_context(Command("prewarm", url, directory=world.cache.dir))
    world.stack.callback(world.proxy.resume)
    wait_until(lambda: list(world.cache.node_layout.partial.glob("*/progress")), other)
    world.set("SHARDCACHE_LOCK_TIMEOUT", "1s")
    return ["--fetch", url]


# -- the table -----------------------------------------------------------------------------


def end(run, world, command, code):
    arguments = CASES[command, code](world)
    found, out, err = run(command, *arguments)
    assert found == code, (command, out, err)
    assert "Traceback" not in err
    assert code in (0, 3, 4) or err.startswith("error: ")


@pytest.mark.parametrize(("command", "code"), sorted(case for case in CASES if case[1]))
def test_a_command_ends_with(run, world, command, code):
    end(run, world, command, code)


def test_every_command_ends_with_0(run, world):
    commands = [command for command, code in CASES if not code]
    for command in sorted(commands, key=lambda each: each == "rm"):  # it takes from the others
        end(run, world, command, 0)


def test_the_table_has_what_commands_end_with_and_no_more():
    assert set(OTHER_CODES) <= set(_COMMANDS)
    for command in _COMMANDS:
        documented = {*ANY, *OTHER_CODES.get(command, ())}
        tried = {code for name, code in CASES if name == command}
        assert documented - tried <= set(ANY) - {0}, command
        assert tried <= documented <= set(EXIT_CODES), command


#: Arguments with which a command is called at all.
LEAST = {
    "prewarm": ["s3://b/x.tar"],
    "path": ["s3://b/x.tar"],
    "rm": ["s3://b/x.tar"],
    "pin": ["s3://b/x.tar"],
    "unpin": ["s3://b/x.tar"],
    "recipe": ["cron"],
    "completion": ["bash"],
}


@pytest.fixture
def interruptible():
    """SIGINT as a terminal's programs have it: a test run in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("command", list(_COMMANDS))
def test_any_command_ends_with(run, monkeypatch, interruptible, command):
    """What may strike in every one of them: a signal, a disk, a word too many."""
    arguments = LEAST.get(command, [])
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with monkeypatch.context() as struck:
            struck.setattr(Invocation, "logging", lambda self, n=number: signal.raise_signal(n))
            found, _, err = run(command, *arguments)
        assert (found, err.strip()) == (code, "error: interrupted")

    def failing(self):
        raise OSError(errno.EIO, "Input/output error", "/local/nvme")

    with monkeypatch.context() as struck:
        struck.setattr(Invocation, "logging", failing)
        found, _, err = run(command, *arguments)
    assert (found, err) == (1, "error: /local/nvme: Input/output error\n")
    found, out, err = run(command, *arguments, "--no-such-option")
    assert (found, out) == (2, "")
    assert "--no-such-option" in err and f"'shardcache {command} --help'" in err
