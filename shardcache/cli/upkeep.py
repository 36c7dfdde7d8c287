"""``shardcache clean`` and ``shardcache verify``: keep a cache small and intact."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click

from shardcache.cli import main as cli
from shardcache.cli.main import ExitCode, Invocation, command, flag
from shardcache.cli.output import Position, Positions, Row, display, fields_of, printable
from shardcache.space.eviction import Removal
from shardcache.store.partial import read_journal
from shardcache.store.root import is_cache
from shardcache.store.verify import EntryState, Finding, VerifyStatus
from shardcache.units import Limit, counted, format_bytes, format_duration


@command("clean")
@cli.dry_run_option
@cli.yes_option
@flag("--all", "everything", help="Remove all shards that are not in use or pinned.")
@flag("--remove-dir", help="With --all, remove the directory, too.")
@click.option(
    "--wait/--no-wait", default=True, help="Wait for another clean, or exit with 6 (default: wait)."
)
@flag("--orphans", help="Remove only partials of dead processes, including recent ones.")
@click.option(
    "--max-age", type=cli.DURATION, help="Evict shards not used for this long, such as 14d."
)
@click.option(
    "--min-free", type=cli.SIZE, help="Evict until this much space is free: 100GB or 10%."
)
@click.option(
    "--max-size", type=cli.SIZE, help="Evict until the cache is no larger than this: 800GB or 80%."
)
def clean_command(
    invocation: Invocation,
    orphans: bool,
    everything: bool,
    remove_dir: bool,
    yes: bool,
    dry_run: bool,
    wait: bool,
    **limits: Limit | float | None,
) -> ExitCode:
    """Evict shards over the limits, and remove partials of dead processes.

    Without options, the configured limits apply; a limit that is not configured is taken
    from the last job. Shards stay if a process reads them, or if they were
    used since the oldest running job started. Partials younger than an hour stay, too, so
    that an interrupted prewarm can resume them; --orphans removes them. --all --remove-dir
    leaves nothing of the cache, unless shards are pinned or a process uses it; exit code 1
    if the directory stays.

    \b
    Examples:
      shardcache clean -n
      17 * * * *  /opt/venv/bin/shardcache --dir /local/nvme/shards clean -q
      shardcache clean --all --remove-dir -y
    """
    given: dict[str, Any] = {n: value for n, value in limits.items() if value is not None}
    if everything and (given or orphans):
        raise click.UsageError("--all removes everything; omit limits and --orphans.")
    if remove_dir and not everything:
        raise click.UsageError("--remove-dir needs --all.")
    console, loaded = invocation.console, invocation.loaded_with_job_limits()
    with invocation.cache(loaded, existing=True) as cache:
        if everything and not (dry_run or yes):
            what = "Remove the directory and" if remove_dir else "Remove"
            invocation.confirm(f"{what} every shard in {cache.dir}?")
        is_limited = not (everything or (orphans and not given))
        job_limits = invocation.show_job_limits(loaded, given) if is_limited else {}
        report = cache.clean(
            **given,
            orphans=orphans,
            everything=everything,
            remove_dir=remove_dir,
            dry_run=dry_run,
            wait=wait,
        )
        console.object("clean", report, freed=report.freed, job_limits=job_limits)
        if dry_run:
            rows = [(_url_of(r), format_bytes(r.size), r.reason) for r in report.removed]
            console.table(("SHARD", "ON DISK", "REASON"), rows)
        console.info(str(report))
        if report.missing:
            why = "the other shards are pinned, in use, or were used since the running jobs started"
            why = why if report.kept else "no shard is left, and other files fill the disk"
            console.warning(f"the cache is still above its limits: {why}")
        if everything and (used := report.kept - report.pinned):
            console.hint(f"Processes use {counted(used, 'shard')}; `shardcache ls` shows which.")
        if not remove_dir or dry_run:
            return ExitCode.DONE
        for tier in cache.config.by_tier():
            if is_cache(tier.dir):
                why = "a process uses it, or it has files of other programs"
                why = (
                    "shards are pinned or in use (see `shardcache ls`)"
                    if report.kept or cache.pins()
                    else why
                )
                console.error(f"{tier.dir} stays: {why}.")
                return ExitCode.FAILED
        console.info(f"removed {cache.dir}")
    return ExitCode.DONE


def _url_of(removal: Removal) -> str:
    """Return the URL of a removed entry or partial, or its directory if the URL is unknown."""
    if removal.entries:
        return removal.entries[0].name() or removal.name
    journal = read_journal(Path(removal.name))
    return journal.metadata.url if journal else removal.name


@command("verify")
@flag("--quick", help="Compare only sizes, without reading data.")
@flag("--repair", help="Set damaged shards aside; their next readers download them again.")
@cli.dry_run_option
@click.argument("specs", nargs=-1, metavar="[SPEC]...")
def verify_command(
    invocation: Invocation, specs: tuple[str, ...], dry_run: bool, repair: bool, quick: bool
) -> int:
    """Find shards that are damaged.

    Reads each shard and compares it with its recorded checksum. A SPEC has the form that `ls`
    accepts; without one, all shards are verified. After --repair, current readers of a
    damaged shard continue, the next reader downloads it again, and `clean` removes the
    damaged file. Jobs may run at the same time. `prewarm --refresh` asks the origin for newer
    versions.

    A shard is malformed if it is as at the origin, but readers miss samples: it has no end
    marker, or more data behind one. --quick does not look for this.

    Exits with 4 if a shard is damaged or malformed; otherwise with 3 if a shard could not be
    checked, and with 1 if nothing matches a SPEC.

    \b
    Examples:
      shardcache verify 'train-*.tar'
      shardcache verify --repair
      shardcache verify --quick --json
    """
    if dry_run and not repair:
        raise click.UsageError("-n needs --repair; without it nothing is changed.")
    console, counts, wrong = invocation.console, Counter[EntryState](), list[Finding]()
    size, began, status = 0, time.monotonic(), VerifyStatus()

    def positions() -> Positions:
        done = f"{format_bytes(status.passed)} of {format_bytes(status.bytes)}"
        text = f"{status.done:,}/{status.shards:,} shards, {done}"
        return {"": Position(text, status.passed, status.bytes)}

    stop = invocation.poll_stop()
    with invocation.cache(existing=True) as cache:
        findings = cache.verify(
            specs or None, quick=quick, repair=repair and not dry_run, status=status, stop=stop
        )
        with contextlib.closing(findings), display(console, positions):
            for finding in findings:
                counts[finding.state] += 1
                size += 0 if finding.state is EntryState.UNCHECKED else finding.entry.size
                if finding.state is not EntryState.OK:
                    wrong.append(finding)
                    label = console.styled(f"{finding.state:<11}", "yellow", sys.stdout)
                    aside = " (set aside)" if finding.set_aside else ""
                    name = finding.url or finding.entry.directory
                    console.data(f"{label}  {printable(f'{name}  {finding.reason}')}{aside}")
    stopped, seconds = stop.is_set(), round(time.monotonic() - began, 3)
    verified = counts.total() - counts[EntryState.UNCHECKED]
    set_aside = sum(finding.set_aside for finding in wrong)
    rows = [{**fields_of(finding), "entry": fields_of(finding.entry)} for finding in wrong]
    summary: Row = {"interrupted": stopped, "verified": verified, "verified_bytes": size}
    summary |= {"seconds": seconds, **{state.value: counts[state] for state in EntryState}}
    console.object("verify", findings=rows, summary={**summary, "set_aside": set_aside})
    notes = [f"{counts[state]:,} {state}" for state in [*EntryState][1:] if counts[state]]
    if counts[EntryState.DAMAGED] and repair:
        notes[0] += ", to be set aside" if dry_run else f", {set_aside:,} set aside"
    console.info(
        f"{'interrupted: ' if stopped else ''}{'compared the sizes of' if quick else 'verified'} "
        f"{counted(verified, 'shard')}, {format_bytes(size)} in {format_duration(seconds)}: "
        f"{', '.join(notes) or 'nothing is wrong'}"
    )
    if counts[EntryState.DAMAGED] and not repair:
        console.hint("Pass --repair to set damaged shards aside; readers download them again.")
    if counts[EntryState.DAMAGED] or counts[EntryState.MALFORMED]:
        return ExitCode.DAMAGED
    return ExitCode.SOME_FAILED if counts[EntryState.UNCHECKED] else ExitCode.DONE
