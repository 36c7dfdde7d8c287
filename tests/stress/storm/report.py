"""The table at the end of a storm."""

from __future__ import annotations

from tests.stress import machine
from tests.stress.storm.run import Outcome

__all__ = ["show"]

_SHOWN = 10


def show(outcome: Outcome) -> None:
    """Print the figures, and the first violations."""
    settings, verdict = outcome.settings, outcome.verdict
    flock = "flock lying" if settings.lying else "flock real"
    disk = "own disk" if outcome.own_disk else "no disk of its own, so it was never filled"
    print(f"\n### Storm of {settings.seconds:.0f} s, {settings.workers} workers, {flock}\n")
    print(f"{machine()}; {disk}; seed {settings.seed}\n")
    print("| | |\n|---|---|")
    for name, value in verdict.figures.items():
        print(
            f"| {name} | {value:,.1f} |" if isinstance(value, float) else f"| {name} | {value:,} |"
        )
    if not verdict.violations:
        print("\nEvery invariant held.")
        return
    print(f"\n{len(verdict.violations)} violations; the first {_SHOWN}:\n")
    for violation in verdict.violations[:_SHOWN]:
        print(f"- {violation}")
    if outcome.stacks:
        print(f"\nWhere the stuck ones were:\n{outcome.stacks}")
    print(f"\nAgain: python -m tests.stress.storm --seconds {settings.seconds:.0f}", end=" ")
    print(f"--seed {settings.seed}{' --flock lying' if settings.lying else ''}")
    if outcome.kept:
        print(f"Kept: {outcome.kept}")
