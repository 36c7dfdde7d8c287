"""The background fetches of a process: who joins, who leaves, and what an interrupt forgets."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from shardcache.fetch.background import Fetching, Fetchings
from shardcache.urls import parse_url
from tests.support.storetools import PATIENCE

SHARD = parse_url("s3://lab/a.tar")


def test_who_joined_a_fetch_that_is_never_started_is_let_go_and_the_next_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = Fetchings()
    monkeypatch.setattr(Fetching, "start", lambda self: None)  # an interrupt just before it
    first = table.join(SHARD, lambda *_: None, finish=True)
    second = table.join(SHARD, lambda *_: None)
    forgotten = second.fetching
    assert forgotten is not None and forgotten is first.fetching
    waiting = threading.Thread(target=lambda: forgotten.wait_begun(whole=True), daemon=True)
    waiting.start()
    del first
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    assert table.unfinished() == []
    monkeypatch.undo()
    ran = threading.Event()
    third = table.join(SHARD, lambda *_: ran.set())
    assert third.began and ran.wait(PATIENCE)
    second.leave()  # what is over takes nothing with it
    third.leave()


def test_a_fetch_that_ended_needs_no_garbage_collector() -> None:
    table = Fetchings()
    gc.disable()
    try:
        share = table.join(SHARD, lambda *_: None)
        fetching = share.fetching
        assert fetching is not None
        gone = threading.Event()
        weakref.finalize(fetching, gone.set)
        fetching.wait_begun(whole=True)
        del fetching, share
        assert gone.wait(PATIENCE)  # its thread may still be on its way out
    finally:
        gc.enable()
