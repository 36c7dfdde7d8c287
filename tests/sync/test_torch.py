"""sync with torch.distributed initialised: its ranks, and its store instead of a directory."""

import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

from shardcache import sync
from shardcache.errors import ShardCacheError
from shardcache.ranks import torch_store
from tests.support.storetools import PATIENCE, Parent, crowd

torch_data = pytest.importorskip("torch.utils.data")
dist = pytest.importorskip("torch.distributed")


class Asking(torch_data.IterableDataset):
    """Queries in a DataLoader worker, which must not use its parent's connection."""

    def __iter__(self) -> Any:
        yield [sync.rank(), sync.world_size(), torch_store() is None]


def attempt(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return function(*args, **options)
    except (ShardCacheError, ValueError) as exn:
        return [type(exn).__name__, str(exn), getattr(exn, "missing", None)]


def rank(parent: Parent, number: int, port: int) -> None:
    """Be one of two ranks: both report, then rank 1 works, and rank 0 takes over from it."""

    def work() -> str:
        sync.barrier("at work", timeout=PATIENCE)
        parent.say("at work")
        parent.hear()
        return "too late"

    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=number, world_size=2)
    parent.say([sync.rank(), sync.world_size()])
    parent.say([sync.once(key, os.getpid) for key in "kkl"])
    parent.say(attempt(sync.once, "f", float, "no such number"))
    for _ in range(30):
        sync.barrier("b", timeout=PATIENCE)
    parent.say(next(iter(torch_data.DataLoader(Asking(), batch_size=None, num_workers=1))))
    sync.barrier("b", timeout=PATIENCE)
    parent.say(number == 0 and attempt(sync.barrier, "alone", timeout=0.3))
    if number == 0:
        sync.barrier("at work", timeout=PATIENCE)
        parent.say(sync.once("slow", lambda: "taken over", lease=1, timeout=PATIENCE))
        parent.hear()
    parent.say(sync.once("slow", work, lease=1))
    parent.say(attempt(sync.barrier, "end", timeout=PATIENCE))


def test_ranks_of_torch_communicate_through_its_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with crowd(2, rank, port) as (zero, one):
        both = [[child.hear() for _ in range(5)] for child in (zero, one)]
        ranks, works, failures, workers, lates = zip(*both, strict=True)
        assert ranks == ([0, 2], [1, 2])
        assert works[0] == works[1] and set(works[0]) <= {zero.pid, one.pid}
        assert works[0][0] == works[0][1]
        other, own = sorted(failures)
        assert own[0] == "ValueError" and "'no such number'" in own[1]
        assert other[0] == "OnceError" and f"ValueError: {own[1]}" in other[1]
        assert [[int(n) for n in worker] for worker in workers] == [[0, 2, 1], [1, 2, 1]]
        kind, text, missing = lates[0]
        assert (kind, missing) == ("BarrierTimeoutError", [1])
        assert "for 1 of 2 ranks: 1 (notes in the store of torch.distributed)" in text
        # A stopped process sends no heartbeat, so rank 0 takes over.
        assert one.hear() == "at work"
        one.kill(signal.SIGSTOP)
        assert zero.hear() == "taken over"
        one.kill(signal.SIGCONT)
        one.tell()
        assert one.hear() == "taken over"
        zero.kill()
        kind, text, _ = one.hear()
        assert kind == "TorchStoreError" and "Rank 0, which serves it, has probably ended" in text
    assert [name for name in os.listdir(tmp_path) if not name.startswith(".coverage")] == []
