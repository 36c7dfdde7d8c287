"""The races that training scripts keep losing on a cluster: ``from shardcache import sync``.

    sync.makedirs("/nfs/run/trace")                   a directory, whoever makes it; it is visible
    sync.wait_for("/nfs/run/ckpt", by="rank 0")       what another rank makes, with a deadline
    sync.once("unpack", unpack, archive, per="node")  one rank works, the others get its result
    sync.barrier("checkpoint")                        no rank goes on before all have come
    with sync.atomic_write("/nfs/run/best.pt") as f:  a file that is complete or absent
        ...
    sync.rank(), sync.world_size(), sync.local_rank(), sync.node_rank(), sync.local_world_size()

It works with any launcher, with and without torch. Where torch.distributed is initialised, its
ranks and its store are used. docs/sync.md says what each function promises. The room uses
`locks.mounts`, `ranks`, `urls`, `units`, `clock` and `errors`; others import only these names.
"""

from __future__ import annotations

from shardcache.errors import BarrierTimeoutError, InTheWayError, OnceError, WaitTimeoutError
from shardcache.sync.atomic import atomic_write
from shardcache.sync.barrier import barrier
from shardcache.sync.board import local_rank, local_world_size, node_rank, rank, world_size
from shardcache.sync.once import Once, once
from shardcache.sync.paths import makedirs, wait_for

__all__ = [
    "BarrierTimeoutError",
    "InTheWayError",
    "Once",
    "OnceError",
    "WaitTimeoutError",
    "atomic_write",
    "barrier",
    "local_rank",
    "local_world_size",
    "makedirs",
    "node_rank",
    "once",
    "rank",
    "wait_for",
    "world_size",
]
