"""The command line for tests: in this process, as a process, and on a terminal."""

import codecs
import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios

import pytest

from shardcache.cli.main import main
from tests.support.storetools import PATIENCE
from tests.support.tars import make_tar

SHARDS = 4


class Run:
    """Runs the command line in this process; a call returns exit code, stdout and stderr."""

    def __init__(self, capsys):
        self._capsys = capsys

    def __call__(self, *arguments):
        self._capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, *self._capsys.readouterr()

    def out(self, *arguments, code=0):
        """Check the exit code, and return stdout."""
        found = self(*arguments)
        assert found[0] == code, found
        return found[1]

    def err(self, *arguments, code=1):
        """Check the exit code, and return stderr."""
        found = self(*arguments)
        assert found[0] == code, found
        return found[2]

    def json(self, *arguments, code=0):
        return json.loads(self.out(*arguments, "--json", code=code))


@pytest.fixture
def run(capsys):
    return Run(capsys)


@pytest.fixture
def data(s3, bucket):
    """Shards in a bucket, by name."""
    made = {f"train-{n:04d}.tar": make_tar(n, 20) for n in range(SHARDS)}
    for name, content in made.items():
        s3.put(bucket, name, content)
    return made


@pytest.fixture
def spec(bucket, data, s3_environment):
    return f"s3://{bucket}/train-{{0000..{SHARDS - 1:04d}}}.tar"


@pytest.fixture
def warm(run, spec, bucket):
    """Fill the cache with all shards; returns their URLs."""
    assert run("prewarm", spec)[0] == 0
    return [f"s3://{bucket}/train-{n:04d}.tar" for n in range(SHARDS)]


@pytest.fixture
def orphan(warm, tmp_path):
    """The partial of a dead process that no reader can continue."""
    partial = tmp_path / "cache/v1/partial" / f"{'a' * 32}.{'b' * 24}.{'c' * 32}"
    partial.mkdir()
    (partial / "x.tar").write_bytes(b"x")
    return partial


def command(*arguments, **environment):
    """Run the command line without fixtures, in a fork too; returns exit code and all output."""
    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            code = main([str(argument) for argument in arguments])
    assert "Traceback" not in text.getvalue() or "-vv" in arguments
    return code, text.getvalue()


class Command:
    """The command in a process of its own."""

    def __init__(self, *arguments, directory=None, environment=(), python=None, **options):
        python = python or [sys.executable, "-m", "shardcache"]
        environ = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
        environ |= {"TERM": "xterm", **dict(environment)}
        if directory is not None:
            environ["SHARDCACHE_DIR"] = str(directory)
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(
            [*python, *map(str, arguments)], env=environ, text=True, **{**pipes, **options}
        )

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.process.kill()
        self.process.communicate()

    def end(self):
        out, err = self.process.communicate(timeout=2 * PATIENCE)
        return self.process.returncode, out, err


def run_process(*arguments, **options):
    with Command(*arguments, **options) as command:
        return command.end()


@pytest.fixture
def slow(put, bucket, proxy):
    """The spec of three shards whose downloads hang in the middle."""
    for number in range(3):
        put(f"big-{number}.tar", make_tar(number, 60, 70_000))
    proxy.pause(after=2_500_000)
    return f"s3://{bucket}/big-{{0..2}}.tar"


class Screen:
    """A command on a pseudo-terminal; ``text`` is its output so far."""

    def __init__(self, *arguments, columns=100, **options):
        self.leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), follower)
        self.command = Command(*arguments, **options, **streams, start_new_session=True)
        os.close(follower)
        self.text, self.decoder = "", codecs.getincrementaldecoder("utf-8")()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.command.__exit__()
        os.close(self.leader)

    def read(self, until=None):
        """Read until the pattern ``until`` matches, or to the end; returns all text."""
        while until is None or not re.search(until, self.text):
            readable, _, _ = select.select([self.leader], [], [], PATIENCE)
            assert readable, self.text
            try:
                chunk = os.read(self.leader, 65536)
            except OSError:  # EIO: the command has closed the terminal
                chunk = b""
            if not chunk:
                assert until is None, self.text
                break
            self.text += self.decoder.decode(chunk)
        return self.text

    def type(self, text):
        os.write(self.leader, text.encode())

    def end(self):
        """Read to the end; returns all text and the exit code."""
        return self.read(), self.command.process.wait(PATIENCE)
