"""Sessions: who uses the cache, since when, for as long as they live."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardcache.layout import Layout
from shardcache.locks.sessions import (
    Session,
    live_sessions,
)
from shardcache.store.root import make_root
from tests.support.storetools import (
    PATIENCE,
    Parent,
    forked,
    no_descriptor_left,
    refusing,
)
from tests.support.tars import make_tar


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return make_root(tmp_path / "cache", "test")


def oldest(layout: Layout) -> float | None:
    return min(live_sessions(layout), default=None)


def names(layout: Layout) -> list[str]:
    return sorted(os.listdir(layout.sessions))


@pytest.mark.locks_work("flock")
def test_the_oldest_session_counts(layout: Layout) -> None:
    assert oldest(layout) is None
    with no_descriptor_left():
        young, old = Session(layout, 2000.0), Session(layout, 1000.5)
        assert oldest(layout) == 1000.5
        old.close()
        old.close()
        assert oldest(layout) == 2000.0
        young.close()
    assert oldest(layout) is None
    assert names(layout) == []


@pytest.mark.locks_work("flock")
def test_a_dead_process_does_not_count_and_a_stopped_one_does(layout: Layout) -> None:
    def work(parent: Parent) -> None:
        session = Session(layout, 1000.0)
        parent.say(session.path.name)
        parent.hear()

    with forked(work) as child:
        name = child.hear()
        child.kill(signal.SIGSTOP)
        assert oldest(layout) == 1000.0
        child.kill()
        assert names(layout) == [name]
        assert oldest(layout) is None
    assert names(layout) == []


def test_a_session_that_cannot_be_asked_counts_as_live(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = layout.sessions / f"{'0' * 32}.session"
    path.touch()
    os.utime(path, (1000, 1000))
    concerns = lambda p, *a, **k: str(p) == str(path)  # noqa: E731
    monkeypatch.setattr(os, "open", refusing(errno.EACCES, when=concerns, real=os.open))
    assert oldest(layout) == 1000.0
    assert path.exists()


def test_a_cache_that_cannot_be_written_has_no_session_and_no_error(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("open", "utime"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, name, refusing(errno.ENOSPC, real=getattr(os, name)))
            with no_descriptor_left():
                Session(layout, 1000.0).close()
        assert names(layout) == []
    shutil.rmtree(layout.sessions)
    layout.sessions.touch()
    Session(layout, 1000.0).close()


def test_a_program_that_closes_nothing_ends_without_a_word_and_without_a_session(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.tar").write_bytes(make_tar(1))
    program = """
import os, sys
from shardcache import Cache
cache = Cache(sys.argv[1] + "/cache", min_free=0, cache_local=True)
cache.fetch(sys.argv[1] + "/a.tar")
found = os.listdir(sys.argv[1] + "/cache/v1/sessions")
print(sum(name.endswith(".session") for name in found))
"""
    command = [sys.executable, "-X", "dev", "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert os.listdir(tmp_path / "cache/v1/sessions") == []
