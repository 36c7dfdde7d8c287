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
from typing import Any

import kubernetes_validate
import pytest
import yaml

from shardcache.cli.recipe import KINDS, render
from shardcache.errors import ConfigError
from tests.support.clitools import run_process

ODD = '/mnt/50%/it\'s "a" $HOME $(X) disk; #1'
PLAIN: dict[str, Any] = {
    "program": ["/opt/venv/bin/python", "-m", "shardcache"],
    "directory": "/local/nvme/shards",
    "environment": {"SHARDCACHE_MAX_SIZE": "800GB"},
}


def odd(python: str = sys.executable) -> dict[str, Any]:
    return {
        "program": [python, "-m", "shardcache"],
        "directory": ODD,
        "environment": {"SHARDCACHE_MAX_SIZE": "80%", "SHARDCACHE_ALLOW_SCHEMES": "pipe, x#y"},
        "prewarm": ("s3://lab/it's-$(X)-{000..127}.tar",),
        "image": "lab/train:17",
    }


@pytest.fixture(params=["plain", "odd"])
def setting(request: pytest.FixtureRequest) -> dict[str, Any]:
    return PLAIN if request.param == "plain" else odd()


def spy(tmp_path: Path) -> tuple[Path, Path]:
    """A program that notes how it is called, with its options."""
    notes, program = tmp_path / "notes.json", tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"open({str(notes)!r}, 'a').write(json.dumps([sys.argv[1:], "
        "{n: v for n, v in os.environ.items() if n.startswith('SHARDCACHE_')}]) + '\\n')\n"
        "sys.exit(int(os.environ.get('CODE', 0)))\n"
    )
    program.chmod(0o755)
    return program, notes


def called(notes: Path) -> list[tuple[list[str], dict[str, str]]]:
    return [tuple(json.loads(line)) for line in notes.read_text().splitlines()]


# -- cron ------------------------------------------------------------------------


def test_a_crontab_that_cron_takes(setting: dict[str, Any], tmp_path: Path) -> None:
    if shutil.which("crontab") is None:
        pytest.skip("cron is not installed")
    [text] = render("cron", **setting).values()
    (tmp_path / "crontab").write_text(text)
    done = subprocess.run(
        ["crontab", "-n", tmp_path / "crontab"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", [0, 6, 1])
def test_what_cron_runs_is_the_command_on_the_directory(tmp_path: Path, code: int) -> None:
    program, notes = spy(tmp_path)
    [text] = render("cron", **odd(str(program))).values()
    line = text.splitlines()[-1]
    minute, *stars, rest = line.split(" ", 5)
    assert 0 <= int(minute) < 60 and stars == ["*"] * 4
    assert "%" not in rest.replace("\\%", "")  # an end of the line, to cron
    done = subprocess.run(
        ["/bin/sh", "-c", rest.replace("\\%", "%")],
        env={"CODE": str(code)},
        capture_output=True,
        check=False,
    )
    [(arguments, _)] = called(notes)
    assert arguments == ["-m", "shardcache", "--dir", ODD, "clean", "--quiet", "--no-wait"]
    assert (done.returncode, done.stdout, done.stderr) == (0 if code == 6 else code, b"", b"")


# -- systemd ---------------------------------------------------------------------


def test_units_that_systemd_takes(setting: dict[str, Any], tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    files = render("systemd", **setting)
    for name, text in files.items():
        (tmp_path / name).write_text(text.replace("/opt/venv/bin/python", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", *(tmp_path / name for name in files)],
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if "shardcache" in line]
    assert (done.returncode, said) == (0, []), done.stderr


def test_a_unit_says_the_same_as_the_command_line() -> None:
    files = render("systemd", **PLAIN)
    service = files["shardcache-clean.service"]
    assert "SuccessExitStatus=6\n" in service  # busy: another process cleans it
    assert (
        "ExecStart=/opt/venv/bin/python -m shardcache --dir /local/nvme/shards clean --quiet "
        "--no-wait\n" in service
    )
    assert "\nEnvironment=SHARDCACHE_MAX_SIZE=800GB\n" in service
    strange = render("systemd", **odd("/usr/bin/python3"))["shardcache-clean.service"]
    assert '--dir "/mnt/50%%/it\'s \\"a\\" $$HOME $$(X) disk; #1" clean' in strange


# -- Slurm -----------------------------------------------------------------------


def test_scripts_that_bash_and_shellcheck_take(setting: dict[str, Any], tmp_path: Path) -> None:
    files = render("slurm", **setting)
    assert len(files) == (3 if "prewarm" in setting else 1)
    for name, text in files.items():
        path = tmp_path / name
        path.write_text(text)
        subprocess.run(["bash", "-n", path], check=True)
        checker = Path(sys.executable).with_name("shellcheck")
        done = subprocess.run(
            [checker, "--severity=warning", path], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("code", [0, 6, 1])
def test_slurm_never_sees_a_failure_and_the_log_does(tmp_path: Path, code: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("runuser needs root, as Slurm has it")
    program, notes = spy(tmp_path)
    tmp_path.chmod(0o755)
    log = tmp_path / "log"
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "logger").write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(log))}\n')
    (bin_ / "logger").chmod(0o755)
    directory = tmp_path / "ca $che"
    directory.mkdir()
    files = render(
        "slurm", [str(program)], str(directory), {"SHARDCACHE_MAX_SIZE": "80%"}, ["s3://lab/{0..9}"]
    )
    environment = {"PATH": f"{bin_}:/usr/sbin:/usr/bin:/sbin:/bin", "CODE": str(code)}
    environment |= {"SLURM_JOB_USER": "root", "SLURM_JOB_ID": "4711"}
    for name in ("epilog.sh", "prolog.sh"):
        (tmp_path / name).write_text(files[name])
        done = subprocess.run(
            ["bash", tmp_path / name], env=environment, capture_output=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    (cleaned, options), (prewarmed, _) = called(notes)
    assert options == {"SHARDCACHE_MAX_SIZE": "80%"}
    assert cleaned == ["--dir", str(directory), "clean", "--quiet", "--no-wait"]
    assert prewarmed[2:] == [
        *("prewarm", "--quiet", "--best-effort", "--deadline", "5m", "--", "s3://lab/{0..9}")
    ]
    said = log.read_text() if log.exists() else ""
    assert ("cleaning after job 4711 failed" in said) is (code == 1)
    assert ("prewarming for job 4711 ended with" in said) is (code != 0)


def test_a_batch_script_fills_each_node_with_its_own_shards(tmp_path: Path) -> None:
    program, notes = spy(tmp_path)
    (tmp_path / "srun").write_text('#!/bin/sh\n[ "$1" = --ntasks-per-node=1 ] && shift && "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    text = render("slurm", [str(program)], ODD, {}, ["s3://lab/{0..9}"])["job.sh"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["bash", "-c", text], check=True, env=environment)
    [(arguments, _)] = called(notes)
    assert arguments[:3] == ["--dir", ODD, "prewarm"]
    assert "--shard-by-node" in arguments and arguments[-1] == "s3://lab/{0..9}"


def test_without_a_cache_an_epilog_does_nothing(tmp_path: Path) -> None:
    program, notes = spy(tmp_path)
    text = render("slurm", [str(program)], str(tmp_path / "none"), {})["epilog.sh"]
    subprocess.run(["bash", "-c", text], check=True, env={})
    assert not notes.exists()


# -- Kubernetes ------------------------------------------------------------------


def kubelet(text: str) -> str:
    """What a container is given: k8s.io/kubernetes/third_party/forked/golang/expansion."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)", lambda found: "$" if found[0] == "$$" else "EXPANDED", text
    )


def test_a_daemon_set_that_kubernetes_takes(setting: dict[str, Any], tmp_path: Path) -> None:
    found = yaml.safe_load(render("k8s", **setting)["shardcache.yaml"])
    kubernetes_validate.validate(found, "1.31", strict=True)
    pod = found["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["image"] == setting.get("image", "IMAGE")
    assert {row["name"]: kubelet(row["value"]) for row in container["env"]} == setting[
        "environment"
    ]
    assert container["volumeMounts"][0]["mountPath"] == setting["directory"]
    assert pod["volumes"][0]["hostPath"]["path"] == setting["directory"]
    _, notes = spy(tmp_path)
    (tmp_path / "sleep").write_text("#!/bin/sh\nkill $PPID\n")
    (tmp_path / "sleep").chmod(0o755)
    shell, *arguments = map(kubelet, container["command"])
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run([shell, *arguments], check=True, env=environment, timeout=60)
    ran = [arguments[2:] for arguments, _ in called(notes)]
    specs = setting.get("prewarm", ())
    warm = [["--dir", setting["directory"], "prewarm", "--best-effort", "--", *specs]]
    clean = [["--dir", setting["directory"], "clean", "--quiet", "--no-wait"]]
    assert ran == (warm if specs else []) + clean


# -- the command -----------------------------------------------------------------


def test_a_recipe_has_the_options_that_are_set_and_no_secret(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text(
        f'dir = "{tmp_path}/cache"\nmax_size = "800GB"\n[storage_options]\nsecret = "hush"\n'
    )
    code, out, err = run_process(
        "--config", str(config), "recipe", "cron", directory=tmp_path / "cache"
    )
    assert (code, err) == (0, "")
    assert "SHARDCACHE_MAX_SIZE=800GB\n" in out and "hush" not in out
    assert f"--dir {tmp_path}/cache clean --quiet --no-wait" in out
    assert f"{sys.executable} -m shardcache" in out


def test_files_are_written_whole_and_never_over_others(tmp_path: Path) -> None:
    directory = tmp_path / "units"
    directory.mkdir()
    asked = ["recipe", "systemd", "-o", str(directory)]
    code, out, err = run_process(*asked, directory=tmp_path / "cache")
    assert (code, out) == (0, "") and err.count("wrote ") == 2
    names = {"shardcache-clean.service", "shardcache-clean.timer"}
    assert {path.name for path in directory.iterdir()} == names
    (directory / "shardcache-clean.service").unlink()
    (directory / "shardcache-clean.timer").write_text("mine")
    code, _, err = run_process(*asked, directory=tmp_path / "cache")
    assert code == 2 and "is there already" in err
    assert [path.read_text() for path in directory.iterdir()] == ["mine"]
    code, _, _ = run_process(
        "recipe", "slurm", "-o", str(directory), "-v", directory=tmp_path / "cache"
    )
    assert code == 0 and os.access(directory / "epilog.sh", os.X_OK)


def test_a_credential_is_refused() -> None:
    for kind in KINDS:
        with pytest.raises(ConfigError, match="with a credential") as caught:
            render(kind, **PLAIN, prewarm=["https://me:hush@host/a.tar"])
        assert "hush" not in str(caught.value)
