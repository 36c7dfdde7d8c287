"""``shardcache doctor``: the machine against the configuration.

Seven checks; each finding is ok, warn or fail, with what to do. Nothing is made or changed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import socket
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import click

from shardcache.cli.main import ExitCode, Invocation, command
from shardcache.cli.output import counted, printable, reason
from shardcache.config import Config
from shardcache.errors import ShardCacheError
from shardcache.files import Modes
from shardcache.layout import Layout
from shardcache.locks.mounts import mount_of
from shardcache.origins.base import ObjectInfo
from shardcache.origins.connection import Transport
from shardcache.origins.endpoints import endpoint_of, parser, s3_access
from shardcache.origins.resolve import Origins
from shardcache.origins.retry import RetryPolicy
from shardcache.origins.s3 import S3Origin
from shardcache.ranks import detect
from shardcache.space.eviction import total_bytes
from shardcache.space.memory import Volume, allocation, cpu_quota, is_memory
from shardcache.store.entry import Store
from shardcache.store.root import check_foreign, check_root
from shardcache.units import format_bytes, format_duration, format_rate
from shardcache.urls import redact

#: The findings of a check: ok, warn (it works, but not well or not for long) or fail; what was
#: found; and what to do, in one sentence, empty if ok.
T = TypeVar("T")
Answers = Iterator[tuple[str, str, str]]

_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}
#: Bytes that the timed read takes.
_READ_BYTES = 8 << 20
#: Seconds that a filesystem has to answer one check; a slow one takes milliseconds.
_PATIENCE = 10.0
#: Seconds that an address has to accept a connection, and a server to answer.
_CONNECT, _ANSWER = 1.0, 2.0
#: Seconds by which the clock may be off; S3 refuses requests after 15 minutes.
_SKEW = 300
#: Directories that cleaners of temporary files empty: tmpfiles.d(5), tmpreaper(8), tmpwatch(8).
_TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - named, not used


@command("doctor")
@click.option("--url", metavar="URL", help="Also read the start of this shard, and time it.")
def doctor_command(invocation: Invocation, url: str | None) -> ExitCode:
    """Check the machine against the configuration.

    Checks directories, filesystems, memory, limits and CPUs, the credentials and how long they
    last, the addresses and the clock of the endpoint, and with --url the origin. Each finding is
    ok, warn or fail, with what to do about it. Changes nothing. Exit code 4 if a check failed;
    warnings do not count.

    \b
    Examples:
      shardcache doctor
      shardcache doctor --url s3://lab/train-0000.tar
      shardcache --dir /local/nvme/shards doctor --json
    """
    console, findings = invocation.console, list[dict[str, str]]()
    loaded = invocation.loaded()
    loaded = _in_time(invocation.upkeep) or loaded
    for each in _examine(loaded.config, url):
        findings.append(each)
        level, text = each["level"], f"{each['subject']}  {each['found']}"
        if not (console.quiet and level == "ok"):
            label = console.styled(f"{level:<4}", _COLORS[level], sys.stdout)
            text = f"{text.rstrip('.')}. {each['fix']}" if each["fix"] else text
            console.data(f"{label}  {printable(text)}")
    counts = Counter(each["level"] for each in findings)
    console.info(f"{counts['fail']} failed, {counted(counts['warn'], 'warning')}")
    summary = {level: counts[level] for level in _COLORS}
    console.object("doctor", findings=findings, summary=summary)
    return ExitCode.DAMAGED if counts["fail"] else ExitCode.DONE


def _examine(config: Config, url: str | None) -> Iterator[dict[str, str]]:
    for tier in config.by_tier():
        for check in (_owner, _filesystem, _space):
            found = _in_time(functools.partial(_run, check, os.fspath(tier.dir), tier))
            yield from found or _run(_silent, os.fspath(tier.dir))
            if not found or (check is _owner and found[0]["level"] == "fail"):
                break  # the other checks would find nothing
    yield from _run(_cpus, "CPUs")
    found = _in_time(functools.partial(_run, _credentials, "S3", config))
    yield from found or _run(_unanswered, "S3")
    found = _in_time(functools.partial(_run, _endpoint, "endpoint", config, url))
    yield from found or _run(_unanswered, "endpoint")
    if url is not None:
        # A command may have a secret anywhere.
        yield from _run(_read, "pipe:" if url.startswith("pipe:") else url, config, url)


def _in_time(function: Callable[[], T]) -> T | None:
    """What ``function`` returns; None if it takes too long.

    A filesystem that is gone may never answer, and nothing interrupts who asks it.
    """
    found = list[T]()
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return found[0] if found else None


def _run(check: Callable[..., Answers], subject: str, *args: object) -> list[dict[str, str]]:
    """The findings of a check; what it raises is one."""
    answers = list[tuple[str, str, str]]()
    try:
        answers += check(*args)
    except (ShardCacheError, OSError) as exn:
        answers.append(("fail", "it cannot be used", reason(exn)))
    names = ("check", "subject", "level", "found", "fix")
    rows = ((check.__name__.lstrip("_"), subject, *answer) for answer in answers)
    return [dict(zip(names, map(redact, row), strict=True)) for row in rows]


def _silent() -> Answers:
    fix = "Its mount may be dead: mount it anew (umount -l), or point dir at another disk."
    yield "fail", f"its filesystem has not answered for {_PATIENCE:g} s", fix


def _unanswered() -> Answers:
    fix = "Check DNS, the network, and the program or service that gives credentials."
    yield "fail", f"this check has not ended for {_PATIENCE:g} s", fix


def _existing(directory: Path) -> Path:
    """The directory, or the nearest one above it that exists."""
    return next(path for path in (directory, *directory.parents) if path.exists())


def _owner(tier: Config) -> Answers:
    """Owner, mode, and whether the directory can be written."""
    path = _existing(tier.dir)
    modes = Modes.of(tier.shared_group)
    if path == tier.dir and path.is_dir():
        check_root(tier.dir, modes)
        check_foreign(tier.dir)
    if not path.is_dir():
        yield "fail", f"{path} is not a directory", "Point dir at a directory, or at a name in one."
    elif not os.access(path, os.W_OK | os.X_OK):
        fix = "Point dir at a directory that this user may write, or make this one writable"
        fix += f" (mount -o remount,rw {shlex.quote(str(path))} if it is mounted read-only)."
        yield "fail", f"nothing can be written in {path}", fix
    elif path != tier.dir:
        yield "ok", "writable, will be made", ""
    else:
        yield "ok", f"writable, mode {stat.S_IMODE(path.stat().st_mode):o}", ""


def _filesystem(tier: Config) -> Answers:
    """Which filesystem it is, how the cache locks there, and whether something empties it."""
    mount = mount_of(tier.dir)
    local = mount is not None and mount.is_local
    locks = tier.locks if tier.locks != "auto" else "flock" if local else "lease"
    text = mount.type if mount else "unknown filesystem"
    text += f", {'local' if local else 'network'}, locks by {locks}"
    if local:
        yield "ok", text, ""
    elif tier.locks == "flock":
        fix = "Remove the option locks (SHARDCACHE_LOCKS): leases work there."
        yield "fail", f"{text}, which other nodes do not see", fix
    else:
        yield "warn", text, "Point dir at a local disk (NVMe) if there is one."
    real = Path(os.path.realpath(tier.dir))
    if parent := next((name for name in _TEMPORARY if real.is_relative_to(name)), None):
        text = f"under {parent}, where systemd-tmpfiles, tmpreaper or tmpwatch may delete shards"
        yield "warn", text, f"Add to /etc/tmpfiles.d/shardcache.conf: x {real}"


def _space(tier: Config) -> Answers:
    """max_size and min_free against the disk; of a RAM disk also against the job's memory."""
    disk = Volume.of(path := _existing(tier.dir))
    held = total_bytes(Store(Layout.of_root(tier.dir)).entries(), allocation(path))
    floor, limit = tier.min_free.of(disk.size), disk.budget(tier)
    room = max(0, disk.free - floor) + held
    text = f"{format_bytes(disk.free)} of {format_bytes(disk.size)} free, "
    text += f"min_free keeps {format_bytes(floor)}"
    if limit:
        text += f", max_size is {format_bytes(limit)}"
    if room == 0:
        fix = "Make room on that disk, set a smaller min_free, or point dir at another disk."
        yield "fail", f"{text}: nothing can be stored", fix
    elif limit and limit > disk.size and is_memory(path):
        fix = f"Set max_size well below {format_bytes(disk.size)}, or give the job more memory and "
        fix += "remount with a larger size= (Kubernetes: sizeLimit of the emptyDir)."
        yield "fail", f"{text}: more than the RAM disk and the job's memory", fix
    elif limit and limit > room:
        fix = f"Remove other files from that disk, or set max_size to {format_bytes(room)}."
        yield "warn", f"{text}: only {format_bytes(room)} can be held", fix
    else:
        yield "ok", text, ""
    inodes = os.statvfs(path)
    if inodes.f_files and inodes.f_favail < 5:  # what a shard takes
        fix = "Remove small files on that disk (df -i), or make the filesystem with more inodes."
        yield "fail", f"{inodes.f_favail:,} of {inodes.f_files:,} inodes free", fix


def _cpus() -> Answers:
    """The CPUs that may be used against the DataLoader workers that are likely to be started."""
    found = detect()
    ranks, slurm = found.local_size or 1, found.source == "slurm"
    total, quota = os.cpu_count() or 1, cpu_quota()
    usable = min(len(os.sched_getaffinity(0)), quota or total)
    # srun binds each task to CPUs of its own.
    each = usable if slurm and usable < total else usable / ranks
    text = f"{usable:g} of {total} usable, {each:.3g} for each of {counted(ranks, 'rank')}"
    if each >= 2 and usable >= total / 2:
        yield "ok", text, ""
    else:
        fix = "Ask the scheduler for more CPUs (Slurm: --cpus-per-task, Kubernetes: limits.cpu), "
        fix += f"or start at most {max(1, int(each) - 1)} workers per rank (num_workers)."
        yield "warn", text, fix


def _credentials(config: Config) -> Answers:
    """Which credentials and which endpoint S3 shards are read with."""
    keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    missing = [name for name in keys if not os.environ.get(name)]
    if len(missing) == 1:
        fix = f"Set {missing[0]} as well, or unset the other and use a profile or a role."
        yield "warn", f"{missing[0]} is not set, but the other key variable is", fix
    access = s3_access(config, timed=True)
    if access.credentials:
        yield "ok", str(access), ""
    else:
        fix = "Set AWS_PROFILE or AWS_ACCESS_KEY_ID, give the node a role, or set anon."
        yield "warn", str(access), fix


def _endpoint(config: Config, text: str | None) -> Answers:
    """Which addresses of the S3 endpoint accept connections, and whether the clocks agree."""
    server = endpoint_of(config)
    if text is not None:
        with contextlib.suppress(ShardCacheError):  # `_read` reports it
            url = parser(config)(text)
            origin = Origins(config).of(url)
            server = origin.server(url) if isinstance(origin, S3Origin) else server
    if server is None:
        yield "ok", "not contacted: no endpoint is set, and --url names no S3 shard", ""
        return
    try:
        # Only Date is read, so certificates do not matter.
        answer = Transport(timeout=_ANSWER, trusted=False).request("HEAD", server, {})
        now = time.time()
        answer.close()
        parts = urlsplit(server)
        host, port = parts.hostname or "", parts.port or parts.scheme
        proxied = getproxies().get(parts.scheme) and not proxy_bypass(host)
        rows = [] if proxied else socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as exn:
        fix = "Check endpoint_url, DNS, the network and https_proxy."
        yield "fail", f"{server} does not answer: {exn}", fix
        return
    with ThreadPoolExecutor(len(rows) or 1) as pool:
        dead = ", ".join(filter(None, pool.map(_dead, rows)))
    found = (
        f"{host} has {counted(len(rows), 'address', 'addresses')}" if rows else f"{host} answers"
    )
    if dead:
        found += f", without a connection within {_CONNECT:g} s: {dead}"
        yield "warn", found, "Repair the route there, or remove them from DNS."
    else:
        yield "ok", found, ""
    with contextlib.suppress(ValueError):  # the server does not state its time
        date = parsedate_to_datetime(answer.headers.get("date", ""))
        skew = abs(date.timestamp() - now)
        found = f"this machine's clock is {format_duration(skew)} off that of {host}"
        fix = "Synchronise it (chronyc makestep): S3 refuses requests from 15 minutes on."
        yield ("ok", found, "") if skew < _SKEW else ("warn", found, fix)


def _dead(row: tuple[Any, ...]) -> str:
    """The address of a row of `getaddrinfo`, if it does not accept a connection in time."""
    with contextlib.suppress(OSError), socket.socket(row[0], socket.SOCK_STREAM) as sock:
        sock.settimeout(_CONNECT)
        sock.connect(row[4])
        return ""
    return str(row[4][0])


def _read(config: Config, text: str) -> Answers:
    """Read the start of a shard as the cache would, and time it."""
    url = parser(config)(text)
    origins = Origins(config)

    def read() -> tuple[int, float, ObjectInfo]:
        size, first, buffer = 0, 0.0, bytearray(1 << 20)
        with contextlib.closing(origins.of(url).open(url, 0, _READ_BYTES)) as body:
            while count := body.readinto(memoryview(buffer)[: _READ_BYTES - size]):
                size, first = size + count, first or time.monotonic() - began
            return size, first, body.info

    origins.prepare(url)
    began = time.monotonic()
    # Two attempts: a single hiccup is no finding.
    retry = RetryPolicy(2, config.deadline, 0).started(str(url))
    size, first, info = retry.call(read, sleep=time.sleep)
    seconds = max(time.monotonic() - began, 1e-9)
    found = f"{format_bytes(size)} in {format_duration(seconds)} ({format_rate(size / seconds)}), "
    found += f"first byte after {format_duration(first)}, ETag {info.etag or 'none'}"
    if info.identifiable:
        yield "ok", found, ""
    else:
        fix = "Have the server state ETag or Last-Modified: without them no fetch can be resumed."
        yield "warn", found, fix
