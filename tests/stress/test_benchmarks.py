"""The benchmarks run, bring right bytes, and say so when a peer does not."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import cleaning, epochs, report, transfers
from benchmarks.buckets import BUCKET, WORKLOADS, Workload, write_bucket
from benchmarks.epochwork import WAYS
from benchmarks.libraries import ADAPTERS
from benchmarks.links import TARGETS, Target, link
from benchmarks.peers import PEERS, WARM, Peer, run
from benchmarks.plots import Bar, Panel, chart
from benchmarks.results import save
from shardcache.layout import Layout
from shardcache.store.scanning import scan
from tests.support.storetools import wait_until

ROOT = Path(__file__).resolve().parents[2]
SMALL = Workload("small", 5, 100 << 10)
PARTS = Workload("parts", 1, (17 << 20) + 512)  # more than a part of the raw bound
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("objects")
    write_bucket(home, [SMALL, PARTS, WARM])
    return home


@pytest.fixture(scope="module")
def fast(objects: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with link(objects, tmp_path_factory.mktemp("link")) as running:
        yield running


def bench(module: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run a benchmark; its figures and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--quick", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    (place,) = (Path(b) for a, b in itertools.pairwise(arguments) if a == "--json")
    return json.loads(place.read_text()), done.stdout


def well_formed(markdown: str) -> int:
    """The number of tables, each with as many cells in all of its rows."""
    tables = re.findall(r"(?:^\|.*\|\n?)+", markdown, re.MULTILINE)
    for text in tables:
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in text.strip().splitlines()}
        assert len(cells) == 1, text
    return len(tables)


@pytest.mark.parametrize("name", ["raw-4", "raw-32", "shardcache", "shardcache-command"])
@pytest.mark.parametrize("workload", [SMALL, PARTS], ids=lambda workload: workload.name)
def test_a_peer_brings_the_objects_and_leaves_nothing(
    fast: Target, objects: Path, tmp_path: Path, name: str, workload: Workload
) -> None:
    done = run(PEERS[name], fast, workload, tmp_path / "fetched", source=objects)
    assert done.failure is None
    assert done.seconds > 0
    assert done.peak_rss_bytes > 5 << 20
    assert (done.startup_seconds > 0) == (PEERS[name].command is None)
    assert list(tmp_path.iterdir()) == []


def test_wrong_bytes_are_found(fast: Target, objects: Path, tmp_path: Path) -> None:
    write_bucket(tmp_path / "other", [SMALL])
    other = tmp_path / "other" / BUCKET / SMALL.keys[2]
    data = bytearray(other.read_bytes())
    data[-2000] ^= 1
    other.write_bytes(data)
    done = run(PEERS["raw-4"], fast, SMALL, tmp_path / "f", source=tmp_path / "other")
    assert done.failure == f"failed: {SMALL.keys[2]} has other bytes than the object"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("pass", "small/00000.tar did not come whole"),
        ("raise SystemExit('no such bucket')", "no such bucket"),
        ("import time; time.sleep(600)", "not done after 2 s"),
    ],
)
def test_a_peer_that_fails_is_reported_with_the_reason(
    fast: Target, tmp_path: Path, code: str, said: str
) -> None:
    peer = Peer("broken", "Broken", command=lambda job: [sys.executable, "-c", code])
    done = run(peer, fast, SMALL, tmp_path / "f", timeout=2)
    assert done.failure == f"failed: {said}"
    rows = transfers.measure(
        fast,
        SMALL,
        [replace(peer, command=lambda job: ["false"])],
        tmp_path,
        repeats=2,
        objects=tmp_path,
    )
    assert rows[0]["failure"] == "failed: 1"
    assert rows[0]["runs"] == []


def test_a_peer_that_is_not_installed_is_reported_as_missing(fast: Target, tmp_path: Path) -> None:
    peer = Peer("absent", "Absent", "no-such-distribution-at-all")
    done = run(peer, fast, SMALL, tmp_path / "f")
    assert done.failure == "missing: no-such-distribution-at-all is not installed"
    program = Peer("absent", "Absent", program="no-such-program")
    assert run(program, fast, SMALL, tmp_path / "f").failure is not None


def test_costs_hold_the_memory_and_time_of_descendants(tmp_path: Path) -> None:
    inner = "data = bytearray(200 << 20); sum(data[:30_000_000]); raise SystemExit(3)"
    code = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {inner!r}]))"
    result = tmp_path / "costs.json"
    costs = [sys.executable, "-I", "-S", str(ROOT / "benchmarks" / "costs.py")]
    command = [*costs, str(result), "60", str(tmp_path / "log"), "--", sys.executable, "-c", code]
    subprocess.run(command, check=True)
    found = json.loads(result.read_text())
    assert (found["exit_code"], found["timed_out"]) == (3, False)
    assert 200 << 20 < found["peak_rss_bytes"] < 300 << 20
    assert found["cpu_seconds"] > 0
    assert found["wall_seconds"] > 0


def test_the_memory_of_who_measures_is_not_the_peers(fast: Target, tmp_path: Path) -> None:
    """A started program inherits the peak of whoever starts it; this process has a large one."""
    ballast = bytearray(300 << 20)
    peer = Peer("tiny", "Tiny", command=lambda job: ["sh", "-c", "exit 1"])
    assert len(ballast) > 0
    assert run(peer, fast, SMALL, tmp_path / "f").failure == "failed: 1"
    done = run(PEERS["raw-4"], fast, SMALL, tmp_path / "f")
    assert done.peak_rss_bytes < 150 << 20


def test_a_run_that_is_ended_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    places = ["--ram", str(tmp_path / "ram"), "--disk", str(tmp_path / "disk")]
    for place in ("ram", "disk"):
        (tmp_path / place).mkdir()
    command = [
        sys.executable,
        "-m",
        "benchmarks.transfers",
        "--only=small,s3-like,shardcache-fetch",
    ]
    process = subprocess.Popen([*command, *places], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process.stderr:
        assert "S3-like link" in process.stderr.readline()
        # 2,000 objects, one by one, of 30 ms each: it is in the middle of them.
        wait_until(lambda: list(tmp_path.glob("ram/*/fetched/v1/objects/*/*/*")))
        process.terminate()
        process.stderr.read()  # ends when every process that has it has ended
    assert process.wait() == 143
    assert [*tmp_path.glob("*/*")] == []


def test_rounds_begin_with_another_peer_each(
    fast: Target, objects: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(peer: Peer, *args: Any, **kw: Any) -> Any:
        order.append(peer.name)
        return run(peer, *args, **kw)

    monkeypatch.setattr(transfers, "run", noted)
    peers = [PEERS["raw-4"], PEERS["raw-32"]]
    rows = transfers.measure(fast, SMALL, peers, tmp_path, repeats=3, objects=objects)
    assert order == ["raw-4", "raw-32", "raw-32", "raw-4", "raw-4", "raw-32"]
    assert [len(row["runs"]) for row in rows] == [3, 3]


def test_only_restricts_each_kind_by_itself() -> None:
    choice = transfers.choose(["small", "s3-like", "shardcache", "raw-4"], quick=True)
    assert [workload.title for workload in choice.workloads] == ["20 x 100 KiB"]
    assert choice.targets == ["s3-like"]
    assert [peer.name for peer in choice.peers] == ["shardcache", "raw-4"]
    assert choice.places("s3-like") == ["ram"]
    assert choice.places("nginx") == ["ram", "disk"]
    assert transfers.choose(["disk"]).places("s3-like") == ["disk"]
    everything = transfers.choose()
    assert [workload.title for workload in everything.workloads] == [
        *("1 x 1 GiB", "16 x 64 MiB", "256 x 4 MiB", "2,000 x 100 KiB")
    ]
    assert (everything.targets, len(everything.peers)) == (list(TARGETS), len(PEERS))
    near, far = (everything.workloads_from(name) for name in ("nginx", "rtt"))
    assert near == everything.workloads
    assert [workload.title for workload in far] == [
        *("1 x 1 GiB", "16 x 64 MiB", "256 x 4 MiB", "400 x 100 KiB")
    ]
    with pytest.raises(SystemExit, match="shardcash"):
        transfers.choose(["shardcash"])


def test_every_library_has_an_adapter_and_every_adapter_a_peer() -> None:
    assert set(ADAPTERS) == {peer.name for peer in PEERS.values() if peer.command is None}


def test_the_bench_extra_installs_every_peer() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = extras["optional-dependencies"]
    named = [*extras["dependencies"], *extra["bench"], *extra["checksums"]]
    installed = {re.match(r"[\w-]+", line)[0] for line in named}  # type: ignore[index]
    wanted = {peer.package for peer in PEERS.values()} - {"", "boto3"}
    assert wanted <= installed
    assert "boto3==" in (ROOT / "Makefile").read_text()  # for the reason given there


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], str]]:
    """A quick run of each benchmark."""
    home = tmp_path_factory.mktemp("bench")
    ram, disk = home / "ram", home / "disk"
    ram.mkdir()
    disk.mkdir()
    places = ["--ram", str(ram), "--disk", str(disk)]
    only = "--only=small,large,s3-like,shardcache,raw-4"
    runs = {
        "transfers": [only, *places],
        "hits": ["--dir", str(disk)],
        "cleaning": ["--disk", str(disk)],
    }
    if shutil.which("curl"):
        runs["epochs"] = ["--only=fast", *places]
    found = {
        name: bench(name, *arguments, "--json", str(home / "results" / f"{name}.json"))
        for name, arguments in runs.items()
    }
    assert [*ram.iterdir(), *disk.iterdir()] == []
    return {**found, "home": ({}, str(home))}


def test_a_quick_run_of_transfers_has_a_figure_of_every_peer(figures: dict) -> None:
    facts, printed = figures["transfers"]
    groups = [(group["workload"], group["destination"]) for group in facts["groups"]]
    # Behind a slow link the disk limits nobody, so it is left out unless it is asked for.
    assert groups == [("large", "ram"), ("small", "ram")]
    for group in facts["groups"]:
        assert group["bytes"] == WORKLOADS[group["workload"]][1].total
        for row in group["rows"]:
            assert row.get("failure") is None
            # Neither can be faster than 30 ms and the rate of all connections allow.
            assert all(one["seconds"] >= 0.03 for one in row["runs"])
    assert well_formed(printed) == 2
    assert printed.strip() == transfers.report(facts)


@needs_curl
def test_a_quick_epoch_counts_what_every_way_costs(figures: dict) -> None:
    facts, printed = figures["epochs"]
    (group,) = facts["groups"]
    shards, crew = epochs.QUICK.shards, epochs.QUICK.processes
    fetches = {row["way"]: row["runs"][0]["object_fetches"] for row in group["epochs"]}
    assert set(fetches) == set(WAYS)
    # Two epochs: streamed twice, or fetched once.
    assert fetches["pipe-curl"] == fetches["s3fs-open"] == 2 * shards
    assert fetches["shardcache"] == fetches["wds-filecache"] == shards
    for row in group["epochs"]:
        for epoch in ("cold", "warm"):
            found = row["runs"][0][epoch]
            assert found["bytes"] == shards * epochs.QUICK.samples * epochs.SAMPLE_BYTES
            assert 0 < found["first"] <= found["seconds"]
    shared = {
        (row["way"], row["processes"]): row["runs"][0]["object_fetches"] for row in group["sharing"]
    }
    assert shared["shardcache", 1] == shared["shardcache", crew] == 1
    assert shared["pipe-curl", crew] == crew
    (prewarmed,) = group["prewarm"]
    assert prewarmed["runs"][0]["object_fetches"] == epochs.QUICK.prewarmed
    assert well_formed(printed) == 3


def test_a_quick_cleaning_removes_what_it_should(figures: dict) -> None:
    facts, printed = figures["cleaning"]
    removed = {row["task"]: row["runs"][0]["removed"] for row in facts["rows"]}
    assert removed == {"nothing": 0, "dry-run": 20, "tenth": 20, "webdataset": 20}
    assert well_formed(printed) == 1


def test_entries_made_for_cleaning_are_entries(tmp_path: Path) -> None:
    cleaning.make_entries(tmp_path / "cache", 7)
    entries = sorted(scan(Layout.of_root(tmp_path / "cache")), key=lambda entry: entry.used)
    assert [entry.data.name for entry in entries] == [f"{n:07d}.tar" for n in range(7)]
    assert {entry.size for entry in entries} == {cleaning.SIZE}


def test_a_hit_is_compared_with_a_plain_open_and_the_filecache(figures: dict) -> None:
    facts, printed = figures["hits"]
    names = list(facts["microseconds"])
    assert names[0] == "plain open"
    assert {"shardcache", "WebDataset FileCache"} <= set(names)
    assert well_formed(printed) == 1


def test_the_page_holds_every_table_and_chart(figures: dict, tmp_path: Path) -> None:
    results = {name: facts for name, (facts, _) in figures.items() if facts}
    page = report.render(results, tmp_path).read_text()
    assert page.startswith("<!-- Generated by `make bench` (python -m benchmarks.report).")
    assert "These figures mean nothing" in page
    for name, (facts, printed) in figures.items():
        if facts:
            assert printed.strip() in page, name
    images = re.findall(r"!\[[^]]*\]\(([^)]+)\)", page)
    assert sorted(images) == sorted(path.name for path in tmp_path.glob("*.svg"))
    assert "transfers-s3-like-ram.svg" in images
    for image in images:
        drawing = ElementTree.parse(tmp_path / image).getroot()
        assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
        style = drawing.find("{http://www.w3.org/2000/svg}style")
        assert style is not None and "prefers-color-scheme: dark" in (style.text or "")
    assert results["transfers"]["machine"]["kernel"] in page
    assert f"| shardcache | {results['transfers']['versions']['shardcache']} |" in page
    well_formed(page)


def test_the_page_is_rendered_from_the_figures_alone(figures: dict, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.report", "--render", "--docs", str(tmp_path)]
    home = Path(figures["home"][1])
    done = subprocess.run(
        [*command, "--results", str(home / "results")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "benchmarks.md").is_file()


def test_a_target_that_cannot_run_is_named_on_the_page(figures: dict, tmp_path: Path) -> None:
    facts = json.loads(json.dumps(figures["transfers"][0]))
    facts["groups"].append(
        {**facts["groups"][0], "target": "nginx", "rows": [], "unavailable": "no nginx | here"}
    )
    page = report.render({"transfers": facts}, tmp_path).read_text()
    assert "Not run: no nginx | here" in page
    assert "Not run. `python -m benchmarks.epochs` runs it." in page


def test_bars_are_as_long_as_their_figures_and_text_is_escaped() -> None:
    bars = [Bar("a < b & c", 100.0, "ours"), Bar("half", 50.0), Bar("none", None)]
    drawing = ElementTree.fromstring(chart('"quoted" & <odd>', [Panel("p < q", "MB/s", bars)]))
    name = "{http://www.w3.org/2000/svg}"
    widths = [
        float(rect.get("width", ""))
        for rect in drawing.iter(f"{name}rect")
        if rect.get("height") == "16"
    ]
    assert len(widths) == 2
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2)
    texts = [text.text for text in drawing.iter(f"{name}text")]
    assert {'"quoted" & <odd>', "p < q (MB/s)", "a < b & c", "no figure", "100", "50"} <= {*texts}
    assert drawing.get("aria-label") == '"quoted" & <odd>'


def step(groups: list[str], date: str = "2026-11-22") -> dict:
    return {"machine": {"date": date, "load": 0.0}, "groups": [{"target": g} for g in groups]}


def test_a_page_is_put_together_from_its_steps(tmp_path: Path) -> None:
    save(tmp_path / "transfers-rtt.json", step(["rtt"], "2026-11-23"))
    save(tmp_path / "transfers-nginx.json", step(["nginx"]))
    save(tmp_path / "hits.json", step([]))
    (tmp_path / "epochs-fast.part").write_text("{}")
    found = report._results(tmp_path)
    assert sorted(found) == ["hits", "transfers"]
    assert [group["target"] for group in found["transfers"]["groups"]] == ["nginx", "rtt"]
    assert found["transfers"]["machine"]["date"] == "2026-11-22, 2026-11-23"


@pytest.mark.parametrize(
    ("options", "ran"),
    [
        (["--only", "epochs"], ["epochs-fast", "epochs-s3-like"]),
        (["--only", "epochs,transfers-rtt", "--missing"], ["epochs-s3-like"]),
        (["--only", "hits"], ["hits"]),
        (["--render"], []),
    ],
)
def test_a_run_takes_the_steps_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], ran: list[str]
) -> None:
    for name in ("epochs-fast", "transfers-rtt"):
        save(tmp_path / f"{name}.json", step(["old"]))
    commands: list[list[str]] = []

    def run(command: list[str]) -> int:
        commands.append(command)
        part = Path(command[command.index("--json") + 1])
        save(part, step(["new"]))
        return int(part.stem == "epochs-s3-like")

    monkeypatch.setattr(report, "_run", run)
    monkeypatch.setattr(report, "render", lambda results, folder: folder)
    monkeypatch.setattr(sys, "argv", ["report", "--results", str(tmp_path), *options])
    assert report.main() == ("epochs-s3-like" in ran)
    assert [Path(c[c.index("--json") + 1]).stem for c in commands] == ran
    for command, name in zip(commands, ran, strict=True):
        part = name.partition("-")[2]
        assert (command[command.index("--only") + 1] == part) if part else "--only" not in command
    assert not list(tmp_path.glob("*.part"))
    assert (tmp_path / "epochs-s3-like.json").exists() is False
    assert (tmp_path / "hits.json").exists() == ("hits" in ran)


def test_make_bench_writes_the_page() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "bench"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().splitlines()[-1].endswith("bin/python -m benchmarks.report")


def test_epochs_are_chosen_by_link_way_and_part() -> None:
    links, ways, parts = epochs.choose(["fast", "shardcache", "epochs"])
    assert (links, ways, parts) == (["fast"], ["shardcache"], ["epochs"])
    assert epochs.choose([]) == (
        ["fast", "s3-like"],
        list(WAYS),
        ["epochs", "sharing", "prewarm"],
    )
    with pytest.raises(SystemExit, match="unknown nowhere"):
        epochs.choose(["fast", "nowhere"])
