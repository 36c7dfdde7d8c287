"""Which shards were fetched, and when: a line each, for the node's report.

    <seconds since the epoch> <bytes> <seconds it took> <rank or -> <URL>

All processes of a node append to one file; a line is one write, so lines are never mixed. At
8 MiB the file becomes the old one, and that before it goes: some 100,000 fetches are
remembered. It is for people: what cannot be written, or read, is left out.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardcache.files import is_alone, open_file, settle
from shardcache.layout import Layout, read_file

__all__ = ["Fetch", "fetches", "note_fetch"]

logger = logging.getLogger(__name__)

_NAME, _OLD = "fetches.log", "fetches.old"
_MOST = 8 << 20
#: A line longer than a page might not be written in one piece.
_LONGEST = 4096


@dataclass(frozen=True, slots=True)
class Fetch:
    """One fetch.

    Attributes:
        at: when it ended, seconds since the epoch.
        size: bytes of the shard.
        seconds: how long it took.
        rank: who fetched it; None outside any job.
        url: of the shard, without credentials.
    """

    at: float
    size: int
    seconds: float
    rank: int | None
    url: str


def note_fetch(layout: Layout, fetch: Fetch) -> None:
    """Add a line, if the disk lets us."""
    rank = "-" if fetch.rank is None else fetch.rank
    url = fetch.url.replace("\n", "%0A")
    line = f"{fetch.at:.3f} {fetch.size} {fetch.seconds:.3f} {rank} {url}\n".encode()
    if len(line) > _LONGEST:
        return
    path = layout.stats / _NAME
    flags, mode = os.O_WRONLY | os.O_APPEND | os.O_CREAT, layout.modes.file
    try:
        with open_file(path, io.FileIO, flags, mode) as file:
            fd = file.fileno()
            if not is_alone(fd):
                return
            settle(fd, mode)
            os.write(fd, line)
            full = os.fstat(fd).st_size >= _MOST
        if full:
            path.replace(layout.stats / _OLD)
    except OSError as exn:
        logger.debug("%s: %s", path, exn)


def fetches(layout: Layout, since: float = 0.0) -> Iterator[Fetch]:
    """What is remembered, oldest first.

    Args:
        layout: the node's namespace.
        since: what ended before that is left out; seconds since the epoch.
    """
    for name in (_OLD, _NAME):
        for line in _lines(layout.stats / name):
            fetch = _parsed(line)
            if fetch is not None and fetch.at >= since:
                yield fetch


def _lines(path: Path) -> list[str]:
    try:
        return read_file(path, 2 * _MOST).decode("utf-8", "replace").splitlines()
    except OSError as exn:
        logger.debug("%s: %s", path, exn)
        return []


def _parsed(line: str) -> Fetch | None:
    try:
        at, size, seconds, rank, url = line.split(" ", 4)
        return Fetch(float(at), int(size), float(seconds), None if rank == "-" else int(rank), url)
    except ValueError:
        return None
