"""Manifests: Kubernetes takes them, and what is in them agrees with itself and with the command."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcache.cli.clean import clean_command
from shardcache.cli.manifests import Pod, clean_job, keeper, prewarm_job, room_for, training_pod
from shardcache.cli.prewarm import prewarm_command
from shardcache.config import load
from shardcache.errors import ConfigError
from shardcache.units import parse_bytes
from tests.support.clitools import run
from tests.support.storetools import wait_until

__all__ = ["run"]

ODD = '/mnt/50%/it\'s "a" $HOME $(X) $$ ünï 🗄 disk: {#1}, - [a]\\'
SPEC = "s3://lab/it's-$(X)-{000..127}.tar"
KINDS = ("k8s", "k8s-daemonset", "k8s-pod")


def kubelet(text: str, environment: dict[str, str]) -> str:
    """What a container is given: k8s.io/kubernetes/third_party/forked/golang/expansion."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return environment.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


def pod_of(found: dict[str, Any]) -> dict[str, Any]:
    """The pod in a manifest."""
    if found["kind"] == "Pod":
        return found["spec"]
    spec = found["spec"]
    while "jobTemplate" in spec:
        spec = spec["jobTemplate"]["spec"]
    return spec["template"]["spec"]


def loaded(text: str) -> dict[str, Any]:
    """A manifest, which Kubernetes takes."""
    found = yaml.safe_load(text)
    kubernetes_validate.validate(found, "1.31", strict=True)
    return found


def words(container: dict[str, Any]) -> list[str]:
    return [kubelet(word, {"X": "WRONG", "HOME": "/root"}) for word in container["command"]]


def parsed(arguments: list[str]) -> tuple[str, str, dict[str, Any]]:
    """A command of ours as our own parser takes it: the directory, the command, its options."""
    assert arguments[:3] == ["python", "-m", "shardcache"] and arguments[3] == "--dir"
    name, rest = arguments[5], arguments[6:]
    command = {"prewarm": prewarm_command, "clean": clean_command}[name]
    context = command.make_context(name, list(rest), resilient_parsing=False)
    return arguments[4], name, context.params


def every(directory: str, environment: dict[str, str], specs: list[str], pod: Pod) -> list[str]:
    return [
        clean_job(directory, environment, pod),
        prewarm_job(directory, environment, specs, pod),
        keeper(directory, environment, specs, pod),
        keeper(directory, environment, [], pod),
        training_pod(directory, environment, specs, pod),
    ]


FULL = Pod(
    "registry.lab:5000/train:17@sha256:0",
    3,
    cpu=0.5,
    memory=1 << 30,
    user=1000,
    secrets=("s3", "hub.token"),
    account="trainer",
    tolerations=("*", "nvidia.com/gpu", "gpu=yes:NoSchedule", "spot:NoExecute"),
    selector=("disk=nvme", "lab.org/rank=true"),
    namespace="training",
)


@pytest.mark.parametrize("pod", [Pod(), FULL], ids=["plain", "full"])
@pytest.mark.parametrize("directory", ["/local/nvme", ODD], ids=["plain", "odd"])
def test_kubernetes_takes_every_manifest(directory: str, pod: Pod) -> None:
    environment = {"SHARDCACHE_MAX_SIZE": "80%", "SHARDCACHE_ENDPOINT_URL": "http://$(X):$$1"}
    for text in every(directory, environment, [SPEC, "-odd"], pod):
        found = loaded(text)
        spec = pod_of(found)
        containers = [*spec["containers"], *spec.get("initContainers", [])]
        for container in containers:
            rows = {row["name"]: kubelet(row["value"], {}) for row in container["env"]}
            assert environment.items() <= rows.items()
            assert container["image"] == pod.image
            [mount] = container["volumeMounts"]
            assert mount["mountPath"] == directory
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            limits = container["resources"]["limits"]
            assert limits["cpu"] == ("500m" if pod is FULL else "2")
            secrets = [row["secretRef"]["name"] for row in container.get("envFrom", [])]
            assert secrets == list(pod.secrets)
        [volume] = spec["volumes"]
        assert volume["hostPath"] == {"path": directory, "type": "Directory"}
        if pod is FULL:
            assert found["metadata"]["namespace"] == "training"
            assert spec["serviceAccountName"] == "trainer"
            assert spec["securityContext"]["runAsUser"] == 1000
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["nodeSelector"] == {"disk": "nvme", "lab.org/rank": "true"}
            assert spec["tolerations"] == [
                {"operator": "Exists"},
                {"key": "nvidia.com/gpu", "operator": "Exists"},
                {"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"},
                {"key": "spot", "operator": "Exists", "effect": "NoExecute"},
            ]


def test_a_job_has_one_pod_on_each_node_and_tries_again_what_can_be_had() -> None:
    job = loaded(prewarm_job("/c", {}, ["s3://lab/a.tar"], Pod(nodes=5)))["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (5, 5, "Indexed")
    template = job["template"]
    [term] = template["spec"]["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert term["labelSelector"]["matchLabels"] == template["metadata"]["labels"]
    assert template["spec"]["restartPolicy"] == "Never"  # podFailurePolicy takes no other
    keep = loaded(keeper("/c", {}, [], Pod()))["spec"]
    assert keep["selector"]["matchLabels"] == keep["template"]["metadata"]["labels"]


# -- commands ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", ["s3://lab/a.tar", SPEC, "-x", "--dir", "a b", "$$(A)$", "🗄", "\x7f\x85\u2028\ufeff\t"]
)
def test_the_commands_are_those_of_the_command_line(spec: str) -> None:
    [clean] = pod_of(loaded(clean_job(ODD, {}, Pod())))["containers"]
    directory, name, options = parsed(words(clean))
    assert (directory, name, options["everything"]) == (ODD, "clean", False)
    for text in (prewarm_job(ODD, {}, [spec], Pod()), training_pod(ODD, {}, [spec], Pod())):
        found = pod_of(loaded(text))
        [container] = found.get("initContainers", found["containers"])
        directory, name, options = parsed(words(container))
        assert (directory, name, options["specs"]) == (ODD, "prewarm", (spec,))


texts = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"])
    | st.sampled_from("$(){}'\"\\#:-"),
    min_size=1,
    max_size=20,
)


@settings(max_examples=60)
@given(st.lists(texts, min_size=1, max_size=3), texts)
def test_any_name_arrives_as_it_was_given(specs: list[str], name: str) -> None:
    specs = [f"s3://lab/{spec.replace('@', '').replace('?', '')}" for spec in specs]
    directory, environment = f"/mnt/{name}", {"SHARDCACHE_X": name}
    [container] = pod_of(yaml.safe_load(prewarm_job(directory, environment, specs, Pod())))[
        "containers"
    ]
    arguments = words(container)
    assert arguments[4] == directory and arguments[-len(specs) :] == specs
    assert kubelet(container["env"][0]["value"], {"X": "WRONG"}) == name
    [container] = pod_of(yaml.safe_load(keeper(directory, {}, specs, Pod())))["containers"]
    lines = [line for line in words(container)[2].splitlines() if " prewarm " in line]
    found = shlex.split("\n".join(lines).removesuffix("|| :"))
    if len(lines) == 1:  # a name may hold what ends a line, elsewhere
        assert found[5] == directory and found[-len(specs) :] == specs


def test_a_daemon_prewarms_and_cleans_and_ends_when_it_is_told(tmp_path: Path) -> None:
    """Its script, run by a real shell, with a stand-in for Python."""
    notes, program = tmp_path / "notes", tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys, time\n"
        f"open({str(notes)!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
        "sys.exit(6 if 'clean' in sys.argv else 3)\n"
    )
    program.chmod(0o755)
    (tmp_path / "sleep").write_text(
        f"#!/bin/sh\necho '[\"sleep\"]' >> {notes}\nexec /bin/sleep 600\n"
    )
    (tmp_path / "sleep").chmod(0o755)
    [container] = pod_of(loaded(keeper(ODD, {}, [SPEC], Pod())))["containers"]
    shell = subprocess.Popen(
        words(container),
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said = wait_until(lambda: notes.exists() and "sleep" in notes.read_text())
        prewarm, clean, _ = map(json.loads, notes.read_text().splitlines())
        assert said and parsed(["python", *prewarm])[2]["specs"] == (SPEC,)
        assert parsed(["python", *clean])[:2] == (ODD, "clean")
        shell.send_signal(signal.SIGTERM)
        out, _ = shell.communicate(timeout=60)
        assert (shell.returncode, out) == (0, b"")
    finally:
        shell.kill()
        shell.communicate()


# -- limits --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["emptydir", "memory"])
def test_the_limits_of_a_volume_agree(run: Any, kind: str) -> None:
    code, out, _ = run(
        *("recipe", "k8s-pod", "--volume", kind, "--room", "50GiB", "--memory", "8GiB"),
        *("--prewarm", "s3://lab/a.tar", "--cpu", "4"),
    )
    assert code == 0
    spec = pod_of(loaded(out))
    [volume] = spec["volumes"]
    room = parse_bytes(volume["emptyDir"]["sizeLimit"] + "B")
    assert room == 50 << 30
    assert volume["emptyDir"].get("medium") == ("Memory" if kind == "memory" else None)
    for container in (*spec["containers"], *spec["initContainers"]):
        limits = container["resources"]["limits"]
        assert container["resources"]["requests"] == limits
        rows = {row["name"]: row for row in container["env"]}
        if kind == "memory":
            assert parse_bytes(limits["memory"] + "B") == (8 << 30) + room
            assert int(rows["SHARDCACHE_MAX_SIZE"]["value"]) == int(room * 0.9)
        else:
            assert limits["memory"] == "8Gi"
            assert parse_bytes(limits["ephemeral-storage"] + "B") == room
            field = rows["SHARDCACHE_EPHEMERAL_LIMIT"]["valueFrom"]["resourceFieldRef"]
            assert field == {"resource": "limits.ephemeral-storage"}
            # What the kubelet makes of it is a number, which the library takes.
            config = load({}, {"SHARDCACHE_DIR": "/c", "SHARDCACHE_EPHEMERAL_LIMIT": str(room)}, [])
            assert config.config.ephemeral_limit == room
    train = {row["name"]: row.get("value") for row in spec["containers"][0]["env"]}
    assert train["SHARDCACHE_DIR"] == spec["containers"][0]["volumeMounts"][0]["mountPath"]


@pytest.mark.parametrize(
    ("pod", "limits", "room"),
    [
        (Pod(), (10, False, None), None),
        (Pod(volume="memory", room=100), (None, False, None), 100),
        (Pod(volume="memory", room=100), (100, False, None), 100),
        (Pod(volume="memory", room=100), (None, True, None), 100),  # of the RAM disk itself
        (Pod(volume="memory"), (90, False, None), 100),
        (Pod(volume="emptydir"), (90, False, None), 100),
        (Pod(volume="emptydir"), (None, False, 70), 70),
        (Pod(volume="emptydir"), (60, False, 70), 70),
    ],
)
def test_the_room_of_a_volume(pod: Pod, limits: Any, room: int | None) -> None:
    assert room_for(pod, *limits) == room


@pytest.mark.parametrize(
    ("pod", "limits", "said"),
    [
        (Pod(room=10), (None, False, None), "has max_size"),
        (Pod(volume="memory"), (None, False, None), "Give --room"),
        (Pod(volume="emptydir"), (None, True, None), "share of the filesystem"),
        (Pod(volume="emptydir", room=100), (101, False, None), "max_size is 101 B"),
        (Pod(volume="memory", room=100), (None, False, 101), "ephemeral_limit is 101 B"),
    ],
)
def test_limits_that_do_not_agree_are_refused(pod: Pod, limits: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        room_for(pod, *limits)


# -- the command -----------------------------------------------------------------------------


def test_the_command_prints_what_kubernetes_takes(run: Any, tmp_path: Path) -> None:
    names = {
        "k8s": {"shardcache-clean.yaml", "shardcache-prewarm.yaml"},
        "k8s-daemonset": {"shardcache-keep.yaml"},
        "k8s-pod": {"train.yaml"},
    }
    for kind in KINDS:
        code, out, _ = run(
            *("recipe", kind, "--prewarm", "s3://lab/{0..3}.tar", "--prewarm", "s3://lab/b/"),
            *("--secret", "s3", "--user", 0, "--json"),
        )
        files = {file["name"]: file["text"] for file in json.loads(out)["files"]}
        assert (code, set(files)) == (0, names[kind])
        for text in files.values():
            spec = pod_of(loaded(text))
            assert spec["securityContext"]["runAsNonRoot"] is False
            assert spec["volumes"][0]["hostPath"]["type"] == "DirectoryOrCreate"
            assert "s3://lab/b/" in text or "prewarm" not in text


def test_no_secret_gets_into_a_manifest(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "job.toml"
    config.write_text(f'dir = "{tmp_path}/cache"\n[storage_options]\nsecret = "hush"\n')
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    for kind in KINDS:
        code, out, err = run("--config", config, "recipe", kind, "--secret", "s3")
        assert code == 0 and "hush" not in out + err
    for spec in ("https://me:hush@host/a.tar", "s3://b/a.tar?X-Amz-Signature=hush"):
        for kind in KINDS:
            code, out, err = run("recipe", kind, "--prewarm", spec)
            assert code == 2 and "--secret" in err and "hush" not in out + err


@pytest.mark.parametrize(
    "arguments",
    [
        ("k8s", "--volume", "memory"),
        ("k8s", "--room", "1GB"),
        ("k8s-pod", "--room", "1GB"),
        ("k8s-pod", "--volume", "memory"),
        ("k8s-pod", "--volume", "disk"),
        ("k8s-pod", "--volume", "memory", "--room", "0"),
        ("k8s-pod", "--volume", "memory", "--room", "much"),
        ("k8s-pod", "--nodes", "2"),
        ("k8s", "--nodes", "0"),
        ("k8s", "--cpu", "0"),
        ("k8s", "--user", "-1"),
        ("k8s", "--memory", "none"),
        ("k8s", "--image", "a b"),
        ("k8s", "--secret", "a_b"),
        ("k8s", "--secret", "KEY=value"),
        ("k8s", "--service-account", "A"),
        ("k8s", "--namespace", "../x"),
        ("k8s", "--toleration", "a=b:Never"),
        ("k8s", "--toleration", "-"),
        ("k8s", "--node-selector", "disk"),
        ("cron", "--image", "x"),
        ("systemd", "--user", "1"),
        ("slurm", "--secret", "s3"),
        ("cron", "--prewarm", "s3://b/a"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_printed(
    run: Any, arguments: tuple[str, ...]
) -> None:
    code, out, err = run("recipe", *arguments)
    assert (code, out) == (2, "") and err


def test_tiers_and_limits_of_the_configuration_are_looked_at(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDCACHE_MAX_SIZE", "100GB")
    asked = ("recipe", "k8s-pod", "--volume", "memory")
    assert run(*asked, "--room", "50GB")[0] == 2
    code, out, _ = run(*asked)
    room = parse_bytes(pod_of(loaded(out))["volumes"][0]["emptyDir"]["sizeLimit"] + "B")
    assert code == 0 and room * 0.9 >= 100 * 10**9
    monkeypatch.setenv("SHARDCACHE_TIERS", "/dev/shm/x=1GB")
    for kind in KINDS:
        code, _, err = run("recipe", kind)
        assert code == 2 and "tiers" in err
