"""Recipes: each is what its own program takes, whatever is in the paths and values."""

from __future__ import annotations

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

from shardcache.cli.recipe import KINDS, render
from shardcache.errors import ConfigError
from tests.support.clitools import run_process

ODD = '/mnt/50%/it\'s "a" $HOME $(X) disk; #1'
PLAIN = {
    "program": ["/opt/venv/bin/python", "-m", "shardcache"],
    "directory": "/local/nvme/shards",
    "environment": {"SHARDCACHE_MAX_SIZE": "800GB"},
}
CLEAN = ["clean", "--quiet", "--no-wait"]


def odd(python=sys.executable):
    return {
        "program": [python, "-m", "shardcache"],
        "directory": ODD,
        "environment": {"SHARDCACHE_MAX_SIZE": "80%", "SHARDCACHE_ALLOW_SCHEMES": "pipe, x#y"},
        "prewarm": ("s3://lab/it's-$(X)-{000..127}.tar",),
        "image": "lab/train:17",
    }


@pytest.fixture(params=[PLAIN, odd()], ids=["plain", "odd"])
def setting(request):
    return request.param


@pytest.fixture
def spy(tmp_path):
    """A program that notes how it is called, with its options."""
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"open({str(tmp_path / 'notes')!r}, 'a').write(json.dumps([sys.argv[1:], "
        "{n: v for n, v in os.environ.items() if n.startswith('SHARDCACHE_')}]) + '\\n')\n"
        "sys.exit(int(os.environ.get('CODE', 0)))\n"
    )
    program.chmod(0o755)
    return str(program)


def called(tmp_path):
    return [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]


def checked(*command):
    """What a program that checks files says of them."""
    program = Path(sys.executable).with_name(command[0])
    if not program.exists() and shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    command = [program if program.exists() else command[0], *command[1:]]
    done = subprocess.run(command, capture_output=True, text=True)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "shardcache" in line]
    assert done.returncode == 0, done.stdout + done.stderr
    return said


# -- cron and systemd --------------------------------------------------------------


def test_a_crontab_that_cron_takes(setting, tmp_path):
    (tmp_path / "crontab").write_text(render("cron", **setting)["crontab"])
    checked("crontab", "-n", tmp_path / "crontab")


@pytest.mark.parametrize("code", [0, 6, 1])
def test_what_cron_runs_is_the_command_on_the_directory(spy, tmp_path, code):
    line = render("cron", **odd(spy))["crontab"].splitlines()[-1]
    minute, *stars, rest = line.split(" ", 5)
    assert 0 <= int(minute) < 60 and stars == ["*"] * 4
    assert "%" not in rest.replace("\\%", "")  # an end of the line, to cron
    shell = ["/bin/sh", "-c", rest.replace("\\%", "%")]
    done = subprocess.run(shell, env={"CODE": str(code)}, capture_output=True)
    [(arguments, _)] = called(tmp_path)
    assert arguments == ["-m", "shardcache", "--dir", ODD, *CLEAN]
    assert (done.returncode, done.stdout, done.stderr) == (0 if code == 6 else code, b"", b"")


def test_units_that_systemd_takes(setting, tmp_path):
    files = render("systemd", **setting)
    for name, text in files.items():
        (tmp_path / name).write_text(text.replace("/opt/venv/bin/python", sys.executable))
    assert checked("systemd-analyze", "verify", *(tmp_path / name for name in files)) == []


def test_a_unit_says_the_same_as_the_command_line():
    service = render("systemd", **PLAIN)["shardcache-clean.service"]
    assert "SuccessExitStatus=6\n" in service  # busy: another process cleans it
    command = shlex.join([*PLAIN["program"], "--dir", PLAIN["directory"], *CLEAN])
    assert f"\nExecStart={command}\n" in service
    assert "\nEnvironment=SHARDCACHE_MAX_SIZE=800GB\n" in service
    strange = render("systemd", **odd("/usr/bin/python3"))["shardcache-clean.service"]
    assert '--dir "/mnt/50%%/it\'s \\"a\\" $$HOME $$(X) disk; #1" clean' in strange


# -- Slurm -----------------------------------------------------------------------


def test_scripts_that_bash_and_shellcheck_take(setting, tmp_path):
    files = render("slurm", **setting)
    assert len(files) == (3 if "prewarm" in setting else 1)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        subprocess.run(["bash", "-n", tmp_path / name], check=True)
        checked("shellcheck", "--severity=warning", tmp_path / name)


@pytest.mark.skipif(os.geteuid() != 0, reason="runuser needs root, as Slurm has it")
@pytest.mark.parametrize("code", [0, 6, 1])
def test_slurm_never_sees_a_failure_and_the_log_does(spy, tmp_path, code):
    tmp_path.chmod(0o755)
    log, directory = tmp_path / "log", tmp_path / "ca $che"
    (tmp_path / "logger").write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(log))}\n')
    (tmp_path / "logger").chmod(0o755)
    options = {"SHARDCACHE_MAX_SIZE": "80%"}
    files = render("slurm", [spy], str(directory), options, ["s3://lab/{0..9}"])
    environment = {"PATH": f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin", "CODE": str(code)}
    environment |= {"SLURM_JOB_USER": "root", "SLURM_JOB_ID": "4711"}
    subprocess.run(["bash", "-c", files["epilog.sh"]], env=environment, check=True)
    assert not (tmp_path / "notes").exists()  # there is no cache yet
    directory.mkdir()
    for name in ("epilog.sh", "prolog.sh"):
        shell = ["bash", "-c", files[name]]
        done = subprocess.run(shell, env=environment, capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    (cleaned, given), (prewarmed, _) = called(tmp_path)
    assert given == options and cleaned == ["--dir", str(directory), *CLEAN]
    warm = ["prewarm", "--quiet", "--best-effort", "--deadline", "5m", "--", "s3://lab/{0..9}"]
    assert prewarmed[2:] == warm
    said = log.read_text() if log.exists() else ""
    assert ("cleaning after job 4711 failed" in said) is (code == 1)
    assert ("prewarming for job 4711 ended with" in said) is (code != 0)


def test_a_batch_script_fills_each_node_with_its_own_shards(spy, tmp_path):
    (tmp_path / "srun").write_text('#!/bin/sh\n[ "$1" = --ntasks-per-node=1 ] && shift && "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    text = render("slurm", [spy], ODD, {}, ["s3://lab/{0..9}"])["job.sh"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["bash", "-c", text], check=True, env=environment)
    [(arguments, _)] = called(tmp_path)
    assert arguments[:3] == ["--dir", ODD, "prewarm"]
    assert "--shard-by-node" in arguments and arguments[-1] == "s3://lab/{0..9}"


# -- Kubernetes ------------------------------------------------------------------


def kubelet(text):
    """What a container is given: k8s.io/kubernetes/third_party/forked/golang/expansion."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda m: "$" if m[0] == "$$" else "EXPANDED", text)


def test_a_daemon_set_that_kubernetes_takes(setting, spy, tmp_path):
    found = yaml.safe_load(render("k8s", **setting)["shardcache.yaml"])
    kubernetes_validate.validate(found, "1.31", strict=True)
    pod = found["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["image"] == setting.get("image", "IMAGE")
    env = {row["name"]: kubelet(row["value"]) for row in container["env"]}
    assert env == setting["environment"]
    assert container["volumeMounts"][0]["mountPath"] == setting["directory"]
    assert pod["volumes"][0]["hostPath"]["path"] == setting["directory"]
    (tmp_path / "sleep").write_text("#!/bin/sh\nkill $PPID\n")
    (tmp_path / "sleep").chmod(0o755)
    command = [kubelet(word) for word in container["command"]]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(command, check=True, env=environment, timeout=60)
    ran = [arguments[4:] for arguments, _ in called(tmp_path)]
    assert {arguments[3] for arguments, _ in called(tmp_path)} == {setting["directory"]}
    specs = setting.get("prewarm", ())
    warm = [["prewarm", "--best-effort", "--", *specs]]
    assert ran == (warm if specs else []) + [CLEAN]


# -- the command -----------------------------------------------------------------


def test_a_recipe_has_the_options_that_are_set_and_no_secret(tmp_path):
    config, cache = tmp_path / "job.toml", tmp_path / "cache"
    config.write_text(f'dir = "{cache}"\nmax_size = "800GB"\n[storage_options]\nsecret = "hush"\n')
    code, out, err = run_process("--config", config, "recipe", "cron", directory=cache)
    assert (code, err) == (0, "")
    assert "SHARDCACHE_MAX_SIZE=800GB\n" in out and "hush" not in out
    assert f"{sys.executable} -m shardcache --dir {cache} clean --quiet --no-wait" in out
    for kind in KINDS:
        with pytest.raises(ConfigError, match="with a credential") as caught:
            render(kind, **PLAIN, prewarm=["https://me:hush@host/a.tar"])
        assert "hush" not in str(caught.value)


def test_files_are_written_whole_and_never_over_others(run, tmp_path):
    units = tmp_path / "units"
    units.mkdir()
    code, out, err = run("recipe", "systemd", "-o", units)
    assert (code, out) == (0, "") and err.count("wrote ") == 2
    assert {p.name for p in units.iterdir()} == {
        "shardcache-clean.service",
        "shardcache-clean.timer",
    }
    (units / "shardcache-clean.service").unlink()
    (units / "shardcache-clean.timer").write_text("mine")
    code, _, err = run("recipe", "systemd", "-o", units)
    assert code == 2 and "is there already" in err
    assert [path.read_text() for path in units.iterdir()] == ["mine"]
    assert run("recipe", "slurm", "-o", units)[0] == 0
    assert os.access(units / "epilog.sh", os.X_OK)
