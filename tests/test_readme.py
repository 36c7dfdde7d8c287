"""The pages tell the truth: the README's code runs, generated pages are current, links lead on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import shardcache
from tests.support.tars import make_tar

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def commands():
    """Of the README, the first of which installs the package."""
    texts = [text for language, text in BLOCKS if language == "console"]
    return [line[2:] for text in texts for line in text.splitlines() if line.startswith("$ ")]


@pytest.fixture
def spec(s3, bucket, s3_environment):
    for number in range(3):
        s3.put(bucket, f"train-{number:04d}.tar", make_tar(number))
    return f"s3://{bucket}/train-{{0000..0002}}.tar"


def run(command, **options):
    """Run it; what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout + done.stderr


def test_the_generated_pages_are_current():
    run([sys.executable, str(ROOT / "docs" / "generate.py"), "--check"])


def test_the_loader_trains_from_s3(spec, tmp_path):
    (code,) = (text for language, text in BLOCKS if language == "python")
    for here, there in (
        ("/local/nvme/shards", str(tmp_path / "cache")),
        ("s3://bucket/train-{0000..2047}.tar", spec),
        ("num_workers=8", "num_workers=2"),
    ):
        assert here in code
        code = code.replace(here, there)
    code += "print(len(list(loader)))\n"
    assert run([sys.executable, "-c", code]).startswith("12\n")


def test_prewarm_and_cron_lines_run_as_they_stand(spec, tmp_path):
    bin_directory = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin_directory}:{os.environ['PATH']}"}
    for command in commands()[1:]:
        line = command.replace("/local/nvme/shards", str(tmp_path / "cache"))
        line = line.replace("s3://bucket/train-{0000..2047}.tar", spec)
        said = run(["sh", "-c", line], env=environment, stdin=subprocess.DEVNULL)
    assert said == ""  # cron mails whatever is printed
    assert len(list(shardcache.Cache(tmp_path / "cache").entries())) == 3


def test_a_wheel_holds_the_types_the_command_and_the_way_in_for_fsspec(tmp_path):
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    run([*pip, str(tmp_path), str(ROOT)])
    (wheel,) = tmp_path.glob("shardcache-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        declared = archive.read(entry_points).decode()
    assert "shardcache/py.typed" in names
    assert "shardcache = shardcache.cli.main:main" in declared
    assert "shardcache = shardcache.integrations.fsspec:ShardCacheFileSystem" in declared
    assert {f"shardcache/cli/templates/{name}" for name in ("report.html", "crontab")} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_within_the_repository_is_there(page):
    text = page.read_text("utf-8")
    links = {page.parent / link for link in re.findall(r"\]\((?!https?:)([^)#]+)", text)}
    folders = "benchmarks|docs|examples|shardcache|tests"
    links |= {ROOT / name for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", text)}
    assert [str(link) for link in links if not link.exists()] == []
