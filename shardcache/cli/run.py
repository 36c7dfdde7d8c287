"""``shardcache run``: run an unchanged program whose WebDataset reads through the cache.

Each Python that the program starts imports ``autoload/sitecustomize.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import click

import shardcache
from shardcache.cli.main import ExitCode, Invocation, command, store_options
from shardcache.config import Config, usual_files
from shardcache.errors import ConfigError
from shardcache.layout import Layout
from shardcache.notices import log_read_only, log_unusable
from shardcache.ranks import RUN_VARIABLE, detect
from shardcache.stats.database import samples
from shardcache.stats.summary import summed
from shardcache.store.root import is_read_only, make_root, unusable
from shardcache.units import counted, format_bytes
from shardcache.urls import absolute

#: Signals to forward to the program: batch systems and users send them to jobs. Slurm's --signal
#: may send USR1 or USR2.
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@command("run", allow_interspersed_args=False)
@click.option(
    "-o",
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set an option of the cache, such as max_size=800GB; may be repeated.",
)
@click.option("--env", "show", is_flag=True, help="Print variables for a shell instead.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
@store_options
def run_command(
    invocation: Invocation, options: tuple[str, ...], show: bool, program: tuple[str, ...]
) -> int:
    """Run an unchanged training program that reads its shards through the cache.

    Write the options of this command before PROGRAM: all words after PROGRAM are its arguments.

    All Python processes that the program starts, such as DataLoader workers and the ranks of
    torchrun, read through the cache, too. Only tar archives are cached, but no local ones that
    WebDataset opens by itself; writes and other files are not affected. Invalid options end
    this command with exit code 2. Otherwise its exit code is that of the program, 127 if there
    is no such program, and 126 if it cannot be started. If this command is killed by SIGKILL,
    the program goes on.

    If you cannot change the command line of the program, set the variables that --env prints.

    \b
    Examples:
      shardcache run torchrun --nproc-per-node 8 train.py
      shardcache --dir /local/nvme/shards run -o max_size=800GB python train.py
      eval "$(shardcache run --env)"
    """
    if bool(program) == show:
        raise click.UsageError("Give a program to run, or --env.")
    if invocation.console.json:
        raise click.UsageError("This command prints no JSON: omit --json.")
    if show and invocation.store_options:
        raise click.UsageError(
            "--env would print the storage options of the configuration. Set AWS_PROFILE or "
            "AWS_DEFAULT_REGION, or storage_options in a file."
        )
    config, variables = _configure(invocation, options)
    if show:
        for name, value in variables.items():
            invocation.console.data(f"export {name}={shlex.quote(value)}")
        return ExitCode.DONE
    for tier in config.by_tier():
        try:
            make_root(tier)
        except (OSError, ConfigError) as exn:  # the program streams, as with `Cache`
            error = exn if isinstance(exn, ConfigError) else unusable(tier.dir, exn)
            if tier.dir == config.dir:  # the program warns of other tiers
                log_unusable(error, tier.dir, detect())
        if is_read_only(tier.dir):
            log_read_only(tier.dir, detect())
    environment = {**os.environ, **variables}  # the program inherits that a fault was logged
    with contextlib.ExitStack() as stack:
        notes, stats, lines = None, summed(()), list[str]()
        with contextlib.suppress(OSError):  # no directory for temporary files can be written
            here = tempfile.TemporaryDirectory("", "shardcache-run-", ignore_cleanup_errors=True)
            notes = Path(stack.enter_context(here), "notes")
            notes.touch()
        environment[RUN_VARIABLE] = f"{time.time():.6f}:{notes or ''}"
        child, early = None, list[int]()  # signals that came before the program
        for number in _FORWARDED:
            if (before := signal.getsignal(number)) is signal.SIG_IGN:  # by nohup
                continue  # so that the program ignores it, too
            stack.callback(signal.signal, number, before)
            signal.signal(number, lambda n, _: child.send_signal(n) if child else early.append(n))
        # The terminal sends Ctrl-C to the program as well, and the program decides whether to end.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, lambda number, frame: None)
        try:
            child = subprocess.Popen(program, env=environment)
        except OSError as exn:
            invocation.console.error(
                f"{program[0] or repr('')} cannot be started: {exn.strerror}.", exn
            )
            return 127 if isinstance(exn, FileNotFoundError) else 126  # as shells do
        for missed in early:
            child.send_signal(missed)
        code = child.wait()
        if notes is not None:
            with contextlib.suppress(OSError):  # someone has removed the directory
                lines = notes.read_text("utf-8", "replace").splitlines()
                stats = summed(samples(Layout(notes.parent), ever=True))
    uncached = {name: reason for name, tab, reason in (x.partition("\t") for x in lines) if tab}
    was = "is known to have been" if code else "was"
    text = f"no shard {was} opened through the cache in {config.dir}"
    if not (stats.opens or lines or code):
        how = "WebDataset may open them itself: use cache.attach" if config.cache_local else ""
        how = how or "they are read in place, unless cache_local is set"
        text += f" (does the program replace PYTHONPATH? For local files: {how})"
    if opened := stats.opens - stats.failed:
        text = f"{counted(opened, 'shard')} opened, {stats.hits:,} of them from the cache in "
        text += f"{config.dir}; {format_bytes(stats.bytes_origin)} came from the origin"
    if failed := stats.failed - stats.left:
        text += f"; {failed:,} could not be opened"
    if code:  # a process that is killed does not write its last counts
        text += "; counts of the last second may be missing"
    if uncached:
        first, reason = next(iter(uncached.items()))
        text += f"; {counted(len(uncached), 'shard')} not cached, the first is {first}: {reason}"
    invocation.console.hint(f"shardcache: {text}")
    return code if code >= 0 else 128 - code


def _configure(invocation: Invocation, options: tuple[str, ...]) -> tuple[Config, dict[str, str]]:
    """Return the configuration of the program, and the variables that give it to the program."""
    given = dict[str, str]()
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:
            raise click.UsageError(f"{option!r} is not of the form NAME=VALUE.")
        given[name.lower()] = value
    config, sources = invocation.loaded(given)
    if invocation.endpoint_url:
        given.setdefault("endpoint_url", invocation.endpoint_url)
    if invocation.store_options:
        given["storage_options"] = json.dumps(config.storage_options)
    # The program may change its working directory.
    tiers = json.dumps(config.job_settings()["tiers"])
    for name, value in ("dir", os.fspath(config.dir)), ("tiers", tiers):
        if sources[name].startswith(("argument", "environment")):
            given[name] = value
    files = [invocation.config] if invocation.config else usual_files(os.environ)
    # Other nodes, on which the program may run, have their own.
    if invocation.config or not all(map(os.path.isabs, files)):
        given["config"] = os.pathsep.join(os.fspath(absolute(file)) for file in files)
    variables = {f"SHARDCACHE_{name.upper()}": value for name, value in given.items()}
    if verbosity := invocation.console.verbosity:
        variables["_SHARDCACHE_LOG"] = "INFO" if verbosity == 1 else "DEBUG"
    folder, existing = Path(shardcache.__file__).parent / "autoload", os.environ.get("PYTHONPATH")
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), existing)))
    return config, variables
