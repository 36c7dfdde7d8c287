"""Cleaners of temporary files: whose directories they empty, told by their configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcache.cli.cleaners import Reaper, aged, parse_rules, read_rules, reaped, reapers

TMP = "q /tmp 1777 root root 10d\nq /var/tmp 1777 root root 30d\n"


def cleaned(text: str, directory: str) -> str | None:
    rule = aged(directory, list(parse_rules(text, "x.conf")))
    return None if rule is None else rule.age


@pytest.mark.parametrize("kind", ["d", "D", "e", "v", "q", "Q", "d-", "q="])
def test_every_type_with_an_age_cleans_what_is_below(kind: str) -> None:
    text = f"{kind} /var/tmp 1777 root root 30d"
    assert cleaned(text, "/var/tmp/shards") == "30d"
    assert cleaned(text, "/var/tmp") == "30d"
    assert cleaned(text, "/var/tmpfs") is None
    assert cleaned(text, "/local/shards") is None


@pytest.mark.parametrize(
    "line",
    [
        "d /var/tmp 1777 root root -",
        "d /var/tmp",
        "# d /var/tmp 1777 root root 30d",
        "d! /var/tmp 1777 root root 30d",
        "f /var/tmp 1777 root root 30d",
        "L /var/tmp - - - 30d /x",
        'd "/var/tmp 1777',
        "d %b/tmp 1777 root root 30d",
    ],
)
def test_lines_that_clean_nothing(line: str) -> None:
    assert cleaned(line, "/var/tmp/shards") is None


@pytest.mark.parametrize(
    "line", ["x /var/tmp/shards", "x /var/tmp/sh*", "x /var/tmp/shards/*", "x /var/tmp/my"]
)
def test_an_x_excludes_a_directory_with_all_that_is_in_it(line: str) -> None:
    directory = "/var/tmp/my/shards" if line.endswith("my") else "/var/tmp/shards"
    assert cleaned(TMP, directory) == "30d"
    assert cleaned(f"{TMP}{line}\n", directory) is None


@pytest.mark.parametrize("line", ["X /var/tmp/shards", "x /var/tmp/other", "x /var/*/shards/a"])
def test_what_does_not_exclude_the_shards(line: str) -> None:
    assert cleaned(f"{TMP}{line}\n", "/var/tmp/shards") == "30d"


def test_a_star_ends_at_a_slash() -> None:
    assert cleaned(f"{TMP}x /var/*\n", "/var/tmp/a/shards") is None  # /var/tmp is excluded
    assert cleaned(f"{TMP}x /var/tmp/*b\n", "/var/tmp/a/b") == "30d"


def test_the_innermost_line_decides() -> None:
    assert cleaned(f"{TMP}d /var/tmp/shards 0700 me me -\n", "/var/tmp/shards/x") is None
    assert cleaned(f"{TMP}d /var/tmp/shards 0700 me me 1d\n", "/var/tmp/shards/x") == "1d"
    assert cleaned(f"{TMP}e /var/tmp/s* - - - 2d\n", "/var/tmp/shards") == "2d"


def test_names_of_usual_directories_are_known() -> None:
    assert cleaned("q %V 1777 root root 30d", "/var/tmp/shards") == "30d"
    assert cleaned("q %T/x 1777 root root 3d", "/tmp/x") == "3d"


def test_a_file_of_the_administrator_replaces_the_systems(tmp_path: Path) -> None:
    etc, usr = tmp_path / "etc", tmp_path / "usr"
    for directory in (etc, usr):
        directory.mkdir()
    (usr / "tmp.conf").write_text(TMP)
    (usr / "notes.txt").write_text("q /local 1777 root root 1d\n")
    both = [etc, tmp_path / "absent", usr]
    found = aged("/var/tmp/x", read_rules(both))
    assert found is not None and found.file == str(usr / "tmp.conf")
    assert aged("/local/x", read_rules(both)) is None
    (etc / "tmp.conf").symlink_to("/dev/null")
    assert aged("/var/tmp/x", read_rules(both)) is None


def test_tmpreaper_and_tmpwatch_count_where_they_are_installed(tmp_path: Path) -> None:
    conf = tmp_path / "tmpreaper.conf"
    environ = {"PATH": str(tmp_path)}
    assert reapers(environ, conf) == []
    for name in ("tmpreaper", "tmpwatch"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    found = reapers(environ, conf)
    assert [reaper.name for reaper in found] == ["tmpreaper", "tmpwatch"]
    assert reaped("/tmp/shards", found) == Reaper("tmpreaper", ("/tmp",))
    assert reaped("/var/tmp/shards", found) == Reaper("tmpwatch", ("/tmp", "/var/tmp"))
    assert reaped("/local/shards", found) is None
    conf.write_text(
        "# no\nTMPREAPER_DIRS='/tmp/. /scratch/.'\nTMPREAPER_PROTECT_EXTRA='/tmp/a/**'\n"
    )
    found = reapers(environ, conf)[:1]
    assert found[0].cleans == ("/tmp", "/scratch")
    assert reaped("/scratch/a", found) and reaped("/tmp/b", found)
    assert reaped("/tmp/a", found) is None
