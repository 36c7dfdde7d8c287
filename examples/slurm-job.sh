#!/bin/bash
# For a batch script, before the training: downloads to each node the shards that it will read.
# If torchrun starts the ranks, write its --nproc-per-node in place of this number.
ranks=${SLURM_NTASKS_PER_NODE:-$((${SLURM_NTASKS:-$SLURM_NNODES} / SLURM_NNODES))}
SHARDCACHE_DIR=/local/nvme/shards
shardcache=/opt/venv/bin/shardcache
shards='s3://bucket/train-{0000..2047}.tar'

srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 "$shardcache" --dir "$SHARDCACHE_DIR" \
    prewarm --quiet --shard-by-node --ranks-per-node "$ranks" -- "$shards"
