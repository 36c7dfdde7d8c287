#!/bin/bash
# Prolog= in slurm.conf: fetches shards before a job starts, for five minutes at most. Slurm
# drains the node if this fails, so it never does: the job fetches what is missing.
output=$$(runuser -u "$$SLURM_JOB_USER" -- $sh_run \
    prewarm --quiet --best-effort --deadline 5m -- $sh_specs 2>&1)
code=$$?
if [ "$$code" -ne 0 ]; then
    logger -t shardcache "prewarming for job $${SLURM_JOB_ID:-?} ended with $$code: $$output"
fi
exit 0
