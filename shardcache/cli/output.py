"""Everything that the command line prints.

Data goes to stdout, everything else to stderr. With ``--json`` stdout has one object: raw bytes,
seconds, RFC 3339 and ``"schema": 1``. Otherwise it has text for people, in colour on a terminal. A
command prints both: `Console.object` is silent without ``--json``, the other methods for stdout are
silent with it. rich is imported when a table or a display is drawn.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

import click

from shardcache.errors import ShardCacheError
from shardcache.files import FULL
from shardcache.units import format_duration

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from rich.console import ConsoleOptions, RenderableType, RenderResult
    from rich.measure import Measurement
    from rich.table import Table

#: Version of the JSON output.
SCHEMA = 1
#: Columns where there is no terminal: nothing is folded in a file.
_UNLIMITED = 100_000
#: rich's own are red, which is for what failed.
_COLORS = {"bar.complete": "green", "bar.finished": "green", "progress.data.speed": "none"}


@dataclass(slots=True)
class Console:
    """Standard output and standard error, as the global options want them."""

    json: bool = False  #: print JSON for programs
    color: str = "auto"  #: on a terminal, unless NO_COLOR or TERM=dumb; or always, or never
    quiet: bool = False  #: print no hints, no progress and no success messages
    verbosity: int = 0  #: 1 shows the library's log, 2 debugging and tracebacks
    no_progress: bool = False

    # -- the terminal ------------------------------------------------------------

    @property
    def progress(self) -> bool:
        """Whether progress is shown at all."""
        return not (self.quiet or self.no_progress)

    @property
    def live(self) -> bool:
        """Whether progress may be redrawn in place."""
        return self.progress and sys.stderr.isatty() and not _is_dumb()

    def colored(self, stream: TextIO) -> bool:
        """Whether ``stream`` gets colours."""
        if self.color != "auto":
            return self.color == "always"
        return stream.isatty() and not os.environ.get("NO_COLOR") and not _is_dumb()

    def styled(self, text: str, color: str, stream: TextIO) -> str:
        """``text`` in a colour where ``stream`` gets colours."""
        return click.style(text, fg=color) if color and self.colored(stream) else text

    def terminal(self, stream: TextIO) -> Terminal:
        """Make a console of rich's on ``stream``."""
        from rich.console import Console as Terminal
        from rich.theme import Theme

        colored = self.colored(stream)
        return Terminal(
            file=stream,
            force_terminal=True if colored else None,
            color_system="standard" if colored else None,
            theme=Theme(_COLORS),
            width=None if stream.isatty() else _UNLIMITED,
            highlight=False,
            emoji=False,
            markup=False,
        )

    # -- stdout ------------------------------------------------------------------

    def object(self, command: str, record: Any = None, **more: Any) -> None:
        """Print the result for programs: the fields of ``record``, and ``more``."""
        if self.json:
            found = {"schema": SCHEMA, "command": command, **fields_of(record), **more}
            _write(sys.stdout, f"{json.dumps(found, default=_plain, allow_nan=False)}\n")

    def data(self, text: str) -> None:
        """Print what was asked for."""
        if not self.json:
            _write(sys.stdout, f"{text}\n")

    def info(self, text: str) -> None:
        """Print what was done; nothing when quiet."""
        if not self.quiet:
            self.data(text)

    def render(self, drawing: RenderableType) -> None:
        """Print what rich draws, as data."""
        terminal = self.terminal(sys.stdout)
        with terminal.capture() as captured:
            terminal.print(drawing)
        self.data("\n".join(line.rstrip() for line in captured.get().splitlines()))

    def table(
        self, titles: Sequence[str], rows: Iterable[Sequence[str]], right: Container[str] = ()
    ) -> None:
        """Print rows as `text_table` aligns them; nothing without rows."""
        if not self.json and (found := list(rows)):
            self.render(text_table(titles, found, right))

    # -- stderr ------------------------------------------------------------------

    def hint(self, text: str) -> None:
        """Print advice or progress; nothing when quiet."""
        if not self.quiet:
            self.message("", text)

    def warning(self, text: str) -> None:
        """Print a warning; the command goes on."""
        self.message("warning: ", text, "yellow")

    def error(self, text: str, exn: BaseException | None = None) -> None:
        """Print why the command failed; with ``-vv`` the traceback, too."""
        if exn is not None and self.verbosity >= 2:
            _write(sys.stderr, "".join(traceback.format_exception(exn)))
        self.message("error: ", text, "red")

    def message(self, label: str, text: str, color: str = "") -> None:
        """Print lines after a coloured label; safe between threads."""
        shown = "\n".join(map(printable, text.splitlines()))
        _write(sys.stderr, f"{self.styled(label, color, sys.stderr)}{shown}\n")


@dataclass(frozen=True, slots=True)
class Shortened:
    """A URL, or the end of one, for rich: a narrow terminal takes its middle away."""

    text: str

    def __rich_measure__(self, terminal: Terminal, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement(1, min(len(self.text), options.max_width))

    def __rich_console__(self, terminal: Terminal, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        text, room = self.text, max(3, options.max_width)
        if len(text) > room:
            # The name with its slash, and before it as much as finds room.
            name = min(len(text) - text.rfind("/"), room * 2 // 3)
            text = f"{text[: room - 1 - name]}…{text[-name:]}"
        yield Text(text, no_wrap=True, overflow="ellipsis")


def text_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Container[str] = (),
    *,
    shorten: bool = False,
) -> Table:
    """Aligned columns without lines; a narrow terminal folds the first one, or shortens it."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, title in enumerate(titles):
        table.add_column(title, no_wrap=number > 0, overflow="fold")
        table.columns[-1].justify = "right" if title in right else "left"
    for first, *rest in rows:
        name = Shortened(printable(first)) if shorten else Text(printable(first))
        table.add_row(name, *(Text(printable(cell)) for cell in rest))
    return table


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 shard``, ``1,848 shards``."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def local_time(moment: datetime | None) -> str:
    """``2026-11-20 21:04`` where the reader is."""
    return "-" if moment is None else f"{moment.astimezone():%Y-%m-%d %H:%M}"


def short_duration(seconds: float | None) -> str:
    """``120 us``, ``1.2 s``; ``-`` where it is unknown."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:.0f} us" if seconds < 0.001 else format_duration(seconds)


def percentage(share: float | None, decimals: int = 1) -> str:
    """``98.6%``; ``-`` where it is unknown."""
    return "-" if share is None else f"{share:.{decimals}%}"


def printable(text: str) -> str:
    """``text`` in one line, with control characters and lone surrogates escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def reason(exn: Exception) -> str:
    """Why something failed, in a sentence."""
    if isinstance(exn, ShardCacheError):
        return exn.message
    if isinstance(exn, OSError):
        where = f"{exn.filename}: " if exn.filename else ""
        advice = ". Make room on that disk (df -h, df -i), or use another one."
        return f"{where}{exn.strerror or exn}{advice if exn.errno in FULL else ''}"
    return f"{type(exn).__name__}: {exn}"


def fields_of(record: Any) -> dict[str, Any]:
    """What a result has for programs: its ``as_dict``, else the fields of a dataclass or tuple."""
    for method in ("as_dict", "_asdict"):
        if hasattr(record, method):
            return dict(getattr(record, method)())
    fields = () if record is None else dataclasses.fields(record)
    return {field.name: getattr(record, field.name) for field in fields}


def _plain(value: Any) -> Any:
    """A value that JSON does not know."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds")
    if isinstance(value, Exception):
        return {"type": type(value).__name__, "message": reason(value)}
    return os.fspath(value) if isinstance(value, os.PathLike) else fields_of(value)


def _is_dumb() -> bool:
    return os.environ.get("TERM", "") in ("dumb", "unknown")


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()  # somebody may act on it while the command runs
    except BrokenPipeError:  # the reader has ended, as with `| head`: drop all further output
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
