"""Pages: their code runs, generated pages are current, and links lead to files.

`tests/packages` runs the blocks of docs/integrations.md that need more than torch and WebDataset.
"""

import contextlib
import io
import json
import os
import re
import sys
import tomllib

import pytest
import torch  # noqa: F401 - once, and not in each process that runs a block
import yaml

from shardcache import config, default_cache, sync
from shardcache.pipe_commands import PROGRAMS
from shardcache.store.root import make_root
from tests.support.storetools import together
from tests.support.trainingtools import PAGE, PLAIN, ROOT, DataSet, blocks, programs, run

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
BLOCKS = {
    str(page.relative_to(ROOT)): BLOCK.findall(page.read_text("utf-8"))
    for page in PAGES
    if page.name != "integrations.md"
}
#: Stubs for Slurm with one node of two ranks, and for pip.
STUBS = {
    "pip": r'[[ "$*" =~ ^install\ (shardcache|boto3\ awscli\ botocore==[0-9.]+$) ]]',
    "srun": """
        [[ $1 == --ntasks=1 ]] && shift 2 && exec "$@"
        export SLURM_NTASKS=2 SLURM_STEP_ID=0
        for SLURM_PROCID in 0 1; do SLURM_PROCID=$SLURM_PROCID "$@" || exit 1; done
    """,
}
SLURM = {"SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
#: Lines that a page appends to the program for training.
LIST = """
with open("samples", "a") as file:
    file.writelines(sample["__key__"] + "\\n" for sample in loader)
"""
#: Pages whose job has several ranks.
RANKS = {"docs/sync.md": 3}


def python(code, ranks):
    def rank(number):
        os.environ |= {"RANK": str(number), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(number)}
        names = {"__name__": "docs"}
        exec(compile(code, "docs", "exec"), names)  # noqa: S102 - our own
        return len(list(names["loader"])) if "loader" in names else 24

    assert together(ranks, rank) == [24] * ranks


@pytest.mark.parametrize("page", [name for name, blocks in BLOCKS.items() if blocks])
def test_every_block_of_a_page_runs(page, s3, proxy, s3_environment, tmp_path, set_variables):
    def here(code):
        code = re.sub(r"(?<=[\"'=\s])/(local|nfs|home)/", rf"{tmp_path}/\1/", code)
        code = code.replace("{0000..2047}", "{0000..0003}")
        return code.replace("num_workers=8", "num_workers=2")

    s3.create_bucket("bucket")
    data, samples = DataSet(s3, "bucket", proxy), tmp_path / "samples"
    project = tmp_path / "home" / "me" / "project"
    project.mkdir(parents=True)
    if page == "docs/troubleshooting.md":  # its commands remove the shards of a cache
        make_root(config.Config(tmp_path / "local" / "nvme" / "shards"))
    set_variables(HOME=project.parent, **SLURM)  # of ~/.cache/shards
    (code,) = (code for language, code in BLOCKS["README.md"] if language == "python")
    for directory in (tmp_path, project):
        (directory / "train.py").write_text(here(code) + LIST)
    set_variables(PATH=programs(tmp_path / "bin", **STUBS), SHARDCACHE_JOB=tmp_path.name)
    set_variables(SHARDCACHE_SYNC_DIR=tmp_path / "meet")
    for language, code in BLOCKS[page]:
        match language:
            case "python":
                python(here(code), RANKS.get(page, 1))
            case "sh":
                run(["bash", "-euo", "pipefail", "-c", here(code)], cwd=tmp_path)
            case "toml":
                (file := tmp_path / "shardcache.toml").write_text(code)
                config.load(files=[file])
            case "yaml":
                assert yaml.safe_load(code)
            case "json":
                assert json.loads(code)
            case _:
                assert language == "text", "a block without a language"
    assert page != "docs/clusters.md" or data.complete(samples.read_text().split())


@pytest.mark.filterwarnings("ignore")  # torch warns of forks
@pytest.mark.usefixtures("s3_environment")
@pytest.mark.parametrize("block", [b for b in blocks() if b.section in PLAIN], ids=str)
def test_a_block_prints_its_output_and_downloads_each_shard_once(block, s3, proxy, tmp_path):
    s3.create_bucket("bucket")
    data, out = DataSet(s3, "bucket", proxy), io.StringIO()
    default_cache.cache_clear()
    with contextlib.redirect_stdout(out):
        exec(compile(block.here(tmp_path), str(block), "exec"), {"__name__": "__main__"})  # noqa: S102
    block.check(out.getvalue())
    assert data.once()


def test_integrations_lists_every_option_of_commands():
    rows = re.finditer(r"^\| `(\w+)[^|]+(.+)", PAGE.read_text("utf-8"), re.MULTILINE)
    named = {row[1]: set(re.findall(r"`(--?[a-zA-Z0-9-]+)", row[2])) for row in rows}
    for name, program in PROGRAMS.items():
        known = {f"--{option.rstrip('=')}" for option in program.long.split()}
        assert named[name] == known | {f"-{letter}" for letter in program.short.replace(":", "")}


def test_the_sync_page_names_every_function():
    text = (ROOT / "docs" / "sync.md").read_text("utf-8")
    assert [name for name in sync.__all__ if not re.search(rf"`{name}\b", text)] == []


def test_the_generated_pages_are_current():
    run([sys.executable, "docs/generate.py", "--check"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files(page):
    text = page.read_text("utf-8")
    links = {page.parent / link for link in re.findall(r"\]\((?!https?:)([^)#]+)", text)}
    folders = "benchmarks|docs|examples|shardcache|tests"
    links |= {ROOT / name for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", text)}
    assert [str(link) for link in links if not link.exists()] == []


def test_the_package_and_the_pages_name_the_same_versions_of_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, end = map(int, re.findall(r"3\.(\d+)", project["requires-python"]))
    versions = [f"3.{minor}" for minor in range(first, end)]
    assert re.findall(r"3\.\d+", " ".join(project["classifiers"])) == versions
    text = f"Python {', '.join(versions[:-1])} or {versions[-1]}"
    for page in ("README.md", "CONTRIBUTING.md"):
        assert text in (ROOT / page).read_text("utf-8")
