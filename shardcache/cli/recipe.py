"""``shardcache recipe``: a ready file that has the cache cleaned."""

from __future__ import annotations

import getpass
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from shardcache.cli.main import Invocation, command
from shardcache.cli.manifests import Pod, room_for
from shardcache.cli.recipes import RECIPES, Recipe, Setting
from shardcache.config import Config, Loaded, describe
from shardcache.errors import ConfigError
from shardcache.units import parse_bytes

__all__ = ["recipe_command"]


def _size(context: click.Context, parameter: click.Parameter, value: Any) -> int | None:
    """The callback of an option that takes a size of more than nothing."""
    if value is None:
        return None
    try:
        size = parse_bytes(value)
    except ConfigError as exn:
        raise click.BadParameter(exn.message, context, parameter) from exn
    if size == 0:
        raise click.BadParameter("it is nothing.", context, parameter)
    return size


#: Given otherwise, or not in a variable.
_NO_VARIABLE = frozenset({"dir", "storage_options", "upstreams", "validate"})


_POD = ("k8s", "k8s-daemonset", "k8s-pod")
#: Options of pods, and which kinds they are for.
_FOR = {
    "prewarm": ("slurm", *_POD),
    "image": _POD,
    "nodes": ("k8s",),
    "volume": ("k8s-pod",),
    "room": ("k8s-pod",),
    "cpu": _POD,
    "memory": _POD,
    "user": _POD,
    "secret": _POD,
    "service_account": _POD,
    "toleration": _POD,
    "node_selector": _POD,
    "namespace": _POD,
}


@command(
    "recipe",
    short="Print a file for cron, systemd, Slurm or Kubernetes.",
    examples="""
        shardcache recipe cron
        shardcache recipe systemd -o /etc/systemd/system
        shardcache recipe slurm --prewarm 's3://lab/train-{0000..0127}.tar'
        shardcache recipe k8s --image lab/train:17 --nodes 8 --prewarm s3://lab/train/
        shardcache recipe k8s-daemonset --image lab/train:17 --secret s3 --toleration gpu
        shardcache recipe k8s-pod --image lab/train:17 --volume memory --room 50GB
    """,
)
@click.argument("kind", type=click.Choice(list(RECIPES)))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIRECTORY",
    help="Write the files there instead of printing them; none is overwritten.",
)
@click.option(
    "--prewarm",
    multiple=True,
    metavar="SPEC",
    help="slurm, k8s*: shards to fetch before a job starts; may be given again.",
)
@click.option("--image", metavar="NAME", help="k8s*: a container with shardcache.")
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    metavar="N",
    help="k8s: on how many nodes the cache is.  [default: 1]",
)
@click.option(
    "--volume",
    type=click.Choice(["hostpath", "emptydir", "memory"]),
    help="k8s-pod: the node's directory, or the pod's, on disk or in memory.  [default: hostpath]",
)
@click.option(
    "--room", callback=_size, metavar="SIZE", help="k8s-pod: how much the pod's own volume holds."
)
@click.option(
    "--cpu",
    type=click.FloatRange(min=0, min_open=True, max=1024),
    metavar="CPUS",
    help="k8s*: processors of a container.  [default: 2]",
)
@click.option(
    "--memory",
    callback=_size,
    metavar="SIZE",
    help="k8s*: memory of a container, beside a volume in memory.  [default: 2GiB]",
)
@click.option(
    "--user",
    type=click.IntRange(0, 2**31 - 1),
    metavar="UID",
    help="k8s*: who runs it and owns the cache.  [default: the image's]",
)
@click.option(
    "--secret",
    multiple=True,
    metavar="NAME",
    help="k8s*: a Secret whose keys become variables; may be given again.",
)
@click.option("--service-account", metavar="NAME", help="k8s*: which has access to the origin.")
@click.option(
    "--toleration",
    multiple=True,
    metavar="KEY[=VALUE][:EFFECT]",
    help="k8s*: a taint of the nodes, * for all; may be given again.",
)
@click.option(
    "--node-selector",
    multiple=True,
    metavar="KEY=VALUE",
    help="k8s*: a label of the nodes; may be given again.",
)
@click.option("--namespace", metavar="NAME", help="k8s*: where it is put.")
def recipe_command(invocation: Invocation, kind: str, output: Path | None, **given: Any) -> int:
    """Print a file that has this cache cleaned every hour, or after every job.

    With the directory and the options that are set now, as variables; storage options,
    which may be secret, are left out. For Kubernetes also: a Job that prewarms each node
    once (k8s --prewarm), a DaemonSet that keeps each node warm and clean, and a pod to
    train in.
    """
    chosen = {name: value for name, value in given.items() if value not in (None, ())}
    for name in chosen:
        if kind not in _FOR[name]:
            option = f"--{name.replace('_', '-')}"
            elsewhere = "; run `shardcache prewarm` first" if name == "prewarm" else ""
            raise click.UsageError(f"{option} is for {', '.join(_FOR[name])}{elsewhere}.")
    loaded = invocation.loaded()
    recipes = RECIPES[kind](
        Setting(
            [sys.executable, "-m", "shardcache"],
            os.fspath(loaded.config.dir),
            getpass.getuser(),
            _environment(loaded),
            chosen.pop("prewarm", ()),
            _pod(kind, loaded.config, chosen),
        )
    )
    console = invocation.console
    if output is not None:
        _write(invocation, output, recipes)
        if not console.human:
            _tell(invocation, kind, recipes, output)
    elif console.human:
        for number, recipe in enumerate(recipes):
            if len(recipes) > 1:
                console.data(f"{chr(10) if number else ''}# -- {recipe.name}")
            console.data(recipe.text.rstrip("\n"))
    else:
        _tell(invocation, kind, recipes)
    return 0


def _pod(kind: str, config: Config, chosen: dict[str, Any]) -> Pod:
    """What is told of a pod.

    Raises:
        ConfigError: something that Kubernetes would not take, or limits that do not agree.
    """
    names = {
        "secret": "secrets",
        "service_account": "account",
        "toleration": "tolerations",
        "node_selector": "selector",
    }
    pod = Pod(**{names.get(name, name): value for name, value in chosen.items()})
    if kind not in _POD:
        return pod
    if config.tiers:
        raise ConfigError(
            "a pod has one volume for the cache, and tiers would be without. Leave tiers out; with "
            "k8s-pod, --volume memory is a cache in memory."
        )
    limit = config.max_size
    size, percent = (None, False) if limit is None else (limit.bytes, limit.percent is not None)
    return replace(pod, room=room_for(pod, size, percent, config.ephemeral_limit))


def _environment(loaded: Loaded) -> dict[str, str]:
    return {
        f"SHARDCACHE_{setting.name.upper()}": setting.value
        for setting in describe(loaded)
        if setting.source != "default" and setting.name not in _NO_VARIABLE
    }


def _tell(
    invocation: Invocation, kind: str, recipes: list[Recipe], directory: Path | None = None
) -> None:
    files = [
        {
            "name": recipe.name,
            "path": None if directory is None else str(directory.absolute() / recipe.name),
            "text": recipe.text,
        }
        for recipe in recipes
    ]
    invocation.console.record("recipe", {"kind": kind, "files": files}, "")


def _write(invocation: Invocation, directory: Path, recipes: list[Recipe]) -> None:
    """Write all of them, or none.

    Raises:
        UsageError: one is there already.
        OSError: the directory cannot be written.
    """
    taken = [recipe.name for recipe in recipes if os.path.lexists(directory / recipe.name)]
    if taken:
        raise click.UsageError(f"{', '.join(taken)} is there already in {directory}; remove it.")
    for recipe in recipes:
        path = directory / recipe.name
        with path.open("x", encoding="utf-8") as file:
            file.write(recipe.text)
        if recipe.text.startswith("#!"):
            path.chmod(0o755)
        invocation.console.hint(f"wrote {path}")
