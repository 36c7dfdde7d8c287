"""Sessions of live processes."""

import errno
import fcntl
import os
import signal
import sys

import pytest

from shardcache.locks.sessions import Session, live_sessions, remove_dead
from tests.support.clitools import run_process
from tests.support.storetools import forked, no_descriptor_left, refusing
from tests.support.tars import make_tar


@pytest.mark.locks_work
def test_sessions_of_live_and_stopped_processes_count(layout) -> None:
    def work(parent):
        session = Session(layout, 1000.5)
        parent.say(session.path.name)
        parent.hear()

    with no_descriptor_left():
        young = Session(layout, 2000.0)
        with forked(work) as child:
            theirs = child.hear()
            child.kill(signal.SIGSTOP)
            assert sorted(live_sessions(layout)) == [1000.5, 2000.0]
            child.kill()
            assert theirs in os.listdir(layout.sessions)
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
