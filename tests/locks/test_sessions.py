"""Sessions of live processes, and the processes that wait for a shard."""

import errno
import fcntl
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardcache.locks.keys import Holder
from shardcache.locks.sessions import Session, live_sessions, live_waits, remove_dead
from shardcache.urls import parse_url
from tests.support.caches import read
from tests.support.clitools import run_process
from tests.support.storetools import forked, layout_of, no_descriptor_left, refusing, wait_until
from tests.support.tars import make_tar

URL = "s3://lab/train-0000.tar"
KEY = parse_url(URL).key
DATA = make_tar(1, size=400_000)
WAITER = Holder(12, "node-7", 5, None, 1_000_010.0, url=URL)


@pytest.mark.locks_work
def test_sessions_of_live_and_stopped_processes_count(layout) -> None:
    def work(parent):
        mine = Session(layout, 1000.5), Session(layout, 0.0, (KEY, WAITER))
        parent.say({session.path.name for session in mine})
        parent.hear()

    with no_descriptor_left():
        young = Session(layout, 2000.0)
        with forked(work) as child:
            theirs = child.hear()
            child.kill(signal.SIGSTOP)
            assert sorted(live_sessions(layout)) == [1000.5, 2000.0]
            assert list(live_waits(layout)) == [(KEY, WAITER)]
            child.kill()
            assert list(live_waits(layout)) == [] and theirs < set(os.listdir(layout.sessions))
            assert live_sessions(layout) == [2000.0]
        remove_dead(layout)
        assert os.listdir(layout.sessions) == [young.path.name]
        young.close()
        young.close()
    assert live_sessions(layout) == os.listdir(layout.sessions) == []


def test_without_flock_a_new_session_of_an_old_job_is_live(layout, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOLCK, real=fcntl.flock))
    session = Session(layout, 1000.5)
    assert live_sessions(layout) == [1000.5]
    session.close()


def test_a_program_without_close_leaves_no_warning_and_no_session(tmp_path):
    (tmp_path / "a.tar").write_bytes(make_tar(1))
    program = """
import os, sys
from shardcache import Cache
cache = Cache(sys.argv[1] + "/cache", min_free=0, cache_local=True)
cache.fetch(sys.argv[1] + "/a.tar")
found = os.listdir(sys.argv[1] + "/cache/v1/sessions")
print(sum(name.endswith(".session") for name in found))
"""
    ended = run_process(tmp_path, python=[sys.executable, "-X", "dev", "-c", program])
    assert ended == (0, "1\n", "")
    assert os.listdir(tmp_path / "cache/v1/sessions") == []


@pytest.mark.locks_work
def test_invalid_records_of_waiting_processes_are_ignored(layout) -> None:
    session = Session(layout, 0.0, (KEY, WAITER))
    for text in (b"", b"{", b'{"pid": "12"}', b"[]", WAITER.encode().replace(b"node", b"\\u001b")):
        assert list(live_waits(layout)) == [(KEY, WAITER)]
        session.path.write_bytes(text)
        assert list(live_waits(layout)) == []
        session.path.write_bytes(WAITER.encode())
    session.close()


@pytest.mark.locks_work
def test_top_shows_waiting_processes_and_their_holders(make_cache, origin, monkeypatch, run):
    origin.objects[URL] = DATA

    def fetch(parent):
        make_cache(validate=lambda path: (parent.say(os.getpid()), parent.hear())).fetch(URL)

    with ThreadPoolExecutor() as pool, forked(fetch) as child:
        fetcher, me = child.hear(), os.getpid()
        monkeypatch.setenv("SHARDCACHE_RANK", "1")
        reading = pool.submit(read, cache := make_cache(), URL)
        wait_until(lambda: list(live_waits(layout_of(cache.dir))))
        command = ("top", "--count", "1", "--interval", "0.2")
        _, table = run(*command)[1].split("1 waiting process")
        _, titles, row, *_ = table.splitlines()
        assert titles.split() == ["SHARD", "TIME", "WAITS", "FOR", "PROCESS"]
        assert row.startswith(URL)
        assert f"rank 1, pid {me}" in row and f"pid {fetcher}" in row
        (found,) = json.loads(run(*command, "--json")[1])["waits"]
        assert (found["url"], found["rank"], found["pid"]) == (URL, 1, me)
        assert found["holder"]["pid"] == fetcher and found["seconds"] >= 0.4
        assert found["since"].endswith("+00:00")
        child.tell()
        assert reading.result() == DATA
    wait_until(lambda: not list(live_waits(layout_of(cache.dir))))
