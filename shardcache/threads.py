"""Threads in the background, and forks of a process that has such threads.

A fork copies the locks that other threads hold at that moment, and nobody in the child will
release them: of an import that is half done, and of OpenSSL, which locks what all its users
share while a context is made and *while a thread that used it ends*. That is after `join` has
returned: a DataLoader worker that is forked then waits for ever for its first context. So a
fork waits for imports in other threads, for pieces of work that are not to be cut in two
(`undivided`), and for threads of ours that have ended until the kernel, too, says so. It does not
wait for anything else that a thread may do, such as a TLS handshake.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

__all__ = ["lazy", "start", "undivided"]

T = TypeVar("T")

#: Seconds that a fork waits: what the slowest disk takes. Then the child takes its chance.
_BEFORE_FORK = 30.0
#: Seconds between looks, and that the end of a thread may take: it takes microseconds, more
#: where processors are busy.
_LOOK = 0.0005
_ENDING = 5.0

#: Threads remembered before those that ended are forgotten.
_MANY = 64

#: Modules that take locks of their own before a fork.
_HOOKS = ("concurrent.futures.thread", "filelock")

_ours: set[threading.Thread] = set()
_undivided: dict[int, int] = {}  # threads, and how often each of them is inside
#: Held over a fork, so that nothing undivided begins just before it.
_gate = threading.RLock()


class lazy(Generic[T]):  # noqa: N801 - used as a decorator
    """`functools.cached_property` without its lock.

    Up to Python 3.11 all instances of a class share that lock, and a child that is forked while
    another thread holds it waits for ever.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> T:
        value = instance.__dict__[self._name] = self._function(instance)
        return value


def start(function: Callable[[], object], name: str) -> threading.Thread:
    """Call ``function`` in a new thread of this name.

    The end of the process does not wait for it: an origin may be silent, and of a shard in
    flight nothing is lost.

    Raises:
        RuntimeError: a limit of processes.
    """
    _wait_before_forks()
    if len(_ours) >= _MANY:
        _ours.difference_update(_ended() - _ending())
    thread = threading.Thread(target=function, name=name, daemon=True)
    _ours.add(thread)
    try:
        thread.start()
    except RuntimeError:
        _ours.discard(thread)
        raise
    return thread


@contextlib.contextmanager
def undivided() -> Iterator[None]:
    """Let forks wait for what the calling thread does, other than its own."""
    _wait_before_forks()
    me = threading.get_ident()
    with _gate:
        _undivided[me] = _undivided.get(me, 0) + 1
    try:
        yield
    finally:
        # A child has only its own: there may be none.
        if (depth := _undivided.pop(me, 1)) > 1:
            _undivided[me] = depth - 1


def _ended() -> set[threading.Thread]:
    """Those of our threads that have ended, in the eyes of Python."""
    return {each for each in list(_ours) if each.native_id is not None and not each.is_alive()}


def _ending() -> set[threading.Thread]:
    """Those that have not ended yet in the eyes of the kernel."""
    ended = _ended()  # before the kernel is asked: they do not come back
    tasks = set(os.listdir("/proc/self/task")) if ended else ()  # noqa: PTH208 - in a hook
    return {each for each in ended if str(each.native_id) in tasks}


@functools.cache
def _wait_before_forks() -> None:
    """Let forks wait, before anything else is done for them.

    What is registered last is called first. Others hold their locks over a fork, filelock for
    one: if it came first, a thread that wants such a lock and the fork would wait for each
    other.
    """
    for name in _HOOKS:
        importlib.import_module(name)
    # Names of hosts are spelt with it. A child that is forked while it is being imported has a
    # Python that takes it for unknown from then on.
    codecs.lookup("idna")
    os.register_at_fork(before=_wait, after_in_parent=_go_on, after_in_child=_begin_anew)


def _wait() -> None:
    me, begun = threading.get_ident(), time.monotonic()
    while True:
        _gate.acquire()
        waited = time.monotonic() - begun
        others = any(each != me for each in list(_undivided)) or _is_importing(me)
        busy = waited < _BEFORE_FORK and others
        ending = waited < _ENDING and _ending()
        if not (busy or ending):
            return
        _gate.release()
        time.sleep(_LOOK)


def _is_importing(me: int) -> bool:
    """Whether another thread imports a module: it holds a lock that the child would copy."""
    # No public name tells. Python removes a lock from the table when its import has ended.
    locks = [reference() for reference in list(importlib._bootstrap._module_locks.values())]  # type: ignore[attr-defined]
    return any(getattr(lock, "owner", None) not in (None, me) for lock in locks)


def _go_on() -> None:
    # An interrupt in `_wait` is shown and forgotten, and the fork goes on without the gate.
    with contextlib.suppress(RuntimeError):
        _gate.release()


def _begin_anew() -> None:
    global _gate
    _gate = threading.RLock()
    _ours.clear()
    _undivided.clear()
