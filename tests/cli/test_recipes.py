"""Recipes: each is what its own program takes, whatever is in the paths and values."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from shardcache.cli.manifests import Pod
from shardcache.cli.recipes import RECIPES, Recipe, Setting
from tests.support.clitools import run_process

ODD = '/mnt/50%/it\'s "a" $HOME disk; #1'
PLAIN = Setting(
    ["/opt/venv/bin/python", "-m", "shardcache"],
    "/local/nvme/shards",
    "trainer",
    {"SHARDCACHE_MAX_SIZE": "800GB"},
)


def odd(python: str = sys.executable) -> Setting:
    return Setting(
        [python, "-m", "shardcache"],
        ODD,
        "root",
        {"SHARDCACHE_MAX_SIZE": "80%", "SHARDCACHE_ALLOW_SCHEMES": "pipe, x#y"},
        prewarm=("s3://lab/it's-{000..127}.tar",),
        pod=Pod("lab/train:17", 3),
    )


@pytest.fixture(params=["plain", "odd"])
def setting(request: pytest.FixtureRequest) -> Setting:
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


def test_a_crontab_that_cron_takes(setting: Setting, tmp_path: Path) -> None:
    if shutil.which("crontab") is None:
        pytest.skip("cron is not installed")
    [recipe] = RECIPES["cron"](setting)
    (tmp_path / "crontab").write_text(recipe.text)
    done = subprocess.run(
        ["crontab", "-n", tmp_path / "crontab"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", [0, 6, 1])
def test_what_cron_runs_is_the_command_on_the_directory(tmp_path: Path, code: int) -> None:
    program, notes = spy(tmp_path)
    [recipe] = RECIPES["cron"](odd(str(program)))
    line = recipe.text.splitlines()[-1]
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


def test_units_that_systemd_takes(setting: Setting, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    recipes = RECIPES["systemd"](setting)
    for recipe in recipes:
        text = recipe.text.replace("/opt/venv/bin/python", sys.executable)
        (tmp_path / recipe.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", *(tmp_path / recipe.name for recipe in recipes)],
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if "shardcache" in line]
    assert (done.returncode, said) == (0, []), done.stderr


def test_a_unit_says_the_same_as_the_command_line() -> None:
    service, timer = RECIPES["systemd"](PLAIN)
    assert "SuccessExitStatus=6\n" in service.text  # busy: somebody else cleans it
    assert (
        "ExecStart=/opt/venv/bin/python -m shardcache --dir /local/nvme/shards clean --quiet "
        "--no-wait\n" in service.text
    )
    assert "User=trainer\nEnvironment=SHARDCACHE_MAX_SIZE=800GB\n" in service.text
    assert (service.name, timer.name) == ("shardcache-clean.service", "shardcache-clean.timer")
    odd_service = RECIPES["systemd"](odd("/usr/bin/python3"))[0].text
    assert '--dir "/mnt/50%%/it\'s \\"a\\" $$HOME disk; #1" clean' in odd_service


# -- Slurm -----------------------------------------------------------------------


def test_scripts_that_bash_and_shellcheck_take(setting: Setting, tmp_path: Path) -> None:
    recipes = RECIPES["slurm"](setting)
    assert len(recipes) == (2 if setting.prewarm else 1)
    for recipe in recipes:
        path = tmp_path / recipe.name
        path.write_text(recipe.text)
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
    setting = Setting(
        [str(program)], str(directory), "root", {"SHARDCACHE_MAX_SIZE": "80%"}, ("s3://lab/{0..9}",)
    )
    environment = {"PATH": f"{bin_}:/usr/sbin:/usr/bin:/sbin:/bin", "CODE": str(code)}
    environment |= {"SLURM_JOB_USER": "root", "SLURM_JOB_ID": "4711"}
    for recipe in RECIPES["slurm"](setting):
        (tmp_path / recipe.name).write_text(recipe.text)
        done = subprocess.run(
            ["bash", tmp_path / recipe.name], env=environment, capture_output=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    (cleaned, options), (prewarmed, _) = called(notes)
    assert options == {"SHARDCACHE_MAX_SIZE": "80%"}
    assert cleaned == ["--dir", str(directory), "clean", "--quiet", "--no-wait"]
    assert prewarmed[2:] == [
        *("prewarm", "--quiet", "--best-effort", "--deadline", "5m", "s3://lab/{0..9}")
    ]
    said = log.read_text() if log.exists() else ""
    assert ("cleaning after job 4711 failed" in said) is (code == 1)
    assert ("prewarming for job 4711 ended with" in said) is (code != 0)


def test_without_a_cache_an_epilog_does_nothing(tmp_path: Path) -> None:
    program, notes = spy(tmp_path)
    setting = Setting([str(program)], str(tmp_path / "none"), "root", {})
    [recipe] = RECIPES["slurm"](setting)
    (tmp_path / recipe.name).write_text(recipe.text)
    subprocess.run(["bash", tmp_path / recipe.name], check=True, env={})
    assert not notes.exists()


# -- Kubernetes ------------------------------------------------------------------


def test_a_cron_job_that_kubernetes_takes(setting: Setting) -> None:
    recipe = RECIPES["k8s"](setting)[0]
    found = yaml.safe_load(recipe.text)
    kubernetes_validate.validate(found, "1.31", strict=True)
    pod = found["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["command"][3:5] == ["--dir", setting.directory]
    assert container["image"] == setting.pod.image
    assert {row["name"]: row["value"] for row in container["env"]} == setting.environment
    assert container["volumeMounts"][0]["mountPath"] == setting.directory
    job = found["spec"]["jobTemplate"]["spec"]
    assert job["parallelism"] == job["completions"] == setting.pod.nodes


def test_without_options_there_is_no_environment() -> None:
    setting = Setting(["python"], "/c", "me", {})
    found = yaml.safe_load(RECIPES["k8s"](setting)[0].text)
    kubernetes_validate.validate(found, "1.31", strict=True)
    [container] = found["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert "env" not in container


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


def test_a_recipe_is_an_object_to_machines(tmp_path: Path) -> None:
    code, out, _ = run_process("recipe", "k8s", "--json", directory=tmp_path / "cache")
    found = json.loads(out)
    assert code == 0 and [file["name"] for file in found["files"]] == ["shardcache-clean.yaml"]


@pytest.mark.parametrize(
    "arguments", [("recipe",), ("recipe", "anacron"), ("recipe", "cron", "--prewarm", "s3://b/a")]
)
def test_what_is_no_recipe_is_a_usage_error(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert run_process(*arguments, directory=tmp_path / "cache")[0] == 2


def test_recipes_are_named_files() -> None:
    for make in RECIPES.values():
        for recipe in make(PLAIN):
            assert isinstance(recipe, Recipe) and recipe.text.endswith("\n")
