"""Make WebDataset pipelines read shards through a cache, and read tar archives in less time."""

from shardcache.wds.attach import attach, tar_files, tar_samples, url_opener
from shardcache.wds.gopen import register

__all__ = ["attach", "register", "tar_files", "tar_samples", "url_opener"]
