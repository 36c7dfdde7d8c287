"""``shardcache config``, ``dir`` and ``recipe``: the configuration, and files made for it.

The files for cron, systemd, Slurm and Kubernetes are those in ``templates``. What stands in them
for a path or a value is quoted as its format has it: crontab(5), systemd.service(5) "Command
lines", bash(1), YAML.
"""

from __future__ import annotations

import getpass
import json
import os
import shlex
import string
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from shardcache.cli.main import Invocation, command
from shardcache.cli.output import fields_of
from shardcache.config import describe
from shardcache.errors import ConfigError
from shardcache.origins.endpoints import s3_access
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


@command("config")
def config_command(invocation: Invocation) -> None:
    """Show every option, its value and who set it.

    First wins: arguments (--dir), SHARDCACHE_* variables, configuration files,
    WDS_CACHE and WDS_CACHE_SIZE, defaults. Below them are the S3 endpoint and the
    source of the credentials in force. Secrets are not shown.

    \b
    Examples:
      shardcache config
      shardcache --config job.toml config
    """
    loaded = invocation.loaded()
    options, access = describe(loaded), s3_access(loaded.config)
    changed = sum(option.source != "default" for option in options)
    console = invocation.console
    summary = {"options": len(options), "set": changed}
    console.object(
        "config", options=[*map(fields_of, options)], s3=access._asdict(), summary=summary
    )
    rows = [(option.name, option.value, option.source) for option in options]
    console.table(("OPTION", "VALUE", "SOURCE"), rows)
    console.data(f"S3: {access}\n{len(rows)} options, {changed} set")


@command("dir")
def dir_command(invocation: Invocation) -> None:
    """Print the directory of the cache, and nothing else.

    It need not exist yet.

    \b
    Examples:
      shardcache dir
      du -sh "$(shardcache dir)"
    """
    directory = invocation.loaded().config.dir
    invocation.console.object("dir", dir=directory)
    invocation.console.data(os.fspath(directory))


@command("recipe")
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.option(
    "--prewarm",
    multiple=True,
    metavar="SPEC",
    help="slurm, k8s: shards to fetch before a job starts; may be given again.",
)
def recipe_command(invocation: Invocation, kind: str, prewarm: tuple[str, ...]) -> None:
    """Print a file for cron, systemd, Slurm or Kubernetes.

    It cleans this cache every hour, or after every job, with the directory and the
    options that are set now, as variables; storage options, which may be secret, are
    left out. Limits that nobody has set are those of the running job, or of the last one.
    Slurm: an epilog, and with --prewarm a prolog and lines for a batch script. Kubernetes:
    a DaemonSet that keeps the cache of each node clean, and with --prewarm warm. Each of
    several files begins with its name.

    \b
    Examples:
      shardcache recipe cron
      shardcache recipe systemd
      shardcache recipe slurm --prewarm 's3://lab/train-{0000..0127}.tar'
      shardcache recipe k8s --prewarm s3://lab/train/
    """
    if prewarm and kind not in ("slurm", "k8s"):
        raise click.UsageError("--prewarm is for slurm and k8s; run `shardcache prewarm` first.")
    loaded = invocation.upkeep()
    invocation.tell_limits(loaded)
    config = loaded.config
    if config.max_size is None and config.ephemeral_limit is None and config.max_age is None:
        invocation.console.warning(
            f"no limit is set: this cleans only to keep {config.min_free} of the filesystem free. "
            "Set one first, such as SHARDCACHE_MAX_SIZE=800GB."
        )
    variables = [
        f"SHARDCACHE_{setting.name.upper()}={setting.value}"
        for setting in describe(loaded)
        if setting.source != "default" and setting.name not in _NO_VARIABLE
    ]
    program, directory = [sys.executable, "-m", "shardcache"], os.fspath(loaded.config.dir)
    files = render(kind, program, directory, variables, prewarm)
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
    """Fill in the templates of a kind: text by file name.

    ``program`` is how the command line is run, ``variables`` are each ``NAME=value``.
    """
    if secret := next((redact(spec) for spec in prewarm if redact(spec) != spec), None):
        raise ConfigError(
            f"{secret} was given with a credential, which would be in the file. Leave it out."
        )
    folder = Path(__file__).parent / "templates"

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
