"""The command line. `main.main` runs it, and imports a command's module when the command is called.

This package may use all others. Only the command and the progress of `Cache.prewarm` use it.
"""
