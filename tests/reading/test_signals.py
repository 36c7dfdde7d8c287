"""A signal handler raises in the middle of a read, and the caller reads on with the same stream."""

import gc
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shardcache
from shardcache import TransferError
from tests.support.storetools import descriptors
from tests.support.tars import make_tar
from tests.support.webservers import Files, answer, part_of, running

DATA = make_tar(1, members=50, size=40_000)
HERE = str(Path(shardcache.__file__).parent)


class Deadline(Exception):
    """Raised by a handler."""


def raise_at(number, error):
    """Raise as a handler does, after a call or at the start of one; return a list that is empty
    once that has happened."""
    left = [error, *[None] * number]

    def profile(frame, event, _):
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(HERE):
            if left and (raised := left.pop()) is not None:
                raise raised

    sys.setprofile(profile)
    return left


@pytest.fixture
def files():
    with running(Files()) as server:
        server.files["/a.tar"] = DATA
        yield server


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [Deadline(), TimeoutError("my own deadline")], ids=repr)
@pytest.mark.parametrize("source", ["hit", "follow", "past"])
@pytest.mark.parametrize("size", [600_000, -1])
def test_the_caller_gets_what_its_handler_raises_and_may_read_on(
    make_cache, files, monkeypatch, source, error, size
):
    """At any call. Python drops what a finalizer raises, so such a read counts as undisturbed."""
    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    cache, url = make_cache(max_size=1000 if source == "past" else None), f"{files.url}/a.tar"
    for number in itertools.count():
        if source == "follow":
            cache.remove(url)
            event = files.hold("/a.tar", 1_000_000)
        with cache.open(url) as stream:
            start, caught = stream.read(1000), None
            left = raise_at(number, error)
            try:
                if size > 0 or source != "follow":
                    start += stream.read(size)
                else:
                    break
            except type(error) as exn:
                caught, start = exn, DATA[: stream.tell()]
            finally:
                sys.setprofile(None)
                if source == "follow":
                    event.set()
            assert start + stream.read() == DATA
        if left:
            break
        assert caught is error or dropped, number
        dropped.clear()
