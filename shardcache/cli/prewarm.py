"""``shardcache prewarm``: download shards before a job, on this node or on a Ray cluster."""

from __future__ import annotations

import io
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from shardcache.cli import main as cli
from shardcache.cli.main import ExitCode, Invocation, command, flag, number_option, store_options
from shardcache.cli.output import (
    SKIPPED,
    Console,
    Position,
    Positions,
    display,
    fields_of,
    printable,
    reason,
)
from shardcache.config import Config
from shardcache.download.connections import parse_rate
from shardcache.errors import ShardNotFoundError
from shardcache.origins.aws import with_options
from shardcache.origins.listing import SHARD, is_pattern
from shardcache.prewarm.plan import own_share
from shardcache.prewarm.results import (
    Event,
    Finished,
    Outcome,
    Planned,
    PrewarmReport,
    Started,
    Stopped,
)
from shardcache.prewarm.run import JOBS, most_processes, prewarm
from shardcache.units import Limit, counted, format_bytes, format_duration, format_rate
from shardcache.urls import ShardURL, parse_listed

if TYPE_CHECKING:
    from shardcache.cache import Cache

RATE = cli.Parsed("RATE", parse_rate)
#: Maximum number of running downloads that are shown below the bar of the command.
_RUNNING = 8


@command("prewarm")
@cli.dry_run_option
@click.option("--limit-rate", type=RATE, help="Maximum bytes per second, such as 50MB.")
@cli.skip_missing_option
@flag("--best-effort", help="Leave out shards that do not fit, instead of refusing.")
@number_option("--max-failures", help="Accept N failed shards; stop at the next one.", minimum=0)
@click.option("--deadline", type=cli.DURATION, help="Stop after this time, such as 5m.")
@click.option("--max-size", type=cli.SIZE, help="Maximum size of the cache: 800GB or 80%.")
@flag("--check", help="Only check that all shards are cached (exit 4 if not).")
@flag("--refresh", help="Download cached shards again if they have changed at the origin.")
@number_option("--node-count", help="Number of nodes, if no launcher sets it.")
@number_option(
    "--node-rank", help="Number of this node, from 0, if no launcher sets it.", minimum=0
)
@number_option("--ranks-per-node", help="Training processes per node.  [default: 1]")
@flag("--shard-by-node", help="Prewarm only the shards that split_by_node gives to this node.")
@flag("--ray", help="Prewarm all nodes of the Ray cluster (RAY_ADDRESS, else the local one).")
@number_option(
    "-j", "--jobs", help=f"Shards to download at once.  [default: {JOBS} per process]", maximum=256
)
@click.option(
    "-f",
    "--file",
    "lists",
    # Windows begins files with a byte order mark. The names of local files may be any bytes.
    type=click.File(encoding="utf-8-sig", errors="surrogateescape"),
    multiple=True,
    metavar="LIST",
    help="Read SPECs from a file, one per line; - is stdin. May be repeated.",
)
@click.argument("specs", nargs=-1, metavar="SPEC...")
@store_options
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
    """Download shards before a job.

    A SPEC is a WebDataset shard specification with {braces}, a prefix ending in / (all tar
    files below it), or a name with * or ?. If the command is interrupted, run it again: it
    resumes partial downloads.

    Shards that do not exist do not stop the others. With --skip-missing, they are not counted
    as failed. If the origin refuses the first shards of a bucket (credentials, endpoint), the
    command does not try the rest of the bucket.

    With --ray, each node prewarms its own cache, with its own configuration and credentials.
    If a node fails or dies, the others continue.

    \b
    Examples:
      shardcache prewarm 's3://lab/train-{0000..2047}.tar' -j 16
      shardcache prewarm s3://lab/val/ 's3://lab/test-*.tar' --check
      shardcache prewarm -f shards.txt --deadline 5m --best-effort
      srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 \\
          shardcache prewarm --shard-by-node --ranks-per-node 8 's3://lab/{0000..2047}.tar'
      shardcache prewarm --ray 's3://lab/train-{0000..2047}.tar'
    """
    has_node = node_rank is not None or node_count is not None
    if not shard_by_node and (has_node or ranks_per_node is not None):
        raise click.UsageError("--node-rank, --node-count, --ranks-per-node need --shard-by-node.")
    if ray and has_node:
        raise click.UsageError("With --ray, omit --node-rank and --node-count: Ray sets them.")
    lines = [line.strip() for file in lists for line in file]
    wanted = [*specs, *(line for line in lines if line and not line.startswith("#"))]
    if not wanted:
        empty = "The list contains no shards. Write one SPEC per line."
        raise click.UsageError(empty if lists else "No shards given. Pass a SPEC, or -f LIST.")
    if options["check"] and options["skip_missing"]:
        raise click.UsageError("--check sends no requests for shards: omit --skip-missing.")
    ranks = (ranks_per_node or 1) if shard_by_node else None
    if ray:
        return _prewarm_ray(invocation, wanted, options | {"jobs": jobs or JOBS}, max_size, ranks)
    options["share"] = None if ranks is None else own_share(node_rank, node_count, ranks)
    loaded = invocation.loaded_with_job_limits()
    invocation.show_job_limits(loaded, ["max_size"] if max_size else [])
    connections = max(jobs or 0, loaded.config.connections)
    max_size = max_size or loaded.config.max_size
    cache = invocation.cache(loaded, connections=connections, max_size=max_size)
    return _prewarm(invocation, cache, wanted, options | {"jobs": jobs})


@command("import")
@cli.dry_run_option
@number_option("--max-failures", help="Accept N failed shards; stop at the next one.", minimum=0)
@click.argument("source", metavar="DIR")
@click.argument("prefix", metavar="PREFIX")
@store_options
def import_command(invocation: Invocation, source: str, prefix: str, **options: Any) -> int:
    """Put tar files of this machine into the cache, if the origin has the same.

    DIR/a/b.tar becomes the shard PREFIX/a/b.tar if it has its size, and its checksum or ETag
    (of MD5s, so not with KMS). Other files are named, and not imported. -n only compares.

    Your files on the cache's filesystem are hard-linked, others are copied. A linked file loses
    its write permissions, because a write to it, even by root, would change the cached shard.
    You may delete or replace it (mv, rsync without --inplace); then evicting frees its room.

    \b
    Examples:
      shardcache import /local/nvme/train s3://lab/train/
      shardcache import -n /mnt/snapshot s3://lab/
    """
    if SHARD.search(prefix) or is_pattern(prefix.removesuffix("/")):
        raise click.UsageError("PREFIX is the place of the files of DIR, such as s3://lab/train/.")
    if not source or not Path(source).is_dir():
        raise click.UsageError(f"{source or repr(source)} is not a directory.")
    cache = invocation.cache()
    files = filter(Path.is_file, sorted(Path(source).rglob("*")))
    paths = [path for path in files if SHARD.search(path.name)]
    roots = [tier.dir.resolve() for tier in cache.config.by_tier()]  # DIR may contain the cache
    paths = [p for p in paths if not any(map(p.resolve().is_relative_to, roots))]
    urls = [f"{prefix.removesuffix('/')}/{path.relative_to(source)}" for path in paths]
    shards = [parse_listed(cache.parse, url) for url in urls]
    if not shards:
        raise click.UsageError(f"There are no tar files below {source}.")
    sources = {s.key: path.resolve() for s, path in zip(shards, paths, strict=True)}
    options |= {"check": False, "best_effort": False, "jobs": None}
    return _prewarm(invocation, cache, shards, options | {"sources": sources})


def _prewarm(
    invocation: Invocation, cache: Cache, specs: Sequence[str | ShardURL], options: dict[str, Any]
) -> int:
    console = invocation.console
    only_plans = options["check"] or options["dry_run"]
    name, verb, done = "prewarm", "fetch", "Warmed"
    if "sources" in options:
        name, verb, done = "import", "import", "Imported"

    def on_event(event: Event) -> None:
        if isinstance(event, Planned):
            console.info(str(event.plan).replace(" to fetch", f" to {verb}"))
            if not only_plans:
                invocation.poll_stop()

    with cache:
        options |= {"processes": most_processes(cache), "stop": invocation.stop}
        options["jobs"] = options["jobs"] or JOBS * options["processes"]
        with PrewarmProgress(on_event, console) as progress:
            handler = on_event if only_plans else progress
            report = prewarm(cache, specs, on_event=handler, **options)
        console.object(name, shards=[*map(fields_of, report.results)], summary=report)
        if not only_plans:
            console.info(str(report).replace("Warmed", done))
        for word, line in _failures(console, report, check=options["check"], cache=cache):
            console.message(f"  {word}  ", line, "red")
        _print_hints(console, report, options)
    return _exit_code(report, options)


def _print_hints(console: Console, report: PrewarmReport, options: Mapping[str, Any]) -> None:
    """Print to stderr what the user can do about shards that are not cached."""
    if report.stopped is None:
        if 0 < report.failed < len(report.results) and options["max_failures"] is None:
            errors, can_skip = report.failures.values(), "sources" not in options
            are_absent = can_skip and all(isinstance(e, ShardNotFoundError) for e in errors)
            option = "--skip-missing" if are_absent else f"--max-failures {report.failed}"
            console.hint(f"  To accept these failures, pass {option}.")
    elif report.stopped is Stopped.REQUESTED and report.not_started:
        console.hint("Run the same command again to continue.")
    elif report.not_started and (console.quiet or console.json):
        shards = counted(report.not_started, "shard")
        console.warning(f"{shards} not done because {report.stopped.why}")
    unlisted = [r.url for r in report.plan.to_fetch if r.size is None]
    if options["dry_run"] and 0 < len(unlisted) < len(report.plan.to_fetch):
        for line in console.reasons(dict.fromkeys(unlisted, "not listed at the origin")):
            console.hint(f"  {line}")
    if report.count(Outcome.LEFT_OUT):
        console.hint("  Reading the shards left out evicts cached ones, unless they are pinned.")
    # If the name of a missing shard has no suffix, the user may have meant a prefix.
    for result in report.results:
        is_absent = isinstance(result.error, ShardNotFoundError) or (
            result.outcome is Outcome.MISSING and result.size is None  # in a dry run
        )
        has_suffix = "." in result.url.partition("?")[0].rpartition("/")[2]
        if is_absent and not has_suffix and is_pattern(f"{result.url}/"):
            console.hint(f"  For all shards below {result.url}, write {result.url}/")
            return


def _exit_code(report: PrewarmReport, options: Mapping[str, Any]) -> int:
    if options["check"]:
        return 0 if report.cached == len(report.results) else ExitCode.DAMAGED
    if report.full or (report.missing and report.plan.missing and not options["best_effort"]):
        return ExitCode.FULL
    is_empty = 0 < report.count(Outcome.SKIPPED) == len(report.results)
    has_failed = is_empty or report.failed > (options["max_failures"] or 0)
    is_refused = report.stopped is Stopped.REFUSED
    is_short = report.not_started and (is_refused or not options["best_effort"])
    return ExitCode.SOME_FAILED if has_failed or is_short else 0


def _prewarm_ray(
    invocation: Invocation,
    specs: Sequence[str],
    options: Mapping[str, Any],
    max_size: Limit | None,
    ranks_per_node: int | None,
) -> int:
    from shardcache.prewarm.ray import prewarm_nodes

    console, began = invocation.console, time.monotonic()
    latest = deque([(0, 0)], maxlen=1)  # how many nodes have ended, and of how many
    only_plans = options["check"] or options["dry_run"]
    stored = with_options(Config(Path("/")), invocation.store_options.items()).storage_options
    settings: dict[str, Any] = {"dir": invocation.dir}
    settings |= {"endpoint_url": invocation.endpoint_url, "storage_options": stored or None}
    stop = invocation.poll_stop()

    def positions() -> Positions:
        ended, nodes = latest[-1]
        return {"": Position(f"{ended:,}/{nodes:,} nodes done" if nodes else "waiting for Ray")}

    # A thread of Ray prints the death of a node to stdout.
    with redirect_stdout(io.StringIO()), display(console, positions):
        nodes = prewarm_nodes(
            specs,
            settings={**settings, "max_size": max_size and str(max_size)},
            config_file=invocation.config,
            ranks_per_node=ranks_per_node,
            on_progress=lambda *counts: latest.append(counts),
            stop=stop,
            **options,
        )
    console.info(f"{counted(len(nodes), 'node')}: {', '.join(node.name for node in nodes)}")
    shards, records = list[Any](), dict[str, Any]()
    failures = defaultdict[tuple[str, str], list[str]](list)
    for node in nodes:
        report, error, code = node.report, node.error, _exit_code(node.report, options)
        node_failures = list(_failures(console, report, check=options["check"]))
        word = "lost" if node.lost else "interrupted" if node.interrupted else "failed"
        lines: list[object] = [report.plan] if only_plans else [report.plan, report]
        if error is not None or node.interrupted:
            lines, code = [word], ExitCode.SOME_FAILED
        if error is not None:
            node_failures.append((word, reason(error)))
            code = cli.code_of(error)
            code = ExitCode.SOME_FAILED if code is ExitCode.FAILED else code
        for line in lines:
            console.info(f"{node.name}  {line}")
        for failure in node_failures:
            failures[failure].append(node.name)
        record = {"number": node.number, "exit_code": code, "lost": node.lost, "error": error}
        records[node.name] = {**fields_of(report), **record, "interrupted": node.interrupted}
        shards += [{"node": node.name, **fields_of(result)} for result in report.results]
    seconds, received = time.monotonic() - began, sum(node.report.received for node in nodes)
    codes = [record["exit_code"] for record in records.values()]
    done = f"{codes.count(0):,} of {counted(len(nodes), 'node')}"
    speed = f"{format_duration(seconds)}, {format_rate(received / seconds)}"
    console.info(f"{'Ok on' if only_plans else 'Warmed'} {done} in {speed}.")
    summary = {"seconds": round(seconds, 6), "received_bytes": received, "nodes": records}
    console.object("prewarm", shards=shards, summary=summary)
    for (word, text), names in failures.items():
        console.message(f"  {word}  ", f"{', '.join(names)}: {text}", "red")
    if any(node.lost or node.interrupted for node in nodes):
        console.hint("Run the same command again to download the remaining shards.")
    # If all failed nodes have the same exit code, the command exits with this code.
    failed = set(codes) - {0}
    return 0 if not failed else failed.pop() if len(failed) == 1 else ExitCode.SOME_FAILED


def _failures(
    console: Console, report: PrewarmReport, *, check: bool, cache: Cache | None = None
) -> Iterator[tuple[str, str]]:
    """Yield why shards failed or were skipped. In a check, missing shards have failed, too."""
    for line in console.reasons(report.errors(Outcome.SKIPPED), SKIPPED):
        yield "skipped", line
    reasons: dict[str, Any] = {**report.failures}
    if check:
        from shardcache.cli.entries import other_copies  # here, because a prewarm does not need it

        missing = {r.url: "not cached" for r in report.results if r.outcome is Outcome.MISSING}
        reasons |= missing
        for url, endpoint in (other_copies(cache, missing) if cache else {}).items():
            reasons[url] = f"not cached; its copy came from another endpoint ({endpoint})"
    for line in console.reasons(reasons):
        yield "failed", line


class PrewarmProgress(ExitStack):
    """Shows the progress of a prewarm, from its plan to the end of a ``with`` block."""

    def __init__(
        self, on_event: Callable[[Event], None] | None, console: Console | None = None
    ) -> None:
        super().__init__()
        self._on_event, self._console = on_event, console or Console()
        self._prefix = 0  # length of the directory that the URLs of all shards to download share
        self._active: dict[str, Started] = {}
        self._left: dict[str, int | None] = {}  # shards to download, and their sizes if known
        self._done = self._bytes = self._failed = 0

    def __call__(self, event: Event) -> None:
        """Pass an event on, and count it. One thread may call this, another one `positions`."""
        if self._on_event is not None:
            self._on_event(event)
        match event:
            case Planned(plan):
                prefix = os.path.commonprefix([result.url for result in plan.to_fetch])  # noqa: RUF071 - URLs
                self._prefix = prefix.rfind("/") + 1
                known = plan.results.items()
                self._left = {k: r.size for k, r in known if r.outcome is Outcome.MISSING}
                if plan.to_fetch:
                    self.enter_context(display(self._console, self.positions))
            case Started(shard, _):
                self._active[shard.key] = event
            case Finished(shard, result):
                # Remove the shard first, so that `positions` never counts its bytes twice.
                self._active.pop(shard.key, None)
                if result.outcome not in (Outcome.CACHED, Outcome.NOT_STARTED):
                    self._left.pop(shard.key, None)
                    self._done += 1
                    self._failed += result.outcome is Outcome.FAILED
                    # Count failed shards, too: the estimated time is for the remaining shards.
                    self._bytes += result.size or 0

    def positions(self) -> Positions:
        """Return the progress of the prewarm and of its running downloads."""
        active, sizes = list(self._active.values()), list(self._left.values())
        written = self._bytes + sum(started.progress().written for started in active)
        total = None if None in sizes else self._bytes + sum(size or 0 for size in sizes)
        text = f"{self._done:,}/{self._done + len(sizes):,} shards, "
        text += f"{self._failed:,} failed, " if self._failed else ""
        text += format_bytes(written)
        text += f" of {format_bytes(total)}" if total else ""
        positions = {"": Position(text, written, total or None)}
        for shard, read_progress in active[:_RUNNING]:
            progress = read_progress()
            text = printable(str(shard)[self._prefix :])
            if progress.size is None:  # still connecting, or another process has the shard's lock
                text += "  waiting"
            elif progress.retries:
                text += f"  retry {progress.retries}"
            positions[shard.key] = Position(text, progress.written, progress.size)
        return positions
