"""The one place where the command line speaks.

Data goes to stdout, everything said about it to stderr, in one of four formats:

* human: aligned columns ending in a one-line summary, colour on a terminal;
* json: one object; jsonl: one object per line, the last a summary;
* tsv: a header and rows, raw values.

Machines get raw bytes, seconds and RFC 3339, and ``"schema": 1``. Only the human
format rounds. A reader that hangs up early (``| head``) is no error: the command
goes on, and its exit code tells how it went.

Not safe between threads, apart from `Console.log`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from shardcache.clock import rfc3339

__all__ = ["FORMATS", "SCHEMA", "Column", "Console", "counted", "printable", "short_date"]

#: Version of the JSON and JSON lines output.
SCHEMA = 1
FORMATS = ("human", "json", "jsonl", "tsv")
_GAP = "   "
#: A column is not cut shorter than this, whatever the terminal's width.
_LEAST_WIDTH = 24
#: Select Graphic Rendition parameters, ECMA-48 8.3.117.
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_HALF_A_YEAR = 182 * 86_400


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        name: of the value in a row, and in machine-readable formats.
        title: the human heading; empty for a column that people do not see.
        show: the value as people read it.
        right: aligned to the right.
        style: names a style for a value, or None.
    """

    name: str
    title: str = ""
    show: Callable[[Any], str] = str
    right: bool = False
    style: Callable[[Any], str | None] = lambda value: None


class Console:
    """An output with its format and manners.

    Args:
        format: one of `FORMATS`.
        color: auto (a terminal, unless NO_COLOR or TERM=dumb), always or never.
        quiet: no hints, no progress, no word of success.
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
        self._drawn = False
        self._heading = ""

    # -- manners ---------------------------------------------------------------

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

    # -- stdout ----------------------------------------------------------------

    def data(self, text: str) -> None:
        """A line that was asked for."""
        if _is_terminal(sys.stdout):
            self.redraw("")
        _write(sys.stdout, f"{text}\n")

    def said(self, text: str) -> None:
        """A line for people about what was done; nothing when quiet or for machines."""
        if self.human and not self.quiet:
            self.data(text)
            _flush(sys.stdout)

    def did(self, command: str, record: Mapping[str, Any], human: str) -> None:
        """What was done by a command that prints nothing else: `said`, or `record` for machines."""
        if self.human:
            self.said(human)
        else:
            self.record(command, record, human)

    def line(self, kind: str, record: Mapping[str, Any]) -> None:
        """One object of JSON lines, as it happens; nothing in other formats."""
        if self.format == "jsonl":
            self.data(_json({"schema": SCHEMA, "type": kind, **record}))
            _flush(sys.stdout)  # somebody may act on it while the command runs

    def record(self, command: str, record: Mapping[str, Any], human: str) -> None:
        """A single result: one object, one row, or ``human``."""
        if self.human:
            self.data(human)
        elif self.format == "tsv":
            row = dict(_flat(record))
            heading = "\t".join(row)
            if heading != self._heading:  # one for all rows, where more of them follow
                self._heading = heading
                self.data(heading)
            self.data("\t".join(map(_plain, row.values())))
            _flush(sys.stdout)
        else:
            self.data(_json({"schema": SCHEMA, "command": command, **record}))

    def table(
        self,
        command: str,
        noun: str,
        columns: Sequence[Column],
        rows: Iterable[Mapping[str, Any]],
        *,
        summary: Mapping[str, Any],
        footer: str = "",
    ) -> None:
        """Rows and what they come to.

        Args:
            command: named in JSON.
            noun: what a row is, in the singular.
            columns: what of a row is shown; JSON has all of it.
            rows: raw values.
            summary: totals, for JSON.
            footer: the same for people.
        """
        if self.format == "json":
            found = {f"{noun}s": [dict(row) for row in rows], "summary": dict(summary)}
            self.data(_json({"schema": SCHEMA, "command": command, **found}))
        elif self.format == "jsonl":
            for row in rows:
                self.line(noun, row)
            self.line("summary", summary)
        elif self.format == "tsv":
            _write(sys.stdout, "\t".join(column.name for column in columns) + "\n")
            for row in rows:
                _write(sys.stdout, "\t".join(_plain(row.get(c.name)) for c in columns) + "\n")
        else:
            self._human_table([c for c in columns if c.title], list(rows))
            if footer:
                self.data(footer)
        _flush(sys.stdout)

    def _human_table(self, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        cells = [[printable(c.show(row.get(c.name))) for c in columns] for row in rows]
        widths = [
            max(_width(column.title), *(_width(row[index]) for row in cells))
            for index, column in enumerate(columns)
        ]
        widths[0] = _fit(widths)
        heading = [_pad(c.title, width, c.right) for c, width in zip(columns, widths, strict=True)]
        self.data(self.styled(_GAP.join(heading).rstrip(), "bold", sys.stdout))
        for row, texts in zip(rows, cells, strict=True):
            parts = []
            for column, text, width in zip(columns, texts, widths, strict=True):
                padded = _pad(_cut(text, width), width, column.right)
                if column is columns[-1]:
                    padded = padded.rstrip()
                parts.append(self.styled(padded, column.style(row.get(column.name)), sys.stdout))
            _write(sys.stdout, _GAP.join(parts) + "\n")

    # -- stderr ----------------------------------------------------------------

    def hint(self, text: str) -> None:
        """Something worth knowing; nothing when quiet."""
        if not self.quiet:
            self._say("", None, text)

    def warning(self, text: str) -> None:
        """Something to look at, though the command goes on."""
        self._say("warning: ", "yellow", text)

    def error(self, text: str, exn: BaseException | None = None) -> None:
        """Why the command failed; with the traceback if that much was asked for."""
        if exn is not None and self.verbosity >= 2:
            _write(sys.stderr, "".join(traceback.format_exception(exn)))
        self._say("error: ", "red", text)

    def redraw(self, text: str) -> None:
        """Progress in one line in place of the one before; empty removes it. See `live`."""
        if not text and not self._drawn:
            return
        self._drawn = bool(text)
        _write(sys.stderr, f"\r{_cut(printable(text), _screen_width(sys.stderr) - 1)}\x1b[K")
        _flush(sys.stderr)

    def detail(self, label: str, style: str, text: str) -> None:
        """One of several lines that explain a failure."""
        self._say(f"  {label}  ", style, text)

    def log(self, level: str, text: str) -> None:
        """A record of the library's log; safe between threads."""
        style = {"warning": "yellow", "error": "red", "critical": "red"}.get(level, "dim")
        self._say(f"{level}: ", style, text)

    def _say(self, label: str, style: str | None, text: str) -> None:
        self.redraw("")
        shown = "\n".join(printable(line) for line in text.splitlines())
        _write(sys.stderr, f"{self.styled(label, style, sys.stderr)}{shown}\n")
        _flush(sys.stderr)


def counted(number: int, noun: str) -> str:
    """``1 shard``, ``1,848 shards``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def short_date(seconds: float, now: float) -> str:
    """``Nov 20 21:04`` in local time; the year instead of the time when long ago."""
    then = datetime.fromtimestamp(seconds, UTC).astimezone()
    recent = abs(now - seconds) < _HALF_A_YEAR
    return then.strftime("%b %d %H:%M" if recent else "%b %d  %Y")


def printable(text: str) -> str:
    """``text`` in one line, with control characters and lone surrogates escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _json(value: Any) -> str:
    return json.dumps(value, default=_raw, allow_nan=False)


def _raw(value: Any) -> Any:
    if isinstance(value, datetime):
        return rfc3339(value.timestamp())
    if isinstance(value, Path | BaseException):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Fields of fields as fields: ``waits.disk.count``."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return _json(value)
    if isinstance(value, bool):
        return str(value).lower()
    return printable(str(_raw(value)) if isinstance(value, datetime | Path) else str(value))


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def _is_dumb() -> bool:
    return os.environ.get("TERM", "") in ("dumb", "unknown")


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _pad(text: str, width: int, right: bool) -> str:
    space = " " * (width - _width(text))
    return f"{space}{text}" if right else f"{text}{space}"


def _fit(widths: Sequence[int]) -> int:
    """The width of the first column on this terminal; elsewhere nothing is cut."""
    if not _is_terminal(sys.stdout):
        return widths[0]
    others = sum(widths[1:]) + len(_GAP) * (len(widths) - 1)
    return min(widths[0], max(_LEAST_WIDTH, _screen_width(sys.stdout) - others))


def _screen_width(stream: TextIO) -> int:
    """Columns of a terminal; where it does not tell, what most have had since the VT100."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _cut(text: str, width: int) -> str:
    """Shortened in the middle: a URL's bucket and the shard's number both matter."""
    if _width(text) <= width:
        return text
    head = (width - 1) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


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
