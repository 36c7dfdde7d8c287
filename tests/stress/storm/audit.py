"""Looks at the cache from outside: while the storm blows, and when it is over."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from shardcache import Cache
from tests.stress.storm import shards
from tests.stress.storm.arena import Arena
from tests.stress.storm.files import below, inside

__all__ = ["Sampler", "audit", "locked_inodes"]

#: Published shards that are re-read in each sample.
_READ = 3
_CLEAN_SECONDS = 120


def _namespaces(root: Path) -> list[Path]:
    return [root / "v1", *inside(root / "v1" / "ranks")]


def _data(base: Path) -> list[Path]:
    return below(base / "objects", ".tar")


def _published(root: Path) -> dict[int, tuple[Path, int]]:
    """Inode of the data -> (directory, size) of every entry: a link takes no room."""
    found = {}
    for base in _namespaces(root):
        for path in _data(base):
            with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                found[path.stat().st_ino] = path.parent, path.stat().st_size
    return found


def locked_inodes() -> set[int]:
    """Inodes that somebody has locked with flock, of any filesystem: asking disturbs nobody."""
    lines = Path("/proc/locks").read_text().splitlines()
    return {int(line.split()[5].rpartition(":")[2]) for line in lines if " FLOCK " in line}


def _fetches(root: Path) -> dict[str, tuple[int, bool]]:
    """Directory -> (bytes that a fetch will occupy in the end, whether its process lives)."""
    found = {}
    locked = locked_inodes()
    for base in _namespaces(root):
        for directory in inside(base / "partial"):
            if directory.name.startswith("evict."):
                continue
            with contextlib.suppress(OSError, ValueError, KeyError):  # it comes or goes
                size = json.loads((directory / "meta.json").read_bytes())["size"]
                inodes = {path.stat().st_ino for path in _data_files(directory)}
                found[str(directory)] = size, bool(inodes & locked)
    return found


class Sampler:
    """Samples of what is published, for the judge."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._root = arena.settings.cache
        self._turn = 0

    def sample(self) -> None:
        """Re-read some entries, and add up the budget."""
        paths = sorted(directory for directory, _ in self._sum_up().values())
        for directory in paths[self._turn : self._turn + _READ]:
            self.reread(directory)
        self._turn = self._turn + _READ if self._turn + _READ < len(paths) else 0

    def _sum_up(self) -> dict[int, tuple[Path, int]]:
        """What was there in two looks in a row was there at one moment: add that up.

        A fetch that is published between the looks is not counted.
        """
        entries, fetches = _published(self._root), _fetches(self._root)
        entries_again, fetches_again = _published(self._root), _fetches(self._root)
        occupied = sum(size for inode, (_, size) in entries.items() if inode in entries_again)
        live = [size for path, (size, alive) in fetches.items() if alive]
        for path, (size, alive) in fetches.items():
            if alive and fetches_again.get(path) == (size, True):
                occupied += size
        self._arena.log.write(
            "budget",
            occupied=occupied,
            entries=len(entries),
            live=len(live),
            dead=len(fetches) - len(live),
        )
        return entries_again

    def reread(self, directory: Path) -> None:
        """Tell the digest of what a published path holds."""
        for path in _data_files(directory):
            try:
                with open(path, "rb") as file:
                    inode = os.fstat(file.fileno()).st_ino
                    data = file.read()
            except FileNotFoundError:
                continue  # evicted meanwhile
            version, wrong = shards.examine(path.name, data, self._arena.settings.size)
            self._arena.log.write(
                "sample",
                path=str(path.relative_to(self._root)),
                inode=inode,
                name=path.name,
                version=version,
                digest=shards.digest(data),
                wrong=wrong,
            )


def _data_files(directory: Path) -> list[Path]:
    return [path for path in inside(directory) if path.suffix == ".tar"]


def audit(arena: Arena) -> None:
    """After the end: what was served, what is left, and whether everything can be read."""
    root, log = arena.settings.cache, arena.log
    served = arena.meter.summary()
    for path, seen in served.items():
        log.write("served", name=path.partition("/")[2], fetches=seen.object_fetches)
    present = Counter(path.name for base in _namespaces(root) for path in _data(base))
    for name, entries in present.items():
        log.write("present", name=name, entries=entries)
    sampler = Sampler(arena)
    for directory, _ in _published(root).values():
        sampler.reread(directory)
    log.write("before-sweep", names=_found(root))
    _clean(arena)
    log.write("swept", left=_left(root), occupied=_occupied(root))
    _read_all(arena)
    _clean(arena, "--all", "-y")
    log.write("emptied", left=_left(root), entries=len(_published(root)))


def _occupied(root: Path) -> int:
    return sum(size for _, size in _published(root).values())


def _found(root: Path) -> list[str]:
    """What there is to sweep."""
    kinds = ("partial", "sessions", "quarantine")
    places = [base / kind for base in _namespaces(root) for kind in kinds]
    return [path.name for place in places for path in inside(place)]


def _clean(arena: Arena, *options: str) -> None:
    """What cron would run."""
    settings = arena.settings
    command = [sys.executable, "-m", "shardcache", "--dir", str(settings.cache), "clean"]
    done = subprocess.run(
        [*command, *(options or ["--max-size", str(settings.max_size)])],
        env=arena.environment(),
        capture_output=True,
        text=True,
        timeout=_CLEAN_SECONDS,
        check=False,
    )
    arena.log.write(
        "clean-command", options=options, status=done.returncode, said=done.stdout + done.stderr
    )


def _left(root: Path) -> list[str]:
    """Everything that a sweep must not leave: names in partial, quarantine and sessions, and
    temporary files anywhere.
    """
    left = []
    for base in _namespaces(root):
        for kind in ("partial", "quarantine", "sessions"):
            left += [f"{base.relative_to(root)}/{kind}/{path.name}" for path in inside(base / kind)]
    hidden = [path for path in below(root, "") if path.name.startswith(".")]
    left += [str(path.relative_to(root)) for path in hidden]
    return sorted(set(left))


def _read_all(arena: Arena) -> None:
    """A new process needs no manual step: every shard can be read."""
    settings = arena.settings
    script = "import sys; from tests.stress.storm import audit; audit.read_every(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", script, settings.to_json()],
        env=arena.environment(),
        capture_output=True,
        text=True,
        timeout=_CLEAN_SECONDS + settings.lock_timeout,
        check=False,
    )
    arena.log.write("read-all", status=done.returncode, said=(done.stdout + done.stderr)[-2000:])


def read_every(settings_text: str) -> None:
    """Read and check every shard through a new cache; exits with 1 if one is wrong."""
    from tests.stress.storm.settings import Settings

    settings = Settings.from_json(settings_text)
    wrong: list[Any] = []
    with Cache(**settings.options()) as cache:
        for name in settings.names:
            with cache.open(settings.url(name)) as stream:
                found = shards.examine(name, stream.read(), settings.size)
            if found[1] is not None:
                wrong.append((name, *found))
    if wrong:
        sys.exit(f"wrong: {wrong}")
