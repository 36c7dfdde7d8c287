"""Reading a shard, as one stream over its entry, a download or the origin.

    stream      opens a shard; the stream that users read, over one reader at a time
    readers     the readers of a running download and of the origin
    lookahead   downloads the next shards of a pipeline

The reader of an entry is `store.entry.OpenEntry`. Readers know neither `stream` nor each other.
"""
