"""The origins of shards: each request returns one version, or raises one of two kinds of error.

    base        the protocol of all origins; what a refusal means
    s3          ``s3://``; endpoints finds the server, for keys and clients
    http        ``http(s)://``, and the responses to range requests, S3's too
    connection  keep-alive connections, proxies, TLS
    addresses   connecting to a host that has several addresses
    filesystem  every fsspec filesystem, with a time-out
    command     ``pipe:``
    resolve     `Origins` chooses the origin of a shard, and upstreams with nearer copies
    retry       the only layer that repeats a request
    pace        fewer requests to a server that throttles
    listing     shards behind prefixes and patterns, and their sizes

An origin does not retry.
"""
