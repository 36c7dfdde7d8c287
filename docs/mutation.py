"""The tables of docs/mutation.md: what mutation runs found, and which naive variants are tested.

    python -m benchmarks.mutation --module store --write
    python docs/mutation.py           write
    python docs/mutation.py --check   exit 1 if it would change, or a survivor has no explanation

The figures are those of docs/mutation.json, the explanations those of docs/mutation.toml, the
variants those of tests/mutants.toml.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE / "mutation.md"
RESULTS = HERE / "mutation.json"
REASONS = HERE / "mutation.toml"
VARIANTS = HERE.parent / "tests" / "mutants.toml"

Results = dict[str, dict[str, Any]]
Survivor = tuple[str, str, str, str]


def figures(results: Results) -> str:
    """One line per module."""
    columns = ("mutants", "killed", "timeout", "survived")
    lines = [
        "| module | mutants | killed | ended by a time-out | survived |",
        "|---|--:|--:|--:|--:|",
    ]
    for module, result in sorted(results.items()):
        cells = [str(result[column]) for column in columns]
        if result["seed"] is not None:
            cells[0] += f" of {result['of']}, seed {result['seed']}"
        lines.append(f"| `{module}` | " + " | ".join(cells) + " |")
    sums = [str(sum(result[column] for result in results.values())) for column in columns]
    lines.append("| all | " + " | ".join(sums) + " |")
    left_out = sorted({test for result in results.values() for test in result["left_out"]})
    for test in left_out:
        lines += ["", f"Left out, because it failed without a mutant: `{test}`."]
    return "\n".join(lines)


def survivors(results: Results) -> list[Survivor]:
    """(module, function, old, new) of each, in order."""
    return [
        (module, found["function"], found["old"], found["new"])
        for module, result in sorted(results.items())
        for found in result["survivors"]
    ]


def reasons(rows: list[dict[str, Any]]) -> dict[Survivor, str]:
    """Why a survivor makes no difference that matters."""
    return {
        (row["module"], row["function"], row["old"], new): row["why"]
        for row in rows
        for new in row["new"]
    }


def explained(found: list[Survivor], why: dict[Survivor, str]) -> str:
    """The survivors with their explanations, those of one explanation together."""
    by_reason: dict[tuple[str, str], list[Survivor]] = {}
    for survivor in found:
        by_reason.setdefault((survivor[0], why.get(survivor, "Not explained.")), []).append(
            survivor
        )
    lines = ["| where | change | why it is left |", "|---|---|---|"]
    for (module, reason), group in by_reason.items():
        for number, (_, function, old, new) in enumerate(group):
            change = f"{_code(old)}<br>{_code(new)}"
            said = "as above" if number else reason
            lines.append(f"| `{module}` {_code(function or 'module')} | {change} | {said} |")
    return "\n".join(lines)


def _code(text: str) -> str:
    short = text if len(text) <= 100 else f"{text[:96]} ..."
    return "`" + short.replace("|", "\\|") + "`"


def variants(rows: list[dict[str, Any]]) -> str:
    """The naive variants, what is wrong with them, and the tests that must go red."""
    lines = ["| variant | what is wrong with it | goes red |", "|---|---|---|"]
    for row in rows:
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in row["tests"])
        lines.append(f"| {row['name']} | {row['wrong']} | {tests} |")
    return "\n".join(lines)


def written(page: str, name: str, body: str) -> str:
    """The page with the part ``name`` anew."""
    return re.sub(
        rf"(<!-- {name}: [^>]*-->\n).*?(<!-- /{name} -->)",
        lambda match: f"{match.group(1)}\n{body}\n\n{match.group(2)}",
        page,
        flags=re.DOTALL,
    )


def render(page: str) -> tuple[str, list[str]]:
    """The page as it should be, and what is wrong with the explanations."""
    results: Results = json.loads(RESULTS.read_text("utf-8"))
    why = reasons(tomllib.loads(REASONS.read_text("utf-8"))["harmless"])
    found = survivors(results)
    page = written(page, "figures", figures(results))
    page = written(page, "survivors", explained(found, why))
    page = written(page, "variants", variants(tomllib.loads(VARIANTS.read_text("utf-8"))["mutant"]))
    bad = [f"no explanation for {survivor}" for survivor in found if survivor not in why]
    bad += [f"explained but killed: {survivor}" for survivor in why if survivor not in found]
    return page, bad


def main() -> int:
    page = PAGE.read_text("utf-8")
    new, bad = render(page)
    for line in bad:
        print(line, file=sys.stderr)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(new, "utf-8")
    elif new != page:
        print("docs/mutation.md is not current; run `python docs/mutation.py`", file=sys.stderr)
        return 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
