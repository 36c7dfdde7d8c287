"""Processes of other users: two members of one group, and somebody who is not in it.

Root alone can run as anybody, so tests that use these are marked `needs_root`.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.support.storetools import Child, Parent, forked

#: Numbers that no distribution gives to anybody.
GROUP = 64999


@dataclass(frozen=True)
class User:
    uid: int
    groups: tuple[int, ...] = (GROUP,)


ANNA = User(64991)
BELA = User(64992)


@contextlib.contextmanager
def running(
    user: User, function: Callable[..., None], *args: Any, umask: int = 0o077
) -> Iterator[Child]:
    """``function(parent, *args)`` in a process of ``user``; see `storetools.forked`."""

    def child(parent: Parent) -> None:
        os.chdir("/")  # where the tests run may be closed to others
        os.setgroups(list(user.groups))
        os.setresgid(user.uid, user.uid, user.uid)
        os.setresuid(user.uid, user.uid, user.uid)
        os.umask(umask)
        function(parent, *args)

    with forked(child) as found:
        yield found


def ask(user: User, function: Callable[..., Any], *args: Any, umask: int = 0o077) -> Any:
    """What ``function(*args)`` returns to ``user``."""

    def answer(parent: Parent) -> None:
        parent.say(function(*args))

    with running(user, answer, umask=umask) as child:
        return child.hear()
