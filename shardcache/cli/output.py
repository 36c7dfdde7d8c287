"""Everything that the command line prints.

Data goes to stdout, everything else to stderr, in one of three formats:

* human: tables that end in a one-line summary, colour on a terminal;
* json: one object;
* jsonl: one object per line, the last one a summary.

Machines get raw bytes, seconds and RFC 3339, and ``"schema": 1``. Only the human format rounds. A
reader that hangs up early (``| head``) is no error: the command goes on.

A console is for one thread, apart from `Console.log`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from shardcache.units import format_duration

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

#: Version of the JSON and JSON lines output.
SCHEMA = 1
FORMATS = ("human", "json", "jsonl")
#: Select Graphic Rendition parameters, ECMA-48 8.3.117.
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_HALF_A_YEAR = 182 * 86_400
#: Columns of what is no terminal: nothing is folded in a file.
_UNLIMITED = 100_000


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table for people.

    Attributes:
        name: of the value in a row.
        title: the heading.
        show: the value as people read it.
        right: aligned to the right.
        style: names a style for a value, or None.
    """

    name: str
    title: str
    show: Callable[[Any], str] = str
    right: bool = False
    style: Callable[[Any], str | None] = lambda value: None


class Console:
    """Standard output and standard error in one format.

    Args:
        format: one of `FORMATS`, or one that a single command has.
        color: auto (a terminal, unless NO_COLOR or TERM=dumb), always or never.
        quiet: print no hints, no progress and no word of success.
        verbosity: 1 shows the library's log, 2 debugging and tracebacks.
        progress: whether progress may be shown at all.
    """

    def __init__(
        self,
        *,
        format: str = "human",
        color: str = "auto",
        quiet: bool = False,
        verbosity: int = 0,
        progress: bool = True,
    ) -> None:
        self.format = format
        self.quiet = quiet
        self.verbosity = verbosity
        self.progress = progress and not quiet
        self._color = color

    # -- the terminal ------------------------------------------------------------

    @property
    def human(self) -> bool:
        """Whether people read stdout."""
        return self.format == "human"

    @property
    def interactive(self) -> bool:
        """Whether a question could be asked and answered."""
        return _is_terminal(sys.stdin) and _is_terminal(sys.stderr)

    @property
    def live(self) -> bool:
        """Whether progress may be redrawn in place on stderr."""
        if not self.progress or not _is_terminal(sys.stderr) or _is_dumb():
            return False
        # Rows on the same screen would tear the display apart.
        return self.human or not _is_terminal(sys.stdout)

    def colored(self, stream: TextIO) -> bool:
        """Whether ``stream`` gets colours."""
        if self._color != "auto":
            return self._color == "always"
        return _is_terminal(stream) and not os.environ.get("NO_COLOR") and not _is_dumb()

    def styled(self, text: str, style: str | None, stream: TextIO) -> str:
        """``text`` in bold, dim, red, green, yellow or cyan where there are colours."""
        if not style or not self.colored(stream):
            return text
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"

    def terminal(self, stream: TextIO) -> Terminal:
        """``stream`` for what rich draws."""
        from rich.console import Console as Terminal

        colored = self.colored(stream)
        return Terminal(
            file=stream,
            force_terminal=True if colored else None,
            color_system="standard" if colored else None,
            width=None if _is_terminal(stream) else _UNLIMITED,
            highlight=False,
            emoji=False,
            markup=False,
        )

    # -- stdout ------------------------------------------------------------------

    def data(self, text: str) -> None:
        """A line that was asked for."""
        _write(sys.stdout, f"{text}\n")

    def render(self, drawing: RenderableType) -> None:
        """Something that rich draws, as data."""
        terminal = self.terminal(sys.stdout)
        with terminal.capture() as captured:
            terminal.print(drawing)
        for line in captured.get().splitlines():
            self.data(line.rstrip())

    def said(self, text: str) -> None:
        """A line for people about what was done; nothing when quiet or for machines."""
        if self.human and not self.quiet:
            self.data(text)
            self.flush()

    def line(self, kind: str, record: Any) -> None:
        """One object of JSON lines, as it happens; nothing in other formats."""
        if self.format == "jsonl":
            self.data(_json({"schema": SCHEMA, "type": kind, **_fields(record)}))
            self.flush()  # somebody may act on it while the command runs

    def record(self, command: str, record: Any, human: str) -> None:
        """A single result: a dataclass or a mapping as one object, or ``human``."""
        if self.human:
            self.data(human)
        else:
            self.data(_json({"schema": SCHEMA, "command": command, **_fields(record)}))

    def table(
        self,
        command: str,
        noun: str,
        columns: Sequence[Column],
        rows: Iterable[Any],
        *,
        summary: Any,
        footer: str = "",
    ) -> None:
        """Rows and what they come to.

        Args:
            command: named in JSON.
            noun: what a row is, in the singular.
            columns: what people see of a row, if they see rows at all; machines get all of it.
            rows: dataclasses or mappings of raw values.
            summary: totals for machines, likewise.
            footer: the same for people; without columns a word of success, as in `said`.
        """
        records = [_fields(row) for row in rows]
        if self.format == "json":
            found = {f"{noun}s": records, "summary": _fields(summary)}
            self.data(_json({"schema": SCHEMA, "command": command, **found}))
        elif self.format == "jsonl":
            for record in records:
                self.line(noun, record)
            self.line("summary", summary)
        else:
            if records and columns:
                self._human_table(columns, records)
            if footer:
                (self.data if columns else self.said)(footer)
        self.flush()

    def _human_table(self, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> None:
        from rich.text import Text

        cells = [
            [Text(printable(c.show(row[c.name])), c.style(row[c.name]) or "") for c in columns]
            for row in rows
        ]
        right = [column.title for column in columns if column.right]
        self.render(text_table([column.title for column in columns], cells, right))

    def flush(self) -> None:
        """Hand over to the reader of stdout what was printed."""
        _flush(sys.stdout)

    # -- stderr ------------------------------------------------------------------

    def hint(self, text: str) -> None:
        """Something worth knowing; nothing when quiet."""
        if not self.quiet:
            self._message("", None, text)

    def warning(self, text: str) -> None:
        """Something to look at, though the command goes on."""
        self._message("warning: ", "yellow", text)

    def error(self, text: str, exn: BaseException | None = None) -> None:
        """Why the command failed; with the traceback if that much was asked for."""
        if exn is not None and self.verbosity >= 2:
            _write(sys.stderr, "".join(traceback.format_exception(exn)))
        self._message("error: ", "red", text)

    def detail(self, label: str, style: str, text: str) -> None:
        """One of several lines that explain a failure."""
        self._message(f"  {label}  ", style, text)

    def log(self, level: str, text: str) -> None:
        """A record of the library's log; safe between threads."""
        style = {"warning": "yellow", "error": "red", "critical": "red"}.get(level, "dim")
        self._message(f"{level}: ", style, text)

    def _message(self, label: str, style: str | None, text: str) -> None:
        shown = "\n".join(printable(line) for line in text.splitlines())
        _write(sys.stderr, f"{self.styled(label, style, sys.stderr)}{shown}\n")
        _flush(sys.stderr)


def text_table(
    titles: Sequence[str], rows: Iterable[Sequence[str | Text]], right: Container[str] = ()
) -> Table:
    """Aligned columns without lines.

    Args:
        titles: headings.
        rows: a text for each heading.
        right: headings of columns that are aligned to the right.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for number, title in enumerate(titles):
        # A narrow terminal folds the name, so that it can still be read and copied whole.
        justify: Literal["right", "left"] = "right" if title in right else "left"
        table.add_column(title, justify=justify, no_wrap=number > 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 shard``, ``1,848 shards``."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def short_date(seconds: float, now: float) -> str:
    """``Nov 20 21:04`` in local time; the year instead of the time when long ago."""
    then = datetime.fromtimestamp(seconds, UTC).astimezone()
    recent = abs(now - seconds) < _HALF_A_YEAR
    return then.strftime("%b %d %H:%M" if recent else "%b %d  %Y")


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
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _fields(record: Any) -> dict[str, Any]:
    if hasattr(record, "as_dict"):
        found: dict[str, Any] = record.as_dict()
        return found
    if dataclasses.is_dataclass(record):
        return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return dict(record)


def _json(value: Any) -> str:
    return json.dumps(value, default=_raw, allow_nan=False)


def _raw(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds")
    if isinstance(value, Path | BaseException):
        return str(value)
    return _fields(value)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def _is_dumb() -> bool:
    return os.environ.get("TERM", "") in ("dumb", "unknown")


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
    except BrokenPipeError:
        _silence(stream)


def _flush(stream: TextIO) -> None:
    try:
        stream.flush()
    except BrokenPipeError:
        _silence(stream)


def _silence(stream: TextIO) -> None:
    """Let all further output of a stream nobody reads vanish."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, stream.fileno())
    finally:
        os.close(null)
