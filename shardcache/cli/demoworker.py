"""One data-loading worker of one rank of the demo, as a process of its own.

Run as ``python -m shardcache.cli.demoworker SPEC DIR`` with RANK, WORLD_SIZE, WORKER
and NUM_WORKERS in the environment, from which WebDataset's own splitters take
this worker's share. It says "ready", then for every line on standard input it runs one epoch and
answers with one line of JSON: the keys of the samples it saw. It ends with its
standard input, so it never outlives the demo.
"""

from __future__ import annotations

import json
import sys

__all__ = ["main"]


def main(spec: str, directory: str) -> None:
    """Serve epochs until standard input ends."""
    import webdataset as wds

    import shardcache

    cache = shardcache.Cache(directory)
    dataset = cache.attach(wds.WebDataset(spec, shardshuffle=False, nodesplitter=wds.split_by_node))
    _say("ready")
    for _line in sys.stdin:
        keys = [sample["__key__"] for sample in dataset]
        _say(json.dumps(keys))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
