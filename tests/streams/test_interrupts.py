"""Ctrl-C at any moment: it is passed on, nothing stays locked, the next call is right.

The sweeps interrupt a hit, a fetch, ... at every n-th moment at which Python may run a
signal handler (see `tests.streams.interrupting`); ``python -m benchmarks.interrupts`` takes all
of them. Real signals follow: to the library in a process of its own, and to commands.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.layout import Layout
from tests.streams.interrupting import sweep
from tests.support.clitools import Command
from tests.support.storetools import PATIENCE, make_store, publish, wait_until
from tests.support.tars import make_tar


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("act", "stride"),
    [
        ("hit", 1),
        ("pin", 1),
        ("fetch", 31),
        ("follow", 7),
        ("evict", 47),
        ("clean", 13),
        ("prewarm", 37),
    ],
)
def test_an_interrupt_at_any_moment_is_passed_on_and_leaves_nothing_locked(
    tmp_path: Path, act: str, stride: int
) -> None:
    tally = sweep(tmp_path, act, stride)
    assert tally["tried"] >= 40 and tally["tried"] >= tally["moments"] // stride
    assert tally["lost by Python"] <= tally["tried"] // 20
    assert tally["left by filelock"] <= tally["tried"] // 50


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_while_a_fetch_is_begun_or_left_leaves_none_that_nobody_does(
    tmp_path: Path,
) -> None:
    tally = sweep(tmp_path, "follow", 1, within="fetching.py")
    assert tally["tried"] >= 40


#: Reads shards that are evicted again and again, under a rain of Ctrl-C, with no handler but
#: Python's own. Tells how often it was interrupted and how often it read.
RAIN = """
import hashlib, json, os, random, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
before = {n: signal.getsignal(n) for n in signal.valid_signals()}
from shardcache import Cache
directory, origin, digests = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
cache = Cache(directory, min_free=0, cache_local=True, stale_after=1, max_size=400_000)
for name in digests:  # an import that is interrupted leaves half a module in Python
    cache.open(f"{origin}/{name}").close()
read = interrupted = 0
armed = stop = False
def rain():
    global armed
    while not stop:
        time.sleep(random.random() ** 2 * 0.03)
        if armed:
            armed = False  # one at a time: none strikes where the last one is counted
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
thread = threading.Thread(target=rain, daemon=True)
thread.start()
enough, end = time.monotonic() + 4.0, time.monotonic() + 90.0
while time.monotonic() < end and (time.monotonic() < enough or min(read, interrupted) < 20):
    try:
        armed = True
        name = random.choice(list(digests))
        with cache.open(f"{origin}/{name}") as stream:
            found = hashlib.sha256(stream.read()).hexdigest()
        assert found == digests[name], name
        read += 1
    except KeyboardInterrupt:
        interrupted += 1
try:
    armed, stop = False, True
    thread.join()
except KeyboardInterrupt:
    interrupted += 1
    thread.join()
after = {n: signal.getsignal(n) for n in signal.valid_signals()}
cache.close()
open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
              if os.path.exists(f"/proc/self/fd/{fd}")]
print(json.dumps([read, interrupted, before == after,
                  [name for name in open_files if name.startswith(directory)]]))
"""


def test_a_rain_of_real_interrupts_costs_no_byte_and_no_lock(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    shards = {f"{n}.tar": make_tar(n, 20, 1000) for n in range(12)}
    for name, data in shards.items():
        (origin / name).write_bytes(data)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in shards.items()}
    directory = tmp_path / "cache"
    done = subprocess.run(
        [sys.executable, "-c", RAIN, str(directory), str(origin), json.dumps(digests)],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    read, interrupted, same_handlers, left_open = json.loads(done.stdout)
    assert read >= 20 and interrupted >= 20, done.stderr
    assert same_handlers
    # filelock loses some of its descriptors; whether they are locked, the sweeps tell.
    assert [name for name in left_open if "/v1/locks/" not in name] == []
    assert len(left_open) <= interrupted // 5
    # And the next process finds all in order.
    with Cache(directory, min_free=0, cache_local=True, lock_timeout=1) as cache:
        for name, data in shards.items():
            with cache.open(f"{origin}/{name}") as stream:
                assert stream.read() == data
        cache.clean()
        assert os.listdir(Layout.of_root(directory).partial) == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
def test_a_clean_that_is_interrupted_says_so_and_leaves_whole_entries(
    tmp_path: Path, number: int, code: int
) -> None:
    directory = tmp_path / "cache"
    Cache(directory).close()
    with Cache(directory) as cache:
        cache._here().coordinator()  # makes the root
    store = make_store(directory)
    urls = [f"s3://lab/{n}.tar" for n in range(800)]
    for url in urls:
        publish(store, url, b"shard of " + url.encode())
    with Command("clean", "--all", "-y", directory=directory) as command:
        wait_until(lambda: len(list(store.entries())) < len(urls))
        command.process.send_signal(number)
        ended, _, err = command.end()
    left = list(store.entries())
    assert left, "it was faster than the signal"
    assert ended == code
    assert "Traceback" not in err and "interrupted" in err
    for entry in left:
        assert entry.data.read_bytes() == b"shard of " + entry.metadata().url.encode()
    with Cache(directory) as cache:
        cache.clean(everything=True)
        assert list(cache.entries()) == []
    assert os.listdir(store.layout.partial) == []
