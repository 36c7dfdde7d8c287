"""Connections to other packages: fsspec, wids, Lightning and OpenTelemetry, one module each.

Users reach the modules as ``shardcache.wids``, ``shardcache.lightning`` and
``shardcache.telemetry``; fsspec finds its own by an entry point. No package is imported before it
is used.
"""
