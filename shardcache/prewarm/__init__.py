"""Filling the cache before a job: the plan, the run, the report."""

from shardcache.prewarm.fill import expand, prewarm

__all__ = ["expand", "prewarm"]
