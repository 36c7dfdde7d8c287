"""fetch: one fetch per shard and node.

`coordinator` takes the key's lock or waits for whoever holds it (`waiting`), finds room, and
publishes what `transfer` brings: a `job` per shard, whose parts come over the process's
`connections` as `blocks`. `background` runs fetches that streams read from meanwhile, and copies
shards to upstreams.

Uses space, store, locks and origins. Others import `coordinator.Coordinator`, `transfer.Fetcher`,
`blocks.FetchStatus`, `background.Fetchings`, `connections.Throttle`.
"""
