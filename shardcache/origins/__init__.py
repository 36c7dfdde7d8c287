"""Where shards come from: one version-pinned answer per request, errors sorted into two kinds.

    base        the protocol of all origins; what a refusal means
    s3          ``s3://``; endpoints tells which server that is, for the key and for the client
    http        ``http(s)://``, and range answers, S3's too
    connection  keep-alive connections, proxies, TLS
    addresses   connecting to a host that has several addresses
    filesystem  every fsspec filesystem, with a time-out
    command     ``pipe:``
    resolve     `Origins`: which of them reads which URL, after nearer copies (upstreams)
    retry       the one layer that repeats a request
    listing     shards behind prefixes and patterns, and their sizes

An origin does not retry. What reads shards through botocore, sockets and fsspec's filesystems is
here. The room uses `files`, `config`, `urls` and what is below them.
"""
