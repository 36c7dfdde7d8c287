"""From fields, declared once, to the schemas of what is printed: see `schemas`."""

from __future__ import annotations

from typing import Any

from shardcache.cli.output import SCHEMA

Schema = dict[str, Any]
Fields = dict[str, tuple[Any, str]]

_RFC3339 = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00$"
_HEX = {"type": "string", "pattern": "^[0-9a-f]+$"}
KINDS: dict[str, Schema] = {
    "text": {"type": "string"},
    "bool": {"type": "boolean"},
    "count": {"type": "integer", "minimum": 0},
    "number": {"type": "integer"},
    "share": {"type": "number", "minimum": 0, "x-unit": "1"},
    "bytes": {"type": "integer", "minimum": 0, "x-unit": "bytes"},
    "rate": {"type": "number", "minimum": 0, "x-unit": "bytes per second"},
    "seconds": {"type": "number", "minimum": 0, "x-unit": "seconds"},
    "time": {"type": "string", "format": "date-time", "pattern": _RFC3339, "x-unit": "UTC"},
    "url": {"type": "string"},
    "path": {"type": "string", "pattern": "^/"},
    "hex": _HEX,
}


def words(kind: Any) -> Schema:
    return {"enum": [str(each) for each in kind]}


def nullable(schema: Schema) -> Schema:
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    return {**schema, "type": [schema["type"], "null"]}


def field(kind: Any, about: str) -> Schema:
    """One field's schema."""
    if isinstance(kind, tuple):
        schema = words(kind)
    elif isinstance(kind, dict):
        schema = kind
    else:
        schema = KINDS[kind.removesuffix("?")]
        if kind.endswith("?"):
            schema = nullable(schema)
    return {"description": about, **schema}


def closed(fields: Fields) -> Schema:
    """An object that has all of these fields and no others."""
    return {
        "type": "object",
        "properties": {name: field(*declared) for name, declared in fields.items()},
        "required": list(fields),
        "additionalProperties": False,
    }


def rows(fields: Fields) -> Schema:
    return {"type": "array", "items": closed(fields)}


def by_name(fields: Fields) -> Schema:
    """An object whose values, under whatever names, all have these fields and no others."""
    return {"type": "object", "additionalProperties": closed(fields)}


def texts() -> Schema:
    return {"type": "array", "items": KINDS["text"]}


def summed_up(fields: Fields) -> Fields:
    return {"summary": (closed(fields), "What it comes to.")}


def document(command: str, fields: Fields, *, about: str = "") -> Schema:
    """What --json prints; --format jsonl prints it, too, where a result is one object."""
    head: Fields = {
        "schema": ({"const": SCHEMA}, "Version of this form."),
        "command": ({"const": command}, "Which command says so."),
    }
    return {"title": "object", "description": about or "One object.", **closed({**head, **fields})}


def line(kind: str, fields: Fields, about: str) -> Schema:
    """A line of --format jsonl."""
    head: Fields = {
        "schema": ({"const": SCHEMA}, "Version of this form."),
        "type": ({"const": kind}, "What the line tells."),
    }
    return {"title": f"line: {kind}", "description": about, **closed({**head, **fields})}


def table(
    command: str, noun: str, row: Fields, summary: Fields, *, about: str = ""
) -> list[Schema]:
    """What a command prints that prints rows: an object, or a line for each and the summary."""
    listed: Fields = {f"{noun}s": (rows(row), "One for each.")}
    return [
        document(command, {**listed, **summed_up(summary)}, about=about),
        line(noun, row, "One of them."),
        line("summary", summary, "The last line."),
    ]
