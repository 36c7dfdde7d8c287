"""A process killed at every system call, and every call failing: a sample of the sweep.

The whole of it is a command, ``python -m tests.stress.crash``; what it tries and what
must hold afterwards stands there. Here it is also shown to find what is wrong.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardcache.layout import Layout, random_token
from shardcache.locks import mode as locking
from shardcache.locks.flock import Holder, KeyLock
from tests.stress.crash import __main__ as crashsweep
from tests.stress.crash.judge import Judge, inspect, strays
from tests.stress.crash.place import SHARDS, Place
from tests.stress.crash.plan import errors, kills
from tests.stress.crash.scenarios import SCENARIOS, Scenario
from tests.stress.crash.stage import Result, Stage, _behaviour
from tests.stress.crash.states import having, made
from tests.stress.crash.strace import Run, Strike, Tracer, unavailable
from tests.support.storetools import begin, metadata_for

HOME = Path(__file__).resolve().parents[2]
REASON = unavailable()
needs_strace = pytest.mark.skipif(REASON is not None, reason=REASON or "")

#: One point in so many; with these the two samples take half a minute on two idle cores.
EVERY_KILL, EVERY_ERROR = 40, 80


# -- the sample ----------------------------------------------------------------


def sweep(tmp_path: Path, *arguments: str) -> list[Result]:
    """What the command finds; in a process of its own, which has no threads to fork."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.stress.crash", "--json", str(report), *arguments]
    # Measuring coverage would slow every one of a thousand processes down.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")}
    done = subprocess.run(
        command, cwd=HOME, env=environment, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [Result(**result) for result in json.loads(report.read_text("utf-8"))["results"]]


def struck(results: list[Result]) -> Counter[tuple[str, str]]:
    """How many calls were struck, by scenario and kind."""
    return Counter((r.scenario, r.kind) for r in results if r.call is not None)


@needs_strace
def test_after_a_kill_at_any_call_the_next_process_goes_on(tmp_path: Path) -> None:
    results = sweep(tmp_path, "--part", "kills", "--every", str(EVERY_KILL))
    assert not any(result.wrong for result in results)
    counts = struck(results)
    assert all(counts[name, "before"] for name in SCENARIOS)
    # The publishing rename and its neighbours, before and behind, are in every sample.
    publishing = [
        result.kind
        for result in results
        if result.scenario == "publish" and (result.call or "").startswith("rename")
        if "/partial/" in str(result.call) and "/objects/" in str(result.call)
    ]
    assert {"before", "after"} <= set(publishing)
    assert counts["publish", "before"] >= 11


@needs_strace
def test_an_error_of_any_call_stops_no_reader_and_leaves_nothing(tmp_path: Path) -> None:
    results = sweep(tmp_path, "--part", "errors", "--every", str(EVERY_ERROR))
    assert not any(result.wrong for result in results)
    counts = struck(results)
    assert all(counts[name, "error"] + counts[name, "on"] for name in SCENARIOS)
    assert sum(count for (_, kind), count in counts.items() if kind == "on")


def test_without_strace_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert crashsweep.main([]) == 77
    assert "strace, which is not installed" in capsys.readouterr().err


# -- that it strikes where it says ---------------------------------------------


def make_three(directory: Path) -> Callable[[], list[str]]:
    """Three directories by a thread, then three by the process itself."""

    def work(number: int) -> None:
        for index in range(3):
            os.mkdir(directory / f"{number}-{index}")

    def act() -> list[str]:
        thread = threading.Thread(target=work, args=(1,))
        thread.start()
        thread.join()
        work(0)
        return sorted(os.listdir(directory))

    return act


ALL = ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"]


@needs_strace
def test_a_run_is_watched(tmp_path: Path) -> None:
    run = Tracer(tmp_path).run(make_three(tmp_path))
    assert run.ended and run.answer == ALL and run.struck is None
    makes = [call for call in run.calls if call.name == "mkdir"]
    assert [call.number for call in makes] == [1, 2, 3, 1, 2, 3]
    assert len({call.thread for call in makes}) == 2 and run.counts["mkdir"] == 3
    assert "mkdir" not in run.elsewhere


@needs_strace
@pytest.mark.parametrize(("kind", "left"), [("before", ["1-0"]), ("after", ["1-0", "1-1"])])
def test_a_kill_is_before_or_behind_the_call(tmp_path: Path, kind: str, left: list[str]) -> None:
    run = Tracer(tmp_path).run(make_three(tmp_path), Strike("mkdir", 2, kind))
    assert run.killed and not run.hung and run.answer is None
    assert run.struck is not None and (run.struck.name, run.struck.number) == ("mkdir", 2)
    assert str(tmp_path / "1-1") in run.struck.text
    assert sorted(os.listdir(tmp_path)) == left


@needs_strace
def test_a_call_that_never_comes_strikes_nothing(tmp_path: Path) -> None:
    run = Tracer(tmp_path).run(make_three(tmp_path), Strike.before("mkdir", 4))
    assert run.ended and run.struck is None and run.answer == ALL


@needs_strace
@pytest.mark.parametrize(("on", "left"), [(False, ["0-0", "0-2"]), (True, ["0-0"])])
def test_an_error_is_answered_once_or_from_then_on(
    tmp_path: Path, on: bool, left: list[str]
) -> None:
    def act() -> list[int | None]:
        found: list[int | None] = []
        for index in range(3):
            try:
                os.mkdir(tmp_path / f"0-{index}")
            except OSError as exn:
                found.append(exn.errno)
        return found

    run = Tracer(tmp_path).run(act, Strike.error("mkdir", 2, "EDQUOT", on=on))
    assert run.ended and run.error is None and not run.astray
    assert run.answer == [errno.EDQUOT] * (2 if on else 1)
    assert sorted(os.listdir(tmp_path)) == left


@needs_strace
def test_an_error_that_hit_something_else_is_known(tmp_path: Path) -> None:
    watched = tmp_path / "watched"
    watched.mkdir()

    def act() -> None:
        os.mkdir(tmp_path / "elsewhere")

    run = Tracer(watched).run(act, Strike.error("mkdir", 1, "EIO"))
    assert run.astray and run.error is not None


@needs_strace
def test_an_error_of_a_program_that_was_started_is_not_astray(tmp_path: Path) -> None:
    def act() -> int:
        return subprocess.run(["mkdir", str(tmp_path.parent / "other")], stderr=-3).returncode

    run = Tracer(tmp_path).run(act, Strike.error("mkdir", 1, "EIO"))
    assert run.struck is not None and not run.struck.inside
    assert run.ended and run.answer == 1 and not run.astray


# -- that it sees what is wrong ------------------------------------------------


def stage(tmp_path: Path) -> Stage:
    home = tmp_path / "stage"
    home.mkdir()
    return Stage(home, None)


def naive(place: Place) -> None:
    """Fetches as one would at first: the sidecar, then the data, under the final name."""
    data = SHARDS["a.tar"]
    metadata = metadata_for(place.url("a.tar"), data)
    entry = Layout(place.root / "v1").entry(metadata.key, metadata.info.version, len(data))
    entry.mkdir(parents=True)
    (entry / "meta.json").write_bytes(metadata.encode())
    with open(entry / "a.tar", "wb") as file:
        file.truncate(len(data))
        file.write(data[:5000])
        file.flush()
        file.write(data[5000:])
    (entry / "a.tar").chmod(0o400)


@needs_strace
@pytest.mark.parametrize("find", [kills, errors])
def test_an_engine_that_writes_under_the_final_name_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, find: Callable[..., Any]
) -> None:
    scenario = Scenario("naive", "", naive, made, ("a.tar",), maintains=True)
    monkeypatch.setitem(SCENARIOS, "naive", scenario)
    there = stage(tmp_path)
    points = [p for p in find(scenario, there.prepare(scenario)) if "write" in p.strike.name]
    results = [result for point in points for result in there.attempt(point)]
    wrong = {text for result in results for text in result.wrong}
    assert any("other bytes than the origin" in text for text in wrong), wrong
    assert any("next process" in text for text in wrong), wrong
    assert locking._NODE_DIRECTORIES[0] == "/dev/shm"  # an attempt leaves nothing behind


def _torn(place: Place) -> None:
    [entry] = place.root.glob("v1/objects/*/*/*")
    data = entry / "a.tar"
    data.chmod(0o600)
    with open(data, "r+b") as file:
        file.write(b"\0" * 10)
    data.chmod(0o400)


def _writable(place: Place) -> None:
    [data] = place.root.glob("v1/objects/*/*/*/a.tar")
    data.chmod(0o600)


def _no_sidecar(place: Place) -> None:
    [entry] = place.root.glob("v1/objects/*/*/*")
    (entry / "meta.json").unlink()


def _no_tag(place: Place) -> None:
    (place.root / "CACHEDIR.TAG").unlink()


def _progress(place: Place) -> None:
    [entry] = place.root.glob("v1/objects/*/*/*")
    (entry / "progress").touch()


def _temporary_in_entry(place: Place) -> None:
    [entry] = place.root.glob("v1/objects/*/*/*")
    (entry / f".meta.json.{random_token()}").touch()


def _stray_at_the_top(place: Place) -> None:
    (place.root / f".manifest.json.{random_token()}").touch()


def _stray_in_locks(place: Place) -> None:
    (place.root / "v1" / "locks" / "x.tmp").touch()


def _no_session(place: Place) -> None:
    (place.root / "v1" / "sessions" / "somebody").touch()


SEEN = {
    _torn: "other bytes than the origin",
    _writable: "can be written",
    _no_sidecar: "is not complete",
    _no_tag: "no CACHEDIR.TAG",
    _progress: "progress",
    _temporary_in_entry: "left by the sweep (last): v1/objects",
    _stray_at_the_top: "left by the sweep (last): .manifest",
    _stray_in_locks: "left by the sweep (last): v1/locks/x.tmp",
    _no_session: "left by the sweep (last): v1/sessions/somebody",
}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    there = stage(tmp_path)
    found = there.place(SCENARIOS["hit"], tmp_path / "cache")
    having("a.tar")(found)
    return found


@pytest.mark.parametrize("sweep_first", [True, False])
def test_a_sound_cache_has_nothing_wrong(place: Place, sweep_first: bool) -> None:
    for by_command in (True, False):
        judge = Judge(place, SCENARIOS["hit"], by_command)
        assert judge.verdict(sweep_first=sweep_first) == []


@pytest.mark.parametrize("plant", SEEN, ids=lambda plant: plant.__name__)
def test_what_is_wrong_is_seen(place: Place, plant: Callable[[Place], None]) -> None:
    plant(place)
    wrong = Judge(place, SCENARIOS["hit"]).verdict(sweep_first=False)
    assert any(SEEN[plant] in text for text in wrong), wrong


def test_leftovers_are_seen_and_swept(place: Place) -> None:
    partial = begin(Layout(place.root / "v1"), metadata_for(place.url("a.tar"), b"x"))
    partial.close()
    left = {Path(name).parts[:2] for name in strays(place.root)}
    assert left == {("v1", "partial"), ("v1", "sessions")}  # the map of a job that has ended
    assert Judge(place, SCENARIOS["hit"]).verdict(sweep_first=True) == []
    assert list(strays(place.root)) == []


def test_a_process_that_waits_is_seen(place: Place) -> None:
    shutil.rmtree(place.root / "v1" / "objects")
    layout = Layout(place.root / "v1")
    lock = KeyLock(layout.key_lock(place.key("a.tar")))
    assert lock.try_acquire(Holder.this_process(rank=None, job=None, now=1.0))
    timer = threading.Timer(0.5, lock.release)
    timer.start()
    try:
        wrong = Judge(place, SCENARIOS["hit"]).verdict(sweep_first=False)
    finally:
        timer.join()
    assert any("had to wait" in text for text in wrong), wrong


def test_what_was_damaged_before_must_be_mended_in_the_end(place: Place) -> None:
    [entry] = place.root.glob("v1/objects/*/*/*")
    (entry / "meta.json").unlink()
    planted = frozenset(inspect(place))
    assert len(planted) == 1
    judge = Judge(place, SCENARIOS["hit"], planted=planted)
    idle = Judge(place, dataclasses.replace(SCENARIOS["hit"], reads=()), planted=planted)
    assert any("is not complete" in text for text in idle.verdict(sweep_first=True))
    assert judge.verdict(sweep_first=True) == []


def test_a_run_that_warns_twice_or_raises_is_wrong() -> None:
    said = {"said": ["%s: %s | full", "%s: %s | full", "other | x"], "raised": None}
    assert _behaviour(Run(answer=said)) == ["it warned 2 times: %s: %s | full"]
    assert _behaviour(Run(answer={**said, "said": ["a", "b"]})) == []
    assert _behaviour(Run(error="Traceback"))[0].startswith("it raised")
    assert _behaviour(Run(hung=True)) == ["it hangs"]
    assert _behaviour(Run()) == ["it died"]
