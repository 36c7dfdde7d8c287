"""One storm from beginning to end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.stress.storm.arena import arena, working_directory
from tests.stress.storm.audit import audit
from tests.stress.storm.boss import Boss
from tests.stress.storm.history import read_all
from tests.stress.storm.judge import Verdict, judge
from tests.stress.storm.nursery import Nursery
from tests.stress.storm.rules import rules_of
from tests.stress.storm.settings import Settings

__all__ = ["Outcome", "storm"]


@dataclass(frozen=True)
class Outcome:
    """What came of a storm.

    Attributes:
        settings: of it.
        verdict: the judge's.
        own_disk: whether the cache had a filesystem of its own, which was filled.
        stacks: of whoever hung.
        kept: the working directory, if it is still there.
    """

    settings: Settings
    verdict: Verdict
    own_disk: bool
    stacks: str
    kept: Path | None

    def facts(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "seconds": self.settings.seconds,
            "seed": self.settings.seed,
            "workers": self.settings.workers,
            "flock": "lying" if self.settings.lying else "real",
            "own_disk": self.own_disk,
            "figures": self.verdict.figures,
            "violations": [str(violation) for violation in self.verdict.violations],
        }


def storm(
    *,
    seconds: float,
    seed: int,
    workers: int = 8,
    lying: bool = False,
    sabotage: bool = True,
    parent: Path | None = None,
    keep: bool = False,
    least_calls: int = 0,
) -> Outcome:
    """Let a storm blow and judge it.

    Args:
        seconds: how long.
        seed: of the faults, the sizes and the calls.
        workers: processes.
        lying: whether flock succeeds for everybody.
        sabotage: whether lock files are deleted.
        parent: where the working directory is made.
        keep: whether it stays.
        least_calls: blow until so many calls were made; see `Settings`.
    """
    with working_directory(parent, keep) as directory:
        settings = Settings(
            directory=directory,
            cache=directory / "disk" / "cache",
            seconds=seconds,
            seed=seed,
            workers=workers,
            lying=lying,
            least_calls=least_calls,
        )
        with arena(settings, keep) as found:
            own_disk = found.disk.mounted
            nursery = Nursery(settings, found.environment())
            try:
                Boss(found, sabotage=sabotage).run(nursery)
            finally:
                nursery.close()
            audit(found)
            rules = rules_of(settings, found.meter.endpoint_url)
        verdict = judge(read_all(settings.history), rules)
        stacks = "".join(path.read_text() for path in sorted(settings.history.glob("stuck-*")))
        return Outcome(settings, verdict, own_disk, stacks, directory if keep else None)
