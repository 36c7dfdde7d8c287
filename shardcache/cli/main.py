"""The parts that all commands share: global options, exit codes, signals, errors.

A command's module is imported when the command is called, because ``shardcache dir`` runs at the
start of every job and must start fast. At the first SIGINT or SIGTERM, a command cleans up and
ends; the second ends the process at once.
"""

from __future__ import annotations

import codecs
import contextlib
import enum
import functools
import importlib
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import click

from shardcache.cli.output import Console, reason
from shardcache.config import Loaded, __version__, describe, load
from shardcache.errors import (
    REMOVED,
    ConfigError,
    IntegrityError,
    LockTimeoutError,
    ShardCacheError,
)
from shardcache.faults import FULL, system_error
from shardcache.units import parse_age, parse_limit

if TYPE_CHECKING:
    from shardcache.cache import Cache

_Decorator = Callable[[Any], Any]


class ExitCode(enum.IntEnum):
    """The exit codes of all commands, which scripts rely on. docs/cli.md shows them as a table."""

    meaning: str

    def __new__(cls, number: int, meaning: str) -> Self:
        code = int.__new__(cls, number)
        code._value_ = number
        code.meaning = meaning
        return code

    DONE = 0, "done"
    FAILED = 1, "failed, for example because nothing matches or the disk has errors"
    USAGE = 2, "usage or configuration"
    SOME_FAILED = 3, "some shards failed after retries, or could not be checked"
    DAMAGED = 4, "damage found, or a failed check"
    FULL = 5, "not enough space"
    BUSY = 6, "busy: pinned, in use, or locked by another process"
    INTERRUPTED = 130, "SIGINT; the next run resumes partial downloads"
    TERMINATED = 143, "SIGTERM; the next run resumes partial downloads"


#: Command -> its module in this package, in the order of the help text.
_COMMANDS = {
    "run": "run", "prewarm": "prewarm", "import": "prewarm", "expand": "entries", "index": "index",
    "ls": "entries", "path": "entries", "rm": "entries", "pin": "entries", "unpin": "entries",
    "clean": "upkeep", "verify": "upkeep", "stats": "stats", "top": "stats", "report": "stats",
    "config": "config", "dir": "config", "doctor": "doctor",
}  # fmt: skip


#: Command, and a pattern of a part of its usage error -> advice.
_STORE = "--(no-sign-request|region|profile|endpoint-url)"
_ADVICE = {
    "doctor unexpected extra": "Pass --url URL.",
    "stats 'json'": "Pass --json.",
    f"shardcache {_STORE}": "Write it after the command, such as prewarm.",
    **{name: f"It was removed. {advice}" for name, advice in REMOVED.items()},
}


class Invocation:
    """One run of the command line: its global options, console, cache and signals."""

    def __init__(self) -> None:
        self.console = Console()
        self.dir: str | None = None
        self.config: str | None = None
        self.endpoint_url: str | None = None
        self.store_options: dict[str, str] = {}  #: of S3, for `aws.with_options`
        self.received: int | None = None  #: the number of the first signal, once it was received
        self.stop = threading.Event()  #: set by the first signal
        self._polls_stop = False

    def poll_stop(self) -> threading.Event:
        """Return `stop`, which the command polls; without this, a signal interrupts it."""
        self._polls_stop = True
        return self.stop

    def loaded(self, options: Mapping[str, Any] = {}, job: dict[str, Any] | None = None) -> Loaded:
        """Return the configuration, with these options, and the source of each option."""
        files = None if self.config is None else [Path(self.config)]
        given = {"dir": self.dir, "endpoint_url": self.endpoint_url, **options}
        loaded = load(given, files=files, job=job)
        if self.store_options:
            from shardcache.origins.aws import with_options

            config = with_options(loaded.config, self.store_options.items())
            loaded = loaded._replace(config=config)
        return loaded

    def loaded_with_job_limits(self) -> Loaded:
        """Return the configuration, completed by the limits and tiers that the last job had.

        A job may set them in its code.
        """
        from shardcache.layout import Layout
        from shardcache.store.root import is_cache
        from shardcache.tiers import job_limits

        loaded = self.loaded()
        root, is_shared = loaded.config.dir, loaded.config.shared_group is not None

        def is_ours(tier: Path) -> bool:  # another user may have written the record
            if not is_cache(tier):
                return False
            a, b = root.stat(), tier.stat()
            return a.st_gid == b.st_gid if is_shared else a.st_uid == b.st_uid

        try:
            limits = job_limits(Layout.of_root(root))
            tiers = [tier for tier in limits.get("tiers") or () if is_ours(Path(tier["dir"]))]
            limits["tiers"] = tiers or None
            return self.loaded(job=limits)
        except (ConfigError, OSError, TypeError, KeyError):  # the record is damaged
            return loaded

    def show_job_limits(self, loaded: Loaded, given: Collection[str]) -> dict[str, str]:
        """Print and return the limits of the last job that hold, because they are not ``given``."""
        options = (option for option in describe(loaded) if option.source == "last job")
        limits = {option.name: option.value for option in options if option.name not in given}
        if limits:
            text = ", ".join(f"{name} {value}" for name, value in limits.items())
            self.console.hint(f"Limits of the last job: {text}.")
        return limits

    def cache(
        self, loaded: Loaded | None = None, *, existing: bool = False, **options: Any
    ) -> Cache:
        """Open the cache of ``loaded`` (default: `loaded_with_job_limits`); faults raise errors.

        Raises ConfigError if the directory is no cache and cannot be one, or with ``existing``, if
        it is no cache yet: a mistyped one must not look like an empty one.
        """
        from shardcache.cache import Cache
        from shardcache.store.root import check_usable, check_user, is_cache, require_cache

        if loaded is None:
            loaded = self.loaded_with_job_limits()
            if not existing:  # it may store shards
                self.show_job_limits(loaded, [])
        config, sources = loaded
        for tier in config.by_tier():
            check_user(tier)
        if existing:
            require_cache(config.dir)
        elif not is_cache(config.dir):
            check_usable(config)
            if sources["dir"] == "default" or sys.stderr.isatty():  # it may be mistyped
                self.console.hint(f"Using {config.dir}; --dir or SHARDCACHE_DIR sets another one.")
        return Cache.from_config(config.replace(strict=True, **options))

    def confirm(self, question: str) -> None:
        """Ask the user to confirm that data will be destroyed."""
        if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise click.UsageError(f"{question} There is no terminal to ask on: pass -y.")
        click.confirm(question, abort=True, err=True)

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """Print the library's log on stderr during a ``with`` block, at the level of -q and -v."""
        plain = logging.ERROR if self.console.quiet else logging.WARNING
        handler, library = _ConsoleHandler(self.console), logging.getLogger("shardcache")
        before = library.level, library.propagate
        library.addHandler(handler)
        library.setLevel((plain, logging.INFO, logging.DEBUG)[min(self.console.verbosity, 2)])
        library.propagate = False
        try:
            yield
        finally:
            library.removeHandler(handler)
            library.level, library.propagate = before

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM during a ``with`` block, if this is the main thread."""
        is_main = threading.current_thread() is threading.main_thread()
        with contextlib.ExitStack() as stack:
            for number in (signal.SIGINT, signal.SIGTERM) if is_main else ():
                # nohup, and `&` in a script, start commands that ignore SIGINT. Keep ignoring it.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    stack.callback(signal.signal, number, signal.signal(number, self._handle))
            yield

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if os.isatty(2):
                with contextlib.suppress(OSError):
                    os.write(2, b"\x1b[?25h")  # DECTCEM: show the cursor that a display may hide
            os._exit(128 + number)
        self.received = number
        self.stop.set()
        if not self._polls_stop:
            raise SystemExit  # after a KeyboardInterrupt amid an import, CPython ends by SIGINT


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        # The progress and the summary show the number of retries, so only -v prints each retry.
        if self._console.verbosity or getattr(record, "event", None) != "retry":
            level = record.levelname.lower()
            color = {"warning": "yellow", "error": "red", "critical": "red"}.get(level, "")
            try:
                self._console.message(f"{level}: ", record.getMessage(), color)
            except system_error():  # of stderr, which must not look like one of the cache
                self.handleError(record)


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """An option type that converts text with ``parse``. A ConfigError becomes a usage error."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value)
        except ConfigError as exn:
            self.fail(exn.message, param, ctx)


def _parse_file(text: str) -> str:
    if text == "-":
        raise ConfigError("- is not the name of a file. Write /dev/stdout for standard output.")
    return text


FILE = Parsed("FILE", _parse_file)
DURATION = Parsed("DURATION", parse_age)
#: Expands the directory here, so that `run` and Ray pass on what a shell should have expanded.
_DIRECTORY = Parsed("DIR", lambda text: text and str(load({"dir": text}, {}, files=[]).config.dir))
SIZE = Parsed("SIZE", parse_limit)


def number_option(
    *names: str, help: str, minimum: int = 1, maximum: int | None = None
) -> _Decorator:
    """Declare an option whose value is a whole number."""
    return click.option(*names, type=click.IntRange(minimum, maximum), metavar="N", help=help)


flag = functools.partial(click.option, is_flag=True)
dry_run_option = flag("-n", "--dry-run", help="Print what would be done, and do nothing.")
skip_missing_option = flag(
    "--skip-missing", help="Accept that shards do not exist (404), and name them."
)
yes_option = flag("-y", "--yes", help="Do not ask for confirmation.")


def _take(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Store the value of a global option, whether it precedes or follows the command."""
    name, invocation = str(parameter.name), context.ensure_object(Invocation)
    if value == "":  # of a variable of a shell that is not set
        raise click.BadParameter("It is empty.", context, parameter)
    if name == "verbosity":
        invocation.console.verbosity += value
    elif value and name in ("anon", "profile", "region_name"):
        invocation.store_options[name] = value
    elif value:
        setattr(invocation if hasattr(invocation, name) else invocation.console, name, value)


def _combined(*decorators: _Decorator) -> _Decorator:
    """Return a decorator that applies all ``decorators``, the first one first."""
    return lambda command: functools.reduce(lambda inner, add: add(inner), decorators, command)


_option = functools.partial(click.option, expose_value=False, callback=_take)
#: The options of a command that reads from S3, with the names that the AWS CLI has.
store_options = _combined(
    _option("--no-sign-request", "anon", is_flag=True, help="S3: send no credentials."),
    _option("--region", "region_name", metavar="NAME", help="S3: the region of the bucket."),
    _option("--profile", metavar="NAME", help="S3: the profile with the credentials."),
    _option("--endpoint-url", metavar="URL", help="S3: the endpoint, if not AWS."),
)
_global_options = _combined(
    _option("--dir", type=_DIRECTORY, help="Directory of the cache."),
    _option("--config", metavar="FILE", help="Read only this configuration file."),
    _option("-q", "--quiet", is_flag=True, help="Print only data, warnings and errors."),
    _option("-v", "--verbose", "verbosity", count=True, help="Log more; -vv for debugging."),
    _option("--json", is_flag=True, help="Print one JSON object, for programs."),
    _option("--color", type=click.Choice(["auto", "always", "never"]),
            help="Use colours; auto: on a terminal, unless NO_COLOR is set."),
    _option("--no-progress", is_flag=True, help="Do not show progress."),
    click.version_option(__version__, message="shardcache %(version)s", help="Print the version."),
)  # fmt: skip


class _Command(click.Command):
    """A command that prints the library's log while it runs."""

    def invoke(self, ctx: click.Context) -> Any:
        with ctx.obj.logging():
            return super().invoke(ctx)


def command(name: str, **settings: Any) -> _Decorator:
    """Turn a function into a command; ``settings`` are context settings of click."""
    make = click.command(name, _Command, context_settings=settings)
    return _combined(click.pass_obj, make, _global_options)


class _Commands(click.Group):
    """The group of all commands; imports the module of a command when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module: Any = importlib.import_module(f"shardcache.cli.{_COMMANDS[cmd_name]}")
        return getattr(module, f"{cmd_name}_command")  # type: ignore[no-any-return]


@_global_options
@click.group(
    cls=_Commands,
    commands=dict.fromkeys(_COMMANDS),  # for click's suggestions
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExit codes:\n" + "\n".join(f"  {code:<3}  {code.meaning}" for code in ExitCode),
)
def command_line() -> None:
    """A per-node cache for WebDataset shards: each shard crosses the network once per node.

    Global options may precede or follow the command.
    """


def _as_bytes(exn: UnicodeError) -> tuple[str | bytes, int]:
    """Print the names of files as they are, and what else the encoding lacks as escapes."""
    with contextlib.suppress(UnicodeError):
        return codecs.lookup_error("surrogateescape")(exn)
    return codecs.backslashreplace_errors(exn)


codecs.register_error("shardcache", _as_bytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with arguments (default: those of the process); return its exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the shell has closed the stream
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - stays open
        with contextlib.suppress(AttributeError, ValueError):  # a test may have replaced the stream
            getattr(sys, name).reconfigure(errors="shardcache")
    invocation = Invocation()
    with invocation.signals():
        code = _run(invocation, arguments)
    # After a signal, errors are consequences of the signal, so the exit code states the signal.
    return code if invocation.received is None else 128 + invocation.received


def _run(invocation: Invocation, arguments: Sequence[str] | None) -> int:
    console = invocation.console
    try:
        returned = command_line.main(
            args=list(sys.argv[1:] if arguments is None else arguments) or ["--help"],
            prog_name="shardcache",
            standalone_mode=False,
            obj=invocation,
        )
        return int(returned or ExitCode.DONE)
    except click.ClickException as exn:
        text = " ".join(exn.format_message().split())  # click puts each choice on its own line
        text += "" if text.endswith((".", "?", ")")) else "."
        if not isinstance(exn, click.UsageError):
            console.error(text)
            return ExitCode.FAILED
        if exn.ctx is not None:
            hint = f"Try '{exn.ctx.command_path} --help'."
            for key, advice in _ADVICE.items():
                command, _, part = key.partition(" ")
                is_meant = re.search(rf"(?<![\w-]){part}(?![\w-])", text)
                hint = advice if command == exn.ctx.info_name and is_meant else hint
            text += f" {hint}"
        console.error(text)
        return ExitCode.USAGE
    except (SystemExit, KeyboardInterrupt, click.Abort):
        console.error("nothing was done" if invocation.received is None else "interrupted")
        return ExitCode.FAILED
    except (ShardCacheError, OSError) as exn:
        console.error(reason(exn), exn)
        return code_of(exn)


def code_of(exn: Exception) -> ExitCode:
    """Return the exit code of a command that failed with ``exn``."""
    if isinstance(exn, OSError) and exn.errno in FULL:
        return ExitCode.FULL
    codes = {
        ConfigError: ExitCode.USAGE,
        LockTimeoutError: ExitCode.BUSY,
        IntegrityError: ExitCode.DAMAGED,
    }
    return next((code for kind, code in codes.items() if isinstance(exn, kind)), ExitCode.FAILED)
