"""Runs chosen tests against a changed copy of the package: what the mutation gate is built on.

A `Lab` copies ``shardcache`` and ``tests`` into a directory of its own (the tests too: pytest
puts the directory above a test package first on the path, where the real package lies), changes
a file there, runs tests, and puts the file back.

The tests run in children of one server process that has imported pytest and the libraries, but
nothing of ours: a run costs a fork instead of a second of imports. When a run is over, whatever it
started is killed: a mutant may leave anything behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Lab", "Run"]

ROOT = Path(__file__).resolve().parents[2]
#: What a test needs of the tree.
_COPIED = ("shardcache", "tests", "docs/failures.toml", "pyproject.toml")
#: What tests and package import anyway, and takes long.
_PRELOADED = (
    "asyncio", "botocore.httpsession", "botocore.session", "click", "concurrent.futures",
    "email.message", "filelock", "fsspec", "http.server", "hypothesis.extra.pytestplugin",
    "hypothesis.stateful", "hypothesis.strategies", "multiprocessing.connection", "pytest",
    "pytest_timeout", "rich.console", "tenacity", "unittest.mock", "urllib3", "xxhash",
)  # fmt: skip
_PR_SET_CHILD_SUBREAPER = 36
#: A mutant may loop: what it allocates, and how large a file it writes, is bounded.
_MEMORY_BYTES = 4 << 30
_FILE_BYTES = 256 << 20
#: Seconds that starting the server may take on a busy machine.
_START = 120.0


@dataclass(frozen=True, slots=True)
class Run:
    """What a run of tests said.

    Attributes:
        outcome: ``green``, ``red`` (a test failed), ``timeout``, or ``broken``: the tests could
            not even be collected, or nothing was run.
        failed: the tests that failed.
        seconds: test -> how long it took, of those that passed.
        package: the file of the package that was tested.
        log: what pytest printed.
    """

    outcome: str
    failed: tuple[str, ...]
    seconds: dict[str, float]
    package: str
    log: str


class Lab:
    """A copy of the tree and a server beside it.

    Args:
        directory: must not exist; removed by `close`.
        source: the tree to copy.
    """

    def __init__(self, directory: Path, source: Path = ROOT) -> None:
        self.directory = directory
        self.tree = directory / "tree"
        for name in _COPIED:
            to = self.tree / name
            to.parent.mkdir(parents=True, exist_ok=True)
            if (source / name).is_dir():
                # Times are kept, so that the byte code of an unchanged file stays valid.
                shutil.copytree(source / name, to, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source / name, to)
        # Nor may a run within a run be measured, or take options of the outer one.
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("COV", "PYTEST_"))}
        self.environment = {
            **clean,
            "PYTHONPATH": str(self.tree),
            "PYTHONDONTWRITEBYTECODE": "",
            # The editable install must not be what is tested, nor what children import.
            "PYTHONSAFEPATH": "1",
        }
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.stress.mutationlab"],
            cwd=self.tree,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._number = 0

    def close(self) -> None:
        """End the server and remove the copy."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with contextlib.suppress(OSError):
            self._server.stdin.close()
        try:
            self._server.wait(30)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._server.stdout.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextlib.contextmanager
    def changed(self, texts: Mapping[str, str]) -> Iterator[None]:
        """Modules of the copy have other texts while the context lasts."""
        with contextlib.ExitStack() as stack:
            for name, text in texts.items():
                path = self.tree / "shardcache" / name
                stack.callback(_restore, path, path.read_bytes(), path.stat().st_mtime_ns)
                path.write_text(text, "utf-8")
            yield

    def run(
        self,
        tests: Sequence[str],
        *,
        timeout: float,
        keep_bytecode: bool = False,
        stop: bool = True,
        options: Sequence[str] = (),
    ) -> Run:
        """Run tests in the copy, in their order.

        Args:
            tests: names for pytest.
            timeout: seconds for all of it.
            keep_bytecode: whether to write byte code; only while nothing is changed.
            stop: end at the first that fails.
            options: further ones of pytest.
        """
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._number += 1
        place = self.directory / f"run{self._number}"
        place.mkdir()
        request = {
            "place": str(place),
            "timeout": timeout,
            "bytecode": keep_bytecode,
            "args": [
                *("-p", "no:cacheprovider", "-p", "no:xdist", "-q", "--tb=short", "--no-header"),
                *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # imported before: that is it
                *("--basetemp", str(place / "tmp"), *(["-x"] if stop else []), *options, *tests),
            ],
        }
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        assert line, "the server of the lab died"
        timed_out = json.loads(line)["timed_out"]
        try:
            result = json.loads((place / "result.json").read_bytes())
        except (OSError, ValueError):  # killed, or it broke off
            result = {"code": -1, "failed": [], "seconds": {}, "package": ""}
        log = (place / "log").read_text("utf-8", "replace")
        shutil.rmtree(place, ignore_errors=True)
        return Run(
            "timeout" if timed_out else _outcome(result),
            tuple(result["failed"]),
            result["seconds"],
            result["package"],
            log,
        )


def _restore(path: Path, data: bytes, modified: int) -> None:
    path.write_bytes(data)
    os.utime(path, ns=(modified, modified))  # or its byte code would not be used again


def _outcome(result: dict[str, Any]) -> str:
    if result["code"] == 0 and result["seconds"]:
        return "green"
    return "red" if result["code"] == 1 and result["failed"] else "broken"


class _Watch:
    """A pytest plugin: which tests failed, how long the others took, and of which package."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.failed: list[str] = []
        self.seconds: dict[str, float] = {}
        self.package = ""

    def pytest_collection_finish(self) -> None:
        import shardcache

        self.package = str(shardcache.__file__)
        assert Path(self.package).is_relative_to(self.tree), self.package

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
            self.seconds.pop(report.nodeid, None)
        elif report.passed and report.when == "call":  # a skipped test proves nothing
            self.seconds[report.nodeid] = report.duration


def _child(request: dict[str, Any]) -> None:
    import pytest

    os.setsid()
    log = os.open(Path(request["place"], "log"), os.O_WRONLY | os.O_CREAT, 0o600)
    for number, fd in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(fd, number)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    sys.dont_write_bytecode = not request["bytecode"]
    os.environ["PYTHONDONTWRITEBYTECODE"] = "" if request["bytecode"] else "1"
    watch = _Watch(Path.cwd())
    code = pytest.main(request["args"], plugins=[watch])
    result = {
        "code": int(code),
        "failed": watch.failed,
        "seconds": watch.seconds,
        "package": watch.package,
    }
    Path(request["place"], "result.json").write_text(json.dumps(result), "utf-8")


def _await(pid: int, timeout: float) -> bool:
    """Wait for a child; False if it was killed for taking too long."""
    end = time.monotonic() + timeout
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return False
        time.sleep(0.005)
    return True


def _kill_left() -> None:
    """Kill what the run left: orphans become children of this process (prctl(2))."""
    me = os.getpid()
    while True:
        children = Path(f"/proc/self/task/{me}/children").read_text("ascii").split()
        if not children:
            return
        for child in map(int, children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _find_only() -> None:
    """An example that fails is enough: hypothesis need not look for the smallest."""
    from hypothesis import Phase, settings

    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("find", database=None, phases=phases, derandomize=True, deadline=None)
    settings.load_profile("find")


def main() -> None:
    """The server: one run per line of standard input, until that ends."""
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("prctl: orphans of a mutant could not be killed")
    for name in _PRELOADED:
        importlib.import_module(name)
    _find_only()
    assert "shardcache" not in sys.modules
    for line in sys.stdin.buffer:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 3
            try:
                _child(request)
                status = 0
            finally:
                os._exit(status)
        done = _await(pid, request["timeout"])
        _kill_left()
        print(json.dumps({"timed_out": not done}), flush=True)


if __name__ == "__main__":
    main()
