"""fetch: one fetch per shard and node.

`coordinator` takes the key's lock or waits for whoever holds it (`waiting`), finds room, and
publishes what `transfer` brings: a `job` per shard, over the process's `connections`. `background`
runs fetches that streams read from meanwhile.

Uses space, store, locks and origins. Others import `coordinator.Coordinator`, `transfer.Fetcher`,
`status.FetchStatus`, `connections.Throttle`, and `background.Fetchings`.
"""
