"""A prewarm in two processes, started from a program without other threads."""

import json
import subprocess
import sys
import threading
from collections import Counter

import pytest

from tests.support.storetools import PATIENCE
from tests.support.tars import make_tar
from tests.support.webservers import answer, part_of

SHARDS = 12
PROGRAM = """
import json, os, signal, sys, threading
from pathlib import Path

from shardcache import Cache
from shardcache.prewarm import prewarm

directory, what, *urls = sys.argv[1:]
children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
stop, done, forks = threading.Event(), [], []
os.register_at_fork(after_in_parent=lambda: forks.append(1))

def on_event(event):
    if type(event).__name__ == "Started" and what == "kill" and not done:
        done.extend(map(int, children.read_text().split()))
        os.kill(done[0], signal.SIGKILL)
    if type(event).__name__ == "Started" and what in ("stop", "freeze"):
        if what == "freeze":
            os.kill(int(children.read_text()), signal.SIGSTOP)
        stop.set()

def note(shard):  # runs in the process that downloads the shard
    with pids.open("a") as file:
        print(os.getpid(), file=file)

pids = Path(f"{directory}.pids")
pids.touch()
with Cache(directory, min_free=0, validate=note) as cache:
    jobs = 2 if what == "one each" else 4
    report = prewarm(cache, urls, jobs=jobs, processes=2, on_event=on_event, stop=stop)
    print(json.dumps({
        "outcomes": [result.outcome for result in report.results],
        "stopped": report.stopped,
        "killed": len(done),
        "forks": len(forks),
        "children": children.read_text().split(),
        "pids": len(set(pids.read_text().split())),
    }))
"""


@pytest.fixture
def urls(s3, bucket, s3_environment, proxy):
    for number in range(SHARDS):
        s3.put(bucket, f"{number:02}.tar", make_tar(number))
    return [f"s3://{bucket}/{number:02}.tar" for number in range(SHARDS)]


def run(directory, what, urls):
    command = [sys.executable, "-c", PROGRAM, str(directory), what, *urls]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["children"] == []
    return found


def test_two_processes_share_the_work(tmp_path, urls, proxy):
    absent = urls[0].replace("00.tar", "absent.tar")
    found = run(tmp_path, "", [*urls[:3], absent, *urls[3:]])
    assert found["outcomes"] == ["fetched"] * 3 + ["failed"] + ["fetched"] * (SHARDS - 3)
    assert (found["pids"], found["forks"]) == (2, 1)
    assert run(tmp_path, "", urls)["forks"] == 0  # all are cached
    assert proxy.fetches() == {url.removeprefix("s3://"): 1 for url in urls}


def test_both_download_with_the_secrets_of_their_urls(tmp_path, serve):
    query = "X-Amz-Algorithm=a&X-Amz-Credential=b&X-Amz-Signature=c&token=d"

    def respond(head):
        return b"".join(part_of(make_tar(0), head)) if query in head else answer("403 Forbidden")

    server = serve(respond, most=100)
    found = run(tmp_path, "", [f"{server.url}/{number}.tar?{query}" for number in range(SHARDS)])
    assert found["outcomes"] == ["fetched"] * SHARDS and found["pids"] == 2


def test_a_slow_shard_delays_no_other(tmp_path, serve):
    """The second process takes all other shards, instead of a fixed share."""
    others, finished, all_others = set(), [], threading.Event()

    def respond(head):
        path = head.split()[1]
        if path == "/0.tar":
            finished.append(all_others.wait(PATIENCE / 6))
        else:
            others.add(path)
            if len(others) == SHARDS - 1:
                all_others.set()
        return b"".join(part_of(make_tar(0), head))

    server = serve(respond, most=100)
    found = run(tmp_path, "one each", [f"{server.url}/{number}.tar" for number in range(SHARDS)])
    assert found["outcomes"] == ["fetched"] * SHARDS and finished == [True]


def test_one_process_finishes_the_share_of_a_killed_one(tmp_path, urls):
    found = run(tmp_path, "kill", urls)
    assert found["killed"] == 1
    assert Counter(found["outcomes"]).keys() <= {"fetched", "cached"}


def test_a_stop_ends_all_processes(tmp_path, urls, proxy):
    proxy.pause(after=8_000)  # a listing passes, a shard does not
    found = run(tmp_path, "stop", urls)
    assert found["stopped"] == "requested" and "fetched" not in found["outcomes"]
    proxy.resume()
    assert set(run(tmp_path, "", urls)["outcomes"]) == {"fetched"}


def test_a_helper_that_does_not_continue_holds_nothing_up(tmp_path, urls, proxy):
    proxy.pause(after=8_000)
    assert run(tmp_path, "freeze", urls)["stopped"] == "requested"
    proxy.resume()
    assert set(run(tmp_path, "", urls)["outcomes"]) == {"fetched"}
