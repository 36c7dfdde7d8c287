"""``shardcache doctor``: check that the machine fits the configuration, and change nothing."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from queue import Empty
from typing import Any
from urllib.parse import urlsplit

import click

from shardcache import threads
from shardcache.cache import Cache
from shardcache.cli.main import ExitCode, Invocation, command, store_options
from shardcache.cli.output import printable, reason
from shardcache.config import Config, Upstream
from shardcache.errors import AccessDeniedError, ShardCacheError, ShardNotFoundError
from shardcache.files import existing
from shardcache.layout import Layout, read_manifest
from shardcache.locks.mounts import LOCAL_TYPES, lock_kind, mount_of
from shardcache.origins.aws import endpoint_of, s3_access, url_parser
from shardcache.origins.base import ObjectInfo, TransientError
from shardcache.origins.connection import MalformedError, Transport
from shardcache.origins.listing import expand_braces, is_pattern
from shardcache.origins.resolve import Origins, check_upstream
from shardcache.origins.retry import RetryLimits
from shardcache.origins.s3 import S3Origin
from shardcache.space.eviction import total_bytes
from shardcache.space.memory import Volume, allocation, ram_disk
from shardcache.store.entry import Store
from shardcache.store.root import check_usable, not_writable, unusable
from shardcache.units import counted, format_bytes, format_duration, format_rate
from shardcache.urls import advise_scheme, redact

#: Level, text and advice of each finding. The level warn means that the cache works, but badly or
#: not for long. The advice is one sentence, or empty for the level ok.
Findings = Iterator[tuple[str, str, str]]

_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}
#: Maximum bytes of the timed read.
_READ_BYTES = 8 << 20
#: Time limit of a check in seconds. Even a slow filesystem responds within milliseconds.
_PATIENCE = 10.0
#: Advice if a check exceeds the time limit.
_DEAD_MOUNT = "Its mount may be dead: mount it again (umount -l), or point dir at another disk."
_DEAD_SERVICE = "Check DNS, the network, and the program or service that provides credentials."
_NO_ENDPOINT = "Check endpoint_url, DNS, the network and https_proxy."
#: Time limits for a connection to an address, and for the response of a server, in seconds.
_CONNECT, _RESPOND = 1.0, 2.0
#: Clock skew in seconds that causes a warning. S3 refuses requests with more than 15 minutes.
_SKEW = 300


@command("doctor")
@click.option("--url", metavar="URL", help="Also read the start of this shard, with timing.")
@store_options
def doctor_command(invocation: Invocation, url: str | None) -> ExitCode:
    """Check that the machine fits the configuration.

    Checks directories, filesystems, memory and limits, the versions of packages, the credentials
    and their expiry, the addresses and the clock of the endpoint, and with --url the origin. One
    signed request tries the credentials. Each finding is ok, warn or fail, with advice. Changes
    nothing. Exits with 4 if a check failed.

    \b
    Examples:
      shardcache doctor
      shardcache doctor --url s3://lab/train-0000.tar
      shardcache --dir /local/nvme/shards doctor --json
    """
    is_one = url is None or url.startswith("pipe:") or len(list(expand_braces(url))) == 1
    if not is_one or is_pattern(url or ""):
        raise click.UsageError("--url takes the URL of one shard, not a pattern or a prefix.")
    console, findings = invocation.console, list[dict[str, str]]()
    loaded = invocation.loaded()
    with contextlib.suppress(Exception):  # a check below reports a dead filesystem
        loaded = threads.call(invocation.loaded_with_job_limits, _PATIENCE, "shardcache-doctor")
    for finding in _examine(loaded.config, url):
        findings.append(finding)
        level, text = finding["level"], f"{finding['subject']}  {finding['found']}"
        if not (console.quiet and level == "ok"):
            label = console.styled(f"{level:<4}", _COLORS[level], sys.stdout)
            text = f"{text.rstrip('.')}. {finding['fix']}" if finding["fix"] else text
            console.data(f"{label}  {printable(text)}")
    counts = Counter(finding["level"] for finding in findings)
    console.info(f"{counts['fail']} failed, {counted(counts['warn'], 'warning')}")
    summary = {level: counts[level] for level in _COLORS}
    console.object("doctor", findings=findings, summary=summary)
    return ExitCode.DAMAGED if counts["fail"] else ExitCode.DONE


def _examine(config: Config, url: str | None) -> Iterator[dict[str, str]]:
    for tier in config.by_tier():
        for check in (_owner, _filesystem, _space, _opens):
            rows = _run(check, os.fspath(tier.dir), tier, timeout=_DEAD_MOUNT)
            yield from rows
            if check is _owner and rows[0]["level"] == "fail":
                break  # the other checks would fail as well
    for upstream in config.upstreams:
        yield from _run(_upstream, upstream.url, upstream, timeout=_DEAD_SERVICE)
    yield from _run(_packages, "packages")
    yield from _run(_credentials, "S3", config, timeout=_DEAD_SERVICE)
    yield from _run(_endpoint, "endpoint", config, url, timeout=_DEAD_SERVICE)
    if url is not None:
        # Any part of a command may be a secret, so show only the scheme.
        yield from _run(_read, "pipe:" if url.startswith("pipe:") else url, config, url)


def _run(
    check: Callable[..., Findings], subject: str, *args: object, timeout: str = ""
) -> list[dict[str, str]]:
    """Return the findings of a check: also its error, and with ``timeout`` a missed time limit."""
    rows = list[tuple[str, str, str]]()
    try:  # in a thread, because nothing can interrupt a call to a dead filesystem
        limit = _PATIENCE if timeout else None
        threads.call(lambda: rows.extend(check(*args)), limit, "shardcache-doctor")
    except Empty:
        rows = [("fail", f"no response within {_PATIENCE:g} s", timeout)]
    except Exception as exn:  # noqa: BLE001 - an error of another library is a finding, too
        is_own = isinstance(exn, ShardCacheError | OSError)
        rows.append(("fail", "it cannot be used", reason(exn) if is_own else type(exn).__name__))
    names, name = ("check", "subject", "level", "found", "fix"), check.__name__.lstrip("_")
    return [dict(zip(names, map(redact, (name, subject, *row)), strict=True)) for row in rows]


def _owner(tier: Config) -> Findings:
    check_usable(tier)
    path = existing(tier.dir)
    if not os.access(path, os.W_OK | os.X_OK):
        fix = unusable(tier.dir, not_writable(path)).message
        yield "fail", "its shards can be read, but none can be added", fix
    elif path != tier.dir:
        yield "ok", "writable, will be created", ""
    else:
        yield "ok", f"writable, mode {stat.S_IMODE(path.stat().st_mode):o}", ""


def _filesystem(tier: Config) -> Findings:
    mount = mount_of(tier.dir)
    local = mount is not None and mount.type in LOCAL_TYPES
    text = f"{mount.type if mount else 'unknown filesystem'}, {'local' if local else 'network'}, "
    text += f"locks by {lock_kind(tier, read_manifest(tier.dir))}"
    if local:
        yield "ok", text, ""
    elif tier.locks == "flock":
        fix = "Remove the option locks (SHARDCACHE_LOCKS), so that shardcache uses leases."
        yield "fail", f"{text}, which other nodes do not see", fix
    else:
        yield "warn", text, "Point dir at a local disk (NVMe) if there is one."
    real = Path(os.path.realpath(tier.dir))
    # tmpfiles.d(5), tmpreaper(8) and tmpwatch(8) empty these directories.
    if parent := next((n for n in ("/tmp", "/var/tmp") if real.is_relative_to(n)), None):  # noqa: S108
        text = f"in {parent}, where systemd-tmpfiles, tmpreaper or tmpwatch may delete shards"
        yield "warn", text, f"Add to /etc/tmpfiles.d/shardcache.conf: x {real}"


def _space(tier: Config) -> Findings:
    disk = Volume.of(path := existing(tier.dir))
    stores = map(Store, Layout.of_root(tier.dir).namespaces())
    held = total_bytes((e for store in stores for e in store.entries()), allocation(path))
    floor, limit = tier.min_free.of(disk.size), disk.budget(tier)
    room = max(0, disk.free - floor) + held
    text = f"{format_bytes(disk.free)} of {format_bytes(disk.size)} free, "
    text += f"min_free keeps {format_bytes(floor)}"
    if disk.batches:
        text += f", {format_bytes(disk.batches)} stay free for the batches of PyTorch's workers"
    if limit:
        text += f", max_size is {format_bytes(limit)}"
    if room == 0:
        fix = "Make room on that disk, set a smaller min_free, or point dir at another disk."
        yield "fail", f"{text}: no shard can be stored", fix
    elif limit and limit > disk.size and ram_disk(path):
        fix = "Set a smaller max_size, or give the job and the RAM disk more memory (sizeLimit)."
        yield "fail", f"{text}: more than the RAM disk or the memory of the job", fix
    elif limit and limit > room:
        fix = f"Remove other files from that disk, or set max_size to {format_bytes(room)}."
        yield "warn", f"{text}: there is room for only {format_bytes(room)}", fix
    elif disk.free < floor:
        fix = "Make room on that disk, or set a smaller min_free."
        yield "warn", f"{text}: new shards replace others, or are streamed", fix
    elif "KUBERNETES_SERVICE_HOST" in os.environ and limit is None and not ram_disk(path):
        fix = "Set max_size, or ephemeral_limit (SHARDCACHE_EPHEMERAL_LIMIT) to the pod's limit."
        yield "warn", f"{text}, but the kubelet evicts pods before a node's disk is full", fix
    else:
        yield "ok", text, ""
    inodes = os.statvfs(path)
    if inodes.f_files and inodes.f_favail < 5:  # the number that one shard needs
        fix = "Remove small files on that disk (df -i), or make the filesystem with more inodes."
        yield "fail", f"{inodes.f_favail:,} of {inodes.f_files:,} inodes free", fix


def _opens(tier: Config) -> Findings:
    stats = Cache.from_config(tier).stats("24h")  # those of all tiers are in the last one
    text = f"{stats.streamed_full:,} of {counted(stats.opens, 'open')} of a day found no room"
    if stats.opens:
        fix = "Raise max_size, lower min_free, or point dir at a larger disk."
        yield ("warn", text, fix) if stats.streamed_full else ("ok", text, "")


def _upstream(upstream: Upstream) -> Findings:
    check_upstream(upstream, _RESPOND)
    yield "ok", "the upstream can be read", ""


def _packages() -> Findings:
    """Compare the installed versions with those that the packages for S3 require."""
    parse: Any = None
    for module in ("pip._vendor.packaging", "packaging"):
        with contextlib.suppress(ImportError):
            parse = importlib.import_module(f"{module}.requirements").Requirement
    fit, others = parse is not None, ("boto3", "awscli")
    for name in ("shardcache", "s3fs", "aiobotocore", *others) if parse else ():
        with contextlib.suppress(PackageNotFoundError):
            for needed in map(parse, requires(name) or ()):
                if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                    continue
                found = version(needed.name)
                if not needed.specifier.contains(found, prereleases=True):
                    fit, text = False, f"{name} needs {needed.name}{needed.specifier}, not {found}"
                    pin = f" {needed.name}=={found}" if name in others else ""
                    yield "warn", text, f"Run: pip install {name}{pin}"
    if fit:
        yield "ok", "the installed versions fit", ""


def _credentials(config: Config) -> Findings:
    access, options = s3_access(config, timed=True), config.scheme_options("s3")
    if not access.credentials:
        fix = "Set AWS_PROFILE or AWS_ACCESS_KEY_ID, give the node a role, or set anon for public "
        fix += "buckets (storage_options)."
        yield "warn", str(access), fix
        return
    if options.get("anon"):
        yield "ok", str(access), ""
        return
    origin = S3Origin("s3", options, _RESPOND)
    try:
        if origin.accepts_credentials():
            yield "ok", f"{access}; accepted", ""
        else:
            fix = "Pass --url s3://BUCKET/SHARD to try them."
            yield "warn", f"{access}; not tried: it does not list buckets", fix
    except AccessDeniedError as exn:
        yield "fail", f"{access}; refused", reason(exn)
    except TransientError as exn:
        yield "warn", f"{access}; not tried: {exn}", _NO_ENDPOINT


def _endpoint(config: Config, url: str | None) -> Findings:
    server = endpoint_of(config)
    with contextlib.suppress(ShardCacheError):  # `_read` reports the error
        if url is not None:
            origin = Origins(config).of(shard := url_parser(config)(url))
            server = origin.server(shard) if isinstance(origin, S3Origin) else server
    if server is None:
        yield "ok", "not contacted: no endpoint is set, and --url names no S3 shard", ""
        return
    # Only the Date header is used, so the certificate need not be verified.
    transport = Transport(timeout=_RESPOND, trusted=False)
    via = transport.via(server)
    try:
        response = transport.request("HEAD", server, "/", {})
        now = time.time()
        response.close()
        parts = urlsplit(server)
        host, port = parts.hostname or "", parts.port or parts.scheme
        rows = [] if via else socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, MalformedError) as exn:
        yield "fail", f"{server} does not respond{via}: {exn}", _NO_ENDPOINT
        return
    dead = ", ".join(filter(None, map(_dead_address, rows)))
    addresses = f"has {counted(len(rows), 'address', 'addresses')}"
    text = f"{host} {addresses if rows else f'responds{via}'}"
    if dead:
        text += f", of which these accept no connection within {_CONNECT:g} s: {dead}"
        yield "warn", text, "Repair the route to them, or remove them from DNS."
    else:
        yield "ok", text, ""
    with contextlib.suppress(ValueError):  # the server has sent no valid date
        date = parsedate_to_datetime(response.headers.get("date", ""))
        skew = abs(date.timestamp() - now)
        by = format_duration(skew) if skew >= 2 else "less than two seconds"  # Date has seconds
        text = f"the clocks of this machine and of {host} differ by {by}"
        fix = "Synchronise the clock (chronyc makestep): S3 refuses requests above 15 minutes."
        yield ("ok", text, "") if skew < _SKEW else ("warn", text, fix)


def _dead_address(row: tuple[Any, ...]) -> str:
    """Return the address in a row of `getaddrinfo`, or "" if it accepts a connection in time."""
    with contextlib.suppress(OSError), socket.socket(row[0], socket.SOCK_STREAM) as sock:
        sock.settimeout(_CONNECT)
        sock.connect(row[4])
        return ""
    return str(row[4][0])


def _read(config: Config, url: str) -> Findings:
    shard = url_parser(config)(url)
    if advice := advise_scheme(shard):
        raise ShardNotFoundError(f"{shard.local_path} does not exist. {advice}")
    origins = Origins(config)

    def read() -> tuple[int, float, ObjectInfo]:
        size, first, buffer = 0, 0.0, bytearray(1 << 20)
        with contextlib.closing(origins.of(shard).open(shard, 0, _READ_BYTES)) as body:
            while count := body.readinto(memoryview(buffer)[: _READ_BYTES - size]):
                size, first = size + count, first or time.monotonic() - began
            return size, first, body.info

    origins.of(shard).prepare()
    began = time.monotonic()
    retry = RetryLimits(2, config.deadline, 0).started(str(shard))  # a single error may be chance
    size, first, info = retry.call(read, sleep=time.sleep)
    seconds = max(time.monotonic() - began, 1e-9)
    text = f"{format_bytes(size)} in {format_duration(seconds)} ({format_rate(size / seconds)}), "
    text += f"first byte after {format_duration(first)}, ETag {info.etag or 'none'}"
    if info.identifiable:
        yield "ok", text, ""
    else:
        fix = "Let the server send ETag or Last-Modified: shardcache cannot resume without them."
        yield "warn", text, fix
