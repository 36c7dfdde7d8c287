"""An interrupt at any chosen moment of a piece of code, and what it may leave.

Python runs signal handlers between instructions, not between lines, and only at
some: after a call, at the start of a function, when a loop goes back. `Interrupt`
counts these moments, in code of the library and of what it locks through, and
raises `KeyboardInterrupt` at the chosen one, as the default handler of SIGINT does.

Only the calling thread is watched: no other ever sees a KeyboardInterrupt.
"""

from __future__ import annotations

import dis
import fcntl
import functools
import gc
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import filelock

import shardcache
from shardcache.cache import Cache
from tests.support.fakes import MemoryOrigin
from tests.support.storetools import PATIENCE
from tests.support.tars import make_tar

__all__ = ["ACTS", "Interrupt", "sweep"]

#: What `sweep` can interrupt.
ACTS = ("hit", "pin", "fetch", "follow", "evict", "clean", "prewarm")

#: Code that is interrupted; below it (json, pathlib) are no resources of ours.
WATCHED = tuple(f"{Path(module.__file__).parent}/" for module in (shardcache, filelock))

#: Instructions before which CPython looks for signals, and behind which.
_BEFORE = ("JUMP_BACKWARD",)
_BEHIND = ("CALL", "RESUME")
#: ... but never when a `with` is just about to be entered.
_SPARED = ("BEFORE_WITH", "LOAD_SPECIAL", "CACHE", "PRECALL")


@functools.cache
def moments(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions before which a signal handler may run.

    What the handler raises belongs to the instruction behind which CPython looked, and
    goes where that one's exceptions go. What we raise belongs to the next one: where that
    has another handler (a `return` in a `with` is about to call ``__exit__``) it would be
    an interrupt that cannot be, so it is left out.
    """
    handlers = dis.Bytecode(code).exception_entries

    def handler(offset: int) -> int | None:
        found = [e.target for e in handlers if e.start <= offset < e.end]
        return found[-1] if found else None

    found = set()
    looked, previous = 0, ""
    for instruction in dis.get_instructions(code):
        name, offset = instruction.opname, instruction.offset
        if name in _SPARED:
            previous = "" if name != "PRECALL" else previous
            continue
        if name in _BEFORE:
            looked = instruction.argval - 2  # where it goes on
        here = name in _BEFORE or previous.startswith(_BEHIND)
        if here and handler(looked) == handler(offset):
            found.add(offset)
        looked, previous = offset, name
    return frozenset(found)


class Interrupt:
    """Raises KeyboardInterrupt once, at the ``at``-th moment; 0 only counts.

    Attributes:
        seen: moments so far.
        place: where it struck, or None.
        functions: whose code was running then, the innermost first, as file:function.
        files: for each moment so far, whose it was.
    """

    def __init__(self, at: int, watched: tuple[str, ...] = WATCHED) -> None:
        self.at = at
        self.seen = 0
        self.place: str | None = None
        self.functions: list[str] = []
        self.files: list[str] = []
        self._watched = watched

    def __enter__(self) -> Interrupt:
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._watched):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and frame.f_lasti in moments(frame.f_code):
            self.seen += 1
            self.files.append(Path(frame.f_code.co_filename).name)
            if self.seen == self.at:
                self._note(frame)
                raise KeyboardInterrupt
        return self._step

    def _note(self, frame: FrameType) -> None:
        name = Path(frame.f_code.co_filename).name
        self.place = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        found: FrameType | None = frame
        while found is not None:
            code = found.f_code
            self.functions.append(f"{Path(code.co_filename).parent.name}:{code.co_name}")
            found = found.f_back

    @property
    def in_filelock(self) -> bool:
        """Whether it struck where only filelock knows of the descriptor."""
        return self.functions[0].startswith("filelock:")

    @property
    def dropped_by_python(self) -> bool:
        """Whether Python itself dropped it: exceptions of ``__del__`` go nowhere, nor do those
        of ``tell``, which a buffered reader calls as it is made (bufferedio.c, _buffered_init).
        """
        in_destructor = any(name.endswith(":__del__") for name in self.functions)
        return in_destructor or self.functions[0].endswith(":tell")


URL, OTHER = "s3://lab/a.tar", "s3://lab/b.tar"
OBJECTS = {URL: make_tar(1, members=1, size=2000), OTHER: make_tar(2, members=1, size=2000)}


class Scene:
    """A cache in a directory of its own, and one thing to do with it."""

    def __init__(self, path: Path, act: str) -> None:
        self.path = path
        self.act = act
        budget = 20_000 if act == "evict" else None
        self.cache = Cache(
            path,
            min_free=0,
            max_size=budget,
            connections=2,
            attempts=1,
            fill="follow" if act == "follow" else "complete",
            endpoint_url="http://127.0.0.1:9",  # nobody: who asks for sizes is told so at once
            locks="flock",  # without a process that tries it first
        )
        process = self.cache._here()
        process.coordinator()
        process.origins.add("s3", MemoryOrigin(objects=dict(OBJECTS)))
        getattr(self, f"before_{act}", lambda: None)()

    def before_hit(self) -> None:
        self.cache.fetch(URL)

    before_pin = before_hit

    def before_clean(self) -> None:
        self.cache.fetch(URL)
        self.cache.fetch(OTHER)

    def before_evict(self) -> None:
        os.utime(self.cache.fetch(OTHER).path / "meta.json", (1, 1))

    def run(self) -> None:
        getattr(self, self.act)()

    def read(self, url: str) -> None:
        with self.cache.open(url) as stream:
            assert stream.read() == OBJECTS[url]

    def hit(self) -> None:
        self.read(URL)

    fetch = follow = evict = hit

    def pin(self) -> None:
        with self.cache.pinned(URL) as path:
            assert path.read_bytes() == OBJECTS[URL]

    def clean(self) -> None:
        self.cache.clean(everything=True)

    def prewarm(self) -> None:
        self.cache.prewarm(list(OBJECTS), jobs=2)

    def locked(self) -> list[str]:
        """Files of the cache that somebody holds, but for what a process holds while it lives."""
        found = []
        for path in self.path.rglob("*"):
            if path.suffix in (".session", ".versions") or not path.is_file():
                continue
            fd = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(path.name)
            finally:
                os.close(fd)
        return found

    def settle(self) -> None:
        """Until threads that were called off have let go."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and any(
            thread.name.endswith("-fetch") for thread in threading.enumerate()
        ):
            time.sleep(0.002)


def sweep(directory: Path, act: str, stride: int, within: str | None = None) -> dict[str, int]:
    """Interrupt ``act`` at every ``stride``-th moment; judge what it leaves.

    What is left must be let go of at once, not when the garbage collector comes: so it is off.

    Args:
        directory: for the caches.
        act: of `ACTS`.
        stride: how many moments to go on.
        within: only at moments of this file.

    Returns:
        How many moments were tried, and how often what the library cannot help was seen.
    """
    count = Interrupt(0)
    scene = Scene(directory / "count", act)
    with count:
        scene.run()
    scene.cache.close()
    tally = {"moments": count.seen, "tried": 0, "lost by Python": 0, "left by filelock": 0}
    for at in range(1 + stride // 2, count.seen + 1, stride):
        if within is None or count.files[at - 1] == within:
            gc.disable()
            try:
                judge(Scene(directory / str(at), act), at, tally)
            finally:
                gc.enable()
    return tally


def judge(scene: Scene, at: int, tally: dict[str, int]) -> None:
    interrupt = Interrupt(at)
    try:
        with interrupt:
            scene.run()
    except KeyboardInterrupt:
        passed_on = True
    else:
        passed_on = interrupt.place is None  # it took another way this time, and a shorter one
    tally["tried"] += 1
    told = f"{scene.act}, moment {at}: {interrupt.place}"
    if not passed_on and interrupt.dropped_by_python:
        tally["lost by Python"] += 1
    else:
        assert passed_on, f"swallowed: {told}"
    scene.settle()
    locked = scene.locked()
    if locked and interrupt.in_filelock:
        # Between its flock and its note of it: freed with this process.
        tally["left by filelock"] += 1
    else:
        assert not locked, f"{locked} stayed locked: {told}"
        scene.hit()
        elsewhere = threading.Thread(target=scene.read, args=(OTHER,), daemon=True)
        elsewhere.start()  # it finds what a lock between threads would keep from it
        elsewhere.join(PATIENCE)
        assert not elsewhere.is_alive(), f"another thread hangs: {told}"
        scene.cache.clean()
        left = [
            p.name for name in ("partial", "quarantine") for p in scene.path.glob(f"v1/{name}/*")
        ]
        assert not left, f"{left} stayed: {told}"
    scene.cache.close()
