"""``shardcache verify``: check that cached shards are intact, and still current at the origin."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter

import click

from shardcache.cli.main import ExitCode, Invocation, Parsed, command, dry_run_option, flag
from shardcache.cli.output import counted, fields_of, printable
from shardcache.cli.progress import Position, Positions, display
from shardcache.errors import ConfigError
from shardcache.store.verify import Finding, State, VerifyStatus
from shardcache.units import format_bytes, format_duration


def _share(text: str) -> float:
    """Parse a percentage, with or without its sign."""
    with contextlib.suppress(ValueError):
        if 0 < (percent := float(text.strip().removesuffix("%"))) <= 100:
            return percent / 100
    raise ConfigError("write a percentage above 0%, such as 5%.")


@command("verify")
@flag("--quick", help="Compare only sizes, without reading data.")
@flag("--remote", help="Also check that the origin still has the same version.")
@flag("--repair", help="Set damaged shards aside; their next readers download them again.")
@dry_run_option
@click.option(
    "--sample",
    type=Parsed("PERCENT", _share),
    default="100%",
    help="Verify only a random share, such as 5%.",
)
@click.argument("specs", nargs=-1, metavar="[SPEC]...")
def verify_command(
    invocation: Invocation,
    specs: tuple[str, ...],
    sample: float,
    dry_run: bool,
    repair: bool,
    remote: bool,
    quick: bool,
) -> int:
    """Find shards that are damaged, or that have changed at the origin.

    Reads each shard and compares it with its recorded checksum. A SPEC is as for `ls`; without
    one, all shards are verified. With --remote, the origin gets one request per shard. After
    --repair, current readers of a damaged shard continue, the next reader downloads it again,
    and `clean` removes the damaged file. Jobs may run at the same time.

    Exit code 4 if a shard is damaged, or with --remote has changed or is gone; else 3 if a
    shard could not be checked; 1 if nothing matches a SPEC.

    \b
    Examples:
      shardcache verify 'train-*.tar' --sample 5%
      shardcache verify --repair
      shardcache verify --quick --remote --json
    """
    if dry_run and not repair:
        raise click.UsageError("-n needs --repair; without it nothing is changed.")
    console, counts, wrong = invocation.console, Counter[State](), list[Finding]()
    size, began, status = 0, time.monotonic(), VerifyStatus()

    def positions() -> Positions:
        done = f"{format_bytes(status.passed)} of {format_bytes(status.bytes)}"
        text = f"{status.done:,}/{status.shards:,} shards, {done}"
        return {"": Position(text, status.passed, status.bytes)}

    invocation.polls_stop = True
    with invocation.cache() as cache:
        if not cache.dir.exists() or not any(cache.dir.iterdir()):
            list(cache.entries(specs or None))  # raises if there is a SPEC: it matches nothing
            console.hint(f"Nothing was cached in {cache.dir} yet.")
        else:
            findings = cache.verify(
                specs or None,
                quick=quick,
                remote=remote,
                repair=repair and not dry_run,
                sample=sample,
                status=status,
                stop=invocation.stop,
            )
            with contextlib.closing(findings), display(console, positions):
                for finding in findings:
                    counts[finding.state] += 1
                    size += 0 if finding.state is State.UNCHECKED else finding.entry.size
                    if finding.state is not State.OK:
                        wrong.append(finding)
                        label = console.styled(f"{finding.state:<11}", "yellow", sys.stdout)
                        aside = " (set aside)" if finding.set_aside else ""
                        name = finding.url or finding.entry.directory
                        console.data(f"{label}  {printable(f'{name}  {finding.reason}')}{aside}")
    stopped, seconds = invocation.stop.is_set(), round(time.monotonic() - began, 3)
    verified, set_aside = counts.total() - counts[State.UNCHECKED], sum(f.set_aside for f in wrong)
    console.object(
        "verify",
        findings=[{**fields_of(each), "entry": fields_of(each.entry)} for each in wrong],
        summary={
            "interrupted": stopped,
            "verified": verified,
            "verified_bytes": size,
            "seconds": seconds,
            **{state.value: counts[state] for state in State},
            "set_aside": set_aside,
        },
    )
    notes = [f"{counts[state]:,} {state}" for state in [*State][1:] if counts[state]]
    if counts[State.DAMAGED] and repair:
        notes[0] += ", to be set aside" if dry_run else f", {set_aside:,} set aside"
    console.info(
        f"{'interrupted: ' if stopped else ''}{'compared the sizes of' if quick else 'verified'} "
        f"{counted(verified, 'shard')}, {format_bytes(size)} in {format_duration(seconds)}: "
        f"{', '.join(notes) or 'nothing is wrong'}"
    )
    if counts[State.DAMAGED] and not repair:
        console.hint("Pass --repair to set damaged shards aside; readers download them again.")
    if counts[State.CHANGED]:
        console.hint("Run `shardcache rm URL` for changed shards; readers get the new version.")
    if counts[State.DAMAGED] or counts[State.CHANGED] or counts[State.GONE]:
        return ExitCode.DAMAGED
    unknown = counts[State.UNCHECKED] or counts[State.UNREACHABLE]
    return ExitCode.SOME_FAILED if unknown else ExitCode.DONE
