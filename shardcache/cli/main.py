"""The frame of the command line: global options, exit codes, signals, one sentence per error.

A command's module is imported when that command is called, since ``shardcache dir`` runs at the
start of every job. Global options may stand before or after the name of the command; the later one
wins, and ``-v`` adds up.

The first SIGINT or SIGTERM ends a command in order, the second ends the process at once. Partials
stay on disk in both cases, and the next run resumes them.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import functools
import gc
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click

from shardcache import config as configuration
from shardcache.cli.output import Console, reason
from shardcache.config import Loaded, __version__
from shardcache.errors import ConfigError, IntegrityError, LockTimeoutError, ShardCacheError
from shardcache.files import FULL
from shardcache.units import parse_duration, parse_limit

if TYPE_CHECKING:
    from shardcache.cache import Cache

_Function = TypeVar("_Function", bound=Callable[..., Any])


class ExitCode(enum.IntEnum):
    """How a command ended. Scripts rely on the numbers; docs/cli.md has this table."""

    meaning: str

    def __new__(cls, number: int, meaning: str) -> Self:  # noqa: D102
        code = int.__new__(cls, number)
        code._value_ = number
        code.meaning = meaning
        return code

    DONE = 0, "done"
    FAILED = 1, "failed; what was asked for is not there, or the disk fails"
    USAGE = 2, "usage or configuration"
    SOME_FAILED = 3, "some shards failed after retries, or could not be checked"
    DAMAGED = 4, "damage found, or a failed check"
    FULL = 5, "not enough space"
    BUSY = 6, "busy: pinned or in use, or another process holds it"
    INTERRUPTED = 130, "SIGINT; the next run resumes what was fetched"
    TERMINATED = 143, "SIGTERM; likewise"


#: Command -> module, in the order of the help text.
_COMMANDS = {
    "run": "run", "prewarm": "prewarm", "ls": "entries", "path": "prewarm", "rm": "entries",
    "pin": "entries", "unpin": "entries", "clean": "entries", "verify": "verify", "stats": "stats",
    "top": "top", "report": "stats", "recipe": "config", "config": "config", "dir": "config",
    "doctor": "doctor", "demo": "demo",
}  # fmt: skip
_BY_ERROR: dict[type[Exception], ExitCode] = {
    ConfigError: ExitCode.USAGE,
    LockTimeoutError: ExitCode.BUSY,
    IntegrityError: ExitCode.DAMAGED,
}
#: A live display hides the cursor (DECTCEM); the second signal leaves no time to do it in order.
_SHOW_CURSOR = b"\x1b[?25h"


class Invocation:
    """One run of the command line: its global options, its console, its cache, its signals."""

    def __init__(self) -> None:
        self.console = Console()
        self.dir: str | None = None  #: the value of ``--dir``
        self.config: str | None = None  #: the value of ``--config``
        self.received: int | None = None  #: the first signal
        self.stop = threading.Event()  #: set by the first signal
        self.graceful = False  #: the first signal does no more than set `stop`

    def loaded(self) -> Loaded:
        """The configuration in force."""
        files = None if self.config is None else [Path(self.config)]
        return configuration.load({"dir": self.dir}, files=files)

    def upkeep(self) -> Loaded:
        """The configuration with the limits of the running or last job, where nobody has set one.

        For commands that look after a cache: a job may have its limits from its code.
        """
        from shardcache.space.tiers import job_limits

        loaded = self.loaded()
        try:
            return loaded.completed(*job_limits(loaded.config))
        except (ConfigError, OSError):  # there is no cache, or none that we may read
            return loaded

    def tell_limits(self, loaded: Loaded, *others: str) -> dict[str, str]:
        """Say which limits but ``others`` are those of a job; returns them."""
        found = {name: text for name, text in loaded.config.limits().items() if name not in others}
        found = {n: text for n, text in found.items() if loaded.sources[n].endswith(" job")}
        if found:
            text = ", ".join(f"{name} {value}" for name, value in found.items())
            self.console.hint(f"Limits of the {loaded.sources[next(iter(found))]}: {text}.")
        return found

    def cache(self, *, loaded: Loaded | None = None, connections: int = 0, **options: Any) -> Cache:
        """Open the cache; its faults are errors here, not reasons to stream.

        A directory with other things in it is refused, or a mistyped one would pass for an empty
        cache.

        Args:
            loaded: the configuration; the default is the one in force.
            connections: least number of them.
            options: change the configuration.
        """
        from shardcache.cache import Cache
        from shardcache.store.root import check_foreign, is_cache

        config, sources = loaded or self.loaded()
        check_foreign(config.dir)
        if sources["dir"] == "default" and not is_cache(config.dir):
            self.console.hint(f"The cache is {config.dir}; --dir or SHARDCACHE_DIR names another.")
        connections = max(connections, config.connections)
        return Cache.from_config(config.replace(strict=True, connections=connections, **options))

    def confirm(self, question: str, yes: bool) -> None:
        """Ask before something is destroyed."""
        interactive = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
        if not yes and not interactive:
            raise click.UsageError(f"{question} Nobody can be asked here: pass -y to confirm.")
        if not yes:
            click.confirm(question, abort=True, err=True)

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """Print the library's log on stderr while the context lasts, as much as was asked for."""
        quiet, verbosity = self.console.quiet, self.console.verbosity
        levels = (logging.ERROR if quiet else logging.WARNING, logging.INFO, logging.DEBUG)
        handler = _ConsoleHandler(self.console)
        library = logging.getLogger("shardcache")
        before = library.level, library.propagate
        library.addHandler(handler)
        library.setLevel(levels[min(verbosity, 2)])
        library.propagate = False
        try:
            yield
        finally:
            library.removeHandler(handler)
            library.level, library.propagate = before

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM while the context lasts, if that is in the main thread."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # nohup, or `&` in a script, starts us with SIGINT ignored: it stays so.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if os.isatty(2):
                with contextlib.suppress(OSError):
                    os.write(2, _SHOW_CURSOR)
            os._exit(128 + number)
        self.received = number
        self.stop.set()
        if not self.graceful:
            raise KeyboardInterrupt


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        # Retries are part of the progress and of the summary; -v prints each.
        if self._console.verbosity or getattr(record, "event", None) != "retry":
            level = record.levelname.lower()
            color = {"warning": "yellow", "error": "red", "critical": "red"}.get(level, "")
            self._console.message(f"{level}: ", record.getMessage(), color)


# -- options and commands ------------------------------------------------------------


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """The type of an option whose text ``parse`` reads; its ConfigError names the option."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the text of the option."""
        try:
            return self._parse(value)
        except ConfigError as exn:
            self.fail(exn.message, param, ctx)


DURATION = Parsed("DURATION", parse_duration)
SIZE = Parsed("SIZE", parse_limit)


def number_option(
    *names: str, help: str, least: int = 1, most: int | None = None
) -> Callable[[_Function], _Function]:
    """An option whose value is a whole number."""
    return click.option(*names, type=click.IntRange(least, most), metavar="N", help=help)


flag = functools.partial(click.option, is_flag=True)
dry_run_option = flag("-n", "--dry-run", help="Say what would be done, and do nothing.")
yes_option = flag("-y", "--yes", help="Do not ask.")
since_option = click.option(
    "--since", type=DURATION, help="Only what was counted since, such as 24h.  [default: 30 days]"
)


def _take(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Note a global option; it may have been given before the command, too."""
    name = str(parameter.name)
    invocation = context.ensure_object(Invocation)
    if name == "verbosity":
        invocation.console.verbosity += value
    elif value:
        setattr(invocation if name in ("dir", "config") else invocation.console, name, value)


def _with_global_options(made: Any) -> Any:
    """Add the global options to a command, after its own."""
    option = functools.partial(click.option, expose_value=False, callback=_take)
    for decorate in (
        option("--dir", metavar="DIR", help="Directory of the cache."),
        option("--config", metavar="FILE", help="Read this configuration file only."),
        option("-q", "--quiet", is_flag=True, help="Print data, warnings and errors only."),
        option("-v", "--verbose", "verbosity", count=True,
               help="Log what is done; -vv for debugging."),
        option("--json", is_flag=True, help="Print one JSON object, for programs."),
        option("--color", type=click.Choice(["auto", "always", "never"]),
               help="Colours; auto: on a terminal, unless NO_COLOR is set."),
        option("--no-progress", is_flag=True, help="Show no progress."),
        click.version_option(__version__, message="shardcache %(version)s",
                             help="Print the version."),
    ):  # fmt: skip
        made = decorate(made)
    return made


def command(name: str) -> Callable[[Callable[..., int | None]], Any]:
    """Make a function a command with the global options; its docstring ends with examples."""

    def decorate(function: Callable[..., int | None]) -> Any:
        @functools.wraps(function)
        def run(invocation: Invocation, *args: Any, **kwargs: Any) -> int | None:
            with invocation.logging():
                return function(invocation, *args, **kwargs)

        return _with_global_options(click.command(name)(click.pass_obj(run)))

    return decorate


class _Commands(click.Group):
    """Imports a command's module only when the command is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"shardcache.cli.{_COMMANDS[cmd_name]}")
        found: click.Command = getattr(module, f"{cmd_name}_command")
        return found


@_with_global_options
@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExit codes:\n" + "\n".join(f"  {code:<3}  {code.meaning}" for code in ExitCode),
)
def command_line() -> None:
    """A per-node cache for WebDataset shards: each shard crosses the network once per node.

    Global options may stand before or after the command.
    """


# -- the entrance --------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, or ends the process without ``arguments``."""
    if arguments is None:
        # Commands make few cycles. The collector would look through all modules while they are
        # imported, which took a sixth of the time that a command needs to begin.
        gc.freeze()
        gc.set_threshold(50_000)
    for name in ("stdout", "stderr"):  # closed, or with an encoding that cannot spell a URL
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process lives
        with contextlib.suppress(AttributeError, ValueError):  # replaced by something else
            getattr(sys, name).reconfigure(errors="backslashreplace")
    invocation = Invocation()
    with invocation.signals():
        code = _run(invocation, arguments)
        # A signal is the reason for whatever else went wrong after it.
        code = code if invocation.received is None else 128 + invocation.received
        if arguments is None:
            # As the interpreter ends, but without freeing what it holds, which takes some 35 ms
            # after a prewarm: commands close what they open, and print unbuffered.
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):  # it was closed, or a full disk
                    stream.flush()
            os._exit(code)
    return code


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
        context = exn.ctx if isinstance(exn, click.UsageError) else None
        hint = f" Try '{context.command_path} --help'." if context is not None else ""
        console.error(f"{exn.format_message()}{hint}")
        return ExitCode.USAGE if isinstance(exn, click.UsageError) else ExitCode.FAILED
    except (KeyboardInterrupt, click.Abort):
        console.error("nothing was done" if invocation.received is None else "interrupted")
        return ExitCode.FAILED
    except (ShardCacheError, OSError) as exn:
        console.error(reason(exn), exn)
        return code_of(exn)


def code_of(exn: Exception) -> ExitCode:
    """How a command ends that failed with ``exn``."""
    if isinstance(exn, OSError) and exn.errno in FULL:
        return ExitCode.FULL
    return _BY_ERROR.get(type(exn), ExitCode.FAILED)
