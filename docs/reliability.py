"""The table of docs/reliability.md, made of a test run.

pytest --reliability report.json
python docs/reliability.py report.json           write
python docs/reliability.py report.json --check   exit 1 if it would change
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE / "reliability.md"
ROWS = HERE / "failures.toml"

Found = dict[str, dict[str, dict[str, int]]]


def table(rows: list[dict[str, Any]], found: Found) -> str:
    """One line per failure: what must happen, which tests show it, what they said."""
    lines = ["| failure | what happens then | tests | result |", "|---|---|---|---|"]
    for row in rows:
        tests = found.get(row["id"], {})
        names = "<br>".join(f"`{name.removeprefix('tests/')}`" for name in sorted(tests))
        if names and row.get("open"):
            names += f"<br>Open: {row['open']}"
        lines.append(
            f"| {row['failure']} | {row['behaviour']} | "
            f"{names or row.get('untested', '')} | {_result(tests)} |"
        )
    return "\n".join(lines)


def _result(tests: dict[str, dict[str, int]]) -> str:
    # Without counts: a test that is given one more case is no news for this page. Nor is a
    # machine that lets one of them make no namespaces, as long as others show the row.
    outcomes = {outcome for each in tests.values() for outcome in each}
    for outcome in ("failed", "passed", "skipped"):
        if outcome in outcomes:
            return outcome
    return "not tested"


def unproven(rows: list[dict[str, Any]], found: Found) -> list[str]:
    """Rows without a passing test and without a reason."""
    bad = []
    for row in rows:
        result = _result(found.get(row["id"], {}))
        if result == "failed" or (result == "not tested" and not row.get("untested")):
            bad.append(f"{row['id']}: {result}")
    return bad


def written(page: str, body: str) -> str:
    return re.sub(
        r"(<!-- failures: [^>]*-->\n).*?(<!-- /failures -->)",
        lambda match: f"{match.group(1)}\n{body}\n\n{match.group(2)}",
        page,
        flags=re.DOTALL,
    )


def main() -> int:
    rows = tomllib.loads(ROWS.read_text("utf-8"))["row"]
    found = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    bad = unproven(rows, found)
    for line in bad:
        print(f"not proven: {line}", file=sys.stderr)
    page = PAGE.read_text("utf-8")
    new = written(page, table(rows, found))
    if "--check" not in sys.argv[2:]:
        PAGE.write_text(new, "utf-8")
    elif new != page:
        print("docs/reliability.md is not what this run showed; run `make docs`", file=sys.stderr)
        return 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
