"""How much of the engine the tests hold fast: ``python -m benchmarks.mutation --module store``.

Makes every mutant of a module (`benchmarks.mutationoperators`), one after the other, and runs the
tests against it in a copy of the tree: first those that run the changed lines, the quickest
first, until one fails; if none does, the rest of the module's own tests, because a test may run
the line in a process of its own. A mutant that no test notices is a survivor: either a test is
missing or the change makes no difference, and docs/mutation.toml says why.

``--write`` keeps the figures in docs/mutation.json, of which ``python docs/mutation.py`` makes
the page. Needs cosmic-ray and pytest-cov. A module takes between one and twenty minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.mutationoperators import Mutant, mutants
from tests.stress.mutationlab import Lab

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "mutation.json"

#: Which tests a module is judged by: its own, and those of what is built on it, as far as they
#: are quick and need no server.
SELECTIONS = {
    "blocks": ("blocks", "transfer", "bypass"),
    "coordination": ("coordination", "cache"),
    "intake": ("coordination", "transfer"),
    "descriptors": ("locks", "layout", "partials"),
    "job": ("job", "transfer", "following", "coordination"),
    "locks": ("locks", "store", "sweeping"),
    "opening": ("opening", "store"),
    "partials": ("partials", "sweeping", "coordination"),
    "quarantine": ("store", "coordination"),
    "store": ("store", "coordination"),
    "sweeping": ("sweeping", "eviction"),
    "transfer": ("transfer", "job", "cancellation", "coordination"),
}
#: A mutant may hang in any test. Seconds for one test, of which the slowest takes two; what does
#: not even heed that is killed after a multiple of what the tests took before.
_TEST_SECONDS = 10
_SLACK = 30.0
_FACTOR = 4


@dataclass(frozen=True, slots=True)
class Selection:
    """The tests of a module.

    Attributes:
        seconds: test -> how long it takes.
        left_out: those that failed without a mutant.
        lines: line -> the tests that run it in the process of pytest itself.
    """

    seconds: dict[str, float]
    left_out: tuple[str, ...]
    lines: dict[int, set[str]]

    def covering(self, mutant: Mutant) -> list[str]:
        """The tests that run the changed lines, the quickest first; may be empty."""
        tests: set[str] = set()
        for line in range(mutant.line, mutant.last + 1):
            tests |= self.lines.get(line, set())
        return sorted(tests & set(self.seconds), key=self.seconds.__getitem__)


def select(lab: Lab, module: str, without: Sequence[str] = ()) -> Selection:
    """Run the tests of a module unchanged: to time them, and to see what they run.

    Raises:
        SystemExit: they cannot be run.
    """
    from coverage import CoverageData

    files = [f"tests/test_{name}.py" for name in SELECTIONS[module]]
    data = lab.directory / "coverage"
    settings = lab.directory / "coverage.ini"
    settings.write_text(f"[run]\nsource = shardcache\ndata_file = {data}\n", "utf-8")
    options = ["-m", "not slow", *(f"--deselect={test}" for test in without)]
    options += ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
    run = lab.run(files, timeout=1800, keep_bytecode=True, options=options, stop=False)
    if run.outcome not in ("green", "red"):
        raise SystemExit(f"{module}: {run.outcome} without a mutant:\n{run.log}")
    for test in run.failed:
        print(f"{module}: left out, for it fails without a mutant: {test}", flush=True)
    found = CoverageData(str(data))
    found.read()
    contexts = found.contexts_by_lineno(str(lab.tree / "shardcache" / f"{module}.py"))
    data.unlink()
    lines = {line: {name.split("|")[0] for name in names} for line, names in contexts.items()}
    return Selection(run.seconds, run.failed, lines)


def judge(lab: Lab, module: str, mutant: Mutant, selection: Selection) -> tuple[str, str]:
    """``killed``, ``timeout`` or ``survived``, and by which test.

    A test that took too long is run without the mutant too: when that is slow as well, it is the
    machine, and the mutant gets another hearing with more time.
    """
    for patience in (1, 4, 16):
        verdict, by = _attempt(lab, module, mutant, selection, patience)
        if verdict != "timeout":
            break
        control = lab.run(by.split() or list(selection.seconds), timeout=600.0 * patience)
        if control.outcome == "green" and max(control.seconds.values()) < _TEST_SECONDS / 3:
            break
    return verdict, by


def _attempt(
    lab: Lab, module: str, mutant: Mutant, selection: Selection, patience: int
) -> tuple[str, str]:
    first = selection.covering(mutant)
    own = f"tests/test_{SELECTIONS[module][0]}.py::"
    rest = [
        t for t in selection.seconds if t not in set(first) and (t.startswith(own) or not first)
    ]
    with lab.changed({f"{module}.py": mutant.text}):
        for tests in (first, rest):
            if not tests:
                continue
            limit = _SLACK + _FACTOR * sum(selection.seconds[test] for test in tests)
            options = [f"--timeout={_TEST_SECONDS * patience}"]
            run = lab.run(tests, timeout=limit * patience, options=options)
            if run.outcome == "broken" and "ERROR: not found" in run.log:
                # The mutant changed what the tests are called.
                files = sorted({test.split("::")[0] for test in tests})
                run = lab.run(files, timeout=limit * patience, options=options)
            if run.outcome == "timeout" or "Failed: Timeout" in run.log:
                return "timeout", " ".join(run.failed)
            if run.outcome == "red":
                return "killed", run.failed[0]
            if run.outcome == "broken":
                return "killed", "no test could be run"
    return "survived", ""


def choose(source: str, arguments: argparse.Namespace, kept: dict[str, Any]) -> list[Mutant]:
    """The mutants to run: all, a sample, or those that survived before."""
    chosen = mutants(source)
    if arguments.again:
        return [mutant for mutant in chosen if _row(mutant) in kept["survivors"]]
    if arguments.fraction < 1:
        count = int(len(chosen) * arguments.fraction)
        keep = random.Random(arguments.seed).sample(range(len(chosen)), count)
        chosen = [chosen[index] for index in sorted(keep)]
    return chosen


def _row(mutant: Mutant) -> dict[str, str]:
    return {"function": mutant.function, "old": mutant.old, "new": mutant.new}


def measure(
    lab: Lab, module: str, arguments: argparse.Namespace, kept: dict[str, Any]
) -> dict[str, Any]:
    """Judge the mutants of a module; ``kept`` is what was found before."""
    begun = time.monotonic()
    source = (lab.tree / "shardcache" / f"{module}.py").read_text("ascii")
    chosen = choose(source, arguments, kept)
    selection = select(lab, module, arguments.without)
    counts = {"killed": 0, "timeout": 0, "survived": 0}
    survivors = []
    for number, mutant in enumerate(chosen, 1):
        verdict, by = judge(lab, module, mutant, selection)
        counts[verdict] += 1
        if verdict == "survived":
            survivors.append(_row(mutant))
        note = f"{module}:{mutant.line} {mutant.operator}: {verdict} {by}"
        if verdict != "killed":
            note += f"\n    - {mutant.old}\n    + {mutant.new}"
        print(f"[{number}/{len(chosen)}, {time.monotonic() - begun:.0f} s] {note}", flush=True)
    found = {"left_out": list(selection.left_out), "survivors": survivors}
    if arguments.again:
        gone = [row for row in kept["survivors"] if row not in map(_row, chosen)]
        left = [row for row in kept["survivors"] if row in survivors]  # two mutants may look alike
        count = kept["mutants"] - len(gone)
        late = kept["timeout"] + counts["timeout"]
        now = {"survived": len(left), "timeout": late, "killed": count - len(left) - late}
        return {**kept, **found, **now, "survivors": left, "mutants": count}
    seed = arguments.seed if arguments.fraction < 1 else None
    total = len(mutants(source))
    return {**found, **counts, "mutants": len(chosen), "of": total, "seed": seed}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--module", nargs="+", choices=sorted(SELECTIONS), required=True)
    parser.add_argument("--again", action="store_true", help="those that survived the last time")
    parser.add_argument("--fraction", type=float, default=1.0, help="a sample of the mutants")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--without", nargs="+", default=[], help="tests to leave out")
    parser.add_argument("--write", action="store_true", help="keep the figures in docs/")
    arguments = parser.parse_args()
    survived = 0
    for module in arguments.module:
        with tempfile.TemporaryDirectory(prefix="mutation-") as home, Lab(Path(home, "lab")) as lab:
            kept = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
            result = measure(lab, module, arguments, kept.get(module, {}))
        survived += result["survived"]
        shown = {name: value for name, value in result.items() if name != "survivors"}
        print(f"{module}: {shown}", flush=True)
        if arguments.write:
            RESULTS.write_text(json.dumps(kept | {module: result}, indent=1, sort_keys=True) + "\n")
    sys.exit(1 if survived else 0)


if __name__ == "__main__":
    main()
