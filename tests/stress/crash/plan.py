"""Which system calls of a run are struck, and how.

Calls that do not touch the cache directory are passed over: what is on its disk and who
holds its locks is the same as at the next one that does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.stress.crash.scenarios import Scenario
from tests.stress.crash.strace import Call, Run, Strike

__all__ = ["Point", "errors", "kills", "sampled"]

#: Calls that change a directory, a file or a lock; being killed behind any other is the
#: same as being killed before the next.
_EFFECTS = frozenset(
    {
        "fchmod", "fchmodat", "flock", "fsync", "ftruncate", "futimesat", "link", "linkat",
        "mkdir", "mkdirat", "openat", "pwrite64", "pwritev", "rename", "renameat", "renameat2",
        "rmdir", "unlink", "unlinkat", "utimensat", "write", "writev",
    }
)  # fmt: skip

_CHANGE = ("ENOSPC", "EDQUOT", "EROFS", "EIO", "EACCES", "ENOMEM")
_REMOVE = ("EROFS", "EIO", "EACCES", "ENOMEM")
_LOOK = ("EIO", "EACCES", "ENOMEM")
#: What the manual pages (section 2), ext4 and xfs let a call answer that began on a healthy disk.
_ANSWERS = {
    "close": ("EIO",),
    "dup": ("EMFILE",),
    "fchmod": ("EROFS", "EIO", "ENOMEM"),
    "flock": ("ENOLCK", "EIO"),
    "fstat": ("EIO", "ENOMEM"),
    "fstatfs": ("EIO",),
    "fsync": ("ENOSPC", "EDQUOT", "EIO"),
    "ftruncate": ("ENOSPC", "EROFS", "EIO"),
    "getdents64": ("EIO",),
    "link": _CHANGE,
    "linkat": _CHANGE,
    "lstat": _LOOK,
    "mkdir": _CHANGE,
    "mkdirat": _CHANGE,
    "newfstatat": _LOOK,
    "pread64": ("EIO",),
    "preadv": ("EIO",),
    "pwrite64": ("ENOSPC", "EDQUOT", "EIO"),
    "read": ("EIO",),
    "readlink": ("EIO", "EACCES"),
    "rename": _CHANGE,
    "renameat": _CHANGE,
    "renameat2": _CHANGE,
    "rmdir": _REMOVE,
    "stat": _LOOK,
    "statfs": ("EIO",),
    "statx": _LOOK,
    "unlink": _REMOVE,
    "unlinkat": _REMOVE,
    "utimensat": ("EROFS", "EIO", "EACCES"),
    "write": ("ENOSPC", "EDQUOT", "EIO"),
}
_OPEN = ("EMFILE", "EIO", "EACCES", "ENOMEM")
_MAKE = ("EMFILE", *_CHANGE)
#: Calls before and behind the one that publishes which no sample leaves out.
_NEIGHBOURS = 5


@dataclass(frozen=True, slots=True)
class Point:
    """One attempt.

    Attributes:
        scenario: its name.
        strike: what happens.
        text: the call, as it was when nothing happened; empty for one that was not seen.
        essential: whether every sample has it.
        onward: whether to go on to the next number until nothing is struck.
    """

    scenario: str
    strike: Strike
    text: str
    essential: bool = False
    onward: bool = False


def _unique(run: Run, publishes: bool) -> Iterator[tuple[Call, bool]]:
    """The calls, each name and number once, and whether they are about publishing."""
    near = set()
    for index, call in enumerate(run.calls if publishes else ()):
        if call.name.startswith("rename") and "/objects/" in call.text:
            near.update(range(index - _NEIGHBOURS, index + _NEIGHBOURS + 1))
    seen = set()
    for index, call in enumerate(run.calls):
        if (call.name, call.number) not in seen:
            seen.add((call.name, call.number))
            yield call, index in near


def kills(scenario: Scenario, run: Run) -> Iterator[Point]:
    """Every crash point of a run, in its order; then, for each name, what may come later."""
    for call, essential in _unique(run, scenario.publishes):
        before = Strike.before(call.name, call.number)
        yield Point(scenario.name, before, call.text, essential)
        if _has_effect(call):
            after = Strike.after(call.name, call.number)
            yield Point(scenario.name, after, call.text, essential)
    for name in sorted({call.name for call in run.calls}):
        later = Strike.before(name, run.counts[name] + 1)
        yield Point(scenario.name, later, "", onward=True)


def _has_effect(call: Call) -> bool:
    if call.name == "openat":
        return "O_CREAT" in call.text
    return call.name in _EFFECTS


def errors(scenario: Scenario, run: Run) -> Iterator[Point]:
    """Every error of every call, once; and from each on, where nobody else makes such calls."""
    for call, essential in _unique(run, scenario.publishes):
        for number, error in enumerate(_answers(call)):
            once = Strike.error(call.name, call.number, error)
            yield Point(scenario.name, once, call.text, essential and not number)
            if call.name in _EFFECTS and call.name not in run.elsewhere:
                on = Strike.error(call.name, call.number, error, on=True)
                yield Point(scenario.name, on, call.text)


def _answers(call: Call) -> tuple[str, ...]:
    if call.name == "openat":
        changes = any(flag in call.text for flag in ("O_CREAT", "O_RDWR", "O_WRONLY"))
        return _MAKE if changes else _OPEN
    return _ANSWERS.get(call.name, ())


def sampled(points: list[Point], every: int) -> list[Point]:
    """Every so-many-th, spread evenly, and the essential ones."""
    if every == 1:
        return points
    return [p for i, p in enumerate(points) if p.essential or i % every == every // 2]
