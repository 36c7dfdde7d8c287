"""The machine against the configuration: what would go wrong, before a job finds out.

    places (a killable child each) --.
    machine (kernel, environment) ----+--> checks (pure) --> findings
    reach (the origin, with a URL) --'

A check that fails itself is a finding of its own, a warning. No finding shows a credential.
Nothing is made, changed or left, and no dead mount is waited for.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from shardcache.cli import checkup, machine
from shardcache.cli.checkup import Finding
from shardcache.cli.cleaners import TMPFILES, Reaper, Rule, read_rules, reapers
from shardcache.cli.machine import Machine
from shardcache.cli.places import SILENCE, Place, look
from shardcache.cli.reach import read_origin
from shardcache.config import Config
from shardcache.urls import redact

__all__ = ["examine", "unconfigured"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Seconds for all that is asked of an origin. Its own time-outs end it much earlier; a path on
#: a dead mount has none.
_ORIGIN = 180.0
_AGAIN = "Run it again with -vv for the details; the other findings hold without this one."


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """Facts that are the same for every place."""

    machine: Machine | None
    rules: list[Rule]
    reapers: list[Reaper]


def unconfigured(message: str) -> Finding:
    """That there is no configuration to examine, and why."""
    return Finding("fail", "configuration", "configuration", "it cannot be used", redact(message))


def examine(
    config: Config | None,
    *,
    whole: bool = True,
    url: str | None = None,
    environ: Mapping[str, str] | None = None,
    tmpfiles: Iterable[Path] = TMPFILES,
    silence: float = SILENCE,
) -> Iterator[Finding]:
    """Every finding, as soon as it is known.

    Args:
        config: what is configured; None where that cannot be told.
        whole: whether it is all of that; if not, no origin is asked.
        url: a shard to read the start of.
        environ: the environment; the default is that of this process.
        tmpfiles: where the configuration of systemd-tmpfiles is.
        silence: seconds after which a filesystem that says nothing counts as dead.
    """
    env = os.environ if environ is None else environ
    findings = _examine(config, env, tmpfiles, silence)
    if url is not None:
        findings = chain(findings, _examine_origin(config if whole else None, url))
    for finding in findings:
        subject, found, fix = map(redact, (finding.subject, finding.found, finding.fix))
        yield replace(finding, subject=subject, found=found, fix=fix)


def _examine(
    config: Config | None,
    environ: Mapping[str, str],
    tmpfiles: Iterable[Path],
    silence: float,
) -> Iterator[Finding]:
    surroundings, troubles = _gather(environ, tmpfiles)
    yield from troubles
    if config is not None:
        yield from _examine_places(config, surroundings, silence)
    here = surroundings.machine
    if here is not None:
        if config is not None:
            settings = config
            yield from _guarded("files", "open files", lambda: machine.check_files(here, settings))
        yield from _guarded("cpus", "CPUs", lambda: machine.check_cpus(here))
        yield from _guarded("clock", "clock", lambda: machine.check_clock(here))
    yield from _guarded(
        "environment", "environment", lambda: machine.check_environment(environ, config)
    )


def _gather(
    environ: Mapping[str, str], tmpfiles: Iterable[Path]
) -> tuple[_Surroundings, list[Finding]]:
    here, trouble = _gathered("machine", "this machine", lambda: Machine.now(environ))
    rules, more = _gathered("cleaners", "tmpfiles.d", lambda: read_rules(tmpfiles))
    installed, most = _gathered("cleaners", "tmpreaper", lambda: reapers(environ))
    return _Surroundings(here, rules or [], installed or []), [*trouble, *more, *most]


def _examine_places(config: Config, around: _Surroundings, silence: float) -> Iterator[Finding]:
    places: list[Place] = []
    for tier in config.by_tier():
        place, trouble = _gathered("filesystem", os.fspath(tier.dir), partial(look, tier, silence))
        yield from trouble
        if place is not None:
            places.append(place)
            yield from _judge(place, tier, around)
    yield from _guarded("tiers", os.fspath(config.dir), lambda: checkup.check_tiers(places))


def _judge(place: Place, config: Config, around: _Surroundings) -> Iterator[Finding]:
    dead = list(checkup.check_answer(place))
    yield from dead
    if dead:
        return
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "filesystem": lambda: checkup.check_filesystem(place),
        "locks": lambda: checkup.check_locks(place, config),
        "space": lambda: checkup.check_space(place, config),
        "inodes": lambda: checkup.check_inodes(place, config),
        "cleaners": lambda: checkup.check_cleaners(place, around.rules, around.reapers),
        "leftovers": lambda: checkup.check_leftovers(place),
    }
    here = around.machine
    if here is not None:
        checks |= {
            "memory": lambda: checkup.check_memory(place, config, here.memory, here.memory_of),
            "kubernetes": lambda: checkup.check_kubernetes(place, config, here.pod),
            "isolation": lambda: checkup.check_isolation(place, config, here.ranks),
        }
    for name, check in checks.items():
        yield from _guarded(name, place.directory, check)


def _examine_origin(config: Config | None, url: str) -> Iterator[Finding]:
    if config is None:
        yield Finding(
            "warn",
            "origin",
            "origin",
            "not read: it is not known how",
            "Correct the configuration.",
        )
        return
    said: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()

    def tell() -> None:
        for finding in read_origin(config, url):
            said.put(finding)

    def ask() -> None:
        for finding in (*_gathered("origin", "origin", tell)[1], None):
            said.put(finding)

    # A daemon: a path on a dead mount would keep this process from ending.
    threading.Thread(target=ask, name="doctor-origin", daemon=True).start()
    end = time.monotonic() + _ORIGIN
    try:
        while (finding := said.get(timeout=max(0.0, end - time.monotonic()))) is not None:
            yield finding
    except queue.Empty:
        yield Finding(
            "fail", "origin", "origin", f"no answer within {_ORIGIN:g} s",
            "Check the endpoint, the network and, for a path, its mount.",
        )  # fmt: skip


def _guarded(check: str, subject: str, ask: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """What a check finds; a warning where it fails itself."""
    found, trouble = _gathered(check, subject, lambda: list(ask()))
    return trouble if found is None else found


def _gathered(check: str, subject: str, ask: Callable[[], T]) -> tuple[T | None, list[Finding]]:
    """What ``ask`` returns; where it fails, None and a warning."""
    try:
        return ask(), []
    except Exception as exn:  # whatever it is, the other checks still count
        logger.debug("the check %s failed", check, exc_info=True)
        reason = f"{type(exn).__name__}: {exn}" if str(exn) else type(exn).__name__
        return None, [Finding("warn", check, subject, f"could not be checked: {reason}", _AGAIN)]
