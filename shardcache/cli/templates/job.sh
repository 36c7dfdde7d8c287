#!/bin/bash
# For a batch script, before the training: downloads to each node the shards that it will read.
# If torchrun starts the ranks, write its --nproc-per-node after --ranks-per-node.
srun --ntasks="$$SLURM_NNODES" --ntasks-per-node=1 $sh_run \
    prewarm --quiet --shard-by-node --ranks-per-node "$${SLURM_NTASKS_PER_NODE:-1}" -- $sh_specs
