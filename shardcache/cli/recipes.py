"""Files that have a cache cleaned: for cron, systemd, Slurm and Kubernetes.

Each is a text made of the command to run, the directory and the options that are set, as
``SHARDCACHE_*`` variables. What is special to a format in a path or a value is quoted as that
format has it: crontab(5), systemd.service(5) "Command lines", bash(1). Those for Kubernetes are
made by `manifests`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardcache.cli import manifests
from shardcache.cli.manifests import Pod

__all__ = ["RECIPES", "Recipe", "Setting"]

#: Past the hour, when nobody else's jobs begin.
_MINUTE = 17
_BUSY = 6


@dataclass(frozen=True, slots=True)
class Setting:
    """What a recipe is made of.

    Attributes:
        command: the absolute path of a Python, and how it runs the command line.
        directory: of the cache.
        user: whose it is.
        environment: options, by variable.
        prewarm: shards that a job needs before it starts (Slurm, Kubernetes).
        pod: what else there is to a pod (Kubernetes).
    """

    command: Sequence[str]
    directory: str
    user: str
    environment: Mapping[str, str]
    prewarm: Sequence[str] = ()
    pod: Pod = field(default_factory=Pod)

    def run(self, *arguments: str) -> list[str]:
        """A command on the cache."""
        return [*self.command, "--dir", self.directory, *arguments]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A file.

    Attributes:
        name: under which it is usually kept.
        text: what is in it.
    """

    name: str
    text: str


def cron(setting: Setting) -> list[Recipe]:
    """Lines for ``crontab -e``."""
    variables = "".join(f"{name}={_cron_value(v)}\n" for name, v in setting.environment.items())
    clean = shlex.join(setting.run("clean", "--quiet", "--no-wait")).replace("%", "\\%")
    text = f"""\
# Cleans {setting.directory} every hour, as {setting.user}: add these lines with `crontab -e`.
# Silent unless something fails; exit code {_BUSY} says that somebody else cleans it.
{variables}{_MINUTE} * * * * {clean} || [ $? -eq {_BUSY} ]
"""
    return [Recipe("crontab", text)]


def _cron_value(value: str) -> str:
    return f'"{value}"' if value != value.strip() or "#" in value else value


def systemd(setting: Setting) -> list[Recipe]:
    """A service and the timer that starts it."""
    variables = "".join(
        f"Environment={_unit_word(f'{name}={value}')}\n"
        for name, value in setting.environment.items()
    )
    clean = " ".join(map(_unit_word, setting.run("clean", "--quiet", "--no-wait")))
    path = _unit_word(setting.directory)
    service = f"""\
[Unit]
Description=Clean the shard cache
Documentation=man:systemd.service(5)
RequiresMountsFor={path}
ConditionPathIsDirectory={setting.directory.replace("%", "%%")}

[Service]
Type=oneshot
User={setting.user}
{variables}ExecStart={clean}
# Somebody else cleans it.
SuccessExitStatus={_BUSY}
Nice=10
IOSchedulingClass=idle
"""
    timer = """\
[Unit]
Description=Clean the shard cache every hour

[Timer]
OnCalendar=hourly
RandomizedDelaySec=10min

[Install]
WantedBy=timers.target
"""
    return [Recipe("shardcache-clean.service", service), Recipe("shardcache-clean.timer", timer)]


def _unit_word(text: str) -> str:
    """A word of a command line in a unit: no specifiers, variables or escapes of its own."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{plain}"' if plain != text or not text or any(c in text for c in " \t';") else text


def slurm(setting: Setting) -> list[Recipe]:
    """An epilog, and with shards to prewarm a prolog; they run with hardly any environment."""
    variables = "".join(
        f"export {name}={shlex.quote(value)}\n" for name, value in setting.environment.items()
    )
    clean = shlex.join(setting.run("clean", "--quiet", "--no-wait"))
    directory = shlex.quote(setting.directory)
    epilog = f"""\
#!/bin/bash
# Epilog= in slurm.conf: cleans {setting.directory} when a job has ended. Slurm drains the node
# if this fails, so it does not: what goes wrong is in the log.
[ -d {directory} ] || exit 0
{variables}owner=$(stat -c %U {directory})
said=$(runuser -u "$owner" -- {clean} 2>&1)
code=$?
if [ "$code" -ne 0 ] && [ "$code" -ne {_BUSY} ]; then
    logger -t shardcache "cleaning after job ${{SLURM_JOB_ID:-?}} failed ($code): $said"
fi
exit 0
"""
    found = [Recipe("epilog.sh", epilog)]
    if setting.prewarm:
        arguments = ["prewarm", "--quiet", "--best-effort", "--deadline", "5m", *setting.prewarm]
        prewarm = shlex.join(setting.run(*arguments))
        prolog = f"""\
#!/bin/bash
# Prolog= in slurm.conf: fetches shards before a job starts, for five minutes at most. Slurm
# drains the node if this fails, so it does not: the job fetches what is missing.
{variables}said=$(runuser -u "$SLURM_JOB_USER" -- {prewarm} 2>&1)
code=$?
if [ "$code" -ne 0 ]; then
    logger -t shardcache "prewarming for job ${{SLURM_JOB_ID:-?}} ended with $code: $said"
fi
exit 0
"""
        found.append(Recipe("prolog.sh", prolog))
    return found


def kubernetes(setting: Setting) -> list[Recipe]:
    """A CronJob with a pod on each of the nodes, and with shards to prewarm a Job of that kind."""
    about = setting.directory, setting.environment
    found = [Recipe("shardcache-clean.yaml", manifests.clean_job(*about, setting.pod))]
    if setting.prewarm:
        text = manifests.prewarm_job(*about, setting.prewarm, setting.pod)
        found.append(Recipe("shardcache-prewarm.yaml", text))
    return found


def kubernetes_daemons(setting: Setting) -> list[Recipe]:
    """A DaemonSet that keeps the cache of each node clean, and warm."""
    text = manifests.keeper(setting.directory, setting.environment, setting.prewarm, setting.pod)
    return [Recipe("shardcache-keep.yaml", text)]


def kubernetes_pod(setting: Setting) -> list[Recipe]:
    """A pod that trains with a cache."""
    about = setting.directory, setting.environment, setting.prewarm
    return [Recipe("train.yaml", manifests.training_pod(*about, setting.pod))]


#: What the command line calls them.
RECIPES = {
    "cron": cron,
    "systemd": systemd,
    "slurm": slurm,
    "k8s": kubernetes,
    "k8s-daemonset": kubernetes_daemons,
    "k8s-pod": kubernetes_pod,
}
