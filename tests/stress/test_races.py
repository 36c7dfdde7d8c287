"""The races of training scripts, before and after; see `racestories`.

Before, what another node makes never comes into sight and rank 0 never gets there, so that no
pace of the machine mends it. After, nodes see one another's names after a moment. Set
``RACES_SLOW=15`` to have rank 0 late by as much as it was.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.stress import races
from tests.stress.fuse.shim import needs_fuse
from tests.stress.racestories import STORIES, stage

_NEVER = 3600.0
_SLOW = float(os.environ.get("RACES_SLOW", "1"))


@pytest.mark.parametrize("name", STORIES)
def test_before(tmp_path: Path, name: str) -> None:
    needs_fuse()
    with stage(tmp_path, 2, delay=_NEVER, slow=_NEVER, ranks=16) as place:
        troubles = STORIES[name](place, False)
    assert troubles
    assert all("Error: " in text or "both jobs fetched" in text for text in troubles), troubles


@pytest.mark.parametrize("name", STORIES)
def test_after(tmp_path: Path, name: str) -> None:
    needs_fuse()
    with stage(tmp_path, 3, delay=0.4, slow=_SLOW) as place:
        assert STORIES[name](place, True) == []


def test_the_benchmark_counts_them(capsys: pytest.CaptureFixture[str]) -> None:
    needs_fuse()
    with pytest.raises(SystemExit, match="2"):
        races.main(["--runs", "1", "moon"])
    assert "no story has these words; there are: 64 ranks" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        races.main(["--runs", "1", "lock", "file"])
    assert capsys.readouterr().out.splitlines()[-1] == (
        "| a lock file vanishes under jobs that share a cache | 1/1 "
        "| both jobs fetched it at the same time (1) | 0/1 |"
    )
