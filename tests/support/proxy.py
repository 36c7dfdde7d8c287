"""A recording proxy before an S3 server."""

from shardcache.cli.meter import Meter as Proxy
from shardcache.cli.meter import traffic

__all__ = ["Proxy", "traffic"]
