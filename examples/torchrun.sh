#!/usr/bin/env bash
# Fill the cache of one node, then train with a rank per processor or GPU.
#
#   RANKS=8 SHARDCACHE_DIR=/local/nvme/shards examples/torchrun.sh 's3://bucket/train-{0000..2047}.tar'
#
# Prewarming is optional. Without it, the first epoch downloads each shard once.
set -euo pipefail

shards=${1:?pass a specification of shards, such as 's3://bucket/train-{0000..2047}.tar'}
shift
: "${SHARDCACHE_DIR:?set it to the directory of the cache, such as /local/nvme/shards}"

# Shards that fail or find no room now are downloaded or streamed when they are read.
shardcache prewarm --best-effort "$shards" ||
    echo "prewarming ended with exit code $?; training starts without it" >&2

exec torchrun --standalone --nproc-per-node "${RANKS:-2}" \
    "$(dirname "$0")/train.py" "$shards" "$@"
