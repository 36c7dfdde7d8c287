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
import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.buckets import PREFIX, WORKLOADS, Workload, write_bucket
from benchmarks.peers import PEERS, WARM, Peer, run, versions
from benchmarks.results import Row, end_in_order, machine, median, save, say, table, touched_pages
from benchmarks.servers import network
from benchmarks.servers.links import TARGETS, Target, UnavailableError, target

__all__ = ["Choice", "choose", "main", "measure", "report"]

#: Where to: the RAM disk shows the client alone, the disk shows what a user gets.
DESTINATIONS = ("ram", "disk")
#: The disk is compared on these, unless ``--only`` names it: behind a slow link it is not what
#: limits.
_ON_DISK = ("nginx",)
#: Where each request waits for its answer, so many objects of a kind are enough to see how many
#: requests a client has in the air; more would only take hours.
_FAR = ("s3-like", "rtt")
_MOST_FAR = 400


@dataclass(frozen=True, slots=True)
class Choice:
    """What to run.

    Attributes:
        workloads: of what.
        targets: from where.
        destinations: where to.
        peers: who.
        on_disk: targets that the disk is measured on.
    """

    workloads: Sequence[Workload]
    targets: Sequence[str]
    destinations: Sequence[str]
    peers: Sequence[Peer]
    on_disk: Sequence[str]

    def places(self, name: str) -> list[str]:
        """The destinations that are measured on a target."""
        return [d for d in self.destinations if d != "disk" or name in self.on_disk]

    def workloads_from(self, name: str) -> list[Workload]:
        """The workloads as they are measured on a target."""
        most = _MOST_FAR if name in _FAR else None
        return [replace(w, count=min(w.count, most or w.count)) for w in self.workloads]


def choose(only: Sequence[str] = (), *, quick: bool = False) -> Choice:
    """What ``--only`` and ``--quick`` ask for.

    Raises:
        SystemExit: a name that is none of ours.
    """
    kinds = (tuple(WORKLOADS), tuple(TARGETS), DESTINATIONS, tuple(PEERS))
    unknown = sorted(set(only) - {name for kind in kinds for name in kind})
    if unknown:
        raise SystemExit(f"--only: unknown {', '.join(unknown)}. Known: {kinds}")
    picked = [[name for name in kind if name in only] or list(kind) for kind in kinds]
    workloads = [WORKLOADS[name][quick] for name in picked[0]]
    on_disk = picked[1] if "disk" in only else _ON_DISK
    return Choice(workloads, picked[1], picked[2], [PEERS[name] for name in picked[3]], on_disk)


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
        peer.name: {"peer": peer.name, "title": peer.title, "bound": peer.bound, "runs": []}
        for peer in peers
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


def _places(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Path]:
    """A directory of our own on each destination; the first also holds the objects."""

    def own(parent: Path | None) -> Path:
        made = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent)
        return Path(stack.enter_context(made))

    return {"ram": own(arguments.ram), "disk": own(arguments.disk)}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, help="rounds (default 3, with --quick 1)")
    parser.add_argument("--quick", action="store_true", help="small objects, to see that it runs")
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"), help="a RAM disk")
    parser.add_argument("--disk", type=Path, help="a disk (default: the temporary directory)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    arguments = parser.parse_args()
    end_in_order()
    choice = choose([name for name in arguments.only.split(",") if name], quick=arguments.quick)
    repeats = arguments.repeats or (1 if arguments.quick else 3)
    network_state = network.enter()
    with contextlib.ExitStack() as stack:
        places = _places(arguments, stack)
        facts: Row = {
            "machine": machine(*places.values()),
            "network": network_state,
            "versions": versions(),
            "repeats": repeats,
            "quick": arguments.quick,
            "groups": [],
        }
        facts["machine"]["filesystems"] = {
            name: facts["machine"]["filesystems"][str(path)] for name, path in places.items()
        }
        objects = places["ram"] / "objects"
        write_bucket(objects, [*choice.workloads, WARM])
        for name in choice.targets:
            _one_target(name, choice, places, objects, repeats, facts)
            save(arguments.json, facts)
    print(report(facts))


def _one_target(
    name: str,
    choice: Choice,
    places: dict[str, Path],
    objects: Path,
    repeats: int,
    facts: Row,
) -> None:
    title = TARGETS[name][0]
    try:
        with target(name, objects, places["ram"]) as running:
            for workload in choice.workloads_from(name):
                for destination in choice.places(name):
                    say(f"{workload.title}, {title}, to {destination}")
                    rows = measure(
                        running,
                        workload,
                        choice.peers,
                        places[destination],
                        repeats=repeats,
                        objects=objects,
                    )
                    group = _group(name, workload, destination)
                    facts["groups"].append({**group, "rows": rows})
    except UnavailableError as exn:
        say(f"{title}: not run: {exn}")
        for workload in choice.workloads_from(name):
            group = _group(name, workload, "ram")
            facts["groups"].append({**group, "rows": [], "unavailable": str(exn)})


def _group(name: str, workload: Workload, destination: str) -> Row:
    return {
        "target": name,
        "target_title": TARGETS[name][0],
        "workload": workload.name,
        "workload_title": workload.title,
        "destination": destination,
        "bytes": workload.total,
        "objects": workload.count,
    }


if __name__ == "__main__":
    main()
