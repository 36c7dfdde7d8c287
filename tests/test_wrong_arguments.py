"""No arguments, however wrong, end in a traceback or in a code that is not documented."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.cli import _COMMANDS, main
from tests.conftest import make_tar

#: Those that go on until they are interrupted, or do a whole job.
_LONG = {"top", "demo"}
_WORDS = [
    *("", "-", "--", "-x", "--nothing", "-n", "-y", "-q", "-v", "-l", "-1", "0", "9" * 40, "1e999"),
    *("é", "\udcff", "a\nb", "*", "[", "%", "{0..3}", "{0..", "s3://", "s3:///x", "s3://b/\x00"),
    *("file:///", "/", "..", "nan", "inf", "-inf", "1h", "5%", "200%", "size>", "size>1GB", "x=y"),
    *("--json", "--format", "tsv", "--dir", "--config", "/nope", "--since", "--by", "rank", "hour"),
    *("--sort", "size:desc", "--filter", "--limit", "--max-size", "--min-free", "--max-age"),
    *("--orphans", "--all", "--sample", "--quick", "--remote", "--repair", "--url", "--for", "3d"),
    *("--file", "--jobs", "--check", "--dry-run", "--deadline", "--interval", "--count", "-o"),
    *("--zero", "--prometheus", "--partial", "--fetch", "--keep", "bash", "cron", "k8s"),
]
_CODES = {0, 1, 2, 3, 4, 5, 6}


@pytest.fixture
def used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a.tar").write_bytes(make_tar(1))
    with Cache(tmp_path / "cache", cache_local=True, min_free=0) as cache:
        cache.fetch(str(tmp_path / "a.tar"))
    monkeypatch.chdir(tmp_path)
    # Whatever a word makes of S3, nobody answers, at once.
    for name, value in {
        "SHARDCACHE_DIR": str(tmp_path / "cache"),
        "SHARDCACHE_ATTEMPTS": "1",
        "SHARDCACHE_TIMEOUT": "1",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.mark.parametrize("command", sorted(set(_COMMANDS) - _LONG))
def test_wrong_arguments_are_refused_in_a_sentence(
    used: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(command)
    for _ in range(60):
        words = [chance.choice(_WORDS) for _ in range(chance.randrange(5))]
        code = main([command, *words])
        said = capsys.readouterr()
        assert code in _CODES, (words, code)
        assert "Traceback" not in said.err, words
        if code:
            assert said.err.strip() or said.out.strip(), (words, code)
    assert (used / "a.tar").exists()


@pytest.mark.parametrize("command", sorted(_COMMANDS))
def test_every_command_has_help_with_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert "Usage: shardcache" in said and "Examples:" in said
    assert f"shardcache {command}" in said.split("Examples:")[1]
