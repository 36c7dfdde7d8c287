#!/bin/bash
# For a batch script, before the training: downloads to each node the shards that it will read.
srun --ntasks-per-node=1 $sh_run \
    prewarm --quiet --shard-by-node -- $sh_specs
