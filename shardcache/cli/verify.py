"""``shardcache verify``: whether what is cached is still what was fetched."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import click

from shardcache.cli.entries import matches_glob
from shardcache.cli.main import ExitCode, Invocation, Parsed, command
from shardcache.cli.output import Console, counted, printable
from shardcache.cli.progress import Display, Position, Rate
from shardcache.errors import ConfigError
from shardcache.store.verify import Finding, State, VerifyStatus
from shardcache.units import format_bytes, format_duration, format_rate, parse_limit

_LABEL = max(len(state) for state in State)
_TEXTS = {
    State.DAMAGED: "damaged",
    State.CHANGED: "changed at the origin",
    State.GONE: "gone from the origin",
    State.UNREACHABLE: "whose origin could not be asked",
    State.UNCHECKED: "that could not be checked",
}


def _share(text: str) -> float:
    """A percentage as a part of 1.

    Raises:
        ConfigError: it is something else.
    """
    found = None
    with contextlib.suppress(ConfigError):
        found = parse_limit(text)
    if found is None or not found.percent:
        raise ConfigError(
            f"{text!r} is no share. Write a percentage above 0% and up to 100%, such as 5%."
        )
    return found.percent / 100


@command(
    "verify",
    short="Find damaged shards, and those that changed at the origin.",
    examples="""
        shardcache verify
        shardcache verify 'train-*.tar' --sample 5%
        shardcache verify --repair -n
        shardcache verify --repair
        shardcache verify --quick --remote --json
    """,
)
@click.option("--quick", is_flag=True, help="Compare sizes only, read no data.")
@click.option("--remote", is_flag=True, help="Ask origins, too: does each still have that version?")
@click.option("--repair", is_flag=True, help="Set damaged shards aside, to be fetched anew.")
@click.option("-n", "--dry-run", is_flag=True, help="With --repair: say what would be set aside.")
@click.option(
    "--sample",
    type=Parsed("PERCENT", _share),
    default="100%",
    help="Look at a random share of the shards only, such as 5%.",
)
@click.argument("glob", required=False)
def verify_command(
    invocation: Invocation,
    glob: str | None,
    sample: float,
    dry_run: bool,
    repair: bool,
    remote: bool,
    quick: bool,
) -> int:
    """Read every shard in the cache, and compare it with what was fetched.

    GLOB is matched against whole URLs, or against the last part of them if it has
    no slash. With --remote the origin is asked once per shard. What --repair sets
    aside is fetched anew by its next reader; who reads it now reads on, and `clean`
    removes it. Jobs may run meanwhile.

    Exit code 4 if anything is damaged, or with --remote has changed or is gone; 3 if
    nothing is, but something could not be checked.
    """
    if dry_run and not repair:
        raise click.UsageError("-n goes with --repair; without it nothing is changed anyway.")
    console, signals = invocation.console, invocation.signals
    counts = dict.fromkeys(State, 0)
    wrong: list[Finding] = []
    size, begun, status = 0, time.monotonic(), VerifyStatus()
    with invocation.cache() as cache, signals.graceful():
        if not cache.dir.exists() or not any(cache.dir.iterdir()):
            console.hint(f"Nothing was cached in {cache.dir} yet.")
        else:
            findings = cache.verify(
                None if glob is None else functools.partial(matches_glob, glob),
                quick=quick,
                remote=remote,
                repair=repair and not dry_run,
                sample=sample,
                status=status,
                stop=signals.stop,
            )
            display = Display(console, _progress(status, by_bytes=not quick))
            with contextlib.closing(findings), display:
                for finding in findings:
                    counts[finding.state] += 1
                    size += 0 if finding.state is State.UNCHECKED else finding.entry.size
                    if finding.state is not State.OK:
                        wrong.append(finding)
                        console.line("finding", _row(finding))
                        if console.human:
                            console.data(_line(console, finding))
    seconds = time.monotonic() - begun
    summary: dict[str, Any] = {
        "quick": quick,
        "remote": remote,
        "repair": repair,
        "dry_run": dry_run,
        "sample": sample,
        "interrupted": signals.stop.is_set(),
        "verified": sum(counts.values()) - counts[State.UNCHECKED],
        "verified_bytes": size,
        "seconds": round(seconds, 3),
        **{state.value: count for state, count in counts.items()},
        "set_aside": sum(finding.set_aside for finding in wrong),
    }
    # As lines of JSON they are printed already.
    rows = [] if console.format == "jsonl" else map(_row, wrong)
    text = _summary_text(counts, summary, seconds)
    console.table("verify", "finding", [], rows, summary=summary, footer=text)
    if counts[State.DAMAGED] and not repair:
        console.hint("Pass --repair to set damaged shards aside; readers fetch them anew.")
    if counts[State.CHANGED]:
        console.hint("`shardcache rm URL` removes a changed one; readers fetch the new version.")
    if counts[State.DAMAGED] or counts[State.CHANGED] or counts[State.GONE]:
        return ExitCode.DAMAGED
    unknown = counts[State.UNCHECKED] or counts[State.UNREACHABLE]
    return ExitCode.SOME_FAILED if unknown else ExitCode.DONE


def _summary_text(counts: Mapping[State, int], summary: Mapping[str, Any], seconds: float) -> str:
    what = "compared the sizes of" if summary["quick"] else "verified"
    if summary["interrupted"]:
        what = f"interrupted: {what}"
    size = format_bytes(summary["verified_bytes"])
    wrong = [f"{n:,} {_TEXTS[state]}" for state, n in counts.items() if n and state in _TEXTS]
    if counts[State.DAMAGED] and summary["dry_run"]:
        wrong[0] += ", to be set aside"
    elif counts[State.DAMAGED] and summary["repair"]:
        wrong[0] += f", {summary['set_aside']:,} set aside"
    return (
        f"{what} {counted(summary['verified'], 'shard')}, {size} in {format_duration(seconds)}: "
        f"{', '.join(wrong) or 'nothing is wrong'}"
    )


def _line(console: Console, finding: Finding) -> str:
    """``damaged      s3://lab/a.tar  its bytes changed since they were fetched``."""
    state = finding.state
    style = "red" if state is State.DAMAGED else "yellow"
    label = console.styled(f"{state.value:<{_LABEL}}", style, sys.stdout)
    name = finding.url or finding.entry.directory
    aside = " (set aside)" if finding.set_aside else ""
    return f"{label}  {printable(name)}  {printable(finding.reason)}{aside}"


def _row(finding: Finding) -> dict[str, Any]:
    entry = finding.entry
    return {
        "state": finding.state.value,
        "url": finding.url,
        "reason": finding.reason,
        "size": entry.size,
        "set_aside": finding.set_aside,
        "key": entry.key,
        "version": entry.version,
        "dir": entry.directory,
    }


def _progress(status: VerifyStatus, *, by_bytes: bool) -> Callable[[float], Position]:
    """``28%, 512/1,848 shards, 256.0 GB of 924.3 GB, 2.9 GB/s, ETA 0:03:50``.

    Args:
        status: of what runs.
        by_bytes: whether data is read, so that bytes tell how far it is.
    """
    known = Rate()

    def look(now: float) -> Position:
        if not status.shards:
            return Position(None, ["looking for shards"])
        done, total = status.done, status.shards
        if by_bytes:
            done, total = status.passed, status.bytes
        rate = known.update(now, done)
        parts = [f"{status.done:,}/{status.shards:,} shards"]
        if by_bytes:
            parts += [f"{format_bytes(done)} of {format_bytes(total)}", format_rate(rate)]
        return Position.of(done, total, rate, parts)

    return look
