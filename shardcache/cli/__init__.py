"""The command line. `main.main` runs it, and imports the module of a command when it is called.

Only ``shardcache`` and ``python -m shardcache`` import this room, which may use all others.
"""
