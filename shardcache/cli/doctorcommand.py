"""``shardcache doctor``: the machine against the configuration."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from shardcache.cli.main import Invocation, command
from shardcache.cli.output import counted, printable
from shardcache.config import Config
from shardcache.errors import ConfigError

if TYPE_CHECKING:
    from shardcache.cli.checkup import Finding

__all__ = ["doctor_command"]

_OK, _FAILED = 0, 4
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


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

    Looks at the directories and their filesystems, at memory, limits, CPUs and the clock, and
    with --url at the origin. Each finding is ok, warn or fail, with what to do about it. Makes
    nothing and leaves nothing. Exit code 4 if a check failed; warnings do not count.
    """
    console = invocation.console
    rows = []
    for finding in _findings(invocation, url):
        rows.append(asdict(finding))
        if console.human and not (console.quiet and finding.level == "ok"):
            console.data(_line(invocation, finding))
    levels = Counter(row["level"] for row in rows)
    if console.human:
        footer = f"{levels['fail']} failed, {counted(levels['warn'], 'warning')}"
        console.said(footer)
    else:
        summary: dict[str, Any] = {level: levels[level] for level in _STYLES}
        console.table("doctor", "finding", [], rows, summary=summary)
    return _FAILED if levels["fail"] else _OK


def _findings(invocation: Invocation, url: str | None) -> Iterator[Finding]:
    from shardcache.cli.doctor import examine, unconfigured

    try:
        config: Config | None = invocation.loaded().config
        whole = True
    except ConfigError as exn:
        yield unconfigured(exn.message)
        config, whole = _bare(invocation), False
    yield from examine(config, whole=whole, url=url)


def _bare(invocation: Invocation) -> Config | None:
    """Just the directory, with every default; None if not even that is known."""
    try:
        return Config(invocation.find_directory())
    except ConfigError:
        return None


def _line(invocation: Invocation, finding: Finding) -> str:
    level = invocation.console.styled(f"{finding.level:<4}", _STYLES[finding.level], sys.stdout)
    text = f"{finding.subject}  {finding.found}"
    if finding.fix:
        text = f"{text.rstrip('.')}. {finding.fix}"
    return f"{level}  {printable(text)}"
