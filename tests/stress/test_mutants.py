"""The suite notices naive variants of the engine: the mutation gate.

Each mutant of mutants.toml is written into a copy of the package, and its tests must go red;
unchanged, the same tests are green. `benchmarks/mutation.py` does the same for every line, and
takes an hour.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stress.mutationlab import ROOT, Lab

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl and /proc are Linux's")

MUTANTS: list[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("mutants.toml").read_text("utf-8")
)["mutant"]
#: Seconds on a hang; a mutant is noticed within one.
PATIENCE = 60.0
#: Seconds for one test of a mutant, and for one more try where a machine that stood still for
#: so long, and not the mutant, may have been why there was no verdict.
_TRIES = (20, 50)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("mutants") / "lab") as lab:
        yield lab


def mutated(texts: dict[str, str], mutant: dict[str, Any]) -> dict[str, str]:
    """File -> its text with the mistake in it; ``texts`` are those of the package."""
    changed: dict[str, str] = {}
    for edit in mutant["edit"]:
        text = changed.get(edit["file"], texts[edit["file"]])
        found = text.count(edit["old"])
        assert found == 1, (
            f"{mutant['name']!r}: {edit['file']} has the text below {found} times, not once. The "
            "code has moved on: write the same mistake into it again in mutants.toml.\n"
            f"{edit['old']}"
        )
        changed[edit["file"]] = text.replace(edit["old"], edit["new"])
    return changed


def package() -> dict[str, str]:
    return {path.name: path.read_text("utf-8") for path in (ROOT / "shardcache").glob("*.py")}


def test_every_mutant_has_a_name_of_its_own_and_tests() -> None:
    names = [mutant["name"] for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 40
    for mutant in MUTANTS:
        assert mutant["wrong"]
        assert mutant["tests"]


def test_the_copy_is_what_is_tested_and_what_children_import(lab: Lab) -> None:
    probe = "tests/test_errors.py"
    assert lab.run([probe], timeout=PATIENCE, keep_bytecode=True).outcome == "green"
    with lab.changed({"errors.py": "raise ImportError('the changed copy')\n"}):
        run = lab.run([probe], timeout=PATIENCE)
    assert run.outcome == "broken"
    assert "the changed copy" in run.log
    run = lab.run([probe], timeout=PATIENCE)
    assert run.outcome == "green"
    assert Path(run.package).is_relative_to(lab.tree)
    child = subprocess.run(
        [sys.executable, "-c", "import shardcache; print(shardcache.__file__)"],
        env=lab.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    assert Path(child.stdout.strip()).is_relative_to(lab.tree)


def test_without_a_mutant_all_their_tests_are_green(lab: Lab) -> None:
    tests = list(dict.fromkeys(test for mutant in MUTANTS for test in mutant["tests"]))
    run = lab.run(tests, timeout=2 * PATIENCE, keep_bytecode=True)
    assert run.outcome == "green", run.log
    passed = {test.split("[")[0] for test in run.seconds}
    assert passed == set(tests), "some were skipped"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["name"])
def test_the_mistake_is_noticed(lab: Lab, mutant: dict[str, Any], record_property: Any) -> None:
    with lab.changed(mutated(package(), mutant)):
        for seconds in _TRIES:
            run = lab.run(mutant["tests"], timeout=PATIENCE, options=[f"--timeout={seconds}"])
            if run.outcome in ("red", "green"):
                break
    assert run.outcome == "red", (
        f"{mutant['name']!r} ({mutant['wrong']}) is {run.outcome} with {mutant['tests']}:\n"
        f"{run.log}"
    )
    record_property("killed_by", run.failed[0])


def test_a_mutant_that_does_not_apply_any_more_says_so() -> None:
    gone = {"name": "gone", "edit": [{"file": "a.py", "old": "x = 1\n", "new": "x = 2\n"}]}
    with pytest.raises(AssertionError, match="'gone'.* 0 times"):
        mutated({"a.py": "y = 1\n"}, gone)
    with pytest.raises(AssertionError, match="'gone'.* 2 times"):
        mutated({"a.py": "x = 1\nx = 1\n"}, gone)
    assert mutated({"a.py": "x = 1\n"}, gone) == {"a.py": "x = 2\n"}
