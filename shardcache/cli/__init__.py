"""The command line. `main.main` runs it, and imports a command's module when the command is called.

Only ``shardcache`` and ``python -m shardcache`` import this package, which may use all others.
"""
