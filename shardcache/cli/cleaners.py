"""Which program of this machine would empty a directory: cleaners of temporary files.

What is known of systemd-tmpfiles is from tmpfiles.d(5): types d, D, e, v, q and Q with an age
have the contents of their path cleaned by ``systemd-tmpfiles --clean``, once a day; the innermost
path that has a line of its own decides; ``x`` excludes a path with all that is in it, ``X`` the
path alone and so not the shards; ``!`` is for booting. Of files with one name the one in
``/etc`` counts, then that in ``/run``. tmpreaper(8) and tmpwatch(8) are told what to clean by
a configuration file and by whoever starts them.

Reads configuration only; all but `read_rules` and `reapers` are pure.
"""

from __future__ import annotations

import fnmatch
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["TMPFILES", "Reaper", "Rule", "aged", "parse_rules", "read_rules", "reaped", "reapers"]

#: Earlier ones win.
TMPFILES = tuple(
    Path(parent, "tmpfiles.d") for parent in ("/etc", "/run", "/usr/local/lib", "/usr/lib")
)
_AGED = frozenset("dDevqQ")
_GLOBS = frozenset("exX")
_SPECIFIERS = {
    "%%": "%",
    "%C": "/var/cache",
    "%L": "/var/log",
    "%S": "/var/lib",
    "%T": "/tmp",  # noqa: S108
    "%V": "/var/tmp",  # noqa: S108
    "%h": "/root",
    "%t": "/run",
}
#: What the two clean as their packages start them.
_TEMPORARY = {"tmpreaper": ("/tmp",), "tmpwatch": ("/tmp", "/var/tmp")}  # noqa: S108
_TMPREAPER_CONF = Path("/etc/tmpreaper.conf")


@dataclass(frozen=True, slots=True)
class Rule:
    """A line of tmpfiles.d.

    Attributes:
        type: its letter.
        path: with globs where the type takes them.
        age: as written; empty without one.
        file: where it stands.
    """

    type: str
    path: str
    age: str
    file: str


@dataclass(frozen=True, slots=True)
class Reaper:
    """tmpreaper or tmpwatch, as installed.

    Attributes:
        name: which.
        cleans: directories.
        spares: patterns of what it leaves.
    """

    name: str
    cleans: tuple[str, ...]
    spares: tuple[str, ...] = ()


def parse_rules(text: str, file: str) -> Iterator[Rule]:
    """The lines that say something about cleaning; others, and broken ones, are left out."""
    for line in text.splitlines():
        try:
            words = [] if line.lstrip()[:1] in ("#", ";") else shlex.split(line)
        except ValueError:
            continue
        if len(words) < 2 or "!" in words[0]:
            continue
        kind, path = words[0][:1], words[1]
        for name, value in _SPECIFIERS.items():
            path = path.replace(name, value)
        if kind not in _AGED | _GLOBS or "%" in path or not path.startswith("/"):
            continue
        age = words[5] if len(words) > 5 and words[5] != "-" else ""
        yield Rule(kind, os.path.normpath(path), age, file)


def read_rules(directories: Iterable[Path] = TMPFILES) -> list[Rule]:
    """The rules in force.

    Args:
        directories: where they are, the most important first; missing ones are empty.

    Raises:
        OSError: a file is there and cannot be read.
    """
    files: dict[str, Path] = {}
    for directory in directories:
        for path in sorted(directory.glob("*.conf")):
            files.setdefault(path.name, path)
    rules: list[Rule] = []
    for _, path in sorted(files.items()):  # a link to /dev/null masks those below
        rules += parse_rules(path.read_text("utf-8", "surrogateescape"), str(path))
    return rules


def aged(directory: str, rules: Sequence[Rule]) -> Rule | None:
    """The rule by which systemd-tmpfiles cleans what is in a directory; None without one."""
    for path in (directory, *map(str, Path(directory).parents)):
        own = [rule for rule in rules if _is_of(rule, path)]
        inside = path == directory and any(r.type == "x" and r.path == f"{path}/*" for r in rules)
        if inside or any(rule.type == "x" for rule in own):
            return None
        lines = [rule for rule in own if rule.type in _AGED]
        if lines:
            return next((rule for rule in lines if rule.age), None)
    return None


def _is_of(rule: Rule, path: str) -> bool:
    if rule.type not in _GLOBS:
        return rule.path == path
    # As glob(7): a star ends at a slash, so both have to be as deep.
    same_depth = rule.path.count("/") == path.count("/")
    return same_depth and fnmatch.fnmatchcase(path, rule.path)


def reapers(environ: Mapping[str, str] | None = None, conf: Path = _TMPREAPER_CONF) -> list[Reaper]:
    """Which of tmpreaper and tmpwatch are installed.

    Args:
        environ: with another PATH.
        conf: where tmpreaper's configuration is.

    Raises:
        OSError: it is there and cannot be read.
    """
    search = (os.environ if environ is None else environ).get("PATH", "")
    found = []
    for name, cleans in _TEMPORARY.items():
        # Of the system's administrator, whose directories are not in everybody's PATH.
        if shutil.which(name, path=f"{search}:/usr/sbin:/sbin"):
            stated = _assignments(conf) if name == "tmpreaper" and conf.exists() else {}
            dirs = stated.get("TMPREAPER_DIRS", "").split()  # usually "/tmp/."
            spares = stated.get("TMPREAPER_PROTECT_EXTRA", "").split()
            cleaned = tuple(map(os.path.normpath, dirs)) or cleans
            found.append(Reaper(name, cleaned, tuple(spares)))
    return found


def _assignments(conf: Path) -> dict[str, str]:
    stated = {}
    for line in conf.read_text("utf-8", "replace").splitlines():
        name, mark, value = line.strip().partition("=")
        if mark and not name.startswith("#"):
            stated[name] = value.strip().strip("'\"")
    return stated


def reaped(directory: str, found: Iterable[Reaper]) -> Reaper | None:
    """Which of them cleans what is in a directory."""
    path = Path(directory)
    for reaper in found:
        spared = any(fnmatch.fnmatchcase(f"{directory}/v1/x", pattern) for pattern in reaper.spares)
        if not spared and any(path.is_relative_to(cleaned) for cleaned in reaper.cleans):
            return reaper
    return None
