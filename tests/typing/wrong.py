"""Mistakes that a type checker must find: each line ignores one.

``reportUnnecessaryTypeIgnoreComment`` and mypy's ``warn_unused_ignores`` report an ignore comment
on a line without a mistake.
"""

from __future__ import annotations

import shardcache
from shardcache import Cache

cache = Cache("/local/nvme/shards")
stats = cache.stats()

# fmt: off
# Misspelt names.
stats.hitz  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
stats.hits = 3  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
cache.fetchh("s3://lab/a.tar")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
Cache("/x", max_sizes="1GB")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
cache.prewarm(["s3://lab/a.tar"], job=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
shardcache.CacheFull  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
# Wrong types.
Cache(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Cache("/x", policy="newest")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Cache("/x", max_size=["1GB"])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
cache.open(b"s3://lab/a.tar")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
cache.open("s3://lab/a.tar").read().encode()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
cache.path("s3://lab/a.tar").name  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
_ = stats.hit_rate + 1  # type: ignore[operator]  # pyright: ignore[reportOptionalOperand]
cache.verify(quick="5%")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
cache.url_opener([], lambda exn: None)  # type: ignore[arg-type,return-value]  # pyright: ignore[reportArgumentType]
with cache.pinned("s3://lab/a.tar") as path:
    path.decode()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
# fmt: on
