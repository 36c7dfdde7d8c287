"""Who waits for whom: noted while it lasts, gone with the process, shown by `top`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.cli.output import Console
from shardcache.cli.top import Watcher, frame
from shardcache.layout import Layout, list_names
from shardcache.locks.flock import Holder, KeyLock
from shardcache.locks.sessions import Wait, WaitNote, live_waits, remove_dead
from shardcache.store.root import make_root
from shardcache.urls import parse_url
from tests.support.clitools import run_process
from tests.support.fakes import FakeClock, MemoryOrigin
from tests.support.storetools import Parent, forked, no_descriptor_left, wait_until
from tests.support.tars import make_tar

pytestmark = pytest.mark.locks_work

URL = "s3://lab/train-0000.tar"
DATA = make_tar(1, size=400_000)
HOLDER = Holder(4711, "node-7", 3, "job", 1_000_000.0)
WAIT = Wait(URL, parse_url(URL).key, Holder(12, "node-7", 5, None, 1_000_010.0))
MakeCache = Callable[..., Cache]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return make_root(tmp_path / "cache", "test")


def notes(layout: Layout) -> list[str]:
    return [name for name in list_names(layout.sessions) if name.endswith(".wait")]


def hold(layout: Layout, holder: Holder = HOLDER) -> KeyLock:
    lock = KeyLock(layout.key_lock(parse_url(URL).key))
    assert lock.try_acquire(holder)
    return lock


@pytest.fixture
def patient(make_cache: MakeCache, origin: MemoryOrigin, clock: FakeClock) -> Cache:
    origin.objects[URL] = DATA
    return make_cache(fill="complete")


def test_a_wait_of_half_a_second_is_noted_and_the_note_goes_with_it(
    patient: Cache, clock: FakeClock
) -> None:
    layout = Layout.of_root(patient.dir)
    lock = hold(layout)
    seen: list[tuple[float, list[Wait]]] = []

    def look() -> None:
        seen.append((clock.elapsed, list(live_waits(layout))))
        if clock.elapsed > 3.0:
            lock.release()

    clock.on_sleep.append(look)
    with no_descriptor_left():
        assert patient.open(URL).read() == DATA
    assert not notes(layout)
    assert not any(found for at, found in seen if at < 0.5)
    late = [found for at, found in seen if at > 1.0]
    assert late and all(len(found) == 1 for found in late)
    (wait,) = late[-1]
    assert wait.url == URL
    assert (wait.waiter.pid, wait.waiter.started) == (os.getpid(), clock.now)


def test_a_killed_process_is_not_said_to_wait_and_its_note_is_swept(layout: Layout) -> None:
    def work(parent: Parent) -> None:
        note = WaitNote(layout)
        note.say(WAIT)
        parent.say()
        parent.hear()

    with forked(work) as child:
        child.hear()
        assert list(live_waits(layout)) == [WAIT]
        remove_dead(layout)
        assert len(notes(layout)) == 1
        child.kill(signal.SIGKILL)
        assert list(live_waits(layout)) == []
        assert len(notes(layout)) == 1
    with Cache(layout.base.parent, min_free=0) as cache:
        cache.clean(dry_run=True)
        assert len(notes(layout)) == 1
        cache.clean()
    assert not notes(layout)


@pytest.mark.parametrize("text", [b"", b"{", b'{"waiter": {"pid": "12"}}'])
def test_what_is_no_note_is_not_shown(layout: Layout, text: bytes) -> None:
    with no_descriptor_left(), contextlib.closing(WaitNote(layout)) as note:
        note.say(WAIT)
        note.path.write_bytes(text)
        assert list(live_waits(layout)) == []


def test_top_shows_who_waits_for_whom_since_when_and_how_far(
    make_cache: MakeCache,
    origin: MemoryOrigin,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A process that fetches, and one that waits for it: all of it real but the origin."""
    origin.objects[URL] = DATA
    gate = threading.Event()
    with forked(_fetch_slowly, make_cache) as child:
        fetcher = child.hear()
        monkeypatch.setenv("SHARDCACHE_RANK", "1")
        cache = make_cache()
        results: list[bytes] = []

        def read() -> None:
            results.append(cache.open(URL).read())
            gate.set()

        thread = threading.Thread(target=read)
        thread.start()
        watcher = Watcher(cache)
        (waiting,) = wait_until(lambda: watcher.look().waits)
        assert waiting["pid"] == os.getpid() and waiting["seconds"] >= 0.4
        assert waiting["holder"]["pid"] == fetcher
        Console().render(frame(watcher.look(), "top"))
        lines = capsys.readouterr().out.splitlines()
        (place,) = (n for n, line in enumerate(lines) if line.startswith("WAITS"))
        assert lines[place].split() == ["WAITS", "WHO", "FOR", "WHOM", "SINCE"]
        assert lines[place + 1].split()[0] == URL
        assert f"rank 1, pid {os.getpid()}" in lines[place + 1]
        assert f"pid {fetcher}" in lines[place + 1]
        code, said, _ = run_process(
            "top", "--count", "1", "--interval", "0.2", "--json", directory=cache.dir
        )
        (found,) = json.loads(said)["waits"]
        assert code == 0 and found["url"] == URL and found["since"].endswith("+00:00")
        assert (found["rank"], found["pid"]) == (1, os.getpid())
        assert found["holder"]["pid"] == fetcher and found["seconds"] > 0
        child.tell()
        assert gate.wait(60)
        thread.join()
    assert results == [DATA]
    wait_until(lambda: not watcher.look().waits)  # its thread looks now and then
    Console().render(frame(watcher.look(), "top"))
    assert "WAITS" not in capsys.readouterr().out


def _fetch_slowly(parent: Parent, make_cache: MakeCache) -> None:
    def wait(path: Path) -> None:
        parent.say(os.getpid())
        parent.hear()

    make_cache(validate=wait).fetch(URL)
