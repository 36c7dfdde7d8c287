"""Write the generated parts of README.md anew, or check that they are current.

python docs/generate.py           write
python docs/generate.py --check   exit 1 if anything would change
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from shardcache import config
from shardcache.cli.main import ExitCode, command_line

README = Path(__file__).resolve().parent.parent / "README.md"


def options_table() -> str:
    rows = ["| option | value | default | |", "|---|---|---|---|"]
    for option in config.describe(config.load({"dir": "/"}, {}, [])):
        kind = option.type.replace("|", "\\|")
        rows.append(f"| `{option.name}` | {kind} | {option.default} | {option.help} |")
    return "\n".join(rows)


def commands_reference() -> str:
    context = click.Context(command_line, info_name="shardcache")
    parts = []
    for name in command_line.list_commands(context):
        command = command_line.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context)
        usage = " ".join(command.collect_usage_pieces(inner))
        about = command.get_short_help_str(limit=200)
        lines = [f"#### `shardcache {name}{' ' + usage if usage else ''}`", "", about]
        own = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
        records = [parameter.get_help_record(inner) for parameter in own]
        rows = [f"- `{r[0]}`: {r[1]}" for r in records if r is not None and r[0] not in GLOBAL]
        parts.append("\n".join([*lines, "", *rows]).rstrip())
    return "\n\n".join(parts)


def exit_codes() -> str:
    rows = ["| exit code | means |", "|---|---|"]
    return "\n".join(rows + [f"| {code} | {code.meaning} |" for code in ExitCode])


#: Options that every command takes; listed once, below all commands.
GLOBAL: set[str] = set()


def _learn_global() -> str:
    context = click.Context(command_line, info_name="shardcache")
    rows = []
    for parameter in command_line.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            record = parameter.get_help_record(context)
            if record is not None:
                GLOBAL.add(record[0])
                rows.append(f"- `{record[0]}`: {record[1]}")
    GLOBAL.add("-h, --help")
    GLOBAL.add("--help")
    return "With every command:\n\n" + "\n".join(rows)


def generated(text: str) -> str:
    """``text`` with its generated parts as they should be."""
    everywhere = _learn_global()
    for name, body in (
        ("options", options_table()),
        ("commands", commands_reference() + "\n\n" + everywhere),
        ("exit codes", exit_codes()),
    ):
        text = re.sub(
            rf"(<!-- {name}: [^>]*-->\n).*?(<!-- /{name} -->)",
            lambda match, body=body: f"{match.group(1)}\n{body}\n\n{match.group(2)}",
            text,
            flags=re.DOTALL,
        )
    return text


def main() -> int:
    before = README.read_text("utf-8")
    after = generated(before)
    if "--check" in sys.argv[1:]:
        if before != after:
            sys.stderr.write("README.md is not current: run `make docs`\n")
        return int(before != after)
    README.write_text(after, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
