#!/usr/bin/env bash
# One node: fill its cache, then train with a rank per processor or GPU.
#
#   RANKS=8 SHARDCACHE_DIR=/local/nvme/shards examples/torchrun.sh 's3://bucket/train-{0000..2047}.tar'
#
# Prewarming is optional: without it the first epoch fetches what it reads, each shard once.
set -euo pipefail

shards=${1:?give a specification of shards, such as 's3://bucket/train-{0000..2047}.tar'}
shift
: "${SHARDCACHE_DIR:?say where the cache is: SHARDCACHE_DIR=/local/nvme/shards}"

# What fails or finds no room now is fetched, or streamed, when it is read.
shardcache prewarm --best-effort "$shards" ||
    echo "prewarming ended with exit code $?; training goes on without" >&2

exec torchrun --standalone --nproc-per-node "${RANKS:-2}" \
    "$(dirname "$0")/train.py" "$shards" "$@"
