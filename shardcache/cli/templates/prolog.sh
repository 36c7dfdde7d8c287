#!/bin/bash
# Prolog= in slurm.conf: downloads shards before a job starts, for at most five minutes. Slurm
# drains the node if a prolog fails, so this one always succeeds; the job downloads the rest.
output=$$(runuser -u "$$SLURM_JOB_USER" -- $sh_run \
    prewarm --quiet --best-effort --deadline 5m -- $sh_specs 2>&1)
code=$$?
if [ "$$code" -ne 0 ]; then
    logger -t shardcache "prewarming for job $${SLURM_JOB_ID:-?} ended with $$code: $$output"
fi
exit 0
