#!/bin/bash
# In a batch script, before the training: fills the cache of each node with the shards that
# this node will read.
srun --ntasks-per-node=1 $sh_run \
    prewarm --quiet --shard-by-node -- $sh_specs
