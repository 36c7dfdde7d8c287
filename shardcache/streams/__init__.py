"""streams: reading a shard, from its entry, while it is fetched, or past the cache.

`opener` finds the entry or has it fetched, and knows the way past a fault; `stream` is what users
read; `sources` is where it reads while there is no entry: the fetch, a copy upstream, the origin;
`prefetch` begins to fetch what will be opened next.

Uses runtime and fetch. Others import `opener.Opener` and `prefetch.Lookahead`.
"""
