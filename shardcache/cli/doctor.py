"""``shardcache doctor``: the machine against the configuration.

Eight checks: who may write the directory, its filesystem and the kind of locks there, space,
memory, inodes, CPUs, credentials and endpoint, and with ``--url`` a timed read. Each finding is
ok, warn or fail, with what to do. Nothing is made or changed. A check that hangs on a dead mount is
left behind after ten seconds; one that fails itself is a warning.
"""

from __future__ import annotations

import logging
import os
import resource
import shlex
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import click

from shardcache.cli.main import Invocation, command
from shardcache.cli.output import counted, printable
from shardcache.config import Config
from shardcache.errors import ConfigError, ShardCacheError
from shardcache.locks.mounts import MEMORY_TYPES, mount_of
from shardcache.ranks import detect, local_world_size
from shardcache.units import format_bytes, format_duration, format_rate
from shardcache.urls import parse_url, redact

logger = logging.getLogger(__name__)

Level = Literal["ok", "warn", "fail"]
#: What a check says: level, what it found, and what to do (empty if ok).
Answers = Iterator[tuple[Level, str, str]]

_FAILED = 4
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
#: Seconds for a check of this machine, and for all that is asked of an origin.
_PATIENCE = 10.0
_ORIGIN_PATIENCE = 180.0
#: Bytes that the timed read takes, and seconds after which it ends.
_READ_BYTES = 8 << 20
_READ_SECONDS = 20.0
#: Directories that cleaners of temporary files empty: tmpfiles.d(5), tmpreaper(8), tmpwatch(8).
_TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - named, not used
#: Open files of Python, torch and a GPU's driver, and of eight DataLoader workers, with the pipes
#: and descriptors of tensors on their way (torch.multiprocessing, "file_descriptor").
_OPEN_FILES = 64 + 8 * 32


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Attributes:
        level: ``ok``; ``warn``: it works, but not well or not for long; ``fail``.
        check: which check.
        subject: what it looked at.
        found: what it found.
        fix: what to do, in one sentence; empty if ok.
    """

    level: Level
    check: str
    subject: str
    found: str
    fix: str = ""


@command(
    "doctor",
    short="Check the machine against the configuration.",
    examples="""
        shardcache doctor
        shardcache doctor --url s3://lab/train-0000.tar
        shardcache --dir /local/nvme/shards doctor --json
    """,
)
@click.option("--url", metavar="URL", help="Also read the start of this shard, and time it.")
def doctor_command(invocation: Invocation, url: str | None) -> int:
    """Check the machine against the configuration.

    Looks at the directories and their filesystems, at memory, limits and CPUs, at the
    credentials and the endpoint in force, and with --url at the origin. Each finding is ok, warn
    or fail, with what to do about it. Makes nothing and leaves nothing. Exit code 4 if a
    check failed; warnings do not count.
    """
    console = invocation.console
    rows = []
    for finding in _examine(invocation, url):
        row = {name: redact(text) for name, text in asdict(finding).items()}
        rows.append(row)
        if console.human and not (console.quiet and finding.level == "ok"):
            level = console.styled(f"{finding.level:<4}", _STYLES[finding.level], sys.stdout)
            text = f"{row['subject']}  {row['found']}"
            if finding.fix:
                text = f"{text.rstrip('.')}. {row['fix']}"
            console.data(f"{level}  {printable(text)}")
    levels = Counter(row["level"] for row in rows)
    if console.human:
        console.said(f"{levels['fail']} failed, {counted(levels['warn'], 'warning')}")
    else:
        summary: dict[str, Any] = {level: levels[level] for level in _STYLES}
        console.table("doctor", "finding", [], rows, summary=summary)
    return _FAILED if levels["fail"] else 0


def _examine(invocation: Invocation, url: str | None) -> Iterator[Finding]:
    try:
        config = invocation.loaded().config
    except ConfigError as exn:
        yield Finding("fail", "configuration", "configuration", "it cannot be used", exn.message)
        return
    for tier in config.by_tier():
        where = os.fspath(tier.dir)
        for check in (_owner, _filesystem, _space, _memory, _inodes):
            found = _run(check, where, _PATIENCE, tier)
            yield from found
            dead = any(finding.found.startswith("no answer") for finding in found)
            if dead or (check is _owner and any(finding.level == "fail" for finding in found)):
                break  # the other checks could say nothing
    yield from _run(_cpus, "CPUs", _PATIENCE)
    yield from _run(_files, "open files", _PATIENCE, config)
    yield from _run(_credentials, "S3", _PATIENCE, config)
    if url is not None:
        # What is secret in a command cannot be told.
        subject = "pipe:" if url.startswith("pipe:") else redact(url)
        yield from _run(_read, subject, _ORIGIN_PATIENCE, config, url)


def _run(
    check: Callable[..., Answers], subject: str, patience: float, *args: object
) -> list[Finding]:
    """What a check finds; where it hangs or fails itself, one finding that says so."""
    name, found = check.__name__.lstrip("_"), list[Finding]()
    failure = list[Exception]()

    def ask() -> None:
        try:
            for level, text, fix in check(*args):
                found.append(Finding(level, name, subject, text, fix))
        except Exception as exn:
            logger.debug("the check %s failed", name, exc_info=True)
            failure.append(exn)

    # A daemon: a path on a dead mount would keep this process from ending.
    thread = threading.Thread(target=ask, name=f"doctor-{name}", daemon=True)
    thread.start()
    thread.join(patience)
    if thread.is_alive():
        fix = "Have the filesystem mounted anew (its server may be down), or check the network."
        return [Finding("fail", name, subject, f"no answer within {patience:g} s", fix)]
    if failure:
        fix = "Run it again with -vv for the details; the other findings hold without this one."
        text = f"could not be checked: {type(failure[0]).__name__}: {failure[0]}"
        return [*found, Finding("warn", name, subject, text, fix)]
    return found


def _nearest(directory: Path) -> Path:
    """The directory, or the nearest one above it that exists."""
    return next(path for path in (directory, *directory.parents) if path.exists())


def _owner(tier: Config) -> Answers:
    """Whose the directory is, and who may write it."""
    from shardcache.files import Modes
    from shardcache.store.root import check_root, is_foreign

    near = _nearest(tier.dir)
    try:
        modes = Modes.of(tier.shared_group)
        if near == tier.dir and near.is_dir():
            check_root(tier.dir, modes)
    except ConfigError as exn:
        text, _, fix = exn.message.partition("; ")
        yield "fail", text, fix or "Use another directory."
        return
    if not near.is_dir():
        fix = "Point dir at a directory, or at a name in one."
        yield "fail", f"{near} is not a directory", fix
    elif os.statvfs(near).f_flag & os.ST_RDONLY:
        fix = f"mount -o remount,rw {shlex.quote(str(near))}, or use another disk."
        yield "fail", f"{near} is read-only", fix
    elif not os.access(near, os.W_OK | os.X_OK):
        fix = "Let this user write there, or point dir at a directory that it may write."
        yield "fail", f"nothing can be written in {near}", fix
    elif near == tier.dir and is_foreign(tier.dir):
        fix = f"Give the cache a directory of its own, such as {tier.dir / 'shards'}."
        yield "warn", "no cache, but other things are in it", fix
    else:
        state = "will be made"
        if near == tier.dir:
            state = f"mode {stat.S_IMODE(near.stat().st_mode):o}"
        yield "ok", f"writable, {state}", ""


def _filesystem(tier: Config) -> Answers:
    """Which filesystem it is, how the cache locks there, and who empties it."""
    mount = mount_of(tier.dir)
    kind = "unknown filesystem" if mount is None else mount.type
    local = mount is not None and mount.is_local
    locks = tier.locks if tier.locks != "auto" else "flock" if local else "lease"
    text = f"{kind}, {'local' if local else 'network'}, locks by {locks}"
    if tier.locks == "flock" and not local:
        fix = "Remove the option locks (SHARDCACHE_LOCKS): leases work there."
        yield "fail", f"{text}, which other nodes do not see", fix
    elif not local:
        fix = "Point dir at a local disk (NVMe) if there is one."
        yield "warn", text, fix
    else:
        yield "ok", text, ""
    real = Path(os.path.realpath(tier.dir))
    if parent := next((name for name in _TEMPORARY if real.is_relative_to(name)), None):
        text = f"under {parent}, where systemd-tmpfiles, tmpreaper or tmpwatch may delete shards"
        fix = f"Add to /etc/tmpfiles.d/shardcache.conf: x {real}"
        yield "warn", text, fix


def _space(tier: Config) -> Answers:
    """max_size and min_free against the disk and what is free on it."""
    from shardcache.layout import Layout
    from shardcache.store.entry import scan

    found = os.statvfs(_nearest(tier.dir))
    size, available = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
    if size == 0:
        return  # ramfs states nothing
    held = sum(entry.size for entry in scan(Layout.of_root(tier.dir)))
    floor = tier.min_free.of(size)
    room, limit = max(0, available - floor) + held, tier.max_size and tier.max_size.of(size)
    keeps = f"min_free keeps {format_bytes(floor)}"
    text = f"{format_bytes(available)} of {format_bytes(size)} free, {keeps}"
    if limit:
        text += f", max_size is {format_bytes(limit)}"
    if room == 0:
        fix = "Make room on that disk, set a smaller min_free, or point dir at another disk."
        yield "fail", f"{text}: nothing can be stored", fix
    elif limit and limit > size - floor:
        fix = f"Set max_size to no more than {format_bytes(max(0, size - floor))}."
        yield "warn", f"{text}: more than the disk can hold", fix
    elif limit and limit > room:
        text += f": only {format_bytes(room)} can be held now"
        fix = "Remove what else is on that disk, or set max_size to what there is."
        yield "warn", text, fix
    else:
        yield "ok", text, ""


def _memory(tier: Config) -> Answers:
    """A RAM disk against its size and the memory that it would take."""
    from shardcache.space.memory import memory_headroom

    mount = mount_of(tier.dir)
    if mount is None or mount.type not in MEMORY_TYPES:
        return
    cgroup = memory_headroom()
    pages = os.sysconf("SC_PAGE_SIZE")
    memory = cgroup.limit if cgroup else pages * os.sysconf("SC_PHYS_PAGES")
    left = cgroup.free if cgroup else pages * os.sysconf("SC_AVPHYS_PAGES")
    found = os.statvfs(_nearest(tier.dir))
    disk = found.f_frsize * found.f_blocks
    whose = "the cgroup's memory" if cgroup else "this machine's memory"
    limit = tier.max_size.of(disk) if tier.max_size else None
    text = f"RAM disk of {format_bytes(disk)}, {format_bytes(left)} of {whose} free"
    most = min(size for size in (disk, memory) if size)
    if limit is None:
        yield "ok", f"{text}; no max_size: it shrinks when memory is short", ""
    elif limit > most:
        text = (
            f"max_size is {format_bytes(limit)}, but {mount.point} has {format_bytes(disk)} and "
            f"{whose} is {format_bytes(memory)}"
        )
        fix = (
            f"Set max_size well below {format_bytes(most)}, or give the job more memory and "
            "remount with a larger size= (Kubernetes: sizeLimit of the emptyDir)."
        )
        yield "fail", text, fix
    else:
        yield "ok", f"max_size {format_bytes(limit)}, {text}", ""


def _inodes(tier: Config) -> Answers:
    """Whether files can still be made there: five for a shard."""
    found = os.statvfs(_nearest(tier.dir))
    if not found.f_files:
        return  # made as they are needed
    floor = tier.min_free.of(found.f_files) if tier.min_free.percent is not None else 0
    text = f"{found.f_favail:,} of {found.f_files:,} inodes free"
    if found.f_favail - floor >= 5:
        yield "ok", text, ""
    else:
        fix = "Remove small files on that disk (df -i), or make the filesystem with more inodes."
        yield "fail", f"{text}, min_free keeps {floor:,}", fix


def _cpus() -> Answers:
    """The CPUs that may be used against the DataLoader workers that are likely to be started."""
    from shardcache.space.memory import cpu_quota

    try:
        ranks, slurm = local_world_size() or 1, detect().source == "slurm"
    except ConfigError as exn:
        yield "fail", "the environment states no rank", exn.message
        return
    there, usable, quota = os.cpu_count() or 1, float(len(os.sched_getaffinity(0))), cpu_quota()
    if quota is not None:
        usable = min(usable, quota)
    # srun binds each task to CPUs of its own.
    each = usable if slurm and usable < there else usable / ranks
    text = f"{usable:g} of {there} usable, {each:.3g} for each of {counted(ranks, 'rank')}"
    fix = (
        "Ask the scheduler for more CPUs (Slurm: --cpus-per-task, Kubernetes: limits.cpu), or "
        f"start at most {max(1, int(each) - 1)} DataLoader workers per rank (num_workers)."
    )
    if each < 2 or usable < there / 2:
        yield "warn", text, fix
    else:
        yield "ok", text, ""


def _files(config: Config) -> Answers:
    """The limit of open files against what a job and the cache open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES + config.connections + 4 * (config.prefetch + 1)
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        yield "ok", f"{wanted:,} are enough for 8 workers", ""
    else:
        text = f"limit {limit:,}, but a job with 8 DataLoader workers needs {wanted:,}"
        fix = "Raise it where the job is started: ulimit -n 65536 (systemd: LimitNOFILE=65536)."
        level: Level = "fail" if limit < wanted - 8 * 32 else "warn"
        yield level, text, fix


def _credentials(config: Config) -> Answers:
    """Which credentials and which endpoint S3 shards are read with."""
    from shardcache.origins.endpoints import credential_source, endpoint_of, scheme_options

    endpoint = endpoint_of(config) or "AWS"
    keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    missing = [name for name in keys if not os.environ.get(name)]
    if len(missing) == 1:
        fix = f"Set {missing[0]} as well, or unset the other and use a profile or a role."
        text = f"{missing[0]} is not set, but the other key variable is"
        yield "warn", text, fix
    source = credential_source(scheme_options(config, "s3"))
    if source is None:
        fix = "Set AWS_PROFILE or AWS_ACCESS_KEY_ID, give the node a role, or set anon."
        yield "warn", f"endpoint {endpoint}, no credentials", fix
    else:
        yield "ok", f"endpoint {endpoint}, credentials from {source}", ""


def _read(config: Config, text: str) -> Answers:
    """Read the start of a shard as the cache would, and time it."""
    from shardcache.clock import SYSTEM_CLOCK
    from shardcache.origins.base import VersionChangedError
    from shardcache.origins.endpoints import endpoint_of
    from shardcache.origins.resolve import Origins
    from shardcache.origins.retry import RetryPolicy

    try:
        url = parse_url(text, endpoint=endpoint_of(config), allow_schemes=config.allow_schemes)
    except ShardCacheError as exn:
        yield "fail", "it names no shard", exn.message
        return

    def read() -> tuple[int, float, float, Any]:
        began = time.monotonic()
        body = origins.of(url).open(url, 0, _READ_BYTES)
        try:
            buffer, size, first = memoryview(bytearray(1 << 20)), 0, 0.0
            while size < _READ_BYTES and time.monotonic() - began < _READ_SECONDS:
                count = body.readinto(buffer[: _READ_BYTES - size])
                first = first or time.monotonic() - began
                if not count:
                    break
                size += count
            return size, first, time.monotonic() - began, body.info
        finally:
            body.close()

    origins = Origins(config)
    try:
        origins.prepare(url)
        # One hiccup is none, and an operator wants no more patience than that.
        retry = RetryPolicy(2, config.deadline, SYSTEM_CLOCK).started(str(url))
        size, first, seconds, info = retry.call(read, sleep=time.sleep)
    except (ShardCacheError, VersionChangedError) as exn:
        yield "fail", "the read failed", str(exn)
        return
    found = (
        f"{format_bytes(size)} in {format_duration(seconds)} "
        f"({format_rate(size / max(seconds, 1e-9))}), first byte after {format_duration(first)}, "
        f"ETag {info.etag or 'none'}"
    )
    if info.identifiable:
        yield "ok", found, ""
    else:
        fix = "Have the server state ETag or Last-Modified: without them no fetch can be resumed."
        yield "warn", found, fix
