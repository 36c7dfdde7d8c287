"""The crash sweep strikes where it says, and finds an engine that is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.stress.crash import __main__ as crash
from tests.stress.crash.strace import KILL, Strike, trace, unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@pytest.mark.parametrize(("kind", "left"), [(KILL, ["0"]), ("EIO", ["0", "2"])])
def test_a_call_is_struck_where_it_was_said(tmp_path: Path, kind: str, left: list[str]) -> None:
    def act() -> None:
        for number in range(3):
            try:
                os.mkdir(tmp_path / str(number))
            except OSError:
                continue

    run = trace(tmp_path, act, Strike("mkdir", 2, kind))
    assert run.struck is not None and str(tmp_path / "1") in run.struck.text
    assert run.killed == (kind == KILL) and not run.astray
    assert sorted(os.listdir(tmp_path)) == left


def test_an_engine_that_writes_under_the_final_name_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def naive(place: crash.Place) -> None:
        """Copies the bytes of an entry piecemeal to where it is looked for."""
        (entry,) = place.root.glob("v1/objects/*/*/*")
        data = entry / "a.tar"
        data.unlink()
        with open(data, "wb") as file:
            for at in range(0, len(crash.SHARDS["a.tar"]), 4096):
                file.write(crash.SHARDS["a.tar"][at : at + 4096])
                file.flush()
        data.chmod(0o400)

    before = ((crash._reading("a.tar"), None),)
    monkeypatch.setitem(crash.SCENARIOS, "naive", crash.Scenario(naive, ("a.tar",), before))
    wrong = [text for result in crash.sweep(["naive"], part="kills") for text in result.wrong]
    assert any("not complete" in text for text in wrong), wrong
    assert any("other bytes than the origin" in text for text in wrong), wrong
