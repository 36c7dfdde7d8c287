"""``shardcache recipe``: a ready file that has the cache cleaned."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path

import click

from shardcache.config import Loaded, describe
from shardcache.invocation import Invocation, command
from shardcache.recipes import RECIPES, Recipe, Setting

__all__ = ["recipe_command"]

#: Given otherwise, or not in a variable.
_NO_VARIABLE = frozenset({"dir", "storage_options", "upstreams", "validate"})


@command(
    "recipe",
    short="Print a file for cron, systemd, Slurm or Kubernetes.",
    examples="""
        shardcache recipe cron
        shardcache recipe systemd -o /etc/systemd/system
        shardcache recipe slurm --prewarm 's3://lab/train-{0000..0127}.tar'
        shardcache recipe k8s --image lab/train:17 --nodes 8
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
    help="slurm: shards to fetch before a job starts; may be given again.",
)
@click.option("--image", default="IMAGE", metavar="NAME", help="k8s: a container with shardcache.")
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="k8s: on how many nodes the cache is.",
)
def recipe_command(
    invocation: Invocation,
    kind: str,
    output: Path | None,
    prewarm: tuple[str, ...],
    image: str,
    nodes: int,
) -> int:
    """Print a file that has this cache cleaned every hour, or after every job.

    With the directory and the options that are set now, as variables; storage options,
    which may be secret, are left out.
    """
    if prewarm and kind != "slurm":
        raise click.UsageError("--prewarm is for slurm; elsewhere, run `shardcache prewarm` first.")
    loaded = invocation.loaded()
    recipes = RECIPES[kind](
        Setting(
            [sys.executable, "-m", "shardcache"],
            os.fspath(loaded.config.dir),
            getpass.getuser(),
            _environment(loaded),
            prewarm,
            image,
            nodes,
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
