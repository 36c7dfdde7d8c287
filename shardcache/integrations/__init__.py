"""Integrations with fsspec, wids and Lightning, one module each.

Users import the modules as ``shardcache.wids`` and ``shardcache.lightning``. fsspec
finds the module ``fsspec`` by an entry point. None of the three packages is imported before it is
used.
"""
