"""The output of all commands: results, messages, tables and progress.

Data goes to stdout, all other text to stderr. With ``--json``, only `Console.object` prints to
stdout; without it, only the others do. rich is imported when something is drawn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import click

from shardcache import threads
from shardcache.errors import ShardCacheError
from shardcache.faults import FULL
from shardcache.units import format_duration, format_rate

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from rich.console import ConsoleOptions, RenderableType, RenderResult
    from rich.measure import Measurement
    from rich.table import Table

#: Width in columns of output that does not go to a terminal: wide enough that no line is folded.
_UNLIMITED = 100_000
#: Shards to name that ``--skip-missing`` skipped, unless -v is given.
SKIPPED = 100
#: Minimum width in columns of a shortened name.
_NAME = 16
#: Titles of columns of words. All columns but these and the first one have figures.
_WORDS = {
    "STATE", "VERSION", "PATH", "HOLDER", "DIR", "REASON", "PROCESS", "VALUE",
    "SOURCE",
}  # fmt: skip
#: Maximum number of rows of a table that rich draws: 10,000 take 2.5 s.
_DRAWN = 1000
#: Colours of progress bars. By default, rich uses red, which is for errors here.
_COLORS = {"bar.complete": "green", "bar.finished": "green", "progress.data.speed": "none"}
#: Seconds between two lines of progress without a terminal: a log gets at most 360 per hour.
LINE_EVERY = 10.0
_REDRAW_EVERY = 0.2
#: The same in a notebook, where each line is a message to the browser.
_REPLACE_EVERY = 0.5
#: Seconds over which rates are averaged. With fewer, rates jump; with more, a stall is hidden.
_WINDOW = 8.0
#: Maximum width of a progress bar, and the width of the text next to it, in columns.
_BAR, _TEXT = 26, 60

#: The fields of one record by name, for JSON and for a row of a table.
Row = dict[str, Any]


@dataclass(slots=True, eq=False)
class Console:
    """Prints the output of a command according to the global options."""

    json: bool = False  #: print JSON for programs
    color: str = "auto"  #: auto (on a terminal, unless NO_COLOR or TERM=dumb), always or never
    quiet: bool = False  #: print no hints, no progress and no success messages
    verbosity: int = 0  #: 1 shows the library's log, 2 also debugging and tracebacks
    no_progress: bool = False

    @property
    def live(self) -> bool:
        """Whether to redraw progress in place."""
        # `!command` in a notebook gets a terminal whose output is not redrawn.
        is_redrawn = sys.stderr.isatty() and "JPY_PARENT_PID" not in os.environ
        return is_redrawn and not (self.quiet or self.no_progress or _is_dumb())

    def colored(self, stream: TextIO) -> bool:
        """Return whether to use colours on ``stream``."""
        if self.color != "auto":
            return self.color == "always"
        return stream.isatty() and not os.environ.get("NO_COLOR") and not _is_dumb()

    def styled(self, text: str, color: str, stream: TextIO) -> str:
        """Return ``text`` in a colour, if ``stream`` has colours."""
        return click.style(text, fg=color) if color and self.colored(stream) else text

    def terminal(self, stream: TextIO) -> Terminal:
        from rich.console import Console as Terminal
        from rich.theme import Theme

        return Terminal(
            file=stream,
            force_jupyter=False,  # rich would add a cell for each line
            force_terminal=self.colored(stream) or None,
            color_system="standard" if self.colored(stream) else None,
            theme=Theme(_COLORS),
            width=None if stream.isatty() else _UNLIMITED,
            highlight=False,
            emoji=False,
            markup=False,
        )

    def object(self, command: str, record: Any = None, **more: Any) -> None:
        """With ``--json``, print an object with the fields of ``record``, and ``more``."""
        if self.json:
            fields = {"schema": 1, "command": command, **fields_of(record), **more}
            _write(sys.stdout, f"{json.dumps(fields, default=_to_json, allow_nan=False)}\n")

    def data(self, text: str) -> None:
        """Print the data that the user requested, unless ``--json`` is set."""
        if not self.json:
            _write(sys.stdout, f"{text}\n")

    def info(self, text: str) -> None:
        """Print what the command did, unless quiet."""
        if not self.quiet:
            self.data(text)

    def render(self, drawing: RenderableType) -> None:
        self.data(drawn(drawing, self.terminal(sys.stdout)))

    def table(self, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a table, unless there are no rows.

        Each row is a line with tabs between the cells without a terminal, if the columns do not
        fit, and if there are many rows.
        """
        if self.json or not (cells := [list(map(printable, row)) for row in rows]):
            return
        is_drawn = len(cells) <= _DRAWN and (sys.stdout.isatty() or self.colored(sys.stdout))
        if is_drawn and _fits(table := text_table(titles, cells), self.terminal(sys.stdout)):
            self.render(table)
            return
        self.data("\n".join(map("\t".join, (titles, *cells))))

    def hint(self, text: str) -> None:
        """Print advice or progress, unless quiet."""
        if not self.quiet:
            self.message("", text)

    def warning(self, text: str) -> None:
        self.message("warning: ", text, "yellow")

    def error(self, text: str, exn: BaseException | None = None) -> None:
        """Print why the command failed, and with ``-vv`` also the traceback of ``exn``."""
        if exn is not None and self.verbosity >= 2:
            _write(sys.stderr, "".join(traceback.format_exception(exn)))
        self.message("error: ", text, "red")

    def reasons(self, failed: Mapping[str, Any], most: int = 1) -> Iterator[str]:
        """Yield lines that say why shards failed, from their errors or the reasons by URL.

        Without -v, only the first ``most`` shards with one reason are named.
        """
        by_reason = defaultdict[str, list[str]](list)
        for url, why in failed.items():
            text = reason(why) if isinstance(why, Exception) else why
            line = text if url in text else f"{url}: {text}"
            by_reason[text.replace(url.partition("://")[2], "")].append(line)
        for lines in by_reason.values():
            yield from lines if self.verbosity else lines[:most]
            if len(lines) > most and not self.verbosity:
                yield f"{len(lines) - most:,} more for the same reason; -v lists them"

    def message(self, label: str, text: str, color: str = "") -> None:
        """Print text after a coloured label to stderr. Several threads may call this at once."""
        escaped = "\n".join(map(printable, text.splitlines()))
        _write(sys.stderr, f"{self.styled(label, color, sys.stderr)}{escaped}\n")


class Shortened(NamedTuple):
    """Text such as a URL, for rich. On a narrow terminal, its middle is left out."""

    text: str

    def __rich_measure__(self, terminal: Terminal, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        width = min(len(self.text), options.max_width)
        return Measurement(min(width, _NAME), width)

    def __rich_console__(self, terminal: Terminal, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        text, room = self.text, max(3, options.max_width)
        if len(text) > room:
            # Keep the file name and its slash, but give them at most two thirds of the room.
            name = min(len(text) - text.rfind("/"), room * 2 // 3)
            text = f"{text[: room - 1 - name]}…{text[-name:]}"
        yield Text(text, no_wrap=True, overflow="ellipsis")


def text_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table without borders.

    On a narrow terminal, the names of shards are shortened, and other first columns are folded.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    lines = [[*map(printable, row)] for row in rows]
    for number, (title, *cells) in enumerate(zip(titles, *lines, strict=True)):
        justify: Any = "right" if number and title not in _WORDS else "left"
        width = max(map(len, (title, *cells))) if number else len(title)  # rich measures words
        options: dict[str, Any] = {"min_width": width, "no_wrap": number > 0}
        table.add_column(title, justify=justify, overflow="fold", **options)
    first = Shortened if titles[0] == "SHARD" else Text
    for name, *rest in lines:
        table.add_row(first(name), *map(Text, rest))
    return table


def drawn(drawing: RenderableType, terminal: Terminal) -> str:
    """Return a rich drawing as text for a terminal or file."""
    with terminal.capture() as captured:
        terminal.print(drawing)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _fits(table: Table, terminal: Terminal) -> bool:
    """Return whether the terminal shows all columns of a table without cutting a figure."""
    endless = terminal.options.update(width=_UNLIMITED)
    return terminal.measure(table, options=endless).minimum <= terminal.width


class Fitted(NamedTuple):
    """A table for rich. A narrow terminal leaves out its last columns."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __rich_console__(self, terminal: Terminal, options: ConsoleOptions) -> RenderResult:
        ends = range(len(self.titles), 0, -1)
        tables = (text_table(self.titles[:end], [row[:end] for row in self.rows]) for end in ends)
        yield next((table for table in tables if _fits(table, terminal)), "")


class Position(NamedTuple):
    """The progress of a command or of one shard."""

    text: str
    done: int = 0  #: bytes
    total: int | None = None  #: bytes to reach; None if unknown


#: The progress of the command under the key "", and of each shard under the shard's key.
Positions = Mapping[str, Position]


@contextlib.contextmanager
def display(console: Console, positions: Callable[[], Positions]) -> Iterator[None]:
    """Show progress on stderr during a ``with`` block, below any printed lines.

    A terminal gets bars, a cell of a notebook one line that is replaced, and anything else a line
    every ten seconds. A thread calls ``positions``.
    """
    if console.quiet or console.no_progress:
        yield
        return
    ended = threading.Event()
    show = partial(_show, console, positions, ended, _cell_of_notebook())
    with contextlib.ExitStack() as stack:
        try:
            with contextlib.suppress(threads.NoThreadError):
                stack.callback(threads.start(show, "shardcache-progress").join)
            yield
        finally:
            ended.set()


def _show(
    console: Console,
    positions: Callable[[], Positions],
    ended: threading.Event,
    cell: Callable[[str], None] | None,
) -> None:
    if not console.live and cell is None and ended.wait(LINE_EVERY):
        return  # the command was quicker than the import of rich

    from rich import progress
    from rich.table import Column
    from rich.text import Text

    class Description(progress.ProgressColumn):
        """Description of a row. A narrow terminal shortens it and the bar, but not the figures."""

        def render(self, task: progress.Task) -> Shortened:
            return Shortened(task.description)

    class Figures(progress.ProgressColumn):
        """Percentage, rate in the units of all commands, and remaining time, if they are known."""

        def render(self, task: progress.Task) -> Text:
            rate, remaining = task.finished_speed or task.speed, task.time_remaining
            text = "" if task.total is None else f"{task.percentage:.0f}%"
            text += "" if rate is None else f" {format_rate(rate)}"
            return Text(text if remaining is None else f"{text} ETA {format_duration(remaining)}")

    every = _REDRAW_EVERY if console.live else LINE_EVERY if cell is None else _REPLACE_EVERY
    terminal = console.terminal(sys.stderr)
    bar = min(_BAR, (terminal.width - _TEXT) // 2)
    bars = progress.Progress(
        *([progress.BarColumn(bar)] if console.live and bar > 2 else []),
        Description(),
        Figures(Column(no_wrap=True)),
        console=terminal,
        auto_refresh=False,
        speed_estimate_period=max(_WINDOW, 3 * every),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    )
    rows: dict[str, progress.TaskID] = {}
    with bars if console.live else contextlib.nullcontext():
        while True:
            current = positions() if console.live else {"": positions()[""]}
            for key in rows.keys() - current.keys():
                bars.remove_task(rows.pop(key))
            for key, (text, done, total) in current.items():
                if key not in rows:
                    rows[key] = bars.add_task(text, total=total)
                bars.update(rows[key], description=text, completed=done, total=total)
            if console.live:
                bars.refresh()
            elif cell is None:
                bars.console.print(bars)
            else:
                with bars.console.capture() as line:
                    bars.console.print(bars)
                cell(line.get().rstrip())
            if ended.wait(every):
                break
    if cell is not None:
        cell("")


def _cell_of_notebook() -> Callable[[str], None] | None:
    """Return a function that shows a line below the current cell of a notebook, if any."""
    kernel: Any = sys.modules.get("ipykernel.zmqshell")
    if kernel is None or not kernel.ZMQInteractiveShell.initialized():
        return None
    from IPython.display import display as show  # type: ignore[import-not-found]

    line = show({"text/plain": ""}, raw=True, display_id=True)
    return lambda text: line.update({"text/plain": text}, raw=True)


def local_time(moment: datetime) -> str:
    """Return ``2026-11-20 21:04`` in the local time zone."""
    return moment.astimezone().isoformat(" ", "minutes")[:16]


def printable(text: str) -> str:
    """Return ``text`` with control characters and lone surrogates escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def reason(exn: Exception) -> str:
    """Return the message of an error, with advice if a disk is full."""
    if isinstance(exn, ShardCacheError):
        return exn.message
    if isinstance(exn, OSError):
        where = f"{exn.filename}: " if exn.filename else ""
        advice = ". Make room on that disk (see df -h and df -i), or use another one."
        return f"{where}{exn.strerror or exn}{advice if exn.errno in FULL else ''}"
    return f"{type(exn).__name__}: {exn}"


def fields_of(record: Any) -> dict[str, Any]:
    """Return a dict: the ``as_dict`` of a result, or the fields of a dataclass or named tuple."""
    for method in ("as_dict", "_asdict"):
        if hasattr(record, method):
            return dict(getattr(record, method)())
    fields = () if record is None else dataclasses.fields(record)
    return {field.name: getattr(record, field.name) for field in fields}


def _to_json(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds")
    if isinstance(value, Exception):
        return {"type": type(value).__name__, "message": reason(value)}
    return os.fspath(value) if isinstance(value, os.PathLike) else fields_of(value)


def _is_dumb() -> bool:
    return os.environ.get("TERM", "") in ("dumb", "unknown")


def _write(stream: TextIO, text: str) -> None:
    """Write text. If the reader of a pipe has ended (``| head``), drop all further output."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
