"""Processes of other users. Only root can start them: mark such tests `needs_root`."""

import contextlib
import logging.handlers  # noqa: F401 - the other users may not read the standard library
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.support.storetools import Child, Parent, forked

#: No distribution assigns these numbers.
GROUP = 64999


@dataclass(frozen=True)
class User:
    uid: int
    groups: tuple[int, ...] = (GROUP,)


ANNA = User(64991)
BELA = User(64992)


@contextlib.contextmanager
def running(user: User, function: Callable, *args: Any, umask: int = 0o077) -> Iterator[Child]:
    """Run ``function(parent, *args)`` in a process of ``user``; see `storetools.forked`."""

    def child(parent: Parent) -> None:
        os.chdir("/")  # the user may not enter the working directory
        os.setgroups(list(user.groups))
        os.setresgid(user.uid, user.uid, user.uid)
        os.setresuid(user.uid, user.uid, user.uid)
        os.umask(umask)
        function(parent, *args)

    with forked(child) as found:
        yield found


def ask(user: User, function: Callable[..., Any], *args: Any, umask: int = 0o077) -> Any:
    """Return the result of ``function(*args)`` in a process of ``user``."""

    with running(user, lambda parent: parent.say(function(*args)), umask=umask) as child:
        return child.hear()
