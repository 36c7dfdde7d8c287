"""Recipes: cron, systemd, Slurm and Kubernetes accept them, with any path or value."""

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

from shardcache.cli.recipe import render
from tests.support.clitools import run_process

ODD = '/mnt/50%/it\'s "a" $HOME $(X) disk; #1'
PLAIN = (["/opt/venv/bin/python", "-m", "shardcache"], "/local/nvme/shards", [])
VARIABLES = ["SHARDCACHE_MAX_SIZE=80%", "SHARDCACHE_ALLOW_SCHEMES=pipe, x#y"]
SPEC = "s3://lab/it's-$(X)-{000..127}.tar"
CLEAN = ["clean", "--quiet", "--no-wait"]


def odd(python=sys.executable):
    return [python, "-m", "shardcache"], ODD, VARIABLES, [SPEC]


@pytest.fixture
def spy(tmp_path):
    """A program that records its arguments and options."""
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"open({str(tmp_path / 'notes')!r}, 'a').write(json.dumps([sys.argv[1:], "
        "[f'{n}={v}' for n, v in os.environ.items() if n.startswith('SHARDCACHE_')]]) + '\\n')\n"
        "sys.exit(int(os.environ.get('CODE', 0)))\n"
    )
    program.chmod(0o755)
    return str(program)


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def called(tmp_path):
    calls = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    assert all(variables == VARIABLES for _, variables in calls)
    return [arguments for arguments, _ in calls]


def checked(*command):
    """Check that a linter accepts files."""
    program = shutil.which(command[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert done.returncode == 0 and "shardcache" not in output, output


@pytest.mark.parametrize(("setting", "count"), [(PLAIN, 3), (odd(), 5)], ids=["plain", "odd"])
def test_systemd_bash_and_shellcheck_accept_the_files(setting, count, tmp_path):
    files = {**render("systemd", *setting), **render("slurm", *setting)}
    assert len(files) == count
    for name, text in files.items():
        (tmp_path / name).write_text(text.replace("/opt/venv/bin/python", sys.executable))
        if name.endswith(".sh"):
            checked("shellcheck", "--severity=warning", tmp_path / name)
    checked("systemd-analyze", "verify", *tmp_path.glob("shardcache-clean.*"))


@pytest.mark.parametrize("code", [0, 6, 1])
def test_cron_runs_clean(spy, tmp_path, code):
    line = render("cron", *odd(spy))["crontab"].splitlines()[-1]
    *times, rest = line.split(" ", 5)
    assert 0 <= int(times[0]) < 60 and times[1:] == ["*"] * 4
    assert "%" not in rest.replace("\\%", "")  # cron would end the line here
    shell = ["/bin/sh", "-c", rest.replace("\\%", "%")]
    done = subprocess.run(shell, env={"CODE": str(code)}, capture_output=True)
    assert called(tmp_path) == [["-m", "shardcache", "--dir", ODD, *CLEAN]]
    assert (done.returncode, done.stdout, done.stderr) == (0 if code == 6 else code, b"", b"")


def test_the_systemd_unit_runs_clean():
    service = render("systemd", *PLAIN)["shardcache-clean.service"]
    program, directory, _ = PLAIN
    assert f"\nExecStart={shlex.join([*program, '--dir', directory, *CLEAN])}\n" in service
    for name, text in render("systemd", *PLAIN).items():
        assert text.startswith(f"# Save as /etc/systemd/system/{name}\n")
    strange = render("systemd", *odd("/usr/bin/python3"))["shardcache-clean.service"]
    assert 'ExecStart=/usr/bin/env "SHARDCACHE_MAX_SIZE=80%%" ' in strange
    assert '--dir "/mnt/50%%/it\'s \\"a\\" $$HOME $$(X) disk; #1" clean' in strange


@pytest.mark.skipif(os.geteuid() != 0, reason="runuser needs root, as Slurm has it")
@pytest.mark.parametrize("code", [0, 6, 1])
def test_slurm_scripts_log_failures_and_succeed(spy, tmp_path, code):
    tmp_path.chmod(0o755)
    log, directory = tmp_path / "log", tmp_path / "ca $che"
    script(tmp_path / "logger", f'echo "$@" >> {shlex.quote(str(log))}')
    script(tmp_path / "srun", '[ "$1 $2" = "--ntasks=2 --ntasks-per-node=1" ] && shift 2 && "$@"')
    files = render("slurm", [spy], str(directory), VARIABLES, [SPEC])
    environment = {"PATH": f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin", "CODE": str(code)}
    environment |= {"SLURM_JOB_USER": "root", "SLURM_JOB_ID": "4711"}
    environment |= {"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "8"}
    subprocess.run(["bash", "-c", files["epilog.sh"]], env=environment, check=True)
    assert not (tmp_path / "notes").exists()  # there is no cache yet
    directory.mkdir()
    for name in ("epilog.sh", "prolog.sh"):
        shell = ["bash", "-c", files[name]]
        done = subprocess.run(shell, env=environment, capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    logged = log.read_text() if log.exists() else ""
    assert ("cleaning after job 4711 failed" in logged) is (code == 1)
    assert ("prewarming for job 4711 ended with" in logged) is (code != 0)
    subprocess.run(["bash", "-c", files["job.sh"]], env=environment)
    start, prewarm = ["--dir", str(directory)], ["prewarm", "--quiet"]
    assert called(tmp_path) == [
        [*start, *CLEAN],
        [*start, *prewarm, "--best-effort", "--deadline", "5m", "--", SPEC],
        [*start, *prewarm, "--shard-by-node", "--ranks-per-node", "8", "--", SPEC],
    ]


def kubelet(text):
    """Expand variables as k8s.io/kubernetes/third_party/forked/golang/expansion does."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda m: "$" if m[0] == "$$" else "EXPANDED", text)


@pytest.mark.parametrize("specs", [[], [SPEC]])
def test_kubernetes_accepts_the_daemon_set(spy, tmp_path, specs):
    files = render("k8s", [], ODD, VARIABLES, specs)
    assert ("prewarm" in files["shardcache.yaml"]) is bool(specs)
    assert "\\n" not in files["shardcache.yaml"]  # a line of the script is a line of the file
    found = yaml.safe_load(files["shardcache.yaml"])
    kubernetes_validate.validate(found, "1.31", strict=True)
    pod = found["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["volumeMounts"][0]["mountPath"] == pod["volumes"][0]["hostPath"]["path"] == ODD
    script(tmp_path / "sleep", "kill $PPID")
    command = [kubelet(word) for word in container["command"]]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(command, check=True, env=environment, timeout=60)
    start, warm = ["-m", "shardcache", "--dir", ODD], ["prewarm", "--best-effort", "--", *specs]
    assert called(tmp_path) == [[*start, *warm]] * len(specs) + [[*start, *CLEAN]]


def test_a_missing_kind_is_one_line(run):
    code, _, err = run("recipe")
    assert code == 2 and "Choose from: cron, systemd, slurm, k8s. Try 'shardcache recipe" in err


def test_a_recipe_has_the_options_and_no_secret(run, tmp_path):
    config, cache = tmp_path / "job.toml", tmp_path / "cache"
    config.write_text('max_size = "800GB"\n[storage_options]\nsecret = "hush"\n')
    code, out, err = run_process("--config", config, "recipe", "cron", directory=cache)
    assert (code, err) == (0, "") and "hush" not in out
    assert "/usr/bin/env SHARDCACHE_MAX_SIZE=800GB SHARDCACHE_MIN_FREE=0 " in out
    assert f" {sys.executable} -m shardcache --dir {cache} clean --quiet --no-wait" in out
    code, out, err = run("recipe", "cron")
    assert code == 0 and err.startswith("warning: no limit is set, so this only keeps 0 of")
    code, out, err = run("recipe", "slurm", "--prewarm", "https://me:hush@host/a.tar")
    assert (code, out) == (2, "") and "contains a credential" in err and "hush" not in err
