"""``python -m shardcache``: the command line."""

import sys

from shardcache.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
