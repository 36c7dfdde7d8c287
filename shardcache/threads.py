"""Background threads, and forks of a process that has them.

A fork copies the locks that other threads hold at that moment, and no thread of the child releases
them. This concerns the lock of an import, and those of OpenSSL, which it holds while a context is
made, *during a handshake* and *while a thread that used it ends*. In November 2026, one fork in a
thousand beside four threads that did handshakes made a child that waited for its first context
forever (OpenSSL 3.0). A thread ends some microseconds after `is_alive` has become false. So a fork
waits for imports in other threads, for work inside `undivided`, and for ended threads of shardcache
until the kernel no longer lists them.
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

#: Seconds that a fork waits at most for other threads: an import from a slow disk may take as long.
#: Then it goes on, and the child may hang.
_BEFORE_FORK = 30.0
#: Seconds that a fork waits for threads that are ending. It takes microseconds, or more on busy
#: processors.
_ENDING = 5.0
#: Seconds between two checks: a fork itself takes about as long.
_POLL = 0.0005

#: Threads to remember before the ended ones are forgotten.
_MANY = 64

#: Modules that take locks of their own before a fork.
_HOOKS = ("concurrent.futures.thread", "filelock")

_started: set[threading.Thread] = set()
#: Id of each thread that is inside `undivided`, and how often it entered.
_undivided: dict[int, int] = {}
#: Held during a fork, so that no thread enters `undivided` just before it.
_gate = threading.RLock()


class lazy(Generic[T]):  # noqa: N801 - used as a decorator
    """`functools.cached_property` without its lock.

    Up to Python 3.11 all instances of a class share that lock, and a child that is forked while
    another thread holds it waits forever.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> T:
        value = instance.__dict__[self._name] = self._function(instance)
        return value


def start(function: Callable[[], object], name: str) -> threading.Thread:
    """Call ``function`` in a new daemon thread: an origin may not respond, and downloads resume.

    Raises:
        RuntimeError: the limit of threads is reached.
    """
    _register_hooks()
    if len(_started) >= _MANY:
        _started.difference_update(_ended() - _ending())
    thread = threading.Thread(target=function, name=name, daemon=True)
    _started.add(thread)
    try:
        thread.start()
    except RuntimeError:
        _started.discard(thread)
        raise
    return thread


@contextlib.contextmanager
def undivided() -> Iterator[None]:
    """Make forks by other threads wait until the body has ended."""
    _register_hooks()
    me = threading.get_ident()
    with _gate:
        _undivided[me] = _undivided.get(me, 0) + 1
    try:
        yield
    finally:
        # In a child that was forked in the body, the table is empty.
        if (depth := _undivided.pop(me, 1)) > 1:
            _undivided[me] = depth - 1


def _ended() -> set[threading.Thread]:
    """Return the threads that have ended, as far as Python knows."""
    return {each for each in list(_started) if each.native_id is not None and not each.is_alive()}


def _ending() -> set[threading.Thread]:
    """Return the threads that Python takes for ended, and that the kernel still lists."""
    ended = _ended()  # before the listing, so that a thread that ends now is not missed
    tasks = set(os.listdir("/proc/self/task")) if ended else ()  # noqa: PTH208 - in a hook
    return {each for each in ended if str(each.native_id) in tasks}


@functools.cache
def _register_hooks() -> None:
    """Make every fork call `_before_fork` first.

    Python calls the hook first that was registered last. Other modules, such as filelock, hold
    their locks during a fork. If such a hook came first, the fork and a thread inside `undivided`
    that needs such a lock would wait for each other.
    """
    for name in _HOOKS:
        importlib.import_module(name)
    # The codec of host names. In a child that is forked during its import, Python would remember it
    # as unknown.
    codecs.lookup("idna")
    os.register_at_fork(
        before=_before_fork, after_in_parent=_release_gate, after_in_child=_reset_in_child
    )


def _before_fork() -> None:
    me, start = threading.get_ident(), time.monotonic()
    while True:
        _gate.acquire()
        waited = time.monotonic() - start
        others = any(each != me for each in list(_undivided)) or _is_importing(me)
        busy = waited < _BEFORE_FORK and others
        ending = waited < _ENDING and _ending()
        if not (busy or ending):
            return
        _gate.release()
        time.sleep(_POLL)


def _is_importing(me: int) -> bool:
    """Return whether another thread imports a module, and so holds a lock."""
    # There is no public function for this. Python removes a lock when its import has ended.
    locks = [reference() for reference in list(importlib._bootstrap._module_locks.values())]  # type: ignore[attr-defined]
    return any(getattr(lock, "owner", None) not in (None, me) for lock in locks)


def _release_gate() -> None:
    # If `_before_fork` was interrupted, Python prints the exception and forks without the gate.
    with contextlib.suppress(RuntimeError):
        _gate.release()


def _reset_in_child() -> None:
    global _gate
    _gate = threading.RLock()
    _started.clear()
    _undivided.clear()
