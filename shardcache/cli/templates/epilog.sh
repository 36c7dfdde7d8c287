#!/bin/bash
# Epilog= in slurm.conf: cleans the cache when a job has ended. Slurm drains the node if this
# fails, so it never does: errors go to the system log.
[ -d $sh_dir ] || exit 0
owner=$$(stat -c %U $sh_dir)
output=$$(runuser -u "$$owner" -- $sh_run clean --quiet --no-wait 2>&1)
code=$$?
if [ "$$code" -ne 0 ] && [ "$$code" -ne 6 ]; then
    logger -t shardcache "cleaning after job $${SLURM_JOB_ID:-?} failed ($$code): $$output"
fi
exit 0
