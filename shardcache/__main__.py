"""Run the command line as ``python -m shardcache``."""

import sys

from shardcache.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
