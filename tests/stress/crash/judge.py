"""Whether a cache directory is as it must be after something struck one of its processes.

Nothing of the library's own view is trusted: the directory is walked, every entry
compared with the origin, every name with the grammar of `shardcache.layout`. Then fresh
processes use it, and are looked at in turn.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcache.cli import main as cli
from shardcache.errors import ConfigError
from shardcache.store.digest import file_digest
from shardcache.store.entry import DamagedError, Metadata
from tests.stress.crash.place import SHARDS, Place
from tests.stress.crash.scenarios import Scenario

__all__ = ["Judge", "inspect", "strays"]

#: Seconds after which a fresh process has hung. One takes some milliseconds.
PATIENCE = 60.0
#: Seconds; any wait is one too many, but one that ends says more.
_LOCK_TIMEOUT = 5.0
_ROOT = {"manifest.json", "CACHEDIR.TAG", "README.txt", "v1"}
_BASE = {"objects", "partial", "quarantine", "locks", "sessions", "stats", "ranks"}
_NOTES = {"flock.json"}
_HEX2 = re.compile(r"[0-9a-f]{2}\Z")
_KEY = re.compile(r"[0-9a-f]{32}\Z")
_ENTRY = re.compile(r"[0-9a-f]{24}-([0-9a-f]{1,16})\Z")
_LOCK = re.compile(r"[0-9a-f]{32}\.lock\Z")
_COUNTS = re.compile(r"([0-9a-f]{32}\.(counts|hours)|begin|fetches\.(log|old))\Z")
_NAMED_LOCK = re.compile(r"(budget|clean|ledger|pending|private-\d)\.lock\Z")


@dataclass(frozen=True, slots=True)
class Judge:
    """Looks at one place.

    Attributes:
        place: where.
        scenario: what was struck.
        by_command: whether the sweep is the command, not the method.
        planted: what was wrong with entries before; a reader mends it, but nobody need have.
    """

    place: Place
    scenario: Scenario
    by_command: bool = False
    planted: frozenset[str] = frozenset()

    def verdict(self, *, sweep_first: bool) -> list[str]:
        """Everything that is wrong; nothing is as it should be."""
        wrong = [text for text in inspect(self.place) if text not in self.planted]
        if sweep_first:
            wrong += self._swept("first")
        wrong += self._alone("the next process", self._read)
        wrong += inspect(self.place)
        wrong += self._swept("last")
        return wrong

    def _swept(self, when: str) -> list[str]:
        swept = self._by_command if self.by_command else self._by_method
        wrong = self._alone(f"the sweep ({when})", swept)
        # What has no manifest is not ours to sweep.
        if wrong or not (self.place.root / "manifest.json").exists():
            return wrong
        return [f"left by the sweep ({when}): {name}" for name in strays(self.place.root)]

    def _alone(self, who: str, function: Callable[[], list[str]]) -> list[str]:
        return _alone(who, function, self.scenario.environment)

    def _read(self) -> list[str]:
        """A process that was not there before reads everything, at once and from the cache."""
        wrong = []
        with self.place.cache(strict=True, lock_timeout=_LOCK_TIMEOUT) as cache:
            for name in self.scenario.reads:
                if not self.place.read(cache, name):
                    wrong.append(f"{name} was streamed, not cached")
        return wrong

    def _by_method(self) -> list[str]:
        try:
            with self.place.cache() as cache:
                cache.clean(limits=False)
        except ConfigError:
            if (self.place.root / "manifest.json").exists():
                raise
        return []

    def _by_command(self) -> list[str]:
        if not (self.place.root / "manifest.json").exists():
            return self._by_method()
        code = cli.main(["--dir", str(self.place.root), "--quiet", "clean", "--orphans"])
        return [f"the command ended with {code}"] if code else []


def inspect(place: Place) -> Iterator[str]:
    """What is wrong with the entries: what is visible must be complete; so must the root."""
    if (place.root / "manifest.json").exists():  # which is made last
        for name in ("CACHEDIR.TAG", "README.txt"):
            if not (place.root / name).exists():
                yield f"the root has a manifest and no {name}"
    known = {place.key(name): name for name in SHARDS}
    for base in _bases(place.root):
        for entry in base.glob("objects/*/*/*"):
            match = _ENTRY.match(entry.name)
            name = known.get(entry.parent.name)
            if match is None or name is None:
                yield f"no entry: {entry.relative_to(place.root)}"
            else:
                yield from _compare(entry, name, int(match.group(1), 16))


def _compare(entry: Path, name: str, size: int) -> Iterator[str]:
    data = entry / name
    try:
        metadata = Metadata.decode((entry / "meta.json").read_bytes())
        found = data.read_bytes()
    except (FileNotFoundError, DamagedError) as exn:
        yield f"an entry is not complete: {entry.name}: {type(exn).__name__}"
        return
    if found != SHARDS[name] or not len(found) == size == metadata.size:
        yield f"an entry has other bytes than the origin: {entry.name}"
        return
    with open(data, "rb") as file:
        if file_digest(file.fileno()) != metadata.digest:
            yield f"an entry's sidecar has another digest: {entry.name}"
    if data.stat().st_mode & 0o777 not in (0o400, 0o440):  # ours, a group's
        yield f"an entry's data can be written: {entry.name}"
    if (entry / "progress").exists():
        yield f"an entry has a progress file: {entry.name}"


def strays(root: Path) -> Iterator[str]:
    """Names that a sweep should have removed, or that nobody should have made."""
    for path in root.iterdir():
        if path.name not in _ROOT:
            yield path.name
    for base in _bases(root):
        for path in sorted(base.rglob("*")):
            if not _belongs(path.relative_to(base).parts, path.is_dir()):
                yield str(path.relative_to(root))


def _belongs(parts: tuple[str, ...], is_directory: bool) -> bool:
    """Whether a path in a namespace is one that stays when nothing runs."""
    top, *rest = parts
    if not rest:
        return top in (_BASE if is_directory else _NOTES)
    if top == "ranks":
        return True  # each is a base of its own
    if top == "locks":
        if len(rest) == 1:
            return bool((_HEX2 if is_directory else _NAMED_LOCK).match(rest[0]))
        return len(rest) == 2 and not is_directory and bool(_LOCK.match(rest[1]))
    if top == "stats":
        return len(rest) == 1 and not is_directory and bool(_COUNTS.match(rest[0]))
    if top != "objects" or len(rest) > 4:
        return False
    if len(rest) == 4:
        return rest[3] == "meta.json" or rest[3] in SHARDS
    grammar = (_HEX2, _KEY, _ENTRY)[len(rest) - 1]
    return is_directory and bool(grammar.match(rest[-1]))


def _bases(root: Path) -> list[Path]:
    node = root / "v1"
    ranks = sorted(node.glob("ranks/*"))
    return [base for base in (node, *ranks) if base.is_dir()]


def _alone(
    who: str, function: Callable[[], list[str]], environment: Mapping[str, str]
) -> list[str]:
    """What is wrong with a function, run in a process that does nothing else."""
    answers, answer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(answers)
        os.environ.update(environment)
        _answer(function, answer)
    os.close(answer)
    said = b""
    end = time.monotonic() + PATIENCE
    try:
        while select.select([answers], [], [], max(0.0, end - time.monotonic()))[0]:
            data = os.read(answers, 1 << 16)
            if not data:
                break
            said += data
        else:
            os.kill(pid, signal.SIGKILL)
            return [f"{who} hangs"]
    finally:
        os.close(answers)
        os.waitpid(pid, 0)
    if not said:
        return [f"{who} died"]
    return [f"{who}: {wrong}" for wrong in json.loads(said)]


def _answer(function: Callable[[], list[str]], answer: int) -> None:
    """In the child: run, say what was wrong, end."""
    naps: list[str] = []
    sleep = time.sleep

    def count(seconds: float) -> None:
        caller: Any = sys._getframe(1).f_globals.get("__name__", "")
        if caller != "subprocess":  # whose way it is to wait for a child
            naps.append(str(caller))
        sleep(seconds)

    time.sleep = count
    try:
        wrong = function()
        if naps:
            wrong.append(f"it had to wait {len(naps)} times, in {', '.join(sorted(set(naps)))}")
    except BaseException:
        wrong = [traceback.format_exc()]
    finally:
        os.write(answer, json.dumps(wrong).encode())
        os._exit(0)
