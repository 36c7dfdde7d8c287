"""``shardcache prewarm`` and ``shardcache path``: the commands that fetch."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, TextIO

import click

from shardcache.cli import main as cli
from shardcache.cli.main import ExitCode, Invocation, command, flag, number_option
from shardcache.cli.output import Console, counted, fields_of, reason
from shardcache.cli.progress import Position, Positions, PrewarmProgress, display
from shardcache.config import absolute
from shardcache.download.pool import parse_rate
from shardcache.errors import ConfigError, ShardCacheError, ShardNotFoundError
from shardcache.origins.listing import SHARD, is_pattern
from shardcache.prewarm.helpers import most_processes
from shardcache.prewarm.plan import expand, own_share
from shardcache.prewarm.run import JOBS, prewarm
from shardcache.results import Event, Outcome, Planned, PrewarmReport, Stopped
from shardcache.units import Limit, format_duration, format_rate

if TYPE_CHECKING:
    from shardcache.prewarm.ray import NodeReport

#: Absent shards that are tried as prefixes.
_TRIED = 5
RATE = cli.Parsed("RATE", parse_rate)


@command("prewarm")
@cli.dry_run_option
@click.option("--limit-rate", type=RATE, help="Most bytes per second of all connections: 50MB.")
@flag("--best-effort", help="Leave out what does not fit; do not refuse.")
@number_option("--max-failures", help="Accept up to N failed shards, stop at the next.", least=0)
@click.option("--deadline", type=cli.DURATION, help="Stop after this long, such as 5m.")
@click.option("--max-size", type=cli.SIZE, help="What the cache may hold, such as 800GB or 80%.")
@flag("--check", help="Only tell whether all is cached (exit 4 if not).")
@flag("--refresh", help="Ask origins for what is cached; fetch what they replaced.")
@number_option("--node-count", help="So many nodes, where no launcher tells; with --node-rank.")
@number_option("--node-rank", help="Its number, from 0 on, where no launcher tells.", least=0)
@number_option("--ranks-per-node", help="Processes of the training run on each node.  [default: 1]")
@flag("--shard-by-node", help="Only the shards that split_by_node gives this node's ranks.")
@flag("--ray", help="Prewarm every node of the Ray cluster (RAY_ADDRESS, else the one here).")
@number_option(
    "-j", "--jobs", help=f"Most shards at a time.  [default: {JOBS} per process]", most=256
)
@click.option(
    "-f",
    "--file",
    "lists",
    type=click.File(encoding="utf-8"),
    multiple=True,
    metavar="LIST",
    help="Read SPECs from a file, one per line; - is stdin. May be repeated.",
)
@click.argument("specs", nargs=-1, metavar="SPEC...")
def prewarm_command(
    invocation: Invocation,
    specs: tuple[str, ...],
    lists: tuple[TextIO, ...],
    jobs: int | None,
    max_size: Limit | None,
    ray: bool,
    shard_by_node: bool,
    ranks_per_node: int | None,
    node_rank: int | None,
    node_count: int | None,
    **options: Any,
) -> int:
    """Fill the cache before the job, several shards at once.

    A SPEC is a WebDataset shard specification with {braces}, a prefix ending in /
    (every tar file below it), or a name with * or ?. Interrupted, it leaves
    partials behind; the same command goes on where it ended.

    Shards that do not exist do not stop the others. When the first shards of a
    bucket are all refused (credentials, endpoint), the rest of it is not tried.

    With --ray every node prewarms its own cache, with its own configuration and
    credentials. A node that fails or dies is named; the others complete.

    \b
    Examples:
      shardcache prewarm 's3://lab/train-{0000..2047}.tar' -j 16
      shardcache prewarm s3://lab/val/ 's3://lab/test-*.tar' --check
      shardcache prewarm -f shards.txt --deadline 5m --best-effort
      srun --ntasks-per-node=1 shardcache prewarm --shard-by-node 's3://lab/{0000..2047}.tar'
      shardcache prewarm --ray 's3://lab/train-{0000..2047}.tar'
    """
    stated = node_rank is not None or node_count is not None
    if not shard_by_node and (stated or ranks_per_node is not None):
        raise click.UsageError(
            "--ranks-per-node, --node-rank and --node-count go with --shard-by-node."
        )
    if ray and stated:
        raise click.UsageError("With --ray each node is told which one it is.")
    wanted = [*specs, *(spec for file in lists for spec in _read_list(file))]
    if not wanted:
        empty = "There is no shard in the list: one SPEC per line."
        raise click.UsageError(empty if lists else "Which shards? Give a SPEC, or a list with -f.")
    processes = 1 if ray else most_processes()
    options["jobs"] = jobs or JOBS * processes
    ranks = (ranks_per_node or 1) if shard_by_node else None
    if ray:
        return _prewarm_ray(invocation, wanted, options, max_size, ranks)
    share = None if ranks is None else own_share(node_rank, node_count, ranks)
    changes: dict[str, Any] = {} if max_size is None else {"max_size": max_size}
    console, progress = invocation.console, PrewarmProgress()
    looking = options["check"] or options["dry_run"]
    cache = invocation.cache(connections=jobs or 0, **changes)
    with cache, ExitStack() as stack:

        def on_event(event: Event) -> None:
            progress(event)
            if isinstance(event, Planned):
                console.info(str(event.plan))
                if not looking:
                    invocation.graceful = True  # from now on the first signal ends the run
                if not looking and (event.plan.to_fetch or options["refresh"]):
                    stack.enter_context(display(console, progress.positions))

        report = prewarm(
            cache,
            wanted,
            share=share,
            processes=processes,
            on_event=on_event,
            stop=invocation.stop,
            **options,
        )
        stack.close()
        console.object("prewarm", shards=report.results, summary=report)
        if not looking:
            console.info(str(report))
        print_failures(console, report, options["max_failures"])
        # Of a dry run those that are in no listing.
        absent = [
            f"{each.url}/"
            for each in report.results
            if isinstance(each.error, ShardNotFoundError)
            or (each.outcome is Outcome.MISSING and each.size is None)
        ]
        for prefix in [url for url in absent if is_pattern(url) and not SHARD.search(url[:-1])][
            :_TRIED
        ]:
            with suppress(ShardCacheError, OSError):  # the failure itself was printed
                count = len(expand(prefix, cache))
                console.hint(f"  {counted(count, 'shard')} below {prefix} : did you mean that?")
    return _exit_code(report, options)


def _read_list(file: TextIO) -> list[str]:
    try:
        specs = [line.strip() for line in file]
    except UnicodeDecodeError as exn:
        raise ConfigError(f"the list {file.name} cannot be read: it is not UTF-8 text") from exn
    return [spec for spec in specs if spec and not spec.startswith("#")]


def _exit_code(report: PrewarmReport, options: Mapping[str, Any]) -> int:
    best_effort = options["best_effort"]
    if options["check"]:
        return 0 if report.cached == len(report.results) else ExitCode.DAMAGED
    if report.full or (report.missing and report.plan.missing and not best_effort):
        return ExitCode.FULL
    if report.failed > (options["max_failures"] or 0):
        return ExitCode.SOME_FAILED
    return ExitCode.SOME_FAILED if report.not_started and not best_effort else 0


# -- every node of a Ray cluster -----------------------------------------------


def _prewarm_ray(
    invocation: Invocation,
    specs: Sequence[str],
    options: Mapping[str, Any],
    max_size: Limit | None,
    ranks_per_node: int | None,
) -> int:
    from shardcache.prewarm.ray import prewarm_nodes

    console, began = invocation.console, time.monotonic()
    latest: list[NodeReport] = []

    def on_news(news: Sequence[NodeReport]) -> None:
        latest[:] = news

    looking = options["check"] or options["dry_run"]
    invocation.graceful = True
    with display(console, lambda: _positions(latest)):
        nodes = prewarm_nodes(
            specs,
            settings={
                "dir": invocation.dir and absolute(invocation.dir),
                "max_size": None if max_size is None else str(max_size),
            },
            config_file=invocation.config,
            ranks_per_node=ranks_per_node,
            on_news=on_news,
            stop=invocation.stop,
            **options,
        )
    console.info(f"{counted(len(nodes), 'node')}: {', '.join(node.name for node in nodes)}")
    shards, records = list[Any](), dict[str, Any]()
    failures = defaultdict[tuple[str, str], list[str]](list)
    for node in nodes:
        if node.plan is not None:
            console.info(f"{node.name}  {node.plan}")
        if node.error or node.interrupted or not looking:
            console.info(f"{node.name}  {_node_text(node)}")
        if node.error is not None:
            failures["lost" if node.lost else "failed", reason(node.error)].append(node.name)
        for line in _failures(node.report, everything=console.verbosity > 0):
            failures["failed", line].append(node.name)
        code = _exit_code(node.report, options)
        if node.error is not None:
            code = cli.code_of(node.error)
            code = ExitCode.SOME_FAILED if code is ExitCode.FAILED else code
        record = {"number": node.number, "exit_code": code, "lost": node.lost, "error": node.error}
        records[node.name] = {**record, **fields_of(node.report)}
        shards += [{"node": node.name, **fields_of(each)} for each in node.report.results]
    seconds, received = time.monotonic() - began, sum(node.received for node in nodes)
    codes = [record["exit_code"] for record in records.values()]
    done = f"{sum(not code for code in codes):,} of {counted(len(nodes), 'node')}"
    speed = f"{format_duration(seconds)}, {format_rate(received / seconds)}"
    console.info(f"{'Ok on' if looking else 'Warmed'} {done} in {speed}.")
    summary = {"seconds": round(seconds, 6), "received_bytes": received, "nodes": records}
    console.object("prewarm", shards=shards, summary=summary)
    for (word, text), names in failures.items():
        console.message(f"  {word}  ", f"{', '.join(names)}: {text}", "red")
    if any(node.lost or node.interrupted for node in nodes):
        console.hint("What was fetched is kept; run the same command again for what is missing.")
    bad = set(codes) - {0}
    # 2, 4 and 5 are the command's own if they are true of all nodes that are not done.
    return 0 if not bad else bad.pop() if len(bad) == 1 else ExitCode.SOME_FAILED


def _node_text(node: NodeReport) -> str:
    if node.error is None and not node.interrupted:
        return str(node.report)
    word = "lost" if node.lost else "interrupted" if node.interrupted else "failed"
    if node.plan is None:
        return word
    done = len(node.plan.shards) - node.report.not_started
    return f"{word} after {done:,} of {counted(len(node.plan.shards), 'shard')}"


def _positions(nodes: Sequence[NodeReport]) -> Positions:
    """``2/3 nodes done, 20/36 shards``."""
    if not nodes:
        return {"": Position("waiting for Ray")}
    ended = sum(node.ended for node in nodes)
    done = sum(len(node.results) for node in nodes)
    plans = [node.plan for node in nodes if node.plan is not None]
    shards, size = (sum(len(p.shards) for p in plans), sum(p.fetch_bytes for p in plans))
    text = f"{ended:,}/{len(nodes):,} nodes done, {done:,}/{shards:,} shards"
    return {"": Position(text, sum(node.received for node in nodes), size)}


def print_failures(console: Console, report: PrewarmReport, max_failures: int | None) -> None:
    """Print why shards are not cached; on stderr, and also when quiet."""
    for line in _failures(report, everything=console.verbosity > 0):
        console.message("  failed  ", line, "red")
    if report.stopped is None:
        if report.failed and max_failures is None:
            console.hint(f"  To accept that many failures, pass --max-failures {report.failed}.")
    elif report.stopped is Stopped.REQUESTED and report.not_started:
        console.hint("What was fetched is kept; run the same command to go on.")
    elif report.not_started and (console.quiet or console.json):
        shards = counted(report.not_started, "shard")
        console.warning(f"{shards} not done because {report.stopped.why}")


def _failures(report: PrewarmReport, *, everything: bool) -> Iterator[str]:
    """Why shards failed; of many that failed alike only the first, and how many more."""
    alike = defaultdict[str, list[str]](list)
    for result in report.results:
        if result.outcome is Outcome.FAILED and result.error is not None:
            text = reason(result.error)
            line = text if result.url in text else f"{result.url}: {text}"
            alike[text.replace(result.url.partition("://")[2], "")].append(line)
    for lines in alike.values():
        yield from lines if everything else lines[:1]
        if len(lines) > 1 and not everything:
            yield f"{len(lines) - 1:,} more for the same reason; -v names them"


# -- path ----------------------------------------------------------------------


@command("path")
@flag("--fetch", help="Fetch it first if it is not cached.")
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
def path_command(invocation: Invocation, specs: tuple[str, ...], fetch: bool) -> None:
    """Print the local paths of cached shards, one per line, and nothing else.

    A SPEC is as for `ls`, with --fetch as for `prewarm`. Exit code 1 if one is not cached;
    then nothing is printed. The paths are not pinned: another process may evict the shards
    later.

    \b
    Examples:
      shardcache path s3://lab/train-0000.tar
      tar tf "$(shardcache path --fetch s3://lab/train-0000.tar)"
    """
    rows = list[dict[str, Any]]()
    with invocation.cache() as cache:
        shards = map(cache.parse, expand(specs, cache)) if fetch else cache.select(specs)
        for shard in shards:
            found = cache.path(shard.raw)
            if found is None and fetch:
                cache.fetch(shard.raw)
                found = cache.path(shard.raw)
            if found is None:
                advice = "It was evicted again at once." if fetch else "Pass --fetch to fetch it."
                text = f"{shard} is not cached in {cache.dir}. {advice}"
                raise ShardNotFoundError(text, url=str(shard))
            rows.append({"url": str(shard), "path": found})
    invocation.console.object("path", shards=rows)
    for row in rows:
        invocation.console.data(os.fspath(row["path"]))
