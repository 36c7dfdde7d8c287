"""Four races of training scripts, replayed by real processes on several nodes.

A node is a mount of `fuse.shim` over one tree: what another one makes is seen there after a delay,
and that it was absent is remembered. Each story is told twice: *before*, with what scripts do
(`os.makedirs`, `os.path.exists`, a lock file), and *after*, with `shardcache.sync`.
``RACES_RUNS=100`` tells each so often, ``RACES_SLOW=15`` has rank 0 late by so many seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from shardcache import sync
from tests.stress.fuse.shim import Shim, mounted, needs_fuse
from tests.support.storetools import PATIENCE, Parent, crowd, wait_until

#: Files of the program that many nodes copy.
CODE = {"train.py": "import model\n" * 200, "model.py": "x = 1\n" * 500, "conf/a.yaml": "lr: 1\n"}
SUBDIRECTORIES = ("weights", "optimizer", "rng")
SHARD = b"shard" * 2000
#: Seconds in which a second runner would have shown itself; nothing fails for want of them.
_MOMENT = 0.4


@dataclass
class Stage:
    """The nodes, and how slow things are.

    Attributes:
        nodes: mounts of one tree.
        delay: seconds until a node sees what another one made, and for which it remembers
            that a name was absent.
        slow: seconds by which rank 0 is late.
        ranks: how many processes make one directory.
    """

    nodes: list[Shim]
    delay: float = 0.5
    slow: float = 1.0
    ranks: int = 32
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def fresh(self) -> list[Path]:
        """A directory that all nodes see, as each of them names it."""
        name = f"run-{next(self._numbers)}"
        for node in self.nodes:
            node.set(delay=0.0, negative=0.0)
        (self.nodes[0].root / name).mkdir()
        found = [node.root / name for node in self.nodes]
        wait_until(lambda: all(path.is_dir() for path in found))
        for node in self.nodes:
            node.set(delay=self.delay, negative=self.delay)
        return found


@contextlib.contextmanager
def stage(directory: Path, nodes: int = 2, **settings: Any) -> Iterator[Stage]:
    """Mount the nodes."""
    with contextlib.ExitStack() as stack:
        names = [f"node{number}" for number in range(nodes)]
        yield Stage([stack.enter_context(mounted(directory, name=n)) for n in names], **settings)


def together(
    count: int, act: Callable[[int], Any], before: Callable[[int], Any] = lambda number: None
) -> list[str]:
    """What went wrong for ranks that act at the same time, each after a look `before`."""

    def work(parent: Parent, number: int) -> None:
        before(number)
        parent.say("ready")
        parent.hear()
        try:
            act(number)
        except (OSError, AssertionError, RuntimeError) as exn:
            parent.say(f"{type(exn).__name__}: {exn}"[:300])
        else:
            parent.say(None)

    with crowd(count, work) as children:
        for child in children:
            child.hear()
        for child in children:
            child.tell()
        troubles = [said for child in children[1:] if (said := child.hear())]
        # Rank 0 may be at work for ever; the others have failed by then.
        return troubles or [said for child in children[:1] if (said := child.hear())]


def trace_directory(stage: Stage, after: bool) -> list[str]:
    """Ranks make one trace directory, and each writes its file into it."""
    roots = stage.fresh()

    def path(number: int) -> Path:
        return roots[number % len(roots)] / "traces" / "step-100"

    def trace(number: int) -> None:
        if after:
            sync.makedirs(path(number))
        else:
            os.makedirs(path(number), exist_ok=True)
        (path(number) / f"rank-{number}.json").write_text("{}")

    # They ask first, as scripts do: from now on its absence is remembered.
    return together(stage.ranks, trace, lambda number: path(number).exists())


def slow_rank_zero(stage: Stage, after: bool) -> list[str]:
    """Rank 0 makes three directories for a checkpoint, late; seven others write into them."""
    roots = stage.fresh()

    def save(number: int) -> None:
        checkpoint = roots[number % len(roots)]  # which is there, as of an earlier run
        places = [checkpoint / name for name in SUBDIRECTORIES]
        if number == 0:
            time.sleep(stage.slow)
            for place in places:
                place.mkdir()
            return
        if after:
            sync.wait_for(places, by="rank 0", timeout=stage.slow + PATIENCE)
        else:
            while not checkpoint.exists():
                time.sleep(0.01)
        for place in places:
            (place / f"rank-{number}.pt").write_bytes(b"0")

    return together(8, save)


def code_directory(stage: Stage, after: bool) -> list[str]:
    """Two ranks on each node copy the program to where all nodes will run it."""
    roots = stage.fresh()
    source = stage.nodes[0].backing / f"{roots[0].name}-source"
    for name, text in CODE.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)

    def start(number: int) -> None:
        root = roots[number % len(roots)]
        code = root / "code"
        if after:
            sync.once("code", copy, code, dir=root, job="race")
            sync.wait_for([code / name for name in CODE], by="the rank that copies the code")
        elif not code.exists():
            copy(code)
        for name, text in CODE.items():
            assert (code / name).read_text() == text, f"{name} is not whole"

    def copy(code: Path) -> None:
        shutil.copytree(source, code)

    return together(2 * len(stage.nodes), start)


def vanishing_lock(stage: Stage, after: bool) -> list[str]:
    """Two Slurm jobs share a cache, and an epilog removes the lock file while one fetches."""
    roots = stage.fresh()

    def work(parent: Parent, number: int) -> None:
        os.environ["SLURM_JOB_ID"] = str(1000 + number)
        root = roots[number % len(roots)]
        shard = root / "shard.tar"
        parent.hear()
        if after:
            sync.once("shard.tar", fetch, parent, shard, dir=root, job="cache", timeout=PATIENCE)
            sync.wait_for(shard)
        else:
            with FileLock(root / "shard.tar.lock"):
                if not shard.exists():
                    fetch(parent, shard)
        try:
            parent.say("has it" if shard.read_bytes() == SHARD else "has something else")
        except OSError as exn:  # the other one has replaced it, and the new one is not seen yet
            parent.say(f"{type(exn).__name__}: {exn}")

    def fetch(parent: Parent, shard: Path) -> None:
        parent.say("fetches")
        parent.hear()
        with sync.atomic_write(shard) as file:
            file.write(SHARD)

    def vanish() -> None:
        names = ["shard.tar.lock", "claim.0"]
        found = [path for name in names for path in (roots[0]).rglob(name)]
        assert found, "there is no lock file"
        for path in found:
            path.unlink()

    with crowd(2, work) as (first, second):
        assert first.ask() == "fetches"
        vanish()
        second.tell()
        # Before, the second one gets a new lock at once. After, it says nothing until it has it.
        early = second.speaks(_MOMENT if after else PATIENCE)
        both = early and second.hear() == "fetches"
        for child in (first, second) if both else (first,):
            child.tell()
        results = [first.hear(), second.hear()]
    troubles = ["both jobs fetched it at the same time"] if both else []
    return troubles + [said for said in results if said != "has it"]


STORIES: dict[str, Callable[[Stage, bool], list[str]]] = {
    "many ranks make one trace directory": trace_directory,
    "rank 0 is late, others wait for three directories": slow_rank_zero,
    "many nodes make one code directory": code_directory,
    "a lock file vanishes under jobs that share a cache": vanishing_lock,
}

_NEVER = 3600.0
_RUNS, _SLOW = int(os.environ.get("RACES_RUNS", "1")), float(os.environ.get("RACES_SLOW", "1"))


@pytest.mark.parametrize("run", range(_RUNS))
@pytest.mark.parametrize("name", STORIES)
def test_before(tmp_path: Path, name: str, run: int) -> None:
    """What others make never comes into sight and rank 0 never gets there: no pace mends it."""
    needs_fuse()
    with stage(tmp_path, 2, delay=_NEVER, slow=_NEVER, ranks=16) as place:
        troubles = STORIES[name](place, False)
    assert troubles
    assert all("Error: " in text or "both jobs fetched" in text for text in troubles), troubles


@pytest.mark.parametrize("run", range(_RUNS))
@pytest.mark.parametrize("name", STORIES)
def test_after(tmp_path: Path, name: str, run: int) -> None:
    needs_fuse()
    with stage(tmp_path, 3, delay=0.4, slow=_SLOW) as place:
        assert STORIES[name](place, True) == []
