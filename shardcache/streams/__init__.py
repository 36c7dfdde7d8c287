"""streams: reading a shard, from its entry, while it is fetched, or past the cache.

`opener` finds the entry or has it fetched, knows the way past a fault, and looks ahead for a
pipeline; `stream` is what users read; `sources` is where it reads while there is no entry: the
fetch, a copy upstream, the origin.

Uses runtime and fetch. Others import `opener.Opener` and `opener.Lookahead`.
"""
