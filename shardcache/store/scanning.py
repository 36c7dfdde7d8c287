"""All entries of a namespace: many directories, looked at one after another or side by side.

A hundred thousand entries are as many directories, and a hit or a sidecar costs less than a
look at one. Where it is the disk that is waited for, threads ask it for several at once; where
the processor has to be waited for, another one helps, in a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import marshal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardcache import forks
from shardcache.layout import Layout, list_names
from shardcache.names import is_key
from shardcache.store.entry import Entry, below

__all__ = ["scan"]

logger = logging.getLogger(__name__)

#: Seconds after which a scan that mostly waits for the disk goes on with so many threads: a
#: hundred thousand entries that nothing was asked of for long take a minute, one by one.
_SLOW = 0.25
_LOOKS = 8
#: Seconds after which a scan can be judged, that must be left for a fork to be worth it, and
#: how many processes there are at most.
_TELLING = 0.02
_WORTH = 0.05
_MOST = 4


def scan(layout: Layout) -> Iterator[Entry]:
    """Every entry of a namespace, in no order.

    Entries that go away meanwhile are left out, and so is what does not have
    the name and the place that we give entries.

    Raises:
        OSError: a directory cannot be read.
    """
    objects = layout.objects
    prefixes = [name for name in list_names(objects) if is_key(name * 16)]
    passed = worked = 0.0
    judged = False
    for count, prefix in enumerate(prefixes, 1):
        begun, before = time.monotonic(), time.thread_time()
        found = below(objects, prefix)
        passed += time.monotonic() - begun
        worked += time.thread_time() - before
        yield from found
        rest = prefixes[count:]
        if passed > _SLOW and worked < passed / 4:
            yield from _in_threads(objects, rest)
            return
        if passed > _TELLING and not judged:
            judged = True
            shares = _shares(rest, worked / count) if worked > passed / 2 else 1
            if shares > 1:
                yield from _in_processes(objects, rest, shares)
                return


def _in_threads(objects: Path, prefixes: Sequence[str]) -> Iterator[Entry]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_LOOKS, "shardcache-scan") as pool:
        looks = [pool.submit(below, objects, prefix) for prefix in prefixes]
        try:
            for look in looks:
                yield from look.result()
        finally:  # also where the consumer has seen enough
            pool.shutdown(cancel_futures=True)


def _shares(prefixes: Sequence[str], seconds: float) -> int:
    """Among how many processes to divide so many directories, which take so long each."""
    worth = int(len(prefixes) * seconds / _WORTH)
    return min(worth, forks.processors(), _MOST) if forks.is_harmless(native=True) else 1


def _in_processes(objects: Path, prefixes: Sequence[str], count: int) -> Iterator[Entry]:
    mine, *others = [prefixes[number::count] for number in range(count)]
    with contextlib.ExitStack() as stack:
        begun = []
        for share in others:
            try:
                fork = forks.Fork(functools.partial(_packed, objects, share))
            except OSError as exn:
                logger.debug("looking at entries in fewer processes: %s", exn)
                mine = [*mine, *share]
            else:
                begun.append((stack.enter_context(fork), share))
        for prefix in mine:
            yield from below(objects, prefix)
        for fork, share in begun:
            answer = fork.answer()
            if answer is not None:
                yield from map(Entry._make, marshal.loads(answer))  # noqa: S302 - from our fork
            else:
                for prefix in share:
                    yield from below(objects, prefix)


def _packed(objects: Path, prefixes: Sequence[str]) -> bytes:
    return marshal.dumps([tuple(entry) for prefix in prefixes for entry in below(objects, prefix)])
