"""Naive variants of the cache, each in a copy of the package, each found by the tests named here.

A variant is one line written as one would at first. Where the line has moved, the variant says so:
give it its new place.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parents[2]


#: File below ``shardcache``, a regular expression that is found once in it, what it becomes, and a
#: run of Python that ends with 1 on the variant, and with 0 on the package.
VARIANTS = {
    "the final name is written directly": (
        "store/store.py",
        r"partial\.path\.rename\(entry\)",
        r"shutil.copytree(partial.path, entry); shutil.rmtree(partial.path)",
        "-m tests.stress.crash --every 3 --part kills --scenario resume",
    ),
    "the temporary name is shared": (
        "layout.py",
        r"(/partial/\{key\}\.\{version\}\{length\}\.)\{random_token\(\)\}",
        r"\g<1>" + "0" * 32,
        "-m pytest -x tests/test_processes.py -k stopped",
    ),
    "ranges are asked for without If-Match": (
        "origins/http.py",
        r'headers\["If-Match"\] = pin\.etag',
        "pass",
        "-m pytest -x tests/origins/test_s3.py",
    ),
    "only the size is checked": (
        "store/store.py",
        r"if file_digest\(fd\) != metadata\.digest:",
        "if False:",
        "-m pytest -x tests/stress/test_fuzz.py -k Damaged",
    ),
    "the least recently used goes, in use or not": (
        "store/entry.py",
        r"yield is_idle\(directory\) if free is None else free",
        "yield True",
        "-m pytest -x tests/store/test_store.py",
    ),
    "the endpoint is left out of the key": (
        "urls.py",
        r'identity = f"\{canonical\}\\0\{own\}"',
        "pass",
        "-m pytest -x tests/test_urls.py",
    ),
    "links are counted once per rank": (
        "space/eviction.py",
        r"sum\(links\[0\]\.size for links in linked\(entries\)\)",
        "sum(entry.size for entry in entries)",
        "-m pytest -x tests/space/test_links.py",
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_naive_variant_is_found(name: str, tmp_path: Path) -> None:
    file, line, naive, found_by = VARIANTS[name]
    for part in ("shardcache", "tests", "pyproject.toml"):
        source = HOME / part
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / part)
    path = tmp_path / "shardcache" / file
    text, count = re.subn(line, naive, path.read_text("utf-8"))
    assert count == 1, f"{file} has {count} lines like {line}"
    path.write_text(text, "utf-8")
    done = subprocess.run(
        [sys.executable, *found_by.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, f"nothing found it:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
