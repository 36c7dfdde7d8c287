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
from collections.abc import Mapping, Sequence
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
    environment = {
        f"SHARDCACHE_{setting.name.upper()}": setting.value
        for setting in describe(loaded)
        if setting.source != "default" and setting.name not in _NO_VARIABLE
    }
    program, directory = [sys.executable, "-m", "shardcache"], os.fspath(loaded.config.dir)
    files = render(kind, program, directory, environment, prewarm, image or "IMAGE")
    console = invocation.console
    if output is not None:
        _write(invocation, output, files)
    paths = {name: output and (output / name).absolute() for name in files}
    rows = [{"name": name, "path": paths[name], "text": text} for name, text in files.items()]
    console.object("recipe", kind=kind, files=rows)
    if output is None:
        for number, (name, text) in enumerate(files.items()):
            if len(files) > 1:
                console.data(f"{chr(10) if number else ''}# -- {name}")
            console.data(text.rstrip("\n"))


def render(
    kind: str,
    program: Sequence[str],
    directory: str,
    environment: Mapping[str, str],
    prewarm: Sequence[str] = (),
    image: str = "IMAGE",
) -> dict[str, str]:
    """Fill in the templates of a kind: text by file name.

    ``program`` is how the command line is run on the machine, by absolute path.
    """
    if secret := next((redact(spec) for spec in prewarm if redact(spec) != spec), None):
        raise ConfigError(
            f"{secret} was given with a credential, which would be in the file. Leave it out."
        )
    folder = resources.files("shardcache.cli") / "templates"

    def filled(name: str) -> str:
        return string.Template((folder / name).read_text("utf-8")).substitute(fields)

    run = [*program, "--dir", directory]
    variables = list(environment.items())
    fields = {
        "plain_dir": directory,
        "user": getpass.getuser(),
        "cron_run": shlex.join(run).replace("%", "\\%"),
        "cron_variables": "".join(f"{n}={_cron_value(v)}\n" for n, v in variables),
        "unit_dir": _unit_word(directory),
        "unit_path": directory.replace("%", "%%"),
        "unit_run": " ".join(map(_unit_word, run)),
        "unit_variables": "".join(f"Environment={_unit_word(f'{n}={v}')}\n" for n, v in variables),
        "sh_dir": shlex.quote(directory),
        "sh_run": shlex.join(run),
        "sh_specs": shlex.join(prewarm),
        "sh_variables": "".join(f"export {n}={shlex.quote(v)}\n" for n, v in variables),
        "pod_run": shlex.join(["python", "-m", "shardcache", "--dir", directory]),
        "pod_warms": "" if prewarm else ": ",
        "and_warm": " and warm" if prewarm else "",
        "yaml_dir": _yaml(directory),
        "yaml_image": _yaml(image),
        "yaml_env": _yaml([{"name": n, "value": _kubernetes(v)} for n, v in variables]),
    }
    fields["yaml_script"] = _yaml(_kubernetes(filled("loop.sh")))
    always, with_shards = KINDS[kind]
    names = (*always, *with_shards) if prewarm else always
    return {name: filled(name) for name in names}


def _cron_value(value: str) -> str:
    return f'"{value}"' if value != value.strip() or "#" in value else value


def _unit_word(text: str) -> str:
    """A word of a command line in a unit: no specifiers, variables or escapes of its own."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{plain}"' if plain != text or not text or any(c in text for c in " \t';") else text


def _yaml(value: object) -> str:
    """JSON, which is YAML, too."""
    return json.dumps(value, ensure_ascii=False)


def _kubernetes(text: str) -> str:
    """Text in which Kubernetes expands no ``$(X)``."""
    return text.replace("$", "$$")


def _write(invocation: Invocation, directory: Path, files: Mapping[str, str]) -> None:
    """Write all files, or none."""
    taken = [name for name in files if os.path.lexists(directory / name)]
    if taken:
        raise click.UsageError(f"{', '.join(taken)} is there already in {directory}; remove it.")
    for name, text in files.items():
        path = directory / name
        path.write_text(text, "utf-8")
        if text.startswith("#!"):
            path.chmod(0o755)
        invocation.console.hint(f"wrote {path}")
