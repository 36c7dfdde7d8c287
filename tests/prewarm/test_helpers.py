"""A prewarm in two processes, started from a program without other threads."""

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from shardcache import AccessDeniedError, Cache
from shardcache.origins.http import WebOrigin
from shardcache.prewarm import Planned, Started, prewarm
from tests.support.storetools import PATIENCE, together, wait_until
from tests.support.tars import make_tar
from tests.support.webservers import answer, part_of

NAMES = [f"{number:02}.tar" for number in range(12)]


@pytest.fixture
def urls(put):
    return [put(name, make_tar(number)) for number, name in enumerate(NAMES)]


@pytest.fixture
def hundred(serve):
    """A hundred URLs, for which a prewarm forks a helper."""
    server = serve(lambda head: b"".join(part_of(make_tar(0), head)), most=1000)
    return [f"{server.url}/{number:03}.tar" for number in range(100)]


def helpers():
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    return [int(pid) for pid in children.read_text().split()]


def run(directory, urls, act=lambda stop: None, jobs=4, at_least=1, processes=2):
    """Prewarm in a new process, which calls ``act`` when the first shard has started.

    No shard is complete before ``at_least`` processes have downloaded one; with 0, the processes
    are not counted.

    Returns the outcomes, why the prewarm stopped, and the numbers of helpers that it forked and of
    processes that have downloaded.
    """
    pids = Path(f"{directory}.pids")
    pids.write_text("")

    def note(shard):  # runs in the process that downloads the shard
        with pids.open("a") as file:
            print(os.getpid(), file=file)
        wait_until(lambda: len(set(pids.read_text().split())) >= at_least)

    def work(number):
        stop, seen, forks = threading.Event(), [], []

        def on_event(event):
            if isinstance(event, Planned):
                forks.extend(helpers())
            elif isinstance(event, Started) and not seen:
                seen.append(event)
                act(stop)

        with Cache(directory, validate=note if at_least else None) as cache:
            options = {"jobs": jobs, "processes": processes, "on_event": on_event, "stop": stop}
            report = prewarm(cache, urls, **options)
        assert helpers() == []
        outcomes = [str(result.outcome) for result in report.results]
        return outcomes, report.stopped, len(forks), len(set(pids.read_text().split()))

    return together(1, work)[0]


def test_two_processes_share_the_work(tmp_path, urls, proxy):
    absent = urls[0].replace("00.tar", "absent.tar")
    outcomes, _, *processes = run(tmp_path, [*urls[:3], absent, *urls[3:]], at_least=2)
    assert outcomes == ["fetched"] * 3 + ["failed"] + ["fetched"] * 9 and processes == [1, 2]
    assert run(tmp_path, urls)[2] == 0  # all are cached
    assert proxy.fetches() == {url.removeprefix("s3://"): 1 for url in urls}


@pytest.mark.parametrize("logger", [None, "shardcache.origins.retry"])
def test_a_large_prewarm_uses_two_processes_and_logs_each_failure_once(tmp_path, serve, logger):
    log, failed = tmp_path / "log", set()

    def respond(head):
        path = head.split()[1]
        if path not in failed:
            failed.add(path)
            return answer("503 Service Unavailable")
        return b"".join(part_of(make_tar(0), head))

    server = serve(respond, most=1000)
    logging.getLogger(logger).addHandler(handler := logging.FileHandler(log))
    try:
        names = [f"{server.url}/{number:03}.tar" for number in range(100)]
        outcomes, _, *processes = run(tmp_path / "cache", names, processes=None, at_least=0)
    finally:
        logging.getLogger(logger).removeHandler(handler)
    assert set(outcomes) == {"fetched"} and processes == [1, 0]
    lines = log.read_text().splitlines()
    assert {sum(name in line for line in lines) for name in names} == {1}


@pytest.mark.parametrize("seconds", [0.0003, 0.001, 0.003])
def test_a_signal_during_forks_neither_hangs_nor_loses_shards(tmp_path, hundred, seconds):
    def on_alarm(*args):
        raise TimeoutError("too late")

    def work(_):
        signal.signal(signal.SIGALRM, on_alarm)
        with Cache(tmp_path / "cache") as cache:
            with contextlib.suppress(TimeoutError):  # Python ignores it in some places
                os.register_at_fork(before=lambda: signal.setitimer(signal.ITIMER_REAL, seconds))
                assert cache.prewarm(hundred).fetched == 100
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert helpers() == []
            report = cache.prewarm(hundred, processes=1)
            return report.fetched + report.cached

    assert together(1, work) == [100]


@pytest.mark.parametrize(
    ("start", "most"),
    [
        (lambda cache, url: cache.open(url).close(), 1),  # which counts in the background
        (lambda cache, url: faulthandler.dump_traceback_later(PATIENCE), 1),  # in a native thread
        (lambda cache, url: threading.Thread(target=time.sleep, args=[3], daemon=True).start(), 0),
        # as a worker of a DataLoader, which may have no children
        (lambda cache, url: multiprocessing.current_process()._config.update(daemon=True), 0),
    ],
    ids=["threads of shardcache", "a native thread", "a thread of the program", "a daemon"],
)
def test_only_threads_of_the_program_and_daemons_forbid_helpers(tmp_path, hundred, start, most):
    def work(_):
        forks, options = [], {"processes": 2}
        options["on_event"] = lambda event: forks.append(len(helpers()))
        with Cache(tmp_path / "cache") as cache:
            start(cache, hundred[0])
            report = prewarm(cache, hundred[:9], **options)
            faulthandler.cancel_dump_traceback_later()
            return forks[0], report.failed

    assert together(1, work) == [(most, 0)]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_slow_shard_delays_no_other_and_helpers_have_the_secrets(tmp_path, serve, processes):
    """The second process or thread takes all other shards, instead of a fixed share."""
    query = "X-Amz-Algorithm=a&X-Amz-Credential=b&X-Amz-Signature=c&token=d"
    others, finished, all_others = set(), [], threading.Event()

    def respond(head):
        if query not in head:
            return answer("403 Forbidden")
        path = head.split()[1]
        if "/00.tar" in path:
            finished.append(all_others.wait(PATIENCE / 6))
        else:
            others.add(path)
            if len(others) == len(NAMES) - 1:
                all_others.set()
        return b"".join(part_of(make_tar(0), head))

    server = serve(respond, most=100)
    urls = [f"{server.url}/{name}?{query}" for name in NAMES]
    outcomes, *_, downloaded = run(tmp_path, urls, jobs=2, processes=processes)
    assert outcomes == ["fetched"] * len(NAMES) and finished == [True] and downloaded == processes


def test_refusals_of_a_helper_alone_end_nothing(tmp_path, hundred):
    def work(_):
        owner, real = os.getpid(), WebOrigin.open

        def only_for_owner(*args):
            if os.getpid() != owner:
                raise AccessDeniedError("not here")
            time.sleep(0.05)
            return real(*args)

        WebOrigin.open = only_for_owner
        with Cache(tmp_path / "cache") as cache:
            report = prewarm(cache, hundred[:20], jobs=4, processes=2)
        return report.failed, report.stopped, report.not_started

    failed, stopped, left = together(1, work)[0]
    assert 3 <= failed < 10 and (stopped, left) == (None, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_owner_downloads_the_shards_of_a_lost_helper(tmp_path, urls, set_variables, number):
    set_variables(SHARDCACHE_STALE_AFTER=1)
    outcomes, stopped, *_ = run(tmp_path, urls, lambda stop: os.kill(helpers()[0], number))
    assert stopped is None and set(outcomes) <= {"fetched", "coalesced", "cached"}


def test_a_prewarm_goes_on_after_all_processes_were_stopped(tmp_path, urls, proxy, monkeypatch):
    monkeypatch.setenv("SHARDCACHE_STALE_AFTER", "1")

    def act(stop):
        everyone = " ".join(map(str, [*helpers(), os.getpid()]))
        script = f"(kill -STOP {everyone}; sleep 2.5; kill -CONT {everyone}) &"
        subprocess.run(["sh", "-c", script], check=True)

    proxy.pause(after=8_000)
    threading.Timer(4, proxy.resume).start()
    outcomes, stopped, _, downloaded = run(tmp_path, urls, act)
    assert (set(outcomes), stopped, downloaded) == ({"fetched"}, None, 2)


@pytest.mark.parametrize("freeze", [False, True])
def test_a_stop_ends_all_processes_even_a_frozen_one(tmp_path, urls, proxy, freeze, monkeypatch):
    monkeypatch.setattr("shardcache.prewarm.run._CANCEL_TIMEOUT", 0.5)

    def act(stop):
        if freeze:
            os.kill(helpers()[0], signal.SIGSTOP)
        stop.set()

    proxy.pause(after=8_000)  # a listing passes, a shard does not
    outcomes, stopped, *_ = run(tmp_path, urls, act)
    assert stopped == "requested" and "fetched" not in outcomes
    proxy.resume()
    assert set(run(tmp_path, urls)[0]) == {"fetched"}
