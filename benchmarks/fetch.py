"""How fast a shard is fetched: ``python -m benchmarks.fetch``.

One object from an embedded SeaweedFS into an empty cache, against s3fs and a
plain botocore ``get_object``, all writing a file to the same directory. Server and
client share the machine, so the figures say little about a network; the ratios
compare the clients.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.table import measure, show
from shardcache import Cache
from shardcache.demoserver import S3Server


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the object")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dir", type=Path, help="where to write; /dev/shm for a RAM disk")
    arguments = parser.parse_args()
    size = arguments.mib << 20

    with tempfile.TemporaryDirectory(dir=arguments.dir) as home, S3Server() as server:
        os.environ.update(server.environment())
        server.create_bucket("bench")
        data = os.urandom(1 << 20) * arguments.mib
        server.put("bench", "object.bin", data)
        del data
        target = Path(home, "target")

        def rate(fetch: Callable[[], object]) -> float:
            """MB/s of one fetch into an empty directory."""
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            begun = time.perf_counter()
            fetch()
            return size / (time.perf_counter() - begun) / 1e6

        cache = Cache(target / "cache", min_free=0)
        client = server.client()

        import s3fs

        filesystem = s3fs.S3FileSystem(
            key=server.access_key, secret=server.secret_key, endpoint_url=server.endpoint_url
        )

        def one_stream() -> None:
            body = client.get_object(Bucket="bench", Key="object.bin")["Body"]
            with open(target / "object.bin", "wb") as file:
                shutil.copyfileobj(body, file, 1 << 20)

        figures = measure(
            {
                "shardcache": lambda: rate(lambda: cache.fetch("s3://bench/object.bin")),
                "botocore, one stream": lambda: rate(one_stream),
                "s3fs get_file": lambda: rate(
                    lambda: filesystem.get_file("bench/object.bin", str(target / "object.bin"))
                ),
            },
            arguments.repeats,
        )
        cache.close()
        show(f"Fetch of {arguments.mib} MiB", "MB/s", figures, "s3fs get_file")


if __name__ == "__main__":
    main()
