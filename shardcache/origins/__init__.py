"""Where shards come from: one version-pinned answer per request, errors sorted into two kinds.

    base        what an origin is asked, and what it tells of a version; `TransientError`
    s3          ``s3://``; endpoints tells which server that is, for the key and for the client
    http        ``http(s)://``, and range answers, S3's too
    filesystem  every fsspec filesystem, with a time-out
    command     ``pipe:``
    upstream    nearer copies, asked first
    resolve     `Origins`: which of them reads which URL
    retry       the one layer that repeats a request
    listing     shards behind prefixes and patterns, and their sizes

Origins neither retry nor write files. The room uses `layout`, `files`, `config`, `urls` and what is
below them; it is the only one that knows botocore, urllib3 and fsspec's filesystems.
"""
