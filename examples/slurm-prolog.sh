#!/bin/bash
# Prolog= in slurm.conf: downloads shards before a job starts, for at most five minutes. Slurm
# drains the node if a prolog fails, so this one always succeeds; the job downloads the rest.
# For several users, write shared_group = "lab", their group, into /etc/shardcache.toml.
# The user of the job must be able to make this directory.
SHARDCACHE_DIR=/local/nvme/shards
shardcache=/opt/venv/bin/shardcache
shards='s3://bucket/train-{0000..2047}.tar'

output=$(runuser -u "$SLURM_JOB_USER" -- "$shardcache" --dir "$SHARDCACHE_DIR" \
    prewarm --quiet --best-effort --deadline 5m -- "$shards" 2>&1)
code=$?
if [ "$code" -ne 0 ]; then
    logger -t shardcache "prewarming for job ${SLURM_JOB_ID:-?} ended with $code: $output"
fi
exit 0
