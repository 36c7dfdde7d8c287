"""What a first miss needs, made ready in the background while a program sets itself up.

Imports, directories and an S3 client take some tenths of a second, which the first sample of
an epoch would wait for. A fork waits until a preparation has ended: a child that inherits a
half-done import would wait for it for ever.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import threading
from collections.abc import Callable

__all__ = ["begin"]

logger = logging.getLogger(__name__)

#: Seconds that a fork waits: what the slowest disk takes. Then the child takes its chance.
_BEFORE_FORK = 30.0

#: Modules that take locks of their own before a fork.
_HOOKS = ("concurrent.futures.thread", "filelock", "shardcache.descriptors")
_running: set[threading.Thread] = set()


def begin(function: Callable[[], object]) -> None:
    """Call ``function`` in a thread of its own. What it raises is only logged: it will be
    raised again by whoever needs what it prepares.
    """

    def run() -> None:
        try:
            function()
        except Exception as exn:  # noqa: BLE001 - see above
            logger.debug("not prepared: %s", exn)
        finally:
            _running.discard(thread)

    _wait_before_forks()
    thread = threading.Thread(target=run, name="shardcache-prepare", daemon=True)
    _running.add(thread)
    try:
        thread.start()
    except RuntimeError as exn:  # a limit of processes
        _running.discard(thread)
        logger.debug("not prepared: %s", exn)


@functools.cache
def _wait_before_forks() -> None:
    """Let forks wait, before anything else is done for them.

    What is registered last is called first. Others hold their locks over a fork, filelock for
    one: if it came first, a preparation that wants such a lock and the fork would wait for each
    other.
    """
    for name in _HOOKS:
        importlib.import_module(name)
    os.register_at_fork(before=_finish, after_in_child=_running.clear)


def _finish() -> None:
    for thread in list(_running):
        if thread is not threading.current_thread():
            thread.join(_BEFORE_FORK)
