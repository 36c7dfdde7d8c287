"""With torch.distributed initialised: its ranks, and its store in place of a directory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]

pytest.importorskip("torch")

_RANK = """
import json, os, sys
import torch.utils.data
import torch.distributed as dist
from shardcache import sync

def say(**facts):
    print(json.dumps(facts), flush=True)

rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

def attempt(function):
    try:
        return function()
    except Exception as exn:
        return [type(exn).__name__, str(exn), getattr(exn, "missing", None)]

def fail():
    raise ValueError("no such model")

def work():
    sync.barrier("at work", timeout=60)
    say(at_work=True)
    sys.stdin.readline()
    return "too late"

say(ranks=[sync.rank(), sync.world_size()])
say(once=[sync.once("k", os.getpid), sync.once("k", os.getpid), sync.once("l", lambda: None)])
say(again=[sync.once("k", lambda: n, again=True) for n in range(3)])
say(failure=attempt(lambda: sync.once("f", fail)))
for _ in range(30):
    sync.barrier("b", timeout=60)
say(passed=30)
class Asking(torch.utils.data.IterableDataset):
    def __iter__(self):  # a worker must not speak on its parent's line
        from shardcache.sync.board import torch_store
        yield [sync.rank(), sync.world_size(), torch_store() is None]

say(worker=list(torch.utils.data.DataLoader(Asking(), batch_size=None, num_workers=1))[0])
sync.barrier("b", timeout=60)
say(late=attempt(lambda: rank == 0 and sync.barrier("alone", timeout=0.3)))

if rank == 1:
    say(result=sync.once("slow", work, lease=3))
    say(gone=attempt(lambda: sync.barrier("end", timeout=60)))
    os._exit(0)
sync.barrier("at work", timeout=60)
say(result=sync.once("slow", lambda: "taken over", lease=3, timeout=60))
sys.stdin.readline()
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Rank:
    """One rank, and what it has said."""

    def __init__(self, number: int, port: int, directory: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _RANK, str(number), str(port)],
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.facts: dict[str, Any] = {}

    def hear(self, name: str) -> Any:
        """Read on until it has said something."""
        assert self.process.stdout is not None
        while name not in self.facts:
            line = self.process.stdout.readline()
            assert line, f"it ended without {name}: {self.facts}"
            self.facts |= json.loads(line)
        return self.facts[name]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Rank]]:
    with contextlib.ExitStack() as stack:
        ranks, port = [], free_port()
        for number in range(2):
            ranks.append(Rank(number, port, tmp_path))
            stack.callback(ranks[-1].close)
        yield ranks


def test_ranks_of_torch_tell_one_another_by_its_store(pair: list[Rank], tmp_path: Path) -> None:
    zero, one = pair
    one.hear("at_work")
    # Stopped it beats no more, and rank 0 takes over; its own result comes too late.
    one.process.send_signal(signal.SIGSTOP)
    assert zero.hear("result") == "taken over"
    one.process.send_signal(signal.SIGCONT)
    assert one.process.stdin is not None
    one.process.stdin.write(b"\n")
    one.process.stdin.flush()
    assert one.hear("result") == "taken over"
    zero.process.kill()
    kind, text, _ = one.hear("gone")
    assert kind == "BoardError" and "Rank 0, which serves it, has probably ended" in text

    said = [zero.facts, one.facts]
    assert [facts["ranks"] for facts in said] == [[0, 2], [1, 2]]
    pids = [rank.process.pid for rank in pair]
    assert said[0]["once"] == said[1]["once"] and said[0]["once"][0] in pids
    assert said[0]["once"][1:] == [said[0]["once"][0], None]
    assert [facts["again"] for facts in said] == [[0, 1, 2]] * 2
    failures = sorted(facts["failure"] for facts in said)
    assert failures[1] == ["ValueError", "no such model", None]
    assert failures[0][0] == "OnceError" and "ValueError: no such model" in failures[0][1]
    assert [facts["passed"] for facts in said] == [30, 30]
    assert [facts["worker"] for facts in said] == [[0, 2, True], [1, 2, True]]
    kind, text, missing = zero.facts["late"]
    assert (kind, missing) == ("BarrierTimeoutError", [1])
    assert "for 1: 1 (in the store of torch.distributed)" in text
    assert os.listdir(tmp_path) == []
