"""What workers do, and how often.

Every operation takes the worker, makes one or several calls, and leaves nothing open.
"""

from __future__ import annotations

import os
import pickle
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from shardcache import Cache
from shardcache.space.clean import CleanReport
from shardcache.space.eviction import Reason
from shardcache.streams.following import FollowStream
from tests.stress.storm.worker import Worker

__all__ = ["OPERATIONS"]

#: Seconds that somebody holds a shard open, at most.
_HOLD = 0.8


def _place(stream: BinaryIO) -> str:
    """Where a stream that was read comes from: one past the cache is named by the URL."""
    return "stream" if str(stream.name).startswith("s3://") else "cache"


def _place_at_first(stream: BinaryIO) -> str:
    """``follow`` is a shard that is still on its way, as far as is known by now."""
    raw = getattr(stream, "raw", None)
    following = isinstance(raw, FollowStream) and raw._final is None  # which past the cache is not
    return "follow" if following else _place(stream)


def read(worker: Worker, name: str | None = None, cache: Cache | None = None) -> None:
    """Open a shard and read all of it."""
    name = name or worker.choose()
    with worker.call("read", name) as told, _open(worker, name, told, cache) as stream:
        data = stream.read()
        told["place"] = _place(stream)
        worker.examine(name, data, told)


def _open(worker: Worker, name: str, told: dict[str, Any], cache: Cache | None = None) -> BinaryIO:
    stream = (cache or worker.cache).open(worker.settings.url(name))
    told["place"] = _place_at_first(stream)
    return stream


def hold(worker: Worker) -> None:
    """Read a bit, wait while others evict, read the rest."""
    name = worker.choose()
    with worker.call("hold", name) as told, _open(worker, name, told) as stream:
        head = stream.read(worker.rng.randrange(200_000))
        time.sleep(worker.rng.random() * _HOLD)
        data = head + stream.read()
        told["place"] = _place(stream)
        if told["place"] == "cache":
            told["links"] = os.fstat(stream.fileno()).st_nlink
        worker.examine(name, data, told)


def leave(worker: Worker) -> None:
    """Read a bit and close."""
    name = worker.choose()
    with worker.call("leave", name) as told, _open(worker, name, told) as stream:
        stream.read(worker.rng.randrange(100_000))
        told["place"] = _place_at_first(stream)  # meanwhile there may have been no room


def pinned(worker: Worker) -> None:
    """Use a shard by its path, for a while."""
    name = worker.choose()
    with (
        worker.call("pinned", name) as told,
        worker.cache.pinned(worker.settings.url(name)) as path,
    ):
        told["place"] = "cache"
        before = path.stat().st_ino
        time.sleep(worker.rng.random() * _HOLD)
        told["same"] = path.exists() and path.stat().st_ino == before
        worker.examine(name, path.read_bytes(), told)


def fetch(worker: Worker) -> None:
    """Make sure that a shard is there."""
    name = worker.choose()
    with worker.call("fetch", name):
        worker.cache.fetch(worker.settings.url(name))


def plain(worker: Worker) -> None:
    """Read by path without a pin, as other programs do: it may be gone, never changing."""
    name = worker.choose()
    with worker.call("plain", name) as told:
        path = worker.cache.path(worker.settings.url(name))
        if path is None:
            told["outcome"] = "absent"
            return
        time.sleep(worker.rng.random() * 0.02)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            told["outcome"] = "absent"
            return
        told["place"] = "cache"
        worker.examine(name, data, told)


def opener(worker: Worker) -> None:
    """Read the way a WebDataset does."""
    names = [worker.choose() for _ in range(worker.rng.randint(2, 5))]
    urls = iter([{"url": worker.settings.url(name)} for name in names])
    samples = worker.cache.url_opener(urls)
    for position, name in enumerate(names, start=1):
        # Begun before anybody waits for them, and called off when an error ends this.
        ahead = names[position : position + worker.cache.config.prefetch]
        with worker.call("opener", name, ahead=ahead) as told:
            sample = next(samples)
            with sample["stream"] as stream:
                told["place"] = _place_at_first(stream)
                data = stream.read()
                told["place"] = _place(stream)
                worker.examine(name, data, told)
        if told["outcome"] == "error":
            return  # a generator that raised has ended


def pickled(worker: Worker) -> None:
    """Read through a copy of the cache, as a spawned child has one."""
    with pickle.loads(pickle.dumps(worker.cache)) as copy:
        read(worker, cache=copy)


def threads(worker: Worker) -> None:
    """Three threads want one shard at once."""
    name = worker.choose()
    crew = [threading.Thread(target=read, args=(worker, name), daemon=True) for _ in range(3)]
    with worker.call("threads", None, calls=3):
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()


def forked(worker: Worker) -> None:
    """A child reads through the cache it came with."""
    count = worker.rng.randint(1, 3)
    seed = worker.rng.random()
    with worker.call("fork", None, calls=count) as told:
        pid = os.fork()
        if pid == 0:
            _be_child(worker, seed, count)
        told["child"] = pid
        # Interruptible: os.waitpid is not left by an exception of another thread's.
        while not (found := os.waitpid(pid, os.WNOHANG))[0]:
            time.sleep(0.005)
        status = os.waitstatus_to_exitcode(found[1])
        if status:
            told |= {"outcome": "error", "error": "ChildFailed", "text": f"status {status}"}


def _be_child(worker: Worker, seed: float, count: int) -> None:
    status = 1
    try:
        worker.log.who += f"/{os.getpid()}"
        worker.rng = random.Random(seed)
        for _ in range(count):
            read(worker)
        worker.cache.close()
        status = 0
    finally:
        os._exit(status)


def remove(worker: Worker) -> None:
    """Remove a shard; people do, while others read it."""
    name = worker.choose()
    with worker.call("remove", name) as told:
        freed, told["busy"] = worker.cache.remove(worker.settings.url(name))
        # Versions differ by less than a sixth in size.
        told["gone"] = round(freed / worker.settings.sizes[name])


def _tell(report: CleanReport, told: dict[str, Any]) -> None:
    told["removed"] = len(report.removed)
    told["swept"] = [Path(r.name).name for r in report.removed if r.reason is Reason.ORPHAN]


def clean_size(worker: Worker) -> None:
    """A cron job with a smaller limit."""
    with worker.call("clean", None) as told:
        limit = int(worker.settings.max_size * worker.rng.uniform(0.5, 1.0))
        _tell(worker.cache.clean(max_size=limit), told)


def clean_all(worker: Worker) -> None:
    """Remove everything that nobody reads."""
    with worker.call("clean", None) as told:
        _tell(worker.cache.clean(everything=True), told)


def sweep(worker: Worker) -> None:
    """Remove what dead processes left."""
    with worker.call("sweep", None) as told:
        _tell(worker.cache.clean(limits=False), told)


def look(worker: Worker) -> None:
    """List what is there."""
    with worker.call("look", None) as told:
        told["entries"] = sum(1 for _ in worker.cache.entries())


def restart(worker: Worker) -> None:
    """End the session; the next call begins another."""
    with worker.call("restart", None):
        worker.cache.close()
        worker.cache = worker.make_cache()


#: How often, of 1000 calls: most are reads, as in training, and each kind of removal
#: comes often enough to meet every other call many times a minute.
OPERATIONS: dict[Callable[[Worker], None], float] = {
    read: 713,
    hold: 25,
    leave: 20,
    pinned: 20,
    fetch: 30,
    plain: 50,
    opener: 25,
    pickled: 10,
    threads: 6,
    forked: 10,
    remove: 25,
    clean_size: 18,
    clean_all: 0.7,
    sweep: 35,
    look: 5,
    restart: 8,
}
