"""``shardcache run``: a program whose WebDataset reads shards through the cache, unchanged.

The program gets the folder ``autoload`` on its PYTHONPATH. Python imports ``sitecustomize`` from
there in each interpreter that starts below it, however that is started.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

import shardcache
from shardcache import config as configuration
from shardcache.cli.main import ExitCode, Invocation, command
from shardcache.cli.output import counted
from shardcache.files import Modes
from shardcache.layout import Layout
from shardcache.store.root import make_root
from shardcache.units import format_bytes

if TYPE_CHECKING:
    from shardcache.stats.summary import Stats

#: What a batch system or a person sends to a job; Slurm sends USR1 and USR2 where it is asked to.
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@command("run")
@click.option(
    "-o",
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set an option of the cache, such as max_size=800GB; may be given again.",
)
@click.option("--env", "show", is_flag=True, help="Print the variables instead, for a shell.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def run_command(
    invocation: Invocation, options: tuple[str, ...], show: bool, program: tuple[str, ...]
) -> int:
    """Run a training program, unchanged, through the cache.

    The program stays as it is. Every Python process that it starts reads through the
    cache, too: DataLoader workers, torchrun's ranks. Only archives are cached; what is
    written and other files are not. The options are
    checked before the program starts (exit code 2). Otherwise the exit code is the
    program's.

    Where the command line cannot be changed, set the variables that --env prints.

    \b
    Examples:
      shardcache run -- torchrun --nproc-per-node 8 train.py
      shardcache --dir /local/nvme/shards run -o max_size=800GB -- python train.py
      eval "$(shardcache run --env)"
    """
    if bool(program) == show:
        raise click.UsageError("Give a program to run, or --env.")
    variables = _variables(invocation, options)
    environment = {**os.environ, **variables}
    config = configuration.load(environ=environment).config
    if show:
        for name, value in variables.items():
            invocation.console.data(f"export {name}={shlex.quote(value)}")
        return ExitCode.DONE
    layouts = []
    for tier in config.by_tier():
        with contextlib.suppress(OSError):  # the first miss warns of it, and shards are streamed
            layouts.append(
                make_root(tier.dir, configuration.__version__, Modes.of(tier.shared_group))
            )
    try:
        child = subprocess.Popen(program, env=environment)
    except OSError as exn:
        raise click.ClickException(f"{program[0]} cannot be run: {exn.strerror}") from exn
    with contextlib.ExitStack() as stack:
        for number in _FORWARDED:
            stack.callback(signal.signal, number, signal.getsignal(number))
            signal.signal(number, lambda number, frame: child.send_signal(number))
        # The terminal interrupts the program, too: it is its part to end.
        stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, lambda number, frame: None)
        # The program has long begun when this is loaded, and has not come to its first shard.
        from shardcache.stats.database import NO_RANK, Sample
        from shardcache.stats.summary import summed

        before = _counted(layouts)
        code = child.wait()
    found = summed([Sample(0, 0, NO_RANK, _counted(layouts) - before)])
    invocation.console.hint(f"shardcache: {_told(found, config.dir)}")
    return code if code >= 0 else 128 - code


def _told(stats: Stats, directory: Path) -> str:
    """What the program has read, in one line."""
    opened = stats.opens - stats.failed
    failed = f"; {stats.failed:,} could not be opened" if stats.failed else ""
    if not opened:
        return f"no shard was opened through the cache in {directory}{failed}"
    return (
        f"{counted(opened, 'shard')} opened, {stats.hits:,} of them from the cache in "
        f"{directory}; {format_bytes(stats.bytes_origin)} came from the origin{failed}"
    )


def _counted(layouts: Sequence[Layout]) -> Counter[str]:
    """What all processes of this node have counted so far."""
    from shardcache.stats.database import samples

    found: Counter[str] = Counter()
    for layout in layouts:
        with contextlib.suppress(OSError):
            for sample in samples(layout, ever=True):
                found.update(sample.counters)
    return found


def _variables(invocation: Invocation, options: tuple[str, ...]) -> dict[str, str]:
    """What the environment of the program says beyond our own."""
    found = {}
    if invocation.config is not None:
        found["SHARDCACHE_CONFIG"] = str(configuration.absolute(invocation.config))
    if invocation.dir is not None:
        found["SHARDCACHE_DIR"] = str(configuration.absolute(invocation.dir))
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:
            raise click.UsageError(f"{option!r} is not of the form NAME=VALUE.")
        found[f"SHARDCACHE_{name.upper()}"] = value
    folder = Path(shardcache.__file__).parent / "autoload"
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return found
