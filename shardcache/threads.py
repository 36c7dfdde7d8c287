"""Background threads, and safe forks of a process that has background threads.

A forked child inherits the locks that other threads hold, but not the threads, so nothing releases
the locks. Imports hold such locks, and OpenSSL 3.0 does while it creates a context, during a
handshake, while it reads session tickets and while a thread that used it ends: with four such
threads, one fork in a thousand produced a child that waited for its first context forever. So a
fork waits for imports in other threads, for code inside `no_fork`, and for threads that end.

If a signal handler raises in `threading.Thread.start`, which only the main thread can experience,
the new thread waits for a lock forever. So another thread calls it (`start`).
"""

from __future__ import annotations

import _socket
import _thread
import codecs
import contextlib
import functools
import importlib
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import Empty
from typing import Any, Generic, TypeAlias, TypeVar, cast

from shardcache.errors import ConfigError

T = TypeVar("T")
Item = TypeVar("Item")
#: Receives the outcome of a call: its result, or a list with its exception.
Results: TypeAlias = "Queue[tuple[T | None, list[BaseException]]]"

#: Maximum seconds that a fork waits for other threads: an import from a slow disk may take as long.
#: Then the fork proceeds, and the child may hang.
_BEFORE_FORK = 30.0
#: The same for threads that are ending, which usually takes microseconds.
_ENDING_TIMEOUT = 5.0
#: Seconds between two checks, about as long as a fork itself takes.
_FORK_POLL = 0.0005
#: When this many threads are remembered, those that have ended are forgotten.
_MAX_REMEMBERED = 64
#: Modules with hooks that take locks before a fork. Few processes need the second, slow module.
_HOOKS = "concurrent.futures.thread", "filelock"

_started: set[threading.Thread] = set()
#: Weak references to the locks of modules that are being imported. They have no public name.
_module_locks: dict[str, Any] = importlib._bootstrap._module_locks  # type: ignore[attr-defined]
#: The lock of each thread. The thread holds it inside `no_fork`, and a fork takes it. No signal
#: handler can raise while Python enters or leaves a lock.
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
#: Held during a fork, so that no thread makes its lock.
_gate = threading.RLock()


class _ThreadLock(threading.local):
    def __init__(self) -> None:
        self.lock = threading.RLock()
        with _gate:
            _locks.add(self.lock)


_own = _ThreadLock()


class Queue(Generic[T]):
    """A queue for one consumer. Code that the garbage collector runs may put items into it.

    If a signal interrupts `queue.SimpleQueue.get` just before its timeout, CPython waits forever,
    because the remaining time is negative.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._is_empty = threading.Lock()  # the thread that gets waits until this is released
        self._is_empty.acquire()

    def put(self, item: T) -> None:
        self._items.append(item)
        with contextlib.suppress(RuntimeError):  # released for an item before
            self._is_empty.release()

    def get(self, timeout: float | None = None) -> T:
        """Wait for an item, and remove it. Raises `Empty` after ``timeout`` seconds."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self._items:
            left = min(max(0.0, end - time.monotonic()), threading.TIMEOUT_MAX)
            if not self._is_empty.acquire(timeout=left):
                raise Empty
        return self._items.popleft()


class lazy(functools.cached_property[T]):  # noqa: N801 - used as a decorator
    """`functools.cached_property` without its lock.

    Up to Python 3.11, all instances of a class share that lock, and a child that is forked while
    another thread holds the lock waits for it forever. If two threads compute the value at once,
    both get the value of the first one.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> T:  # type: ignore[override]
        if instance is None:  # `help` and mocks read the attribute of the class
            return cast("T", self)
        value: T = instance.__dict__.setdefault(self.attrname, self.func(instance))
        return value


class NoThreadError(Exception):
    """No thread can be started: at a limit, or because the interpreter shuts down.

    Python raises a RuntimeError, as signal handlers do, such as that of torch's DataLoader.
    """


def start(function: Callable[[], object], name: str) -> threading.Thread:
    """Call ``function`` in a new daemon thread, which does not keep a program from ending.

    Raises NoThreadError.
    """
    _register_hooks(_HOOKS[1] in sys.modules)
    if len(_started) >= _MAX_REMEMBERED:
        _ending()
    thread = threading.Thread(target=function, name=name, daemon=True)

    def begin() -> None:
        thread.start()
        _started.add(thread)

    try:
        if is_main():
            results: Results[None] = Queue()
            _thread.start_new_thread(put_result, (begin, results))
            get_result(results, None)
        else:
            begin()
    except RuntimeError as exn:
        if "new thread" not in str(exn):
            raise
        raise NoThreadError(str(exn)) from None
    return thread


def refuse_patches() -> None:
    """Raise ConfigError if gevent or eventlet has patched sockets: theirs ignore SO_RCVTIMEO."""
    if not issubclass(socket.socket, _socket.socket):
        text = "reads over the sockets of gevent or eventlet would never time out. "
        raise ConfigError(f"{text}Read shards in a process without their monkey patches.")


def is_main() -> bool:
    """Return whether the current thread is the main thread, the only one that handles signals."""
    return threading.get_ident() == threading.main_thread().ident


def is_alone() -> bool:
    """Return whether no other thread runs Python code, except threads of `start`."""
    others = {*threading.enumerate()} - {threading.current_thread()}
    return all(thread.name.startswith("shardcache-") for thread in others)


def call(function: Callable[[], T], seconds: float | None, name: str) -> T:
    """Call ``function`` in a thread of its own, and return its result or raise its exception.

    If no thread can be started (at a limit, or while the interpreter shuts down), ``function`` is
    called in this one. Raises Empty if it has not returned within ``seconds``.
    """
    results: Results[T] = Queue()
    try:
        start(lambda: put_result(function, results), name)
    except NoThreadError:
        put_result(function, results)
    return get_result(results, seconds)


def each(
    function: Callable[[Item], T], items: Sequence[Item], count: int, name: str
) -> Iterator[tuple[int, T]]:
    """Call ``function`` with each item, in ``count`` threads, or here if no thread can be started.

    Yields the position of each item and the result, as they are ready. If the caller stops early,
    no further call begins.
    """
    waiting = deque(enumerate(items))
    results: Results[tuple[int, T]] = Queue()

    def work() -> None:
        with contextlib.suppress(IndexError):  # no item is left
            while True:
                number, item = waiting.popleft()
                put_result(lambda: (number, function(item)), results)  # noqa: B023

    started = 0
    try:
        with contextlib.suppress(NoThreadError):
            while started < min(count, len(items)):
                start(work, name)
                started += 1
        if not started:
            work()
        for _ in items:
            yield get_result(results, None)
    finally:
        waiting.clear()


def put_result(function: Callable[[], T], results: Results[T]) -> None:
    """Call ``function``, and put its result or its exception into a queue."""
    try:
        results.put((function(), []))
    except BaseException as exn:  # noqa: BLE001 - `get_result` raises it
        results.put((None, [exn]))


def get_result(results: Results[T], seconds: float | None) -> T:
    """Wait for an item of `put_result`. Return the result, or raise the exception or `Empty`."""
    result, errors = results.get(timeout=seconds)
    if errors:
        raise errors.pop()
    return cast("T", result)


def no_fork() -> contextlib.AbstractContextManager[bool]:
    """Return a lock that makes forks in other threads wait while the current thread holds it."""
    _register_hooks(_HOOKS[1] in sys.modules)
    return _own.lock


def _ending() -> set[threading.Thread]:
    """Return threads that Python has ended and the kernel still lists; forget those it does not."""
    ended = {t for t in list(_started) if not t.is_alive()}  # before the kernel's list
    tasks = set(os.listdir("/proc/self/task")) if ended else ()  # noqa: PTH208 - only names
    _started.difference_update(thread for thread in ended if str(thread.native_id) not in tasks)
    return ended & _started


@functools.cache
def _register_hooks(again: bool) -> None:
    """Make every fork call `_before_fork` before the hooks of other modules.

    Python first calls the hook that was registered last. If a hook of `_HOOKS` came first, the fork
    would wait for a thread inside `no_fork`, and that thread for the lock of the module. So this
    registers the hook ``again`` when filelock has been imported in the meantime.
    """
    with contextlib.suppress(RuntimeError):  # in a handler of `atexit`, where no fork follows
        importlib.import_module(_HOOKS[0])
    # A child that is forked during the import of the codec of host names would not know it.
    codecs.lookup("idna")
    os.register_at_fork(before=_before_fork, after_in_parent=_release, after_in_child=_reset)
    # Once more, as a signal handler may raise in a hook, which Python ignores.
    os.register_at_fork(after_in_parent=_release)


def _before_fork() -> None:
    own, start = _own.lock, time.monotonic()
    while True:
        _gate.acquire()
        waited = time.monotonic() - start
        taken = {lock for lock in _locks if lock is not own and lock.acquire(blocking=False)}
        held = {*_locks} - taken - {own}
        busy = waited < _BEFORE_FORK and (held or _imported_elsewhere())
        ending = waited < _ENDING_TIMEOUT and _ending()
        if not (busy or ending):
            _locks.difference_update(held)  # no later fork waits for them again
            return
        for lock in taken | {_gate}:
            lock.release()
        time.sleep(_FORK_POLL)


def _imported_elsewhere() -> list[str]:
    """Return the modules that other threads are importing, and whose locks they hold."""
    nobody = None, threading.get_ident()
    owners = [(name, getattr(lock(), "owner", None)) for name, lock in list(_module_locks.items())]
    return [name for name, owner in owners if owner not in nobody]


def _forget_imports() -> None:
    """In a forked child, forget what threads of the parent were importing, to import it again.

    Another thread may begin an import between `_before_fork` and the fork.
    """
    for name in _imported_elsewhere():
        del _module_locks[name]
        if getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False):
            del sys.modules[name]


os.register_at_fork(after_in_child=_forget_imports)  # before the hooks of modules that import


def _release() -> None:
    # The hooks may be registered twice, or a signal handler interrupted `_before_fork`.
    with _gate:
        others = {*_locks} - {_own.lock}
    for lock in others | {_gate}:
        with contextlib.suppress(RuntimeError):  # this thread does not hold it any more
            while True:
                lock.release()


def _reset() -> None:
    global _gate
    _gate = threading.RLock()
    _started.clear()
    _locks.clear()
    _locks.add(_own.lock)
