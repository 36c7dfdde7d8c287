#!/bin/bash
# Epilog= in slurm.conf: cleans the cache after each job. Slurm drains the node if an epilog
# fails, so this one logs errors to the system log and always succeeds.
SHARDCACHE_DIR=/local/nvme/shards
shardcache=/opt/venv/bin/shardcache

[ -e "$SHARDCACHE_DIR/manifest.json" ] || exit 0 # there is no cache yet
owner=$(stat -c %U "$SHARDCACHE_DIR")
output=$(runuser -u "$owner" -- "$shardcache" --dir "$SHARDCACHE_DIR" clean --quiet --no-wait 2>&1)
code=$?
if [ "$code" -ne 0 ] && [ "$code" -ne 6 ]; then # 6: another process is cleaning
    logger -t shardcache "cleaning after job ${SLURM_JOB_ID:-?} failed ($code): $output"
fi
exit 0
