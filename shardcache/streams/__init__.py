"""streams: reading a shard, from its entry, while it is fetched, or past the cache.

`opener` finds the entry or has it fetched, and knows the way past a fault; `stream` reads a shard
that is being fetched; `sources` reads it from its origin or a copy upstream; `prefetch` begins to
fetch what will be opened next.

Uses runtime and fetch. Others import `opener.Opener` and `prefetch.Lookahead`.
"""
