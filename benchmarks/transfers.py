"""Objects from S3 to files, shardcache against its peers: ``python -m benchmarks.transfers``.

    workload x target x destination -> every peer once per round, in rotated order -> medians

A round runs every peer once, each in a fresh process; the next round begins with another one,
so a drift of the machine and a place in the order hit all alike. The bytes of a peer's first
run are compared with the objects. The targets' files lie in memory, and so does the RAM disk
that is written to: its pages are touched before each run, since the first touch of
memory costs more than all copying after it.

``--only`` takes names of workloads, targets, destinations and peers, each restricting its
own kind: ``--only shards,s3-like,shardcache,s5cmd``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.buckets import PREFIX, WORKLOADS, Workload, write_bucket
from benchmarks.peers import PEERS, WARM, Peer, run, versions
from benchmarks.results import (
    Row,
    arguments_of,
    machine,
    median,
    picked,
    save,
    say,
    table,
    touched_pages,
)
from benchmarks.servers.links import TARGETS, Target, UnavailableError, target

__all__ = ["main", "report"]

#: Where to: the RAM disk shows the client alone, the disk shows what a user gets.
DESTINATIONS = ("ram", "disk")
#: The disk is compared on these, unless ``--only`` names it: behind a slow link it is not what
#: limits.
_ON_DISK = ("nginx",)
#: Where each request waits for its answer, so many objects of a kind are enough to see how many
#: requests a client has in the air; more would only take hours.
_FAR = "s3-like"
_MOST_FAR = 400


def measure(
    source: Target,
    workload: Workload,
    peers: Sequence[Peer],
    directory: Path,
    *,
    repeats: int,
    objects: Path,
) -> list[Row]:
    """Every peer ``repeats`` times on one target; a row for each peer.

    Args:
        source: a running target.
        workload: what is fetched.
        peers: contestants.
        directory: where to; what a run brings is removed behind it.
        repeats: rounds.
        objects: directory of buckets to compare with.
    """
    rows: dict[str, Row] = {
        peer.name: {"peer": peer.name, "title": peer.title, "runs": []} for peer in peers
    }
    for number in range(repeats):
        turn = number % len(peers)
        for peer in [*peers[turn:], *peers[:turn]]:
            row = rows[peer.name]
            if row.get("failure"):
                continue  # once is enough to know
            with touched_pages(directory, workload.total):
                pass
            done = run(
                peer,
                source,
                workload,
                directory / "fetched",
                source=None if row["runs"] else objects,
            )
            if done.failure:
                row["failure"] = done.failure
                say(f"  {peer.title}: {done.failure}")
                continue
            row["runs"].append(done.record())
            rate = workload.total / done.seconds / 1e6
            say(f"  {peer.title}: {rate:.0f} MB/s")
    return list(rows.values())


def _cells(row: Row, total: int, reference: float | None) -> list[str]:
    if not row["runs"]:
        return [row["title"], str(row.get("failure", "not run")).partition("\n")[0], *4 * [""]]
    seconds, cpu, rss, startup, first = (
        median(run[name] for run in row["runs"])
        for name in (
            *("seconds", "cpu_seconds", "peak_rss_bytes"),
            *("startup_seconds", "first_object_seconds"),
        )
    )
    figures = f"{total / seconds / 1e6:.0f} / {cpu / total * 1e9:.2f} / {rss / 2**20:.0f}"
    spread = [total / run["seconds"] / 1e6 for run in row["runs"]]
    if len(row["runs"]) and row.get("failure"):
        figures += f" ({row['failure']})"
    return [
        row["title"],
        figures,
        f"{min(spread):.0f} - {max(spread):.0f}",
        f"{reference / seconds:.2f}" if reference else "",
        f"{startup:.2f}" if startup else "in the time",
        f"{first:.2f}" if startup else "in the time",
    ]


def report(facts: Row) -> str:
    """The tables of a result, in Markdown."""
    parts = []
    for group in facts["groups"]:
        heads = ["", "MB/s / CPU s per GB / peak RSS MiB", "MB/s, all runs", "x shardcache"]
        heads += ["start-up s", "first object s"]
        place = "RAM disk" if group["destination"] == "ram" else "disk"
        title = f"#### {group['workload_title']}, {group['target_title']}, to {place}"
        if group.get("unavailable"):
            parts.append(f"{title}\n\nNot run: {group['unavailable']}")
            continue
        ours = next((r for r in group["rows"] if r["peer"] == "shardcache" and r["runs"]), None)
        reference = median(run["seconds"] for run in ours["runs"]) if ours else None
        rows = [_cells(row, group["bytes"], reference) for row in group["rows"]]
        parts.append(f"{title}\n\n{table(heads, rows)}")
    return "\n\n".join(parts)


def _one_target(
    name: str,
    workloads: list[Workload],
    objects: Path,
    places: dict[str, Path],
    peers: Sequence[Peer],
    repeats: int,
) -> list[Row]:
    title, groups = TARGETS[name][0], list[Row]()
    if name == _FAR:
        workloads = [replace(each, count=min(each.count, _MOST_FAR)) for each in workloads]
    try:
        with target(name, objects, objects.parent) as running:
            for workload in workloads:
                for destination, directory in places.items():
                    say(f"{workload.title}, {title}, to {destination}")
                    rows = measure(
                        running, workload, peers, directory, repeats=repeats, objects=objects
                    )
                    groups.append({**_about(name, workload, destination), "rows": rows})
    except UnavailableError as exn:
        say(f"{title}: not run: {exn}")
        why = {"rows": [], "unavailable": str(exn)}
        groups = [{**_about(name, workload, "ram"), **why} for workload in workloads]
    return groups


def _about(name: str, workload: Workload, destination: str) -> Row:
    return {
        "target": name,
        "target_title": TARGETS[name][0],
        "workload": workload.name,
        "workload_title": workload.title,
        "destination": destination,
        "bytes": workload.total,
        "objects": workload.count,
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"), help="a RAM disk")
    parser.add_argument("--disk", type=Path, help="a disk (default: the temporary directory)")
    arguments = arguments_of(parser)
    kinds = WORKLOADS, TARGETS, DESTINATIONS, PEERS
    names, targets, destinations, peers = picked(arguments.only, *kinds)
    workloads = [WORKLOADS[name][arguments.quick] for name in names]
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, dir=arguments.ram) as ram,
        tempfile.TemporaryDirectory(prefix=PREFIX, dir=arguments.disk) as disk,
    ):
        places = {"ram": Path(ram), "disk": Path(disk)}
        facts: Row = {
            "machine": machine(**places),
            "versions": versions(),
            "repeats": arguments.repeats,
            "quick": arguments.quick,
            "groups": [],
        }
        objects = places["ram"] / "objects"
        write_bucket(objects, [*workloads, WARM])
        for name in targets:
            on_disk = name in _ON_DISK or "disk" in arguments.only
            chosen = [each for each in destinations if each != "disk" or on_disk]
            where = {each: places[each] for each in chosen}
            facts["groups"] += _one_target(
                name, workloads, objects, where, [PEERS[peer] for peer in peers], arguments.repeats
            )
            save(arguments.json, facts)
    print(report(facts))


if __name__ == "__main__":
    main()
