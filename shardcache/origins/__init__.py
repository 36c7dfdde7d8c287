"""The origins of shards: S3, web servers, fsspec filesystems and commands.

    base         the interface of all origins; the errors for refused requests
    s3           ``s3://``
    endpoints    the S3 endpoint and region in force, for cache keys and for requests
    credentials  tells AWS credentials that are temporarily unavailable from missing ones
    http         ``http(s)://``, and the responses to range requests, including S3's
    connection   keep-alive connections and proxies
    tls          encrypts the bytes of a connection
    addresses    connects to a host that has several addresses
    filesystem   every fsspec filesystem, with a timeout
    command      ``pipe:``
    resolve      `Origins` chooses the origin of a shard, or an upstream with a nearer copy
    retry        repeats requests, and sends fewer to a server that throttles
    listing      finds the shards behind prefixes and patterns, and their sizes

Only `retry` repeats requests.
"""
