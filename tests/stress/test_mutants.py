"""Each promise of the README is broken by one edit, in a copy of the package, and found by tests.

An edit is a line written as one would at first. Where the line has moved, the edit says so: give it
its new place. docs/reliability.md has the table of promises and tests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.stress.strace import unavailable

HOME = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    """One edit, and a run of Python that ends with 1 on it, and with 0 on the package."""

    promise: str
    naive: str  # what one would do at first
    file: str  # below ``shardcache``
    line: str  # a regular expression that is found once in it
    instead: str
    tests: str  # arguments of pytest, or of Python


MUTANTS = [
    Mutant(
        "Bytes",
        "ranges are asked for without If-Match",
        "origins/http.py",
        r'headers\["If-Match"\] = pin\.etag',
        "pass",
        "tests/origins/test_s3.py",
    ),
    Mutant(
        "Bytes",
        "the endpoint is left out of the key",
        "urls.py",
        r'identity = f"\{canonical\}\\0\{own\}"',
        "pass",
        "tests/test_urls.py",
    ),
    Mutant(
        "Bytes",
        "only the size is checked",
        "store/store.py",
        r"if file_digest\(fd\) != metadata\.digest:",
        "if False:",
        "tests/store/test_store.py -k another_boot",
    ),
    Mutant(
        "Visibility",
        "the final name is written directly",
        "store/store.py",
        r"partial\.path\.rename\(entry\)",
        r"shutil.copytree(partial.path, entry); shutil.rmtree(partial.path)",
        "-m tests.stress.crash --every 3 --scenario resume",
    ),
    Mutant(
        "Visibility",
        "a published file can be written",
        "files.py",
        r"0o400",
        "0o600",
        "tests/test_cache.py -k read_only",
    ),
    Mutant(
        "Economy",
        "everybody fetches",
        "fetch/coordinator.py",
        r"if lock\.try_acquire\(holder\):",
        "if lock.try_acquire(holder) or True:",
        "tests/test_processes.py -k eight_processes",
    ),
    Mutant(
        "Economy",
        "a streamed shard is asked for again",
        "streams/opener.py",
        r"answer = None if start else status\.take_answer\(\)",
        "answer = None",
        "tests/streams/test_economy.py",
    ),
    Mutant(
        "Crash",
        "nobody resumes what a dead process left",
        "fetch/coordinator.py",
        r"begun = None if left is None else left\.partial",
        "begun = None",
        "tests/fetch/test_coordination.py -k resumed",
    ),
    Mutant(
        "Crash",
        "the blocks of a dead process are believed unseen",
        "store/partial.py",
        r"block_digest\(block\) == digest",
        "True",
        "tests/store/test_partials.py -k proven",
    ),
    Mutant(
        "Locks",
        "the temporary name is shared",
        "layout.py",
        r"(/partial/\{key\}\.\{version\}\{length\}\.)\{random_token\(\)\}",
        r"\g<1>" + "0" * 32,
        "tests/test_processes.py -k stopped",
    ),
    Mutant(
        "Locks",
        "a filesystem without flock is an error",
        "locks/flock.py",
        r"if exn\.errno in _UNSUPPORTED:",
        "if False:",
        "tests/locks/test_locks.py -k without_flock",
    ),
    Mutant(
        "Bounded wait",
        "a stopped holder is waited for",
        "fetch/waiting.py",
        r">= self\._stale_after",
        ">= 1e9",
        "tests/fetch/test_coordination.py -k stuck_holder_is_passed_by",
    ),
    Mutant(
        "Budget",
        "links are counted once per rank",
        "space/eviction.py",
        r"return sum\(links\[0\]\.size for links in linked\(entries\)\)",
        "return sum(entry.size for entry in entries)",
        "tests/space/test_links.py",
    ),
    Mutant(
        "Ownership",
        "any directory is taken for a cache",
        "store/root.py",
        r"    except OSError:\n        return False\n(    return stat\.S_ISREG)",
        r"    except OSError:\n        return True\n\1",
        "tests/store/test_security.py -k 'removed or touched'",
    ),
    Mutant(
        "Degrade",
        "a fault of the disk is the reader's",
        "streams/opener.py",
        r"(isinstance\(fault, OSError\) and not isinstance\(fault, ShardCacheError\)):",
        r"False and \1:",
        "tests/fetch/test_diskfaults.py -k read_only_mount",
    ),
    Mutant(
        "Errors",
        "what is absent is asked for again",
        "origins/base.py",
        r"if status in _TRANSIENT:",
        "if status in _TRANSIENT or status == 404:",
        "tests/fetch/test_faults.py -k 'permanent_refusal and 404'",
    ),
    Mutant(
        "Secrecy",
        "the user of a URL is part of its name",
        "urls.py",
        r"host, slash = _web_host\(url, scheme, host\), \"/\"",
        'host, slash = user + at + _web_host(url, scheme, host), "/"',
        "tests/test_secrecy.py -k signed_urls",
    ),
    Mutant(
        "In use",
        "the least recently used goes, in use or not",
        "store/entry.py",
        r"yield is_idle\(directory\) if free is None else free",
        "yield True",
        "tests/test_cache.py -k survives",
    ),
    Mutant(
        "In use",
        "the least recently used goes, in use or not, in a storm",
        "store/entry.py",
        r"yield is_idle\(directory\) if free is None else free",
        "yield True",
        "-m tests.stress.storm --minutes 0.3 --seed 1",
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.promise}: {mutant.naive}")
def test_a_promise_that_is_broken_is_found(mutant: Mutant, tmp_path: Path) -> None:
    if "crash" in mutant.tests and (reason := unavailable()):
        pytest.skip(reason)
    for part in ("shardcache", "tests", "pyproject.toml"):
        source = HOME / part
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / part)
    path = tmp_path / "shardcache" / mutant.file
    text, count = re.subn(mutant.line, mutant.instead, path.read_text("utf-8"))
    assert count == 1, f"{mutant.file} has {count} lines like {mutant.line}"
    path.write_text(text, "utf-8")
    pytest_ = "" if mutant.tests.startswith("-m") else "-m pytest -q -x -p no:cacheprovider "
    done = subprocess.run(
        f"{sys.executable} {pytest_}{mutant.tests}",
        shell=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, f"nothing found it:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_the_table_of_promises_names_the_tests_that_guard_each() -> None:
    page = (HOME / "docs" / "reliability.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| \d+\. (\w[\w ]*): .*?\| (.*) \|$", page, re.MULTILINE))
    assert len(rows) == 12 and set(rows) == {mutant.promise for mutant in MUTANTS}
    for mutant in MUTANTS:
        for file in re.findall(r"tests/[\w/]+\.py", mutant.tests):
            assert f"`{file}`" in rows[mutant.promise], f"{mutant.promise}: {file}"
