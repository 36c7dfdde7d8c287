"""Kubernetes manifests around a cache: clean it, prewarm it, keep it warm, train with it.

    clean      a CronJob with a pod on each node, every hour
    prewarm    an Indexed Job with a pod on each node, once
    keep       a DaemonSet that prewarms and cleans, every hour
    train      a pod that has the cache as a volume, to be filled in

A manifest is built as data and written as YAML whose texts are JSON's, so that no name needs
quoting by hand. In commands and variables `$` is written so that the kubelet, which replaces
$(NAME) there, gives the program what was meant. No secret is in a manifest: `Pod.secrets` names
Secrets, whose keys become variables.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardcache.cli.yamltext import yaml_text
from shardcache.errors import ConfigError
from shardcache.units import format_bytes
from shardcache.urls import redact

__all__ = ["Pod", "clean_job", "keeper", "prewarm_job", "room_for", "training_pod"]

#: Past the hour, when nobody else's jobs begin.
_MINUTE = 17
_HOUR = 3600
#: Exit codes of ours: nothing that another attempt would change; no room on this node.
_USAGE, _NO_ROOM, _BUSY = 2, 5, 6
#: Of a volume that is limited, so much is for shards; as `ephemeral_limit` does it.
_SHARE = 0.9
#: What is asked for where a pod rests most of the time; a hundred thousand entries are scanned in
#: less than this memory.
_IDLE_CPU = 0.1
_IDLE_MEMORY = 256 << 20
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL = r"([A-Za-z0-9]([-A-Za-z0-9._]{0,61}[A-Za-z0-9])?)"
_KEY = rf"([a-z0-9][-a-z0-9.]{{0,252}}/)?{_LABEL}"
_SELECTOR = re.compile(rf"{_KEY}={_LABEL}?")
_TOLERATION = re.compile(
    rf"(?P<key>{_KEY})(=(?P<value>{_LABEL}?))?"
    r"(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)

_Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pod:
    """What a pod is made of, beside the cache.

    Attributes:
        image: a container with shardcache.
        nodes: on how many nodes the cache is.
        volume: a directory of the node, one of the pod on its disk, or one in memory.
        room: bytes of a volume of the pod.
        cpu: processors.
        memory: bytes of memory, beside those of a volume in memory.
        user: id of who runs it, and whose the cache is; None for the image's own.
        secrets: names of Secrets whose keys are variables.
        account: the service account, by which clouds give credentials.
        tolerations: ``KEY``, ``KEY=VALUE``, with ``:EFFECT``, or ``*`` for every taint.
        selector: ``KEY=VALUE`` of the nodes.
        namespace: where it is put.

    Raises:
        ConfigError: one of them that Kubernetes would not take.
    """

    image: str = "IMAGE"
    nodes: int = 1
    volume: Literal["hostpath", "emptydir", "memory"] = "hostpath"
    room: int | None = None
    cpu: float = 2.0
    memory: int = 2 << 30
    user: int | None = None
    secrets: tuple[str, ...] = ()
    account: str | None = None
    tolerations: tuple[str, ...] = ()
    selector: tuple[str, ...] = ()
    namespace: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if not self.image or not all(c.isprintable() and c != " " for c in self.image):
            raise _refused("image", self.image, "a name without spaces")
        names = {"secret": self.secrets, "service-account": (self.account,)}
        for option, several in {**names, "namespace": (self.namespace,)}.items():
            for name in several:
                if name is not None and not _NAME.fullmatch(name):
                    raise _refused(option, name, "lower-case letters, digits, - and .")
        for text in self.tolerations:
            if text != "*" and not _TOLERATION.fullmatch(text):
                raise _refused("toleration", text, "KEY[=VALUE][:EFFECT], or * for every taint")
        for text in self.selector:
            if not _SELECTOR.fullmatch(text):
                raise _refused("node-selector", text, "KEY=VALUE")


def clean_job(directory: str, environment: Mapping[str, str], pod: Pod) -> str:
    """A CronJob with a pod on each of the nodes."""
    command = _command(directory, "clean", "--quiet")
    container = _container("clean", command, directory, environment, pod, idle=True)
    job = {
        "completions": pod.nodes,
        "parallelism": pod.nodes,
        "backoffLimit": 0,
        "template": _apart("shardcache-clean", _spec([container], directory, pod)),
    }
    schedule = {
        "schedule": f"{_MINUTE} * * * *",
        "concurrencyPolicy": "Forbid",
        "jobTemplate": {"spec": job},
    }
    text = f"Cleans {directory} on each of {pod.nodes} nodes every hour."
    return _manifest(text, "batch/v1", "CronJob", "shardcache-clean", schedule, pod)


def prewarm_job(
    directory: str, environment: Mapping[str, str], specs: Sequence[str], pod: Pod
) -> str:
    """An Indexed Job with a pod on each of the nodes; what failed is tried again, alone."""
    command = _prewarm(directory, specs)
    container = _container("prewarm", command, directory, environment, pod)
    rules = [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [_USAGE]}},
        {"action": "FailIndex", "onExitCodes": {"operator": "In", "values": [_NO_ROOM]}},
    ]
    job = {
        "completionMode": "Indexed",
        "completions": pod.nodes,
        "parallelism": pod.nodes,
        "backoffLimitPerIndex": 3,
        "maxFailedIndexes": pod.nodes,
        "podFailurePolicy": {"rules": rules},
        "ttlSecondsAfterFinished": 24 * _HOUR,
        "template": _apart("shardcache-prewarm", _spec([container], directory, pod)),
    }
    text = f"Fills {directory} on each of {pod.nodes} nodes; run again, it fetches what is missing."
    return _manifest(text, "batch/v1", "Job", "shardcache-prewarm", job, pod)


#: The shell is process 1, which signals reach; what it runs is ended with it.
_LOOP = """\
child=
trap 'test -z "$child" || kill "$child" 2>/dev/null; wait; exit 0' TERM INT
run() {{ "$@" & child=$!; wait "$child"; code=$?; child=; return "$code"; }}
while :; do
{steps}    run sleep {seconds}
done
"""


def keeper(directory: str, environment: Mapping[str, str], specs: Sequence[str], pod: Pod) -> str:
    """A DaemonSet that keeps the cache of its node clean, and warm if there are shards for it."""
    steps = ""
    if specs:
        steps = f"    run {shlex.join(_prewarm(directory, specs, '--best-effort'))} || :\n"
    clean = shlex.join(_command(directory, "clean", "--quiet", "--no-wait"))
    steps += f"    run {clean} || [ $? -eq {_BUSY} ] || echo 'it could not be cleaned' >&2\n"
    script = _LOOP.format(steps=steps, seconds=_HOUR)
    container = _container(
        "keep", ["/bin/sh", "-c", script], directory, environment, pod, idle=True
    )
    labels = {"app": "shardcache-keep"}
    spec = _spec([container], directory, pod)
    daemons = {
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": spec},
    }
    text = f"Keeps {directory} of every node {'warm and ' if specs else ''}clean."
    return _manifest(text, "apps/v1", "DaemonSet", "shardcache-keep", daemons, pod)


def training_pod(
    directory: str, environment: Mapping[str, str], specs: Sequence[str], pod: Pod
) -> str:
    """A pod that trains with a cache; shards that are named are there before it begins."""
    variables = {"SHARDCACHE_DIR": directory, **environment}
    train = _container("train", ["python", "train.py"], directory, variables, pod)
    spec = _spec([train], directory, pod)
    spec["restartPolicy"] = "Never"
    if specs:
        command = _prewarm(directory, specs, "--best-effort")
        spec["initContainers"] = [_container("prewarm", command, directory, environment, pod)]
    text = f"Trains with the cache in {directory}: fill in what is to be run, with what."
    return _manifest(text, "v1", "Pod", "train", spec, pod)


def _refused(option: str, value: str, accepted: str) -> ConfigError:
    return ConfigError(f"--{option} {value!r} cannot be used. Accepted: {accepted}.")


# -- what they are made of -------------------------------------------------------------


def _command(directory: str, *arguments: str) -> list[str]:
    return ["python", "-m", "shardcache", "--dir", directory, *arguments]


def _prewarm(directory: str, specs: Sequence[str], *options: str) -> list[str]:
    for spec in specs:
        if redact(spec) != spec:
            raise ConfigError(
                f"{redact(spec)} was given with a credential, which would be in the manifest. Name "
                "a Secret with --secret, and leave it out of the URL."
            )
    return _command(directory, "prewarm", *options, "--", *specs)


def _spec(containers: list[_Tree], directory: str, pod: Pod) -> _Tree:
    spec: _Tree = {"securityContext": {"seccompProfile": {"type": "RuntimeDefault"}}}
    if pod.user is not None:
        ids = {"runAsUser": pod.user, "runAsGroup": pod.user, "fsGroup": pod.user}
        spec["securityContext"] |= {**ids, "runAsNonRoot": pod.user != 0}
    if pod.account is not None:
        spec["serviceAccountName"] = pod.account
    if pod.selector:
        spec["nodeSelector"] = dict(one.split("=", 1) for one in pod.selector)
    if pod.tolerations:
        spec["tolerations"] = [_toleration(one) for one in pod.tolerations]
    return {**spec, "containers": containers, "volumes": [_volume(directory, pod)]}


def _apart(name: str, spec: _Tree) -> _Tree:
    """The template of a job whose pods are on different nodes."""
    labels = {"app": name}
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    return {
        "metadata": {"labels": labels},
        "spec": {"restartPolicy": "Never", "affinity": apart, **spec},
    }


def _toleration(text: str) -> _Tree:
    found = _TOLERATION.fullmatch(text)
    if found is None:
        return {"operator": "Exists"}
    row: _Tree = {"key": found["key"], "operator": "Exists"}
    if found["value"] is not None:
        row |= {"operator": "Equal", "value": found["value"]}
    if found["effect"] is not None:
        row["effect"] = found["effect"]
    return row


def _container(
    name: str,
    command: Sequence[str],
    directory: str,
    environment: Mapping[str, str],
    pod: Pod,
    *,
    idle: bool = False,
) -> _Tree:
    memory = pod.memory
    limits: _Tree = {"cpu": _processors(pod.cpu)}
    requests: _Tree = {"cpu": _processors(min(pod.cpu, _IDLE_CPU) if idle else pod.cpu)}
    if pod.volume == "memory":
        assert pod.room is not None
        memory += pod.room  # what a RAM disk holds counts as the container's
    limits["memory"] = _quantity(memory)
    requests["memory"] = _quantity(min(memory, _IDLE_MEMORY) if idle else memory)
    if pod.volume == "emptydir":
        assert pod.room is not None
        requests["ephemeral-storage"] = limits["ephemeral-storage"] = _quantity(pod.room)
    container = {
        "name": name,
        "image": pod.image,
        "command": [_literal(word) for word in command],
        "env": _variables(environment, pod),
        "envFrom": [{"secretRef": {"name": secret}} for secret in pod.secrets],
        "resources": {"requests": requests, "limits": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "cache", "mountPath": directory}],
    }
    return {key: value for key, value in container.items() if value != []}


def _variables(environment: Mapping[str, str], pod: Pod) -> list[_Tree]:
    values = dict(environment)
    rows: list[_Tree] = []
    if pod.volume == "emptydir":
        values.pop("SHARDCACHE_EPHEMERAL_LIMIT", None)
        field = {"resourceFieldRef": {"resource": "limits.ephemeral-storage"}}
        rows = [{"name": "SHARDCACHE_EPHEMERAL_LIMIT", "valueFrom": field}]
    elif pod.volume == "memory" and "SHARDCACHE_MAX_SIZE" not in values:
        values["SHARDCACHE_MAX_SIZE"] = str(int((pod.room or 0) * _SHARE))
    return [{"name": k, "value": _literal(v)} for k, v in values.items()] + rows


def _volume(directory: str, pod: Pod) -> _Tree:
    if pod.volume == "hostpath":
        # As root made a directory that is not there, nobody else could write to it.
        kind = "DirectoryOrCreate" if pod.user == 0 else "Directory"
        return {"name": "cache", "hostPath": {"path": directory, "type": kind}}
    if pod.room is None:
        raise ConfigError(f"how much may a volume of the kind {pod.volume} hold? Give --room.")
    empty = {"sizeLimit": _quantity(pod.room)}
    if pod.volume == "memory":
        empty["medium"] = "Memory"
    return {"name": "cache", "emptyDir": empty}


def room_for(pod: Pod, max_size: int | None, percent: bool, ephemeral: int | None) -> int | None:
    """How large the volume of a pod is, so that all limits agree.

    Args:
        pod: with the room that was asked for.
        max_size: of the configuration, in bytes.
        percent: whether it is a share of the filesystem instead.
        ephemeral: ``ephemeral_limit`` of the configuration.

    Raises:
        ConfigError: they do not.
    """
    if pod.volume == "hostpath":
        if pod.room is not None:
            raise ConfigError("--room is for a volume of the pod; a hostpath has max_size.")
        return None
    if pod.volume == "emptydir" and percent:
        raise ConfigError(
            "max_size is a share of the filesystem, which for an emptydir is all of the node's. "
            "Give it in bytes, or leave it to --room."
        )
    room = pod.room
    if room is None and pod.volume == "emptydir":
        room = ephemeral
    if room is None and max_size is not None:
        room = -int(-max_size // _SHARE)
    if room is None:
        raise ConfigError(f"how much may a volume of the kind {pod.volume} hold? Give --room.")
    for name, size in (("max_size", max_size), ("ephemeral_limit", ephemeral)):
        if size is not None and size > room:
            raise ConfigError(
                f"{name} is {format_bytes(size)}, and the volume has room for "
                f"{format_bytes(room)}. Raise --room, or lower {name}."
            )
    return room


# -- writing them ----------------------------------------------------------------------


def _literal(text: str) -> str:
    """A text from which the kubelet makes this one: it replaces $(NAME), and $$ by $."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _processors(cpu: float) -> str:
    return str(int(cpu)) if cpu == int(cpu) else f"{max(1, round(cpu * 1000))}m"


def _quantity(size: int) -> str:
    for unit, name in ((1 << 30, "Gi"), (1 << 20, "Mi"), (10**9, "G"), (10**6, "M")):
        if size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)


def _manifest(text: str, version: str, kind: str, name: str, spec: _Tree, pod: Pod) -> str:
    metadata = {"name": name}
    if pod.namespace is not None:
        metadata["namespace"] = pod.namespace
    tree = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
    comment = "".join(c if c.isprintable() else "?" for c in text)
    return f"# {comment}\n" + yaml_text(tree)
