"""What commands print for machines, held against docs/schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

HOME = Path(__file__).resolve().parents[2] / "docs" / "schemas"


class Seen:
    """Checks what one command prints, and remembers which fields and values came.

    The object and the lines share fields: a field is known by its name and its schema.

    Args:
        name: of the schema: a command, or a command and an option.
    """

    def __init__(self, name: str) -> None:
        self.command = name.partition("-")[0]
        self.schema = json.loads((HOME / f"{name}.json").read_text("utf-8"))
        self._seen: set[tuple[str, str, str]] = set()

    def document(self, text: str) -> Any:
        """Check the output of --json."""
        found = json.loads(text)
        self._check(found)
        assert found["command"] == self.command
        return found

    def lines(self, text: str) -> list[Any]:
        """Check the output of --format jsonl."""
        found = [json.loads(line) for line in text.splitlines()]
        for each in found:
            self._check(each)
        return found

    def _check(self, found: Any) -> None:
        of_kind = [kind for kind in self.schema["oneOf"] if _is_of(kind, found)]
        errors = []
        for kind in of_kind:
            whole = {**kind, "$defs": self.schema.get("$defs", {})}
            validator = Draft202012Validator(whole, format_checker=FormatChecker())
            wrong = [f"{e.json_path}: {e.message}" for e in validator.iter_errors(found)]
            if not wrong:
                Draft202012Validator(self.schema).validate(found)
                self._note("", kind, found)
                return
            errors += wrong
        raise AssertionError(f"{self.command}: {errors or 'of no kind'}: {found}")

    def _note(self, name: str, schema: Any, value: Any) -> None:
        """Remember the values of fields, but of those that can have any value."""
        if "$ref" in schema:
            schema = self.schema["$defs"][schema["$ref"].rpartition("/")[2]]
        for each, inner in schema.get("properties", {}).items() if value is not None else ():
            self._note(each, inner, value[each])
        for each in value if isinstance(value, list) else ():
            self._note(name, schema["items"], each)
        for each in value.values() if _is_by_name(schema) else ():
            self._note(name, schema["additionalProperties"], each)
        self._seen.add((name, json.dumps(schema), _sort(schema, value)))

    def unseen(self) -> set[str]:
        """Fields, and values of fields, that a schema has and that never came."""
        wanted = {found for kind in self.schema["oneOf"] for found in self._wanted("", kind)}
        return {f"{name}: {value}" for name, schema, value in wanted - self._seen}

    def _wanted(self, name: str, schema: Any) -> Iterator[tuple[str, str, str]]:
        if "$ref" in schema:
            schema = self.schema["$defs"][schema["$ref"].rpartition("/")[2]]
        for each, inner in schema.get("properties", {}).items():
            yield from self._wanted(each, inner)
        if "items" in schema:
            yield from self._wanted(name, schema["items"])
        if _is_by_name(schema):
            yield from self._wanted(name, schema["additionalProperties"])
        values = schema.get("enum", [])
        if not values:
            values = [None, 0] if "null" in schema.get("type", ()) else [0]
        for value in values:
            yield name, json.dumps(schema), _sort(schema, value)


def _is_of(kind: Any, found: Any) -> bool:
    """Whether the head of an object says that it is of this kind."""
    heads = {n: s["const"] for n, s in kind["properties"].items() if "const" in s}
    return all(found.get(name) == value for name, value in heads.items())


def _is_by_name(schema: Any) -> bool:
    """Whether it is of objects whose names may be any, and whose values are all alike."""
    return isinstance(schema.get("additionalProperties"), dict)


def _sort(schema: Any, value: Any) -> str:
    if "enum" in schema:
        return str(value)
    return "null" if value is None else "any"
