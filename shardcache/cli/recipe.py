"""``shardcache recipe``: a ready file for cron, systemd, Slurm or Kubernetes.

The files are those in ``templates``. What stands in them for a path or a value is quoted as its
format has it: crontab(5), systemd.service(5) "Command lines", bash(1), YAML.
"""

from __future__ import annotations

import getpass
import json
import os
import shlex
import string
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import click

from shardcache.cli.main import Invocation, command
from shardcache.config import describe
from shardcache.errors import ConfigError
from shardcache.urls import redact

#: The files of each kind; those of the second tuple are for shards to prewarm.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cron": (("crontab",), ()),
    "systemd": (("shardcache-clean.service", "shardcache-clean.timer"), ()),
    "slurm": (("epilog.sh",), ("prolog.sh", "job.sh")),
    "k8s": (("shardcache.yaml",), ()),
}
#: Given by --dir, or not to be told in a variable.
_NO_VARIABLE = frozenset({"dir", "storage_options", "upstreams", "validate"})


@command("recipe")
@click.argument("kind", type=click.Choice(list(KINDS)))
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
    help="slurm, k8s: shards to fetch before a job starts; may be given again.",
)
@click.option("--image", metavar="NAME", help="k8s: a container image with shardcache in it.")
def recipe_command(
    invocation: Invocation,
    kind: str,
    output: Path | None,
    prewarm: tuple[str, ...],
    image: str | None,
) -> None:
    """Print a file for cron, systemd, Slurm or Kubernetes.

    It cleans this cache every hour, or after every job, with the directory and the
    options that are set now, as variables; storage options, which may be secret, are
    left out. Slurm: an epilog, and with --prewarm a prolog and lines for a batch
    script. Kubernetes: a DaemonSet that keeps the cache of each node clean, and with
    --prewarm warm.

    \b
    Examples:
      shardcache recipe cron
      shardcache recipe systemd -o /etc/systemd/system
      shardcache recipe slurm --prewarm 's3://lab/train-{0000..0127}.tar'
      shardcache recipe k8s --image lab/train:17 --prewarm s3://lab/train/
    """
    if prewarm and kind not in ("slurm", "k8s"):
        raise click.UsageError("--prewarm is for slurm and k8s; run `shardcache prewarm` first.")
    if image and kind != "k8s":
        raise click.UsageError("--image is for k8s.")
    loaded = invocation.loaded()
    variables = [
        f"SHARDCACHE_{setting.name.upper()}={setting.value}"
        for setting in describe(loaded)
        if setting.source != "default" and setting.name not in _NO_VARIABLE
    ]
    program, directory = [sys.executable, "-m", "shardcache"], os.fspath(loaded.config.dir)
    files = render(kind, program, directory, variables, prewarm, image or "IMAGE")
    paths = {name: output.absolute() / name for name in files} if output is not None else {}
    if taken := [path.name for path in paths.values() if os.path.lexists(path)]:
        raise click.UsageError(f"{', '.join(taken)} is there already in {output}; remove it.")
    console = invocation.console
    for number, (name, text) in enumerate(files.items()):
        if output is not None:
            paths[name].write_text(text, "utf-8")
            if text.startswith("#!"):
                paths[name].chmod(0o755)
            console.hint(f"wrote {paths[name]}")
        elif len(files) > 1:
            console.data(f"{chr(10) if number else ''}# -- {name}\n{text.rstrip()}")
        else:
            console.data(text.rstrip())
    rows = [{"name": name, "path": paths.get(name), "text": text} for name, text in files.items()]
    console.object("recipe", kind=kind, files=rows)


def render(
    kind: str,
    program: Sequence[str],
    directory: str,
    variables: Sequence[str] = (),
    prewarm: Sequence[str] = (),
    image: str = "IMAGE",
) -> dict[str, str]:
    """Fill in the templates of a kind: text by file name.

    Args:
        kind: of `KINDS`.
        program: how the command line is run on the machine, by absolute path.
        directory: of the cache.
        variables: of the environment, each as ``NAME=value``.
        prewarm: shards to fetch before a job.
        image: for Kubernetes.
    """
    if secret := next((redact(spec) for spec in prewarm if redact(spec) != spec), None):
        raise ConfigError(
            f"{secret} was given with a credential, which would be in the file. Leave it out."
        )
    folder = resources.files("shardcache.cli") / "templates"

    def filled(name: str) -> str:
        return string.Template((folder / name).read_text("utf-8")).substitute(fields)

    environment = ["/usr/bin/env", *variables] if variables else []
    run = [*environment, *program, "--dir", directory]
    pod_run = [*environment, "python", "-m", "shardcache", "--dir", directory]
    fields = {
        "plain_dir": directory,
        "user": getpass.getuser(),
        "cron_run": shlex.join(run).replace("%", "\\%"),
        "unit_dir": _unit_word(directory),
        "unit_path": directory.replace("%", "%%"),
        "unit_run": " ".join(map(_unit_word, run)),
        "sh_dir": shlex.quote(directory),
        "sh_run": shlex.join(run),
        "sh_specs": shlex.join(prewarm),
        "pod_run": shlex.join(pod_run),
        "pod_warms": "" if prewarm else ": ",
        "and_warm": " and warm" if prewarm else "",
        # JSON is YAML, too.
        "yaml_dir": json.dumps(directory, ensure_ascii=False),
        "yaml_image": json.dumps(image, ensure_ascii=False),
    }
    # Kubernetes would expand $(X).
    script = filled("loop.sh").replace("$", "$$")
    fields["yaml_script"] = json.dumps(script, ensure_ascii=False)
    always, with_shards = KINDS[kind]
    return {name: filled(name) for name in (*always, *(with_shards if prewarm else ()))}


def _unit_word(text: str) -> str:
    """A word of a command line in a unit: no specifiers, variables or escapes of its own."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{plain}"' if plain != text or not text or any(c in text for c in " \t';") else text
