"""The files in examples/ for cron, systemd, Slurm and Kubernetes are valid and do as they say."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.support.trainingtools import EXAMPLES

PROGRAM, DIRECTORY = "/opt/venv/bin/shardcache", "/local/nvme/shards"
SPEC = "s3://bucket/train-{0000..2047}.tar"
CLEAN = ["clean", "--quiet", "--no-wait"]


def text_of(name, program=PROGRAM, directory=DIRECTORY):
    """Return an example as a user edits it."""
    text = (EXAMPLES / name).read_text()
    return text.replace(PROGRAM, str(program)).replace(DIRECTORY, str(directory))


@pytest.fixture
def spy(tmp_path):
    """A program that records its arguments."""
    note = 'printf "%q " "$@"; echo'
    return script(tmp_path / "shardcache", f"{{ {note}; }} >> {tmp_path}/notes\nexit ${{CODE:-0}}")


def script(path, text):
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def called(tmp_path):
    return [shlex.split(line) for line in (tmp_path / "notes").read_text().splitlines()]


def checked(*command):
    """Check that a linter accepts files."""
    program = shutil.which(command[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert done.returncode == 0 and "shardcache" not in output, output


def test_shellcheck_accepts_the_scripts():
    scripts = [*EXAMPLES.glob("*.sh"), EXAMPLES / "train.sbatch"]
    checked("shellcheck", "--severity=warning", *scripts)


def test_systemd_accepts_the_units(tmp_path):
    for name in ("shardcache-clean.service", "shardcache-clean.timer"):
        (tmp_path / name).write_text(text_of(name, Path(sys.executable).with_name("shardcache")))
        assert f"# Save as /etc/systemd/system/{name}\n" in text_of(name)
    command = " ".join([PROGRAM, "--dir", DIRECTORY, *CLEAN])
    assert f"\nExecStart={command}\n" in text_of("shardcache-clean.service")
    checked("systemd-analyze", "verify", *tmp_path.glob("shardcache-clean.*"))


@pytest.mark.parametrize("code", [0, 6, 1])
def test_cron_runs_clean(spy, tmp_path, code):
    *_, metrics, variable, line = text_of("crontab", spy).splitlines()
    assert variable == f"SHARDCACHE_DIR={DIRECTORY}"
    *times, rest = line.split(" ", 5)
    assert 0 <= int(times[0]) < 60 and times[1:] == ["*"] * 4
    assert "%" not in rest  # cron would end the line here
    (tmp_path / "cache").mkdir()  # such as a mount point
    environment = {"CODE": str(code), "SHARDCACHE_DIR": str(tmp_path / "cache")}
    shell = "/bin/sh", "-c", rest
    for command in (rest, metrics.split(" ", 6)[6]):  # there is no cache yet
        done = subprocess.run(["/bin/sh", "-c", command], env=environment, capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    (tmp_path / "cache/manifest.json").touch()
    done = subprocess.run(shell, env=environment, capture_output=True)
    assert called(tmp_path) == [CLEAN]
    assert (done.returncode, done.stdout, done.stderr) == (0 if code == 6 else code, b"", b"")


@pytest.mark.skipif(os.geteuid() != 0, reason="runuser needs root, as Slurm has it")
@pytest.mark.parametrize("code", [0, 6, 1])
def test_slurm_scripts_log_failures_and_succeed(spy, tmp_path, code):
    tmp_path.chmod(0o755)
    log, directory = tmp_path / "log", tmp_path / "cache"
    script(tmp_path / "logger", f'echo "$@" >> {log}')
    script(tmp_path / "srun", '[ "$1 $2" = "--ntasks=2 --ntasks-per-node=1" ] && shift 2 && "$@"')
    environment = {"PATH": f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin", "CODE": str(code)}
    environment |= {"SLURM_JOB_USER": "root", "SLURM_JOB_ID": "4711"}
    environment |= {"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "8"}

    def bash(name):
        shell = ["bash", "-c", text_of(f"slurm-{name}.sh", spy, directory)]
        done = subprocess.run(shell, env=environment, capture_output=True)
        assert (done.stdout, done.stderr) == (b"", b"")
        return done.returncode

    directory.mkdir()
    assert bash("epilog") == 0
    assert not (tmp_path / "notes").exists()  # there is no cache yet
    (directory / "manifest.json").touch()
    assert (bash("epilog"), bash("prolog"), bash("job")) == (0, 0, code)
    logged = log.read_text() if log.exists() else ""
    assert ("cleaning after job 4711 failed" in logged) is (code == 1)
    assert ("prewarming for job 4711 ended with" in logged) is (code != 0)
    start, prewarm = ["--dir", str(directory)], ["prewarm", "--quiet"]
    assert called(tmp_path) == [
        [*start, *CLEAN],
        [*start, *prewarm, "--best-effort", "--deadline", "5m", "--", SPEC],
        [*start, *prewarm, "--shard-by-node", "--ranks-per-node", "8", "--", SPEC],
    ]


@pytest.mark.parametrize("specs", [[], [SPEC]])
def test_kubernetes_accepts_the_daemon_set(spy, tmp_path, specs):
    found = yaml.safe_load(text_of("daemonset.yaml"))
    kubernetes_validate.validate(found, "1.31", strict=True)
    pod = found["spec"]["template"]["spec"]
    [container] = pod["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    path = container["volumeMounts"][0]["mountPath"]
    assert path == pod["volumes"][0]["hostPath"]["path"] == variables["SHARDCACHE_DIR"]
    # k8s.io/kubernetes/third_party/forked/golang/expansion would replace these.
    assert not any(re.search(r"\$[$(]", word) for word in container["command"])
    script(tmp_path / "sleep", "kill $PPID")
    variables |= {"PATH": f"{tmp_path}:/usr/bin:/bin", "SHARDS": "".join(specs)}
    subprocess.run(container["command"], check=True, env=variables, timeout=60)
    assert called(tmp_path) == [["prewarm", "--best-effort", "--", *specs]] * len(specs) + [CLEAN]


@pytest.mark.parametrize("code", [0, 3])
def test_kubernetes_prewarms_before_the_job_trains(spy, tmp_path, code):
    found = yaml.safe_load(text_of("job.yaml"))
    kubernetes_validate.validate(found, "1.31", strict=True)
    pod = found["spec"]["template"]["spec"]
    [prewarm], [train] = pod["initContainers"], pod["containers"]
    for container in (prewarm, train):
        [mount] = container["volumeMounts"]
        assert container["env"] == [{"name": "SHARDCACHE_DIR", "value": mount["mountPath"]}]
        assert container["image"] == prewarm["image"] and mount["name"] == pod["volumes"][0]["name"]
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CODE": str(code)}
    subprocess.run(prewarm["command"], check=True, env=variables, timeout=60)
    assert called(tmp_path) == [["prewarm", "--best-effort", "--deadline", "30m", SPEC]]


def test_the_dashboard_and_the_alerts_use_metrics_that_exist(run):
    run("pin", "s3://b/a.tar")  # creates the cache
    known = run("stats", "--format", "prometheus")[1]
    assert "\nshardcache_last_clean_timestamp_seconds{" in known  # although it was never cleaned
    checked("promtool", "check", "rules", EXAMPLES / "alerts.yaml")
    metrics = set(re.findall(r"^(?:# TYPE )?(shardcache_\w+)[{ ]", known, re.MULTILINE))
    rules = yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())
    panels = json.loads((EXAMPLES / "grafana.json").read_text())["panels"]
    used = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    used += [target["expr"] for panel in panels for target in panel["targets"]]
    for expression in used:
        names = re.findall(r"shardcache_\w+", expression)
        assert names and set(names) <= metrics, expression
        for label in re.findall(r'(?:outcome|kind)="\w+"', expression):
            assert label in known, expression
