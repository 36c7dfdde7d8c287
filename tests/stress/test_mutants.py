"""Breaks each promise of the README by naive edits, in a copy of the package; tests must find it.

docs/reliability.md has the table of promises and tests. If an edited line has changed, update it.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.support.trainingtools import ROOT

#: A promise and a naive edit; the file, and the line before and after; the tests of which each line
#: must fail, as arguments of pytest.
MUTANTS = """
Bytes: ranges are requested without If-Match
    origins/http.py
    -headers["If-Match"] = expected.etag
    +pass
    tests/origins/test_s3.py

Bytes: only the size is checked
    store/entry.py
    -if file_digest(fd) != metadata.digest:
    +if False:
    tests/store/test_store.py -k another_boot

Visibility: the final name is written directly
    store/entry.py
    -partial.path.rename(entry)
    +import shutil; shutil.copytree(partial.path, entry); shutil.rmtree(partial.path)
    tests/stress/test_crash.py -k resume

Economy: every process downloads
    download/worker.py
    -if not lock.try_acquire(directories.holder()):
    +if not lock.try_acquire(directories.holder()) and False:
    tests/test_processes.py -k eight_processes

Crashes: no process resumes the partial of a dead one
    download/worker.py
    -shard, name = self._download.shard, lock.partial_name or ""
    +shard, name = self._download.shard, ""
    tests/download/test_coordination.py -k resumed

Crashes: the blocks of a dead process are trusted unchecked
    store/partial.py
    -block_digest(block) == digest
    +True
    tests/store/test_partials.py -k proven

Locks: each tier locks its own keys
    tiers.py
    -lock = self.key_lock(entry.parent.name, entry.parents[3])
    +lock = Flock(entry.parents[3] / f"{entry.parent.name}.lock")
    tests/locks/test_key_locks.py -k repair

Locks: processes share a temporary name
    layout.py
    -{key}.{version}{length}.{random_token()}
    +{key}.{version}{length}.00000000000000000000000000000000
    tests/test_processes.py -k stopped

Waiting: waiting for a stopped holder never ends
    download/worker.py
    ->= config.stale_after
    +>= 1e9
    tests/download/test_coordination.py -k stuck_holder_is_announced_and_passed_by

Space: links count once per rank
    space/eviction.py
    -return sum(disk_bytes(links, allocated) for links in group_links(entries))
    +return sum(allocated(entry.size) for entry in entries)
    tests/space/test_jobs.py

Ownership: any directory passes for a cache
    store/root.py
    -if not is_cache(root):
    +if False:
    tests/store/test_security.py -k "removed or touched"

Faults: the reader gets a fault of the disk
    reading/stream.py
    -elif is_local_error(fault):
    +elif False:
    tests/download/test_diskfaults.py -k read_only_mount

Errors: a missing object is requested again
    origins/base.py
    -if throttled or status in _TRANSIENT or (status >= 500 and status not in _LASTING):
    +if throttled or status in _TRANSIENT or status == 404:
    tests/download/test_faults.py -k "permanent_refusal and 404"

Secrets: the user of a URL is part of its name
    urls.py
    -host, slash = _web_host(url, scheme, netloc), "/"
    +host, slash = user + at + _web_host(url, scheme, netloc), "/"
    tests/test_secrecy.py -k signed_urls

Use: shards in use are evicted
    files.py
    -yield free
    +yield True
    tests/test_cache.py -k survives
    tests/stress/test_storm.py -k working
"""
VARIABLES = {"PYTHONDONTWRITEBYTECODE": "1", "MINUTES": "4"}
ROWS = [[line.strip() for line in text.splitlines()] for text in MUTANTS.strip().split("\n\n")]
CASES = [(*row[:4], tests) for row in ROWS for tests in row[4:]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_a_broken_promise_is_found(case, tmp_path):
    _, file, before, after, tests = case
    for folder in ("shardcache", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / "shardcache" / file
    text = path.read_text("utf-8")
    assert text.count(before[1:]) == 1, f"{file} has {text.count(before[1:])} times {before[1:]}"
    path.write_text(text.replace(before[1:], after[1:]), "utf-8")
    done = subprocess.run(
        [*shlex.split(f"{sys.executable} -m pytest -q -x -p no:cacheprovider {tests}")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), **VARIABLES},
        capture_output=True,
        text=True,
    )
    if done.returncode == 0 and "skipped" in done.stdout:
        pytest.skip(done.stdout)
    assert done.returncode == 1, f"nothing found it:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_the_table_of_promises_names_their_tests():
    page = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    table = dict(re.findall(r"^\| \d+\. (\w[\w ]*): .*?\| (.*) \|$", page, re.MULTILINE))
    assert len(table) == 12 and set(table) == {row[0].partition(":")[0] for row in ROWS}
    for name, *_, tests in CASES:
        for file in re.findall(r"tests/[\w/]+\.py", tests):
            assert f"`{file}`" in table[name.partition(":")[0]], f"{name}: {file}"
