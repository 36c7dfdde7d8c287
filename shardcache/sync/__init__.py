"""Avoid the usual race conditions of training scripts: ``from shardcache import sync``.

    sync.makedirs("/nfs/run/trace")                   a directory that this node can see at once
    sync.wait_for("/nfs/run/ckpt", by="rank 0")       wait for a path that another rank makes
    sync.once("unpack", unpack, archive, per="node")  one rank works, the others get its result
    sync.barrier("checkpoint")                        wait until all ranks have arrived
    with sync.atomic_write("/nfs/run/best.pt") as f:  write a file that is complete or absent
        ...
    sync.rank(), sync.world_size()

They work with any launcher, with and without torch. docs/sync.md states their guarantees.
"""

from __future__ import annotations

from shardcache.errors import BarrierTimeoutError, InTheWayError, OnceError, WaitTimeoutError
from shardcache.sync.job import rank, world_size
from shardcache.sync.notes import barrier, once
from shardcache.sync.paths import atomic_write, makedirs, wait_for

__all__ = ["BarrierTimeoutError", "InTheWayError", "OnceError", "WaitTimeoutError"]
__all__ += ["atomic_write", "barrier", "makedirs", "once", "rank", "wait_for", "world_size"]
