"""The command line: `main.main` runs it, one module per command prints through `output.Console`.

It may use every other room; nothing but ``shardcache`` and ``python -m shardcache`` imports it. A
command takes `Invocation`, `command`, `ExitCode` and the shared options from `main`, tables and
messages from `output`, and the display of a long run from `progress`.
"""
