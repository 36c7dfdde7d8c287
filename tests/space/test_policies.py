"""The comparison of policies: traces, models, and the real program beside them."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import policies
from benchmarks.policies import MODELS, play, plots, report, simulate
from benchmarks.traces import TRACES


@pytest.mark.parametrize("policy", MODELS)
@pytest.mark.parametrize("trace", TRACES)
def test_nobody_beats_the_optimum(trace: str, policy: str) -> None:
    made = TRACES[trace](40, 4)
    for share in (0.1, 0.5, 0.9):
        found, best = play(made, policy, share), play(made, "optimum", share)
        assert sum(found.values()) <= sum(best.values()) + 1e-9
        assert all(0.0 <= ratio <= 1.0 for ratio in found.values())


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("trace", ["sequential", "shuffled"])
def test_keeping_what_is_there_is_the_optimum_of_epochs(trace: str, share: float) -> None:
    made = TRACES[trace](40, 6)
    [ratio] = play(made, "working-set", share).values()
    assert ratio == pytest.approx(share) == play(made, "optimum", share)["epochs 2 on"]


def test_in_order_lru_and_fifo_never_hit() -> None:
    made = TRACES["sequential"](40, 6)
    for policy in ("lru", "fifo"):
        assert play(made, policy, 0.9) == {"epochs 2 on": 0.0}


def test_the_first_of_two_jobs_keeps_what_it_has_and_the_second_takes_over() -> None:
    found = play(TRACES["two-jobs"](40, 4), "working-set", 0.5)
    assert list(found.values()) == [1.0, 1.0, 0.0, 1.0]


def test_figures_become_tables_and_plots() -> None:
    facts = {"model": simulate(10, 3), "real": [], "sizes": {}}
    assert report(facts).count("| working-set |") == 7
    for name, chart in plots(facts).items():
        assert name.startswith("policies-")
        assert ElementTree.fromstring(chart).tag.endswith("svg")


def test_the_program_does_what_the_model_says(tmp_path: Path) -> None:
    rows = policies.measure(8, 3, size=20_480, shares=(0.5,), traces=("sequential",))
    found = {row["policy"]: row["ratio"] for row in rows}
    expected = {
        policy: play(TRACES["sequential"](8, 3), policy, 0.5)["epochs 2 on"] for policy in found
    }
    assert found == expected and set(found) == {"working-set", "lru", "fifo"}
