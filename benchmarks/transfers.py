"""Download objects from S3 to files, with shardcache and its peers.

``python -m benchmarks.transfers`` measures every workload on every target with every peer. A round
runs each peer once, in a fresh process. The next round begins with another peer, so that a drift of
the machine or a place in the order affects all of them alike. Peers that took twice as long as the
fastest run only once, except shardcache and s5cmd. The bytes of a peer's first run are compared
with the objects.

The objects are in memory, and so is the RAM disk that peers write to. Its pages are touched before
each run, because the first touch of memory costs more than all copies after it.

``--only`` takes names of workloads, targets and peers, and limits each kind that it names: ``--only
shards,s3-like,shardcache,s5cmd``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks import results
from benchmarks.buckets import PREFIX, WORKLOADS, Workload, write_bucket
from benchmarks.peers import PEERS, WARM, Peer, PeerError, run, versions
from benchmarks.results import Row
from benchmarks.servers.links import TARGETS, Target, UnavailableError, target

#: Limit of objects on the target whose responses have a delay. It is enough to see how many
#: requests a client has in flight.
_FAR, _MOST_FAR = "s3-like", 400
#: Peers that run in each round, and times the fastest one's seconds after which others do not.
_ALWAYS, _SLOW = ("shardcache", "s5cmd"), 2
_FIGURES = ("seconds", "cpu_seconds", "peak_rss_bytes")
_STARTS = ("startup_seconds", "first_object_seconds")


def _measure(
    source: Target, workload: Workload, peers: Sequence[Peer], repeats: int, directory: Path
) -> list[Row]:
    """Run every peer in each round, and return a row for each peer.

    The directory has the ``objects``, and gets the files of one run at a time.
    """
    rows: dict[str, Row] = {
        peer.name: {"peer": peer.name, "title": peer.title, "runs": []} for peer in peers
    }
    for number in range(repeats):
        for peer in results.in_turn(peers, number):
            row = rows[peer.name]
            if "failure" in row or _is_slow(row, rows.values()):
                continue
            with results.touched_pages(directory, workload.total):
                pass
            objects = None if row["runs"] else directory / "objects"
            try:
                row["runs"].append(run(peer, source, workload, directory / "files", objects))
            except PeerError as exn:
                row["failure"] = str(exn)
                results.say(f"  {peer.title}: {exn}")
            else:
                rate = workload.total / row["runs"][-1]["seconds"] / 1e6
                results.say(f"  {peer.title}: {rate:.0f} MB/s")
    return list(rows.values())


def _is_slow(row: Row, rows: Iterable[Row]) -> bool:
    """Return whether a peer's first run was so slow that its median is of no interest."""
    if row["peer"].startswith(_ALWAYS):
        return False
    fastest = min((each["runs"][0]["seconds"] for each in rows if each["runs"]), default=0.0)
    return bool(row["runs"]) and row["runs"][0]["seconds"] > _SLOW * fastest


def _groups(
    name: str, workloads: list[Workload], peers: Sequence[Peer], repeats: int, directory: Path
) -> list[Row]:
    """Measure all workloads on one target, and return a group of rows for each workload."""
    if name == _FAR:
        workloads = [replace(each, count=min(each.count, _MOST_FAR)) for each in workloads]
    title, groups = TARGETS[name], []
    try:
        with target(name, directory / "objects", directory) as running:
            for workload in workloads:
                results.say(f"{workload.title}, {title}")
                group: Row = {"target_title": title, "workload_title": workload.title}
                group["rows"] = _measure(running, workload, peers, repeats, directory)
                groups.append({**group, "bytes": workload.total})
    except UnavailableError as exn:
        results.say(f"{title}: not run: {exn}")
        return [{"target_title": title, "unavailable": str(exn)}]
    return groups


def _cell(row: Row, total: int) -> str:
    """Return the figures of a peer for a workload of ``total`` bytes."""
    failure = row.get("failure", "")
    if not row["runs"]:
        return str(failure)
    seconds, cpu, rss = (median(run[name] for run in row["runs"]) for name in _FIGURES)
    figures = f"{total / seconds / 1e6:.0f}, {cpu / total * 1e9:.2f}, {rss / 2**20:.0f}"
    return f"{figures} ({failure})" if failure else figures


def report(facts: Row) -> str:
    """Return the tables of a result in Markdown."""
    rows = next((g["rows"] for g in facts["groups"] if not g.get("unavailable")), [])
    starts = [
        [row["title"], *(f"{median(run[name] for run in row['runs']):.2f}" for name in _STARTS)]
        for row in rows
        if row["runs"] and row["runs"][0].get(_STARTS[0])
    ]
    heads = ["", "start-up s", "first object s"]
    parts = [results.section("Start-up of the libraries, without TLS", heads, starts)]
    for name in dict.fromkeys(group["target_title"] for group in facts["groups"]):
        groups = [group for group in facts["groups"] if group["target_title"] == name]
        text = f"Not run: {groups[0].get('unavailable')}"
        if "unavailable" not in groups[0]:
            peers = zip(*(group["rows"] for group in groups), strict=True)
            lines = [
                [rows[0]["title"], *map(_cell, rows, [group["bytes"] for group in groups])]
                for rows in peers
            ]
            text = results.table(["", *(group["workload_title"] for group in groups)], lines)
        parts.append(f"#### {name}, to RAM disk\n\n{text}")
    return "\n\n".join(parts)


def summary(facts: Row) -> list[str]:
    """Return the main ratios as sentences."""
    speeds: dict[tuple[str, str], dict[str, float]] = {}
    for group in facts["groups"]:
        speeds[group["target_title"], group["workload_title"]] = {
            row["peer"]: group["bytes"] / median(run["seconds"] for run in row["runs"])
            for row in group["rows"]
            if row["runs"]
        }
    far, small = TARGETS[_FAR], WORKLOADS["small"][0].title
    ratios = {
        place: of["shardcache-command"] / of["s5cmd"]
        for place, of in speeds.items()
        if not place[1].endswith("KiB")
    }
    one = ratios.pop((far, WORKLOADS["large"][0].title))
    fast = speeds[TARGETS["nginx"], small]
    curl, obstore = fast["curl"] / fast["shardcache-command"], fast["obstore"] / fast["shardcache"]
    return [
        f"`shardcache prewarm` fetches one object of 1 GiB over that link {one:.1f} times as fast "
        "as s5cmd, because it uses more connections; elsewhere it reaches "
        f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f} times the speed of s5cmd, which "
        "computes no digest.",
        f"For objects of 100 KiB, curl is {curl:.1f} times as fast as `shardcache prewarm`, and in "
        f"a process, obstore {obstore:.1f} times as fast as `Cache.prewarm`: shardcache locks, "
        "checks and publishes each shard.",
    ]


def main() -> None:
    """Run the benchmark."""
    arguments = results.arguments_of(__doc__, repeats=5)
    names, targets, peers = results.picked(arguments.only, WORKLOADS, TARGETS, PEERS)
    workloads = [WORKLOADS[name][arguments.quick] for name in names]
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=arguments.ram) as ram:
        directory = Path(ram)
        facts = results.begun(arguments, ram=directory) | {"versions": versions(), "groups": []}
        write_bucket(directory / "objects", [*workloads, WARM])
        for name in targets:
            chosen = [PEERS[peer] for peer in peers]
            facts["groups"] += _groups(name, workloads, chosen, arguments.repeats, directory)
            results.save(arguments.json, facts)
    print(report(facts))


if __name__ == "__main__":
    main()
