"""Forked processes that fetch for a prewarm: what they share, and how they and their parent end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardcache import forks
from shardcache.cache import Cache
from shardcache.cli.demo import S3Server
from shardcache.errors import FetchCancelledError, IntegrityError, ShardNotFoundError
from shardcache.fetch.blocks import FetchStatus
from shardcache.prewarm import crew as module
from shardcache.prewarm.crew import Crew, suitable
from shardcache.prewarm.fill import Outcome, Planned, Started, Stopped, prewarm
from tests.support.clitools import Command, run_process, slow, written
from tests.support.proxy import Proxy
from tests.support.storetools import children, no_descriptor_left, wait_until
from tests.support.tars import make_tar

__all__ = ["slow"]  # a fixture

HOME = Path(__file__).resolve().parents[2]


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Twelve shards on a mount that is cached."""
    (tmp_path / "data").mkdir()
    for number in range(12):
        (tmp_path / "data" / f"{number:02d}.tar").write_bytes(make_tar(number, members=4))
    return [f"file://{path}" for path in sorted((tmp_path / "data").iterdir())]


def opened(tmp_path: Path, **options: Any) -> Cache:
    return Cache(tmp_path / "cache", cache_local=True, min_free=0, **options)


@pytest.fixture(autouse=True)
def no_child_left() -> Any:
    before = children()
    yield
    assert children() <= before


def by_process(tmp_path: Path, then: Callable[[Path], None] = lambda path: None) -> Any:
    """A validate hook that notes in which process it was called for which shard."""

    def validate(path: Path) -> None:
        with (tmp_path / "processes").open("a") as file:
            file.write(f"{os.getpid()} {path.name}\n")
        then(path)

    return validate


def processes(tmp_path: Path) -> list[tuple[int, str]]:
    lines = (tmp_path / "processes").read_text().splitlines()
    return [(int(pid), name) for pid, name in map(str.split, lines)]


def test_several_processes_fetch_each_shard_once(tmp_path: Path, shards: list[str]) -> None:
    def slowly(path: Path) -> None:
        time.sleep(0.05)

    with no_descriptor_left(), opened(tmp_path, validate=by_process(tmp_path, slowly)) as cache:
        report = prewarm(cache, shards, processes=2)
    assert [result.outcome for result in report.results] == [Outcome.FETCHED] * 12
    assert all(result.received == result.size for result in report.results)
    found = processes(tmp_path)
    assert sorted(name for _, name in found) == [f"{number:02d}.tar" for number in range(12)]
    assert len({pid for pid, _ in found} - {os.getpid()}) == 2
    for number, url in enumerate(shards):
        with cache.open(url) as stream:
            assert stream.read() == make_tar(number, members=4)
    again = prewarm(cache, shards, processes=2)
    assert again.cached == 12


@pytest.mark.locks_work("answers")
def test_their_connections_are_shares_of_the_configured_ones(
    tmp_path: Path, shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share what the user allowed; each at least one."""
    real, asked = Cache.with_connections, []

    def noted(cache: Cache, count: int) -> Cache:
        asked.append(count)
        return real(cache, count)

    def tell(path: Path) -> None:
        (tmp_path / f"of-{os.getpid()}").write_text(str(asked))

    monkeypatch.setattr(Cache, "with_connections", noted)
    for connections, share in ((9, 3), (2, 1)):
        cache = opened(tmp_path, connections=connections, validate=tell)
        prewarm(cache, shards, processes=3)
        cache.clean(everything=True)
        told = [path.read_text() for path in tmp_path.glob("of-*")]
        assert told and all(f"{share}]" in text for text in told)
        for path in tmp_path.glob("of-*"):
            path.unlink()


def test_an_error_arrives_as_it_was_raised(tmp_path: Path, shards: list[str]) -> None:
    def refuse(path: Path) -> None:
        if path.name == "03.tar":
            raise ValueError("not this one")

    cache = opened(tmp_path, validate=refuse)
    absent = f"file://{tmp_path}/data/absent.tar"
    report = prewarm(cache, [*shards, absent], processes=2)
    assert report.fetched == 11
    refused, missing = report.results[3].error, report.results[12].error
    assert isinstance(refused, IntegrityError) and "not this one" in str(refused)
    assert refused.url == shards[3]  # type: ignore[attr-defined]
    assert isinstance(missing, ShardNotFoundError) and "absent.tar" in str(missing)


class Strange(Exception):
    """Cannot be unpickled: its arguments are not its own."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def test_an_error_that_cannot_travel_is_told_in_words(
    tmp_path: Path, shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def strange(self: Cache, shard: Any, status: Any) -> Any:
        raise Strange("very ", "strange")

    monkeypatch.setattr(Cache, "fetch_shard", strange)
    report = prewarm(opened(tmp_path), shards[:1], processes=2)
    error = report.results[0].error
    assert isinstance(error, OSError) and "Strange: very strange" in str(error)


def test_what_a_killed_process_had_is_fetched_by_others(
    tmp_path: Path, shards: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    own = os.getpid()

    def die(path: Path) -> None:
        if path.name == "05.tar" and os.getpid() != own and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    cache = opened(tmp_path, validate=by_process(tmp_path, die))
    report = prewarm(cache, shards, processes=2)
    # One that it had published already, without having said so, is there.
    assert report.fetched + report.cached == 12
    assert (tmp_path / "died").exists()
    [said] = [r.getMessage() for r in caplog.records if "was lost" in r.getMessage()]
    assert "SIGKILL" in said


def test_when_all_are_killed_this_process_fetches(tmp_path: Path, shards: list[str]) -> None:
    own = os.getpid()

    def die(path: Path) -> None:
        if os.getpid() != own:
            os.kill(os.getpid(), signal.SIGKILL)

    report = prewarm(opened(tmp_path, validate=by_process(tmp_path, die)), shards, processes=2)
    assert report.fetched == 12
    assert {name for pid, name in processes(tmp_path) if pid == own} == {
        f"{number:02d}.tar" for number in range(12)
    }


@pytest.mark.locks_work("answers")
def test_cancelling_the_cache_ends_their_fetches(
    s3: S3Server,
    bucket: str,
    proxy: Proxy,
    s3_environment: dict[str, str],
    tmp_path: Path,
) -> None:
    for number in range(3):
        s3.put(bucket, f"{number}.tar", make_tar(number, members=3000, size=700))
    urls = [f"s3://{bucket}/{number}.tar" for number in range(3)]
    proxy.pause(after=2_500_000)  # in the midst of the second one

    def on_event(event: Any) -> None:
        if isinstance(event, Started):
            last.append(event.status)
            if len(last) == 1:
                threading.Thread(target=call_off).start()

    def call_off() -> None:
        # Told by the processes that fetch.
        wait_until(lambda: sum(status.written for status in last) > 2_000_000)
        cache.cancel()

    last: list[FetchStatus] = []
    with Cache(tmp_path / "cache", min_free=0) as cache:
        report = prewarm(cache, urls, processes=2, jobs=2, on_event=on_event)
        assert report.stopped is Stopped.REQUESTED
        assert any(isinstance(result.error, FetchCancelledError) for result in report.results)
        proxy.resume()
        again = prewarm(cache, urls, processes=2)
        assert again.failed == 0 and all(url in cache for url in urls)
    assert sum(r.received for r in again.results) < sum(r.size or 0 for r in again.results)


def test_a_stop_ends_them(tmp_path: Path, shards: list[str]) -> None:
    """As Ctrl-C in a terminal, which all processes get and the parent answers for."""
    stop = threading.Event()

    def wait(path: Path) -> None:
        os.kill(os.getpid(), signal.SIGINT)  # must not end it
        time.sleep(0.05)

    def on_event(event: Any) -> None:
        if isinstance(event, Started) and event.shard.basename == "05.tar":
            stop.set()

    cache = opened(tmp_path, validate=by_process(tmp_path, wait))
    report = prewarm(cache, shards, processes=2, jobs=2, on_event=on_event, stop=stop)
    assert report.interrupted and report.fetched >= 4 and report.not_started > 0


def test_what_they_log_is_logged_here_and_a_warning_once(
    tmp_path: Path, shards: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def say(path: Path) -> None:
        logging.getLogger("users").warning("the same in %s", "every process")
        logging.getLogger("users").info("%s was seen", path.name)

    class Slow(logging.Handler):
        """Most of it is still to be read when the processes have nothing left to do."""

        def emit(self, record: logging.LogRecord) -> None:
            time.sleep(0.02)

    caplog.set_level(logging.INFO)
    users = logging.getLogger("users")
    users.addHandler(unhurried := Slow())
    try:
        prewarm(opened(tmp_path, validate=say), shards, processes=2)
    finally:
        users.removeHandler(unhurried)
    said = [record for record in caplog.records if record.name == "users"]
    texts = [record.getMessage() for record in said]
    assert len(texts) == 13
    assert texts.count("the same in every process") == 1
    assert sorted(set(texts))[:12] == [f"{number:02d}.tar was seen" for number in range(12)]
    assert all(record.process != os.getpid() for record in said)


def test_progress_arrives_while_a_shard_is_fetched(tmp_path: Path) -> None:
    path = tmp_path / "big.tar"
    path.write_bytes(make_tar(1, members=40, size=1 << 20))
    gate = tmp_path / "gate"

    def wait(path: Path) -> None:
        wait_until(gate.exists)

    cache = opened(tmp_path, validate=wait)
    status = FetchStatus()
    with Crew(cache, 2, 2) as crew:
        thread = threading.Thread(
            target=crew.fetch_shard, args=(cache.parse(f"file://{path}"), status)
        )
        thread.start()
        # All of it is there, and nothing more will be told before it was looked at.
        wait_until(lambda: status.written == path.stat().st_size)
        gate.touch()
        thread.join()
    assert status.written == status.size


def test_without_a_fork_to_be_had_it_goes_on(
    tmp_path: Path, shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refused)
    with no_descriptor_left(), opened(tmp_path) as cache:
        assert prewarm(cache, shards, processes=4).fetched == 12


def test_without_files_for_all_of_them_there_are_fewer(
    tmp_path: Path, shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = module.Pipe, []

    def pipe() -> Any:
        if len(made) == 5:  # the first one has its control and two lines, the second none
            raise OSError(24, "Too many open files")
        made.append(real())
        return made[-1]

    monkeypatch.setattr(module, "Pipe", pipe)
    with opened(tmp_path) as cache, Crew(cache, 2, 4) as crew:
        assert len(crew._members) == 1
        size, how = crew.fetch_shard(cache.parse(shards[0]), FetchStatus())
        assert how == "fetched" and size == len(make_tar(0, members=4))


def test_processes_are_there_before_anybody_is_told(tmp_path: Path, shards: list[str]) -> None:
    """Who is told may start a thread, beside which forking is not safe."""
    before = children()
    seen = []

    def on_event(event: Any) -> None:
        if isinstance(event, Planned):
            seen.append(len(children() - before))

    prewarm(opened(tmp_path), shards, processes=3, on_event=on_event)
    assert seen == [3]


def test_how_many_are_suitable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(forks, "_LARGE", 1 << 50)
    assert [suitable(n, 0) for n in (0, 31, 64, 100, 10_000)] == [1, 1, 2, 3, 8]
    assert [suitable(1, n << 30) for n in (1, 4, 7, 10_000)] == [1, 2, 3, 8]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert suitable(10_000, 0) == 2
    monkeypatch.setattr(forks, "_LARGE", 1 << 20)  # less than any Python has
    assert suitable(10_000, 0) == 1
    monkeypatch.setattr(forks, "_LARGE", 1 << 50)
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert suitable(10_000, 0) == 1


PARENT = """
import os, sys, time
from pathlib import Path
from shardcache import Cache
def wait(path):
    Path(sys.argv[1], f"child-{os.getpid()}").touch()
    while os.getppid() == parent:
        time.sleep(0.05)
parent = os.getpid()
cache = Cache(Path(sys.argv[1], "cache"), cache_local=True, min_free=0, validate=wait)
cache.prewarm([f"file://{p}" for p in sorted(Path(sys.argv[1], "data").iterdir())], processes=2)
"""


@pytest.mark.locks_work("answers")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
def test_a_command_that_is_interrupted_leaves_no_process_and_can_go_on(
    slow: str, proxy: Proxy, tmp_path: Path, number: int, code: int
) -> None:
    """As in a terminal, where all of its processes get the signal."""
    directory = tmp_path / "cache"
    asked = ["prewarm", slow, "-j", "2", "--processes", "2"]
    with Command(*asked, directory=directory, start_new_session=True) as command:
        wait_until(lambda: written(directory) >= 2 << 20)
        members = children(command.process.pid)
        assert len(members) == 2
        os.killpg(command.process.pid, number)
        ended, _, err = command.end()
    assert ended == code and "Traceback" not in err
    assert not any(map(is_alive, members))
    before = written(directory)
    assert before > 1 << 20
    proxy.resume()
    ended, out, err = run_process(*asked, "--json", directory=directory)
    assert ended == 0, err
    found = json.loads(out)
    assert sum(shard["received_bytes"] for shard in found["shards"]) < sum(
        shard["size"] for shard in found["shards"]
    )


def test_they_end_when_their_parent_is_killed(tmp_path: Path, shards: list[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, tmp_path], cwd=HOME) as parent:
        try:
            wait_until(lambda: len(list(tmp_path.glob("child-*"))) == 2)
            pids = [int(path.name.removeprefix("child-")) for path in tmp_path.glob("child-*")]
            # One that does not go on must not keep the others.
            os.kill(max(pids), signal.SIGSTOP)
        finally:
            parent.kill()
    try:
        wait_until(lambda: not is_alive(min(pids)))
        os.kill(max(pids), signal.SIGCONT)
        wait_until(lambda: not any(map(is_alive, pids)))
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
