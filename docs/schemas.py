"""Write the JSON Schemas of what commands print with --json, or check that they are current.

python docs/schemas.py           write docs/schemas/*.json
python docs/schemas.py --check   exit 1 if anything would change

The fields are declared in `fields`. Whatever else the formats need (the object of --json, each of
the lines of --format jsonl) follows from that.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fields import COMMANDS, waits

HOME = Path(__file__).resolve().parent / "schemas"


def text(value: Any, indent: str = "") -> str:
    """JSON with a line for each field: one for each value would be four times as many."""
    plain = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or '"properties"' not in plain:
        names = isinstance(value, dict) and all(isinstance(v, dict) for v in value.values())
        if not names:
            return plain
    inner = indent + " "
    if isinstance(value, list):
        parts, brackets = [text(each, inner) for each in value], "[]"
    else:
        parts, brackets = [f"{json.dumps(k)}: {text(v, inner)}" for k, v in value.items()], "{}"
    lines = ",\n".join(inner + part for part in parts)
    return f"{brackets[0]}\n{lines}\n{indent}{brackets[1]}"


def schemas() -> dict[str, str]:
    """Name of a file -> what is in it."""
    found = {}
    for command, kinds in COMMANDS.items():
        schema = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": f"{command}.json",
            "title": f"shardcache {command.replace('-', ' --')}",
            "description": "What it prints: with --json the object, with --format jsonl the lines.",
            "oneOf": kinds(),
        }
        if command in ("stats", "top", "report"):
            schema["$defs"] = {"waits": waits()}
        found[f"{command}.json"] = text(schema) + "\n"
    return found


def main() -> int:
    wanted = schemas()
    if "--check" in sys.argv[1:]:
        there = {path.name: path.read_text("utf-8") for path in HOME.glob("*.json")}
        if there != wanted:
            sys.stderr.write("docs/schemas is not current: run `make docs`\n")
        return int(there != wanted)
    HOME.mkdir(exist_ok=True)
    for old in HOME.glob("*.json"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        (HOME / name).write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
