"""The origins of shards: S3, web servers, fsspec filesystems and commands.

base         the interface of all origins; the errors for refused requests
resolve      `Origins` chooses the origin of a shard, or an upstream with a nearer copy
s3           ``s3://``
http         ``http(s)://``, and the responses to range requests, including S3's
filesystem   every fsspec filesystem, with a timeout
command      ``pipe:``
retry        the loop that repeats requests, and the pace for servers that throttle
connection   keep-alive connections and proxies
tls          encrypts the bytes of a connection
aws          the S3 endpoint, region and credentials in force
listing      finds the shards behind prefixes and patterns, and their sizes
"""
