"""What is good and bad about a directory for shards: judged from facts, touching nothing.

Every check is pure: facts in, findings out. `places.look` gathers the facts, `doctor` puts the
two together. A finding that is not ok says what an operator can do about it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shardcache.cli.cleaners import Reaper, Rule, aged, reaped
from shardcache.cli.places import SILENCE, Answer, Place
from shardcache.config import Config
from shardcache.locks.mounts import MEMORY_TYPES, Mount
from shardcache.space.eviction import ENTRY_INODES
from shardcache.space.memory import Headroom, Volume
from shardcache.units import format_bytes, format_duration

__all__ = ["Finding", "Level", "check_answer", "check_cleaners", "check_filesystem"]
__all__ += ["check_inodes", "check_isolation", "check_kubernetes", "check_leftovers"]
__all__ += ["check_locks", "check_memory", "check_space", "check_tiers"]

Level = Literal["ok", "warn", "fail"]
Findings = Iterator["Finding"]

#: Where the kubelet keeps the volumes that count as ephemeral storage of a pod.
_EMPTY_DIR = "kubernetes.io~empty-dir"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Attributes:
        level: ``ok``; ``warn``: it works, but not well or not for long; ``fail``.
        check: the kind of question.
        subject: what was looked at.
        found: what was found.
        fix: what to do, in one sentence; empty if ok.
    """

    level: Level
    check: str
    subject: str
    found: str
    fix: str = ""


def is_memory(place: Place) -> bool:
    """Whether what is written there is memory."""
    return place.mount is not None and place.mount.type in MEMORY_TYPES


def _named(mount: Mount | None) -> str:
    if mount is None:
        return "an unknown filesystem"
    return f"{mount.type} mounted at {mount.point}"


def check_answer(place: Place) -> Findings:
    """Whether the filesystem answers; where it does not, nothing else can be judged."""
    mount = _named(place.mount)
    if place.hung:
        yield Finding(
            "fail", "filesystem", place.directory,
            f"{mount} does not answer within {SILENCE:g} s (asked {place.hung})",
            "Have it mounted anew (its server may be down), or point dir at a local disk.",
        )  # fmt: skip
    elif place.broken:
        yield Finding(
            "fail", "filesystem", place.directory, f"{mount} fails: {place.broken}",
            "See the kernel's log (dmesg) and have the disk mended, or point dir at another.",
        )  # fmt: skip


def check_filesystem(place: Place) -> Findings:
    """Whether files can be made and renamed there, and whose directory it is."""
    mount, where = place.mount, place.directory
    faults = list(_faults(place))
    yield from faults
    if place.kind == "foreign":
        yield Finding(
            "warn", "filesystem", where, "no cache, but other things are in it",
            f"Give the cache a directory of its own, such as {where.rstrip('/')}/shards.",
        )  # fmt: skip
    if mount is not None and not mount.is_local:
        yield Finding(
            "warn", "filesystem", where, f"on {_named(mount)}, a network filesystem",
            "Point dir at a local disk (NVMe), if there is one.",
        )  # fmt: skip
    if faults:
        return
    kind = "unknown filesystem" if mount is None else mount.type
    local = "" if mount is None else ", local" if mount.is_local else ", network"
    flock = " and flock work" if place.flock is Answer.WORKS else " works"
    state = {"missing": "; will be made", "empty": "; empty"}.get(place.kind, "")
    if place.kind == "cache":
        state = f"; {place.shards:,} shards, {format_bytes(place.held)}"
    yield Finding("ok", "filesystem", where, f"{kind}{local}, writable, rename{flock}{state}")


def _faults(place: Place) -> Findings:
    where = place.directory
    if place.kind == "file":
        yield Finding(
            "fail", "filesystem", where, f"{place.near} is not a directory",
            "Point dir at a directory, or at a name in one.",
        )  # fmt: skip
    if place.objection:
        found, _, fix = place.objection.partition("; ")
        yield Finding("fail", "filesystem", where, found, _sentence(fix or "Use another directory"))
    if place.unwritable:
        what = f"nothing can be written in {place.near}: {place.unwritable}"
        fix = "Let this user write there, or point dir at a disk that it may write."
        if place.mount is not None and "ro" in place.mount.options:
            fix = f"mount -o remount,rw {shlex.quote(place.mount.point)}, or use another disk."
        yield Finding("fail", "filesystem", where, what, fix)
    if place.unrenamable:
        yield Finding(
            "fail", "filesystem", where, f"files cannot be renamed: {place.unrenamable}",
            "Shards are published by a rename; point dir at another filesystem.",
        )  # fmt: skip


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


def check_locks(place: Place, config: Config) -> Findings:
    """Which way to lock is in force, and why."""
    where = place.directory
    if place.unwritable or place.unrenamable or place.kind == "file":
        return  # nothing is locked where nothing can be made
    local = place.mount is not None and place.mount.is_local
    if config.locks == "lease" or (config.locks == "auto" and not local):
        grace = format_duration(max(3600.0, 2 * config.touch_interval))
        why = (
            "as configured" if config.locks == "lease" else f"since it is on {_named(place.mount)}"
        )
        found = f"nodes agree by leases, entries go only after {grace} without use"
        yield Finding("ok", "locks", where, f"{found}, {why}")
    elif not local:
        yield Finding(
            "fail", "locks", where, f"locks = 'flock', but it is on {_named(place.mount)}",
            "Remove the option locks (SHARDCACHE_LOCKS): auto uses leases there.",
        )  # fmt: skip
    elif place.flock not in (Answer.WORKS, Answer.UNKNOWN):
        yield Finding(
            "warn", "locks", where, f"flock {place.flock} there, so shards may be fetched twice",
            "Set locks=lease, or point dir at a filesystem with a working flock (ext4, xfs).",
        )  # fmt: skip
    else:
        yield Finding("ok", "locks", where, "flock in the cache")


def check_space(place: Place, config: Config) -> Findings:
    """max_size and min_free against the disk and what is free on it."""
    where, option = place.directory, "max_size"
    if place.size == 0:
        return  # it states nothing
    volume = Volume(place.size, place.free, place.inodes, place.free_inodes)
    wanted, floor = volume.budget(config), config.min_free.of(place.size)
    room = max(0, place.free - floor) + place.held
    total, keeps = format_bytes(place.size), f"min_free keeps {format_bytes(floor)}"
    free = f"{format_bytes(place.free)} of {total} free"
    limit = "" if wanted is None else format_bytes(wanted)
    if config.max_size is None:
        option = "ephemeral_limit"
    if room == 0:
        yield Finding(
            "fail", "space", where, f"{free} and {keeps}: nothing can be stored",
            "Make room on that disk, set a smaller min_free, or point dir at another disk.",
        )  # fmt: skip
    elif wanted is not None and wanted > place.size and not is_memory(place):
        yield Finding(
            "warn", "space", where, f"{option} allows {limit}, but the disk has {total}",
            f"Set {option} to no more than {format_bytes(place.size - floor)}.",
        )  # fmt: skip
    elif wanted is not None and place.size - floor < wanted <= place.size:
        yield Finding(
            "warn", "space", where, f"{option} allows {limit} of {total}, but {keeps}",
            f"Set {option} to no more than {format_bytes(place.size - floor)}, or min_free lower.",
        )  # fmt: skip
    elif wanted is not None and wanted > room and not is_memory(place):
        yield Finding(
            "warn", "space", where,
            f"{option} allows {limit}, but only {format_bytes(room)} can be held now ({free})",
            f"Remove what else is on that disk, or set {option} to what there is.",
        )  # fmt: skip
    else:
        limits = f"{option} allows {limit}" if limit else "no max_size"
        yield Finding("ok", "space", where, f"{free}; {limits}, {keeps}")


def check_memory(place: Place, config: Config, memory: Headroom | None, whose: str) -> Findings:
    """A RAM disk against its size and the memory that it would take.

    Args:
        place: what was found.
        config: of its tier.
        memory: what may be taken of it.
        whose: what sets that limit: ``cgroup memory``, ``the machine's memory``.
    """
    where = place.directory
    if not is_memory(place) or place.mount is None:
        return
    wanted = Volume(place.size, place.free, 0, 0).budget(config)
    if wanted is None:
        left = "" if memory is None else f", {format_bytes(memory.free)} of {whose} free"
        size = f"{format_bytes(place.size)} of RAM disk{left}"
        yield Finding("ok", "memory", where, f"{size}; no max_size, and what runs short is freed")
        return
    asked, over = format_bytes(wanted), []
    if 0 < place.size < wanted:
        over.append(f"{place.mount.point} has a limit of {format_bytes(place.size)}")
    if memory is not None and memory.limit < wanted:
        over.append(f"{whose} is {format_bytes(memory.limit)}")
    if over:
        most = min([n for n in (place.size, memory.limit if memory else 0) if n])
        yield Finding(
            "fail", "memory", where, f"max_size {asked}, but {' and '.join(over)}",
            f"Set max_size well below {format_bytes(most)}, or give the job more memory and "
            f"remount with a larger size= (Kubernetes: sizeLimit of the emptyDir).",
        )  # fmt: skip
    elif memory is not None and wanted > memory.free + place.held:
        left = format_bytes(memory.free + place.held)
        yield Finding(
            "warn", "memory", where, f"max_size {asked}, but only {left} of {whose} are left",
            f"Set max_size below {left} less what training needs, or shards will be evicted.",
        )  # fmt: skip
    else:
        left = "" if memory is None else f" and {format_bytes(memory.free)} of {whose} free"
        size = format_bytes(place.size) if place.size else "unlimited"
        yield Finding("ok", "memory", where, f"max_size {asked}, RAM disk of {size}{left}")


def check_inodes(place: Place, config: Config) -> Findings:
    """Whether files can still be named there."""
    if not place.inodes or place.kind == "file":
        return  # made as they are needed
    percent = config.min_free.percent
    floor = 0 if percent is None else config.min_free.of(place.inodes)
    text = f"{place.free_inodes:,} of {place.inodes:,} inodes free"
    if place.free_inodes - floor >= ENTRY_INODES:
        yield Finding("ok", "inodes", place.directory, text)
        return
    fix = "Remove small files on that disk (df -i), or make the filesystem with more inodes."
    what = "shards are evicted for want of them" if place.shards else "nothing can be stored"
    level: Level = "warn" if place.shards else "fail"
    kept = f" and min_free keeps {floor:,}" if floor else ""
    yield Finding(level, "inodes", place.directory, f"{text}{kept}: {what}", fix)


def check_kubernetes(place: Place, config: Config, pod: bool) -> Findings:
    """In a pod, whether the cache knows how much the pod may write."""
    mount = place.mount
    if not pod or is_memory(place) or mount is None:
        return
    if mount.point != "/" and mount.type != "overlay" and _EMPTY_DIR not in mount.root:
        return  # a hostPath or a claim, which nobody counts
    limit = config.ephemeral_limit
    if limit is not None:
        text = f"ephemeral_limit {format_bytes(limit)}, nine tenths of which may be held"
        yield Finding("ok", "kubernetes", place.directory, text)
        return
    yield Finding(
        "warn", "kubernetes", place.directory,
        "on ephemeral storage of a pod, whose limit the cache does not know: the kubelet evicts "
        "a pod that exceeds it",
        "Set SHARDCACHE_EPHEMERAL_LIMIT to resources.limits.ephemeral-storage (resourceFieldRef), "
        "or mount a hostPath or a volume of its own.",
    )  # fmt: skip


def check_cleaners(place: Place, rules: Sequence[Rule], reapers: Sequence[Reaper]) -> Findings:
    """Whether somebody empties the directory from time to time."""
    where, real = place.directory, place.real or place.directory
    rule, reaper = aged(real, rules), reaped(real, reapers)
    if rule is not None:
        yield Finding(
            "warn", "cleaners", where,
            f"under {rule.path}: systemd-tmpfiles may delete shards unused for {rule.age} "
            f"({rule.file})",
            f"Add to /etc/tmpfiles.d/shardcache.conf: x {real}",
        )  # fmt: skip
    if reaper is not None:
        fix = f"Give it --exclude {real} where it is started (cron)."
        if reaper.name == "tmpreaper":
            fix = f"Add '{real}/**' to TMPREAPER_PROTECT_EXTRA in /etc/tmpreaper.conf."
        text = f"{reaper.name} is installed and cleans {', '.join(reaper.cleans)}"
        yield Finding("warn", "cleaners", where, text, fix)
    if rule is None and reaper is None:
        yield Finding("ok", "cleaners", where, "no cleaner of temporary files reaches it")


def check_leftovers(place: Place) -> Findings:
    """What processes left that were killed."""
    if place.kind != "cache":
        return
    parts = []
    if place.orphans:
        parts.append(f"fetches that died: {place.orphans:,} ({format_bytes(place.orphaned)})")
    if place.damaged:
        text = f"damaged shards set aside: {place.damaged:,} ({format_bytes(place.quarantined)})"
        parts.append(text)
    if place.sessions:
        parts.append(f"sessions of dead processes: {place.sessions:,}")
    if not parts:
        yield Finding("ok", "leftovers", place.directory, "dead jobs left nothing")
        return
    fix = f"shardcache --dir {shlex.quote(place.directory)} clean --orphans"
    yield Finding("warn", "leftovers", place.directory, "; ".join(parts), f"Run: {fix}")


def check_isolation(place: Place, config: Config, ranks: int | None) -> Findings:
    """Whether namespaces of their own cost space of their own."""
    if config.isolation == "node" or place.unwritable or place.unrenamable or place.kind == "file":
        return
    if not place.unlinkable:
        text = f"isolation={config.isolation}: copies are shared by hard links"
        yield Finding("ok", "isolation", place.directory, text)
        return
    each = "job" if config.isolation == "job" else "rank"
    times = f"{ranks} ranks of this node take {ranks} times the space"
    if each == "job" or ranks is None:
        times = f"every {each} stores its own copy"
    yield Finding(
        "warn", "isolation", place.directory,
        f"isolation={config.isolation} without hard links ({place.unlinkable}): {times}",
        "Set isolation=node, or point dir at a filesystem with hard links (ext4, xfs, tmpfs).",
    )  # fmt: skip


def check_tiers(places: Sequence[Place]) -> Findings:
    """Whether a tier is on a disk of its own."""
    for number, one in enumerate(places):
        for other in places[number + 1 :]:
            if one.device == other.device != -1:
                yield Finding(
                    "warn", "tiers", one.directory,
                    f"on the same filesystem as {other.directory}: it is no faster, and both "
                    "count the same space as free",
                    "Put the tier on a faster disk (NVMe, /dev/shm), or remove it from tiers.",
                )  # fmt: skip
