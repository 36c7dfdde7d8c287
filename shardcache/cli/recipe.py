"""``shardcache recipe``: files for cron, systemd, Slurm and Kubernetes.

The files are made from ``templates``. Paths and values are quoted for the format of each file:
crontab(5), systemd.service(5) "Command lines", bash(1), YAML.
"""

from __future__ import annotations

import getpass
import json
import os
import shlex
import string
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import click

from shardcache.cli.main import Invocation, command
from shardcache.config import describe
from shardcache.errors import ConfigError
from shardcache.urls import redact

#: Kind -> its files. The files in `_PREWARMS` are printed only with --prewarm.
_KINDS = {
    "cron": ("crontab",),
    "systemd": ("shardcache-clean.service", "shardcache-clean.timer"),
    "slurm": ("epilog.sh", "prolog.sh", "job.sh"),
    "k8s": ("shardcache.yaml",),
}
_PREWARMS = ("prolog.sh", "job.sh")
#: Options that the files do not set as variables: ``dir``, because they use --dir; the others,
#: because their values are not text or may be secret.
_NO_VARIABLE = frozenset({"dir", "storage_options", "upstreams", "validate"})


@command("recipe")
@click.argument("kind", type=click.Choice(list(_KINDS)))
@click.option(
    "--prewarm",
    multiple=True,
    metavar="SPEC",
    help="slurm, k8s: shards to download before a job starts; may be repeated.",
)
def recipe_command(invocation: Invocation, kind: str, prewarm: tuple[str, ...]) -> None:
    """Print a file for cron, systemd, Slurm or Kubernetes.

    The file cleans this cache every hour, or after every job. It sets the current directory
    and options, but not storage options, which may be secret. A limit that you have not
    configured is taken from the last job. Slurm gets an epilog, and with --prewarm also a prolog
    and lines for a batch script. Kubernetes gets a DaemonSet that cleans the cache of each node,
    and with --prewarm also fills it. If there are several files, each begins with its name and
    says where it goes.

    \b
    Examples:
      shardcache recipe cron
      shardcache recipe systemd
      shardcache recipe slurm --prewarm 's3://lab/train-{0000..0127}.tar'
      shardcache recipe k8s --prewarm s3://lab/train/
    """
    if prewarm and kind not in ("slurm", "k8s"):
        raise click.UsageError("--prewarm is for slurm and k8s; run `shardcache prewarm` first.")
    loaded = invocation.loaded_with_job_limits()
    invocation.show_job_limits(loaded)
    config = loaded.config
    if config.max_size is None and config.ephemeral_limit is None and config.max_age is None:
        invocation.console.warning(
            f"no limit is set, so this only keeps {config.min_free} of the filesystem free. "
            "Set one first, such as SHARDCACHE_MAX_SIZE=800GB."
        )
    variables = [
        f"SHARDCACHE_{option.name.upper()}={option.value}"
        for option in describe(loaded)
        if option.source != "default" and option.name not in _NO_VARIABLE
    ]
    program = [sys.executable, "-m", "shardcache"]
    files = render(kind, program, os.fspath(config.dir), variables, prewarm)
    for name, text in files.items():
        invocation.console.data(f"# -- {name}\n{text}" if len(files) > 1 else text.rstrip())
    rows = [{"name": name, "text": text} for name, text in files.items()]
    invocation.console.object("recipe", kind=kind, files=rows)


def render(
    kind: str,
    program: Sequence[str],
    directory: str,
    variables: Sequence[str] = (),
    prewarm: Sequence[str] = (),
) -> dict[str, str]:
    """Fill in the templates of a kind, and return the text of each file by the file's name.

    ``program`` are the words of the command that runs shardcache, ``variables`` the options to set,
    as ``NAME=value``. Raises ConfigError if a SPEC of ``prewarm`` contains a credential.
    """
    if secret := next((redact(spec) for spec in prewarm if redact(spec) != spec), None):
        raise ConfigError(
            f"{secret} contains a credential, which would be visible in the file. Remove it."
        )
    folder = Path(__file__).parent / "templates"

    def filled(name: str) -> str:
        return string.Template((folder / name).read_text("utf-8")).substitute(fields)

    environment = ["/usr/bin/env", *variables] if variables else []
    run = [*environment, *program, "--dir", directory]
    pod_run = [*environment, "python", "-m", "shardcache", "--dir", directory]
    warm = [*pod_run, "prewarm", "--best-effort", "--", *prewarm]
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
        "pod_warm": f"run {shlex.join(warm)} || :\n  " if prewarm else "",
        "and_warm": " and warm" if prewarm else "",
        # JSON is a subset of YAML, so a JSON string is quoted for YAML.
        "yaml_dir": json.dumps(directory, ensure_ascii=False),
    }
    script = filled("loop.sh").replace("$", "$$")  # Kubernetes would expand $(X)
    fields["yaml_script"] = textwrap.indent(script, 14 * " ")
    return {name: filled(name) for name in _KINDS[kind] if prewarm or name not in _PREWARMS}


def _unit_word(text: str) -> str:
    """Quote a word for a command line in a systemd unit, which expands % and $ even in quotes."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{plain}"' if plain != text or not text or any(c in text for c in " \t';") else text
