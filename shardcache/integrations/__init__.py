"""Integrations with fsspec, wids, Lightning and OpenTelemetry, one module each.

Users import the modules as ``shardcache.wids``, ``shardcache.lightning`` and
``shardcache.telemetry``. fsspec finds the module ``fsspec`` by an entry point. None of the four
packages is imported before it is used.
"""
