"""``shardcache completion``: shells take what it prints, and complete with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardcache.cli.main import command_line
from tests.support.clitools import run_process

bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def script(shell: str, tmp_path: Path) -> str:
    code, out, err = run_process("completion", shell, directory=tmp_path / "cache")
    assert (code, err) == (0, "")
    assert not (tmp_path / "cache").exists()
    return out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_a_script_of_its_own(tmp_path: Path, shell: str) -> None:
    text = script(shell, tmp_path)
    assert f"_SHARDCACHE_COMPLETE={shell}_complete" in text
    if (found := shutil.which(shell)) is not None:
        done = subprocess.run([found, "-n"], input=text, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_another_shell_is_refused(tmp_path: Path) -> None:
    code, out, err = run_process("completion", "tcsh", directory=tmp_path / "cache")
    assert (code, out) == (2, "")
    assert "'bash', 'zsh', 'fish'" in err


@pytest.fixture
def complete(tmp_path: Path):
    """What bash offers for the last of some words."""
    program = tmp_path / "bin" / "shardcache"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m shardcache "$@"\n')
    program.chmod(0o755)
    (tmp_path / "script").write_text(script("bash", tmp_path))
    # As readline does it: the function that is registered for the command is called.
    code = """
        source "$1"; shift
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
        "$(complete -p shardcache | sed 's/.*-F \\([^ ]*\\).*/\\1/')" shardcache
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    root = str(Path(__file__).resolve().parents[2])
    path = f"{program.parent}:{os.environ['PATH']}"

    def complete(*words: str) -> list[str]:
        done = subprocess.run(
            ["bash", "--norc", "-c", code, "bash", str(tmp_path / "script"), "shardcache", *words],
            env={**os.environ, "PATH": path, "PYTHONPATH": root},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout.split()

    return complete


@bash
def test_bash_completes_commands(complete) -> None:
    assert complete("") == sorted(command_line.list_commands(None), key=complete("").index)
    assert complete("ver") == ["verify"]
    assert complete("p") == ["prewarm", "path", "pin"]
    assert complete("nothing") == []


@bash
def test_bash_completes_options_and_their_values(complete) -> None:
    assert complete("verify", "--re") == ["--remote", "--repair"]
    assert complete("--dir", "/x", "clean", "--max-s") == ["--max-size"]
    assert complete("ls", "--format", "") == ["human", "json", "jsonl", "tsv"]
    assert complete("completion", "") == ["bash", "zsh", "fish"]
