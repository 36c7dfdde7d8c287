"""One run of the command line: its global options, its console, its cache.

Global options may stand before or after the name of the command; the later one
wins, ``-v`` adds up. Commands get an `Invocation` and nothing global.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardcache import config as configuration
from shardcache.cli.output import FORMATS, Console
from shardcache.cli.signals import Signals
from shardcache.config import Loaded
from shardcache.errors import ConfigError
from shardcache.version import __version__

if TYPE_CHECKING:
    from shardcache.cache import Cache

__all__ = ["Invocation", "command", "global_options", "pass_invocation"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: What `Invocation.directory` needs of the environment; other SHARDCACHE_* variables
#: may be broken without keeping anybody from learning where the cache is.
_FOR_DIRECTORY = frozenset({"SHARDCACHE_DIR", "SHARDCACHE_CONFIG", "WDS_CACHE"})


class Invocation:
    """What this run of the command line was told.

    Attributes:
        signals: what the outside asks of it meanwhile.
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
        """Where this run speaks."""
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
        """What ``--dir`` said."""
        stated = self._given.get("dir")
        return None if stated is None else Path(stated)

    @property
    def stated_config(self) -> Path | None:
        """What ``--config`` said."""
        stated = self._given.get("config")
        return None if stated is None else Path(stated)

    def loaded(self) -> Loaded:
        """The configuration in force.

        Raises:
            ConfigError: see `config.load`.
        """
        loaded = configuration.load({"dir": self._given.get("dir")}, files=self._files())
        self.directory = loaded.config.dir
        return loaded

    def find_directory(self) -> Path:
        """Just the directory, whatever else is wrong with the environment.

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
            looking: for a command that only looks at it. What is no cache is refused, so
                that a mistyped directory does not pass for an empty cache.

        Raises:
            ConfigError: see `config.load`; the directory is something else.
            OSError: with ``looking``, it cannot be looked at.
        """
        from shardcache.cache import Cache

        loaded = self.loaded()
        _check_place(loaded.config.dir, looking)
        config = loaded.config.replace(
            strict=True, connections=max(connections, loaded.config.connections)
        )
        return Cache.from_config(config, sources=loaded.sources)

    def confirm(self, question: str, yes: bool) -> None:
        """Ask before something is destroyed.

        Raises:
            click.UsageError: nobody can be asked, and ``-y`` was not given.
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
        """Let the library's log go to stderr while the context lasts, as much as was asked for."""
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


def _check_place(directory: Path, looking: bool) -> None:
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
        # Retries are part of the progress and of the summary; -v tells each.
        if self._console.verbosity or record.name != "shardcache.origins.retry":
            self._console.log(record.levelname.lower(), record.getMessage())


pass_invocation = click.make_pass_decorator(Invocation, ensure=True)


def _taken(context: click.Context, parameter: click.Parameter, value: Any) -> None:
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


def global_options(function: _Function, formats: Sequence[str] = ()) -> _Function:
    """Give a command the options that every command has.

    Args:
        function: the command.
        formats: which it prints beside those that all do.
    """
    common: dict[str, Any] = {"expose_value": False, "callback": _taken}
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
        epilog = f"\b\nExamples:\n{lines}"

        @functools.wraps(function)
        def run(invocation: Invocation, *args: Any, **kwargs: Any) -> int:
            with invocation.logging():
                return function(invocation, *args, **kwargs)

        made = click.command(name, epilog=epilog, short_help=short)(pass_invocation(run))
        own = list(made.params)
        global_options(made, formats)
        # What belongs to the command comes first in its help.
        made.params = own + [param for param in reversed(made.params) if param not in own]
        return made

    return decorate
