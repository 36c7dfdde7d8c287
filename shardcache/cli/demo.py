"""``shardcache demo``: run a whole training job on this machine, and show its network traffic."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from shardcache import demo
from shardcache.cli.main import Invocation, command, flag
from shardcache.errors import ConfigError, ShardCacheError
from shardcache.units import format_bytes, format_duration


@command("demo")
@flag("--keep", help="Keep the cache and the shards.")
def demo_command(invocation: Invocation, keep: bool) -> None:
    """Run a demo with an embedded S3 server.

    Starts an S3 server on this machine (pip install 'shardcache[demo]'), writes shards, and
    prewarms half of them. Then two ranks with two workers each read them through WebDataset for
    two epochs. A table shows the requests and bytes of the server. All files are in a new
    directory in --dir, or in the system's temporary directory, and are removed at the end.

    \b
    Examples:
      shardcache demo
      shardcache demo --keep --dir /local/nvme
    """
    console, directory = invocation.console, invocation.dir
    if directory is not None and not Path(directory).is_dir():
        raise ConfigError(f"{directory} is not a directory. Create it, or omit --dir.")
    home = Path(tempfile.mkdtemp(prefix="shardcache-demo-", dir=directory))
    try:
        size, steps = demo.run(home, console.hint)
    finally:
        if not keep:
            shutil.rmtree(home, ignore_errors=True)
    summary = {"shards": demo.SHARDS, "shard_bytes": size, "dir": home if keep else None}
    console.object("demo", steps=steps, summary=summary)
    titles = ["STEP", "REQUESTS", "FROM ORIGIN", "SAMPLES", "TIME"]
    rows = []
    for row in steps:
        sent, seconds = format_bytes(row["origin_bytes"]), format_duration(row["seconds"])
        rows.append([row["step"], str(row["requests"]), sent, str(row["samples"] or "-"), seconds])
    console.table(titles, rows, right=titles[1:])
    samples, total = demo.SHARDS * demo.SAMPLES, sum(row["origin_bytes"] for row in steps)
    if total != demo.SHARDS * size or any(row["samples"] not in (None, samples) for row in steps):
        raise ShardCacheError(
            f"The server sent {total} bytes, but {demo.SHARDS} shards have {demo.SHARDS * size} "
            f"bytes; each epoch has {samples} samples. Please report this with the table above."
        )
    console.data(f"Each of {demo.SHARDS} shards of {format_bytes(size)} crossed the network once.")
    if keep:
        console.hint(f"The files are in {home}; remove it when you are done.")
