"""``shardcache index``: write or check the index file of a data set, for `TarDataset`."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path

import click

from shardcache.cache import Cache
from shardcache.cli import main as cli
from shardcache.cli.main import ExitCode, Invocation, command, flag
from shardcache.cli.output import SKIPPED, Position, Positions, display
from shardcache.dataset.index import count_samples, read_index_file, write_index_file
from shardcache.dataset.order import checked_int
from shardcache.errors import ConfigError, IntegrityError, ShardNotFoundError
from shardcache.prewarm.plan import expand
from shardcache.units import counted, format_bytes, format_duration
from shardcache.urls import ShardURL


@command("index")
@cli.skip_missing_option
@flag("--check", help="Write nothing; check that FILE states the right numbers (exit 4 if not).")
@click.option(
    "-o", "--output", "file", required=True, type=cli.FILE, help="The index file, NAME.json."
)
@click.argument("specs", nargs=-1, metavar="[SPEC]...")
@cli.store_options
def index_command(
    invocation: Invocation, specs: tuple[str, ...], file: str, check: bool, skip_missing: bool
) -> ExitCode:
    """Count the samples of shards, for random access with TarDataset.

    Reads the shards through the cache, which downloads those that are not cached. FILE is
    written when all shards are counted; it has the form of wids. If the command is interrupted
    or shards fail, run it again: it does not read again what it has counted, which is in
    FILE.partial until then. With --skip-missing, FILE has the shards that exist.

    \b
    Examples:
      shardcache index 's3://lab/train-{0000..2047}.tar' -o train.json
      shardcache index -o train.json --check
    """
    if check == bool(specs):
        text = "--check reads the shards in FILE: omit SPEC."
        raise click.UsageError(text if check else "No shards given. Pass a SPEC.")
    console, began, journal = invocation.console, time.monotonic(), Path(f"{file}.partial")
    if not check and not journal.parent.is_dir():
        raise click.ClickException(
            f"there is no directory {journal.parent}. Make it, or write FILE to another one."
        )
    if Path(file).exists() and not Path(file).is_file():  # it would be replaced
        raise click.UsageError(f"{file} is no regular file. Pass the name of another one.")
    if not file.endswith(".json"):
        raise click.UsageError("TarDataset knows index files by their names: let it end in .json.")
    counts, expected, wrong, size = dict[str, int](), dict[str, int](), 0, 0
    errors = dict[str, Exception]()

    def positions() -> Positions:
        text = f"{len(counts):,}/{len(shards):,} shards, {format_bytes(size)}"
        return {"": Position(f"{len(errors):,} failed, {text}" if errors else text, size)}

    # Not strict, so that a shard without room is streamed.
    config = invocation.cache().config.replace(strict=False)
    with contextlib.ExitStack() as stack, Cache.from_config(config) as cache:
        if check:
            shards, numbers = read_index_file(cache, file)
            expected = dict(zip(map(str, shards), numbers, strict=True))
        else:
            shards = [cache.parse(url) for url in expand(specs, cache)]
            for shard in shards:
                if replace(shard, raw=str(shard)).is_masked:
                    raise ConfigError(
                        f"{shard}: the values of its parameters may be secrets, which FILE does "
                        "not hold. Pass the URLs to TarDataset, without an index file."
                    )
            writer = stack.enter_context(
                open(journal, "a+", buffering=1, encoding="utf-8", errors="replace")
            )
            writer.seek(0)
            counted_before = dict[str, tuple[str, int]]()
            for line in writer:
                with contextlib.suppress(ValueError, TypeError):  # a killed run left half a line
                    key, version, number = json.loads(line)
                    counted_before[key] = version, checked_int("samples", number, 0)
            for shard in shards:
                version, number = counted_before.get(shard.key, ("", -1))
                # Not if another version was cached since.
                if number >= 0 and version == (_version(cache, shard) or version):
                    counts[str(shard)] = number
        urls = [*map(str, shards)]
        missing = [shard for shard in shards if str(shard) not in counts]
        stack.enter_context(display(console, positions))
        for number, result in count_samples(cache, missing):
            url = str(missing[number])
            if isinstance(result, Exception):
                errors[url] = result
                continue
            counts[url], size = result[0], size + result[1]
            if not check:
                row = missing[number].key, _version(cache, missing[number]), counts[url]
                writer.write(f"\n{json.dumps(row)}")
            elif expected[url] != counts[url]:
                wrong += 1
                samples = counted(counts[url], "sample")
                console.data(f"{url} has {samples}; {file} states {expected[url]}")
    errors = {url: errors[url] for url in urls if url in errors}
    absent = {url: exn for url, exn in errors.items() if isinstance(exn, ShardNotFoundError)}
    option = "" if skip_missing else ", or pass --skip-missing,"
    advice = f"Upload the missing shards{option} and run" if absent else "Run"
    if all(isinstance(exn, IntegrityError | ConfigError) for exn in errors.values()):
        advice = "Pack and upload it again, or leave it out, and run"
    absent = absent if skip_missing and counts else {}  # an empty FILE is of no use
    errors = {url: exn for url, exn in errors.items() if url not in absent}
    seconds, total = round(time.monotonic() - began, 3), sum(counts.values())
    summary = {"shards": len(shards), "samples": total, "failed": len(errors), "wrong": wrong}
    summary["skipped"] = len(absent)
    rows = [{"url": url, "nsamples": counts.get(url)} for url in urls]
    console.object("index", shards=rows, summary={**summary, "seconds": seconds})
    done = f"{counted(total, 'sample')} in {counted(len(counts), 'shard')}"
    done += f", {len(absent):,} skipped" if absent else ""
    for line in console.reasons(absent, SKIPPED):
        console.message("  skipped  ", line, "red")
    console.info(f"{done}, counted in {format_duration(seconds)}")
    if errors:
        for line in console.reasons(errors):
            console.message("  failed  ", line, "red")
        text = f"{counted(len(errors), 'shard')} could not be counted."
        if counts:
            text += f" The others are in {journal}."
        else:
            journal.unlink(missing_ok=True)
        console.error(f"{text} {advice} the command again.")
        return ExitCode.DAMAGED if wrong else ExitCode.SOME_FAILED
    if not check:
        write_index_file(Path(file), {url: counts[url] for url in urls if url in counts})
        journal.unlink(missing_ok=True)
    return ExitCode.DAMAGED if wrong else ExitCode.DONE


def _version(cache: Cache, shard: ShardURL) -> str:
    """Return the cached version of a shard, or "" if it is not cached."""
    return "" if (entry := cache.entry(shard)) is None else entry.version
