"""Make WebDataset pipelines read shards through a cache, and read tar archives in less time."""

from shardcache.wds.attach import attach, url_opener
from shardcache.wds.gopen import register
from shardcache.wds.tar import tar_files, tar_samples

__all__ = ["attach", "register", "tar_files", "tar_samples", "url_opener"]
