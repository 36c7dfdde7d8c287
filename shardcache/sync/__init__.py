"""What training scripts keep getting wrong on a cluster: ``from shardcache import sync``.

    sync.makedirs("/nfs/run/trace")                   a directory, whoever makes it, and it is seen
    sync.wait_for("/nfs/run/ckpt", by="rank 0")       what another rank makes, with an end
    sync.once("unpack", unpack, archive, per="node")  one rank works, the others get its result
    sync.barrier("checkpoint")                        nobody goes on before all have come
    with sync.atomic_write("/nfs/run/best.pt") as f:  a file that is whole or not there
        ...
    sync.rank(), sync.world_size(), sync.local_rank(), sync.node_rank(), sync.local_world_size()

Works with any launcher, without torch and with it; where torch.distributed is initialised its
ranks and its store are used. docs/sync.md says what each of these promises.
"""

from __future__ import annotations

from shardcache.errors import BarrierTimeoutError, InTheWayError, OnceError, WaitTimeoutError
from shardcache.sync.appearing import makedirs, wait_for
from shardcache.sync.atomicfile import atomic_write
from shardcache.sync.meetings import barrier
from shardcache.sync.standing import local_rank, local_world_size, node_rank, rank, world_size
from shardcache.sync.turns import Once, once

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
