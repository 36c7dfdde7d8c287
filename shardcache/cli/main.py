"""The command line's entrance: commands, exit codes (`EXIT_CODES`), one sentence per error.

Commands live in ``commands_*`` and are imported when they are called; nothing
imported here may be slow, since ``shardcache dir`` runs in every job's prologue.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from shardcache.cli.invocation import Invocation, global_options
from shardcache.cli.signals import Signals
from shardcache.errors import (
    CacheFullError,
    ConfigError,
    IntegrityError,
    LockTimeoutError,
    ShardCacheError,
)

__all__ = ["EXIT_CODES", "main"]

DONE, FAILED, USAGE, SOME_FAILED, DAMAGED, FULL, BUSY = range(7)
INTERRUPTED, TERMINATED = 130, 143

#: Code -> what it means. Scripts rely on them; README.md has this table.
EXIT_CODES = {
    DONE: "done",
    FAILED: "failed; what was asked for is not there, or the disk fails",
    USAGE: "usage or configuration",
    SOME_FAILED: "some shards failed after retries, or could not be checked",
    DAMAGED: "damage found, or a failed check",
    FULL: "not enough space",
    BUSY: "busy: pinned or in use, or another process holds it",
    INTERRUPTED: "SIGINT; what was fetched is resumed by the next run",
    TERMINATED: "SIGTERM; likewise",
}
#: Command -> codes that it can end with beside those of `ANY`.
ANY = (DONE, FAILED, USAGE, INTERRUPTED, TERMINATED)
OTHER_CODES: dict[str, tuple[int, ...]] = {
    "prewarm": (SOME_FAILED, DAMAGED, FULL),
    "path": (DAMAGED, FULL, BUSY),
    "rm": (BUSY,),
    "clean": (BUSY,),
    "verify": (SOME_FAILED, DAMAGED),
    "report": (FULL,),
    "doctor": (DAMAGED,),
    "demo": (DAMAGED,),
}

#: Command -> module, in the order of the help text.
_COMMANDS = {
    "prewarm": "prewarm",
    "ls": "entries",
    "path": "prewarm",
    "rm": "clean",
    "pin": "pin",
    "unpin": "pin",
    "clean": "clean",
    "verify": "verify",
    "stats": "stats",
    "top": "top",
    "report": "report",
    "recipe": "recipe",
    "config": "config",
    "dir": "config",
    "doctor": "doctorcommand",
    "completion": "completion",
    "demo": "demo",
}
_BY_ERROR: tuple[tuple[type[Exception], int], ...] = (
    (ConfigError, USAGE),
    (CacheFullError, FULL),
    (LockTimeoutError, BUSY),
    (IntegrityError, DAMAGED),
)
_UNUSABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP})
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


class _Commands(click.Group):
    """Imports a command's module only when the command is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _COMMANDS.get(cmd_name)
        if module is None:
            return None
        found: Any = getattr(
            importlib.import_module(f"shardcache.cli.{module}"), f"{cmd_name}_command"
        )
        assert isinstance(found, click.Command)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as exn:
            import difflib

            near = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            known = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(_COMMANDS)}."
            raise click.UsageError(f"No such command: {args[0]}. {known}", ctx) from exn


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExit codes:\n" + "\n".join(f"  {n:<3}  {what}" for n, what in EXIT_CODES.items()),
)
@global_options
def command_line() -> None:
    """A per-node cache for WebDataset shards: each shard crosses the network once per node.

    Global options may stand before or after the command.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Args:
        arguments: instead of those of the process.
    """
    _prepare_streams()
    with Signals() as signals:
        invocation = Invocation(signals)
        code = _run(invocation, arguments)
        # A signal is the reason for whatever else went wrong after it.
        code = code if signals.exit_code is None else signals.exit_code
    _flush_stdout()
    return code


def _run(invocation: Invocation, arguments: Sequence[str] | None) -> int:
    try:
        returned = command_line.main(
            args=None if arguments is None else list(arguments),
            prog_name="shardcache",
            standalone_mode=False,
            obj=invocation,
        )
        return int(returned or DONE)
    except click.UsageError as exn:
        hint = f" Try '{exn.ctx.command_path} --help'." if exn.ctx is not None else ""
        invocation.console.error(f"{exn.format_message()}{hint}")
        return USAGE
    except click.ClickException as exn:
        invocation.console.error(exn.format_message())
        return FAILED
    except (KeyboardInterrupt, click.Abort):
        interrupted = invocation.signals.received is not None
        invocation.console.error("interrupted" if interrupted else "nothing was done")
        return FAILED
    except (ShardCacheError, OSError) as exn:
        invocation.console.error(_sentence(exn), exn)
        return _exit_code(exn, invocation)


def _sentence(exn: ShardCacheError | OSError) -> str:
    if isinstance(exn, ShardCacheError):
        return exn.message
    what = exn.strerror or str(exn) or type(exn).__name__
    return f"{exn.filename}: {what}" if exn.filename else what


def _exit_code(exn: ShardCacheError | OSError, invocation: Invocation) -> int:
    for kind, code in _BY_ERROR:
        if isinstance(exn, kind):
            return code
    if isinstance(exn, ShardCacheError):
        return FAILED
    if exn.errno in _NO_SPACE:
        return FULL
    directory = invocation.directory
    inside = directory is not None and str(exn.filename or "").startswith(str(directory))
    return USAGE if inside and exn.errno in _UNUSABLE else FAILED


def _prepare_streams() -> None:
    """Survive closed streams, and encodings that cannot spell a URL."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # replaced by something else
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _flush_stdout() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end, and would complain.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
