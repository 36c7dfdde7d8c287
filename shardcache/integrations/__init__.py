"""Other ways in than WebDataset's, each for one package: fsspec, wids, Lightning, OpenTelemetry.

Users reach them as ``shardcache.wids``, ``shardcache.lightning`` and ``shardcache.telemetry``;
fsspec finds its own by the name of the protocol. The room uses `cache` and what is below it, and
imports the package in question only when somebody uses it.
"""
