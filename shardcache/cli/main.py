"""The frame of the command line: global options, exit codes, signals, one sentence per error.

`main` imports a command's module only when that command is called. Nothing that this module
imports may be slow, since ``shardcache dir`` runs at the start of every job.

Global options may stand before or after the name of the command; the later one wins, and ``-v``
adds up.

The first SIGINT or SIGTERM ends a command in order, the second ends the process at once. Partials
stay on disk in both cases, and the next run resumes them.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
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
from shardcache.cli.output import FORMATS, Console
from shardcache.config import Loaded, __version__
from shardcache.errors import (
    CacheFullError,
    ConfigError,
    IntegrityError,
    LockTimeoutError,
    ShardCacheError,
)
from shardcache.units import parse_duration, parse_limit

if TYPE_CHECKING:
    from shardcache.cache import Cache

_Function = TypeVar("_Function", bound=Callable[..., Any])


class ExitCode(enum.IntEnum):
    """How a command ended. Scripts rely on the numbers; README.md has this table."""

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
    "prewarm": "prewarm",
    "ls": "entries",
    "path": "prewarm",
    "rm": "entries",
    "pin": "entries",
    "unpin": "entries",
    "clean": "clean",
    "verify": "verify",
    "stats": "stats",
    "top": "top",
    "report": "report",
    "recipe": "recipe",
    "config": "config",
    "dir": "config",
    "doctor": "doctor",
    "demo": "demo",
}
_BY_ERROR: tuple[tuple[type[Exception], ExitCode], ...] = (
    (ConfigError, ExitCode.USAGE),
    (CacheFullError, ExitCode.FULL),
    (LockTimeoutError, ExitCode.BUSY),
    (IntegrityError, ExitCode.DAMAGED),
)
_UNUSABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP})
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})

#: `Invocation.find_directory` reads these variables only: a mistake in another one must not
#: keep anybody from learning where the cache is.
_FOR_DIRECTORY = frozenset({"SHARDCACHE_DIR", "SHARDCACHE_CONFIG", "WDS_CACHE"})
#: A live display hides the cursor (DECTCEM); the second signal leaves no time to do it in order.
_SHOW_CURSOR = b"\x1b[?25h"


# -- signals -----------------------------------------------------------------------


class Signals:
    """SIGINT and SIGTERM while the context lasts, if that is in the main thread.

    Attributes:
        stop: set by the first signal during `graceful`; elsewhere the first signal raises
            KeyboardInterrupt in the main thread.
        received: the first signal, or None.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.received: int | None = None
        self._graceful = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # nohup, or `&` in a script, starts us with SIGINT ignored: it stays so.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int | None:
        """130 or 143 after a signal."""
        return None if self.received is None else 128 + self.received

    @contextlib.contextmanager
    def graceful(self) -> Iterator[None]:
        """Let the first signal only set `stop` while the context lasts."""
        self._graceful = True
        try:
            yield
        finally:
            self._graceful = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if os.isatty(2):
                with contextlib.suppress(OSError):
                    os.write(2, _SHOW_CURSOR)
            os._exit(128 + number)
        self.received = number
        if not self._graceful:
            raise KeyboardInterrupt
        self.stop.set()


# -- one run -----------------------------------------------------------------------


class Invocation:
    """One run of the command line: its global options, its console, its cache.

    Attributes:
        signals: those that this run received.
        directory: the cache's directory once it is known, for error messages.
    """

    def __init__(self, signals: Signals | None = None) -> None:
        self.signals = signals or Signals()
        self.directory: Path | None = None
        self._given: dict[str, Any] = {}
        self._console: Console | None = None

    def take(self, name: str, value: Any) -> None:
        """Note a global option."""
        if name == "verbose":
            value += self._given.get(name, 0)
        self._given[name] = value
        self._console = None

    @property
    def console(self) -> Console:
        """Where this run prints."""
        if self._console is None:
            given = self._given
            self._console = Console(
                format=given.get("format", "human"),
                color=given.get("color", "auto"),
                quiet=given.get("quiet", False),
                verbosity=given.get("verbose", 0),
                progress=not given.get("no_progress", False),
            )
        return self._console

    @property
    def stated_directory(self) -> Path | None:
        """The value of ``--dir``."""
        stated = self._given.get("dir")
        return None if stated is None else Path(stated)

    @property
    def stated_config(self) -> Path | None:
        """The value of ``--config``."""
        stated = self._given.get("config")
        return None if stated is None else Path(stated)

    def loaded(self) -> Loaded:
        """The configuration in force.

        Raises:
            ConfigError: an option, a variable or a file is wrong.
        """
        loaded = configuration.load({"dir": self._given.get("dir")}, files=self._files())
        self.directory = loaded.config.dir
        return loaded

    def find_directory(self) -> Path:
        """The directory alone, whatever else is wrong with the environment.

        Raises:
            ConfigError: it is set nowhere, or is no path.
        """
        environ = {
            name: value
            for name, value in os.environ.items()
            if name in _FOR_DIRECTORY or not name.startswith(("SHARDCACHE_", "WDS_CACHE"))
        }
        given = {"dir": self._given.get("dir")}
        self.directory = configuration.load(given, environ, self._files()).config.dir
        return self.directory

    def _files(self) -> list[Path] | None:
        return None if self.stated_config is None else [self.stated_config]

    def cache(self, *, connections: int = 0, looking: bool = False) -> Cache:
        """The cache; its faults are errors here, not reasons to stream.

        Args:
            connections: at least so many.
            looking: for a command that only looks. A directory that is no cache is refused then,
                so that a mistyped one does not pass for an empty cache.

        Raises:
            ConfigError: an option is wrong, or the directory is something else.
            OSError: with ``looking``, the directory cannot be read.
        """
        from shardcache.cache import Cache

        loaded = self.loaded()
        _check_directory(loaded.config.dir, looking)
        config = loaded.config.replace(
            strict=True, connections=max(connections, loaded.config.connections)
        )
        return Cache.from_config(config, sources=loaded.sources)

    def confirm(self, question: str, yes: bool) -> None:
        """Ask before something is destroyed.

        Raises:
            click.UsageError: there is nobody to ask, and ``-y`` was not given.
            click.Abort: the answer is no.
        """
        if yes:
            return
        if not self.console.interactive:
            raise click.UsageError(f"{question} Nobody can be asked here: pass -y to confirm.")
        if not click.confirm(question, err=True):
            raise click.Abort

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """Print the library's log on stderr while the context lasts, as much as was asked for."""
        console = self.console
        levels = (logging.ERROR if console.quiet else logging.WARNING, logging.INFO, logging.DEBUG)
        handler = _ConsoleHandler(console)
        library = logging.getLogger("shardcache")
        before = library.level, library.propagate
        library.addHandler(handler)
        library.setLevel(levels[min(console.verbosity, 2)])
        library.propagate = False
        try:
            yield
        finally:
            library.removeHandler(handler)
            library.level, library.propagate = before


def _check_directory(directory: Path, looking: bool) -> None:
    from shardcache.layout import Layout
    from shardcache.store.root import check_links, is_foreign

    if directory.exists() and not directory.is_dir():
        raise ConfigError(
            f"{directory} is not a directory; point dir at a directory for the cache",
            dir=directory,
        )
    if not looking:
        return
    check_links(Layout.of_root(directory))
    if is_foreign(directory):
        raise ConfigError(
            f"{directory} is not a shardcache directory (it has no manifest.json). "
            "Check --dir or SHARDCACHE_DIR.",
            dir=directory,
        )


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        # Retries are part of the progress and of the summary; -v prints each.
        if self._console.verbosity or record.name != "shardcache.origins.retry":
            self._console.log(record.levelname.lower(), record.getMessage())


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

urls_argument = click.argument("urls", nargs=-1, required=True, metavar="URL...")
since_option = click.option(
    "--since",
    type=DURATION,
    help="Only what was counted since then, such as 24h.  [default: 30 days]",
)


def _take(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value is None or value is False or value == 0:
        return
    name = parameter.name or ""
    invocation = context.ensure_object(Invocation)
    if name == "json":
        name, value = "format", "json"
    invocation.take(name, value)


def _show_version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        click.echo(f"shardcache {__version__}")
        context.exit()


def _global_options(function: _Function, formats: Sequence[str] = ()) -> _Function:
    common: dict[str, Any] = {"expose_value": False, "callback": _take}
    for option in (
        click.option("--version", is_flag=True, is_eager=True, expose_value=False,
                     callback=_show_version, help="Print the version."),
        click.option("--no-progress", is_flag=True, help="Show no progress.", **common),
        click.option("--color", type=click.Choice(["auto", "always", "never"]),
                     help="Colours; auto: on a terminal, unless NO_COLOR is set.", **common),
        click.option("--json", is_flag=True, help="Short for --format json.", **common),
        click.option("--format", type=click.Choice([*FORMATS, *formats]),
                     help="How results are printed.", **common),
        click.option("-v", "--verbose", count=True, help="Log what is done; -vv for debugging.",
                     **common),
        click.option("-q", "--quiet", is_flag=True,
                     help="Print data, warnings and errors only.", **common),
        click.option("--config", metavar="FILE", help="Read this configuration file only.",
                     **common),
        click.option("--dir", metavar="DIR", help="Directory of the cache.", **common),
    ):  # fmt: skip
        function = option(function)
    return function


def command(
    name: str, *, examples: str, short: str, formats: Sequence[str] = ()
) -> Callable[[Callable[..., int]], Any]:
    """Make a function a command with the global options and an Examples section.

    Args:
        name: of the command.
        examples: command lines, one per line.
        short: the line in the list of commands.
        formats: which it prints beside those that all commands do.
    """
    lines = "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())

    def decorate(function: Callable[..., int]) -> Any:
        @functools.wraps(function)
        def run(invocation: Invocation, *args: Any, **kwargs: Any) -> int:
            with invocation.logging():
                return function(invocation, *args, **kwargs)

        made = click.command(name, epilog=f"\b\nExamples:\n{lines}", short_help=short)(
            click.make_pass_decorator(Invocation, ensure=True)(run)
        )
        own = list(made.params)
        _global_options(made, formats)
        # The command's own options come first in its help.
        made.params = own + [param for param in reversed(made.params) if param not in own]
        return made

    return decorate


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
    epilog="\b\nExit codes:\n" + "\n".join(f"  {code:<3}  {code.meaning}" for code in ExitCode),
)
@_global_options
def command_line() -> None:
    """A per-node cache for WebDataset shards: each shard crosses the network once per node.

    Global options may stand before or after the command.
    """


# -- the entrance --------------------------------------------------------------------


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
    invocation.console.flush()
    return code


def _run(invocation: Invocation, arguments: Sequence[str] | None) -> int:
    try:
        returned = command_line.main(
            args=None if arguments is None else list(arguments),
            prog_name="shardcache",
            standalone_mode=False,
            obj=invocation,
        )
        return int(returned or ExitCode.DONE)
    except click.UsageError as exn:
        hint = f" Try '{exn.ctx.command_path} --help'." if exn.ctx is not None else ""
        invocation.console.error(f"{exn.format_message()}{hint}")
        return ExitCode.USAGE
    except click.ClickException as exn:
        invocation.console.error(exn.format_message())
        return ExitCode.FAILED
    except (KeyboardInterrupt, click.Abort):
        interrupted = invocation.signals.received is not None
        invocation.console.error("interrupted" if interrupted else "nothing was done")
        return ExitCode.FAILED
    except ShardCacheError as exn:
        invocation.console.error(exn.message, exn)
        return _exit_code(exn, invocation)
    except OSError as exn:
        what = exn.strerror or str(exn) or type(exn).__name__
        invocation.console.error(f"{exn.filename}: {what}" if exn.filename else what, exn)
        return _exit_code(exn, invocation)


def _exit_code(exn: ShardCacheError | OSError, invocation: Invocation) -> ExitCode:
    for kind, code in _BY_ERROR:
        if isinstance(exn, kind):
            return code
    if isinstance(exn, ShardCacheError):
        return ExitCode.FAILED
    if exn.errno in _NO_SPACE:
        return ExitCode.FULL
    directory = invocation.directory
    inside = directory is not None and str(exn.filename or "").startswith(str(directory))
    return ExitCode.USAGE if inside and exn.errno in _UNUSABLE else ExitCode.FAILED


def _prepare_streams() -> None:
    """Survive closed streams, and encodings that cannot spell a URL."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # replaced by something else
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
