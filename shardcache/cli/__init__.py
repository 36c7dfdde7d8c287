"""The command line. `main.main` runs it; each command is in a module of its own.

A command takes `Invocation`, `command`, `ExitCode` and the shared options from `main`, prints
through `output.Console`, and shows a long run with `progress`. Only ``shardcache`` and ``python -m
shardcache`` import this room, which may use all others.
"""
